"""Weights through the memory of GPUs, with GPUs that are not there: who opens what, in which order, and what goes by
call."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from publishing import ThreadPeer, make_engine, send, tiny_model

from hone.errors import EngineError
from hone.model.fingerprint import weights_fingerprint
from hone.weights.buckets import Bucket, Unpacker
from hone.weights.parts import CudaMemory, IpcHandle, PartOpener
from hone.weights.receive import LoadsBuckets, Receiver
from hone.weights.transports import SharedGpu

CPU = torch.device("cpu")


class Gpu(CudaMemory):
    """One GPU as a process sees it. `shared` is what all processes of the machine share; `did` the calls."""

    def __init__(self, uuid, shared, did):
        self._uuid, self._shared, self.did = uuid, shared, did

    def uuid(self, device):
        return self._uuid

    def share(self, data):
        number = len(self._shared)
        self._shared.append(data)
        self.did.append(("share", self._uuid, number))
        return IpcHandle(self._uuid, 0, (number,))

    def open(self, handle, num_bytes, device):
        assert handle.gpu == self._uuid, "opened on another GPU"
        self.did.append(("open", self._uuid, *handle.handle))
        return self._shared[handle.handle[0]][:num_bytes]

    def synchronize(self, device):
        self.did.append(("synchronize", self._uuid))


class Machine:
    """Two GPUs, each with a rank of the trainer, and an engine with a worker on each."""

    def __init__(self, gpus_of_ranks=("gpu-a", "gpu-b"), gpus_of_workers=("gpu-a", "gpu-b")):
        self.did, shared = [], []
        self.ranks = [SharedGpu(CPU, Gpu(uuid, shared, self.did)) for uuid in gpus_of_ranks]
        self.engine = DividedEngine([PartOpener(CPU, Gpu(uuid, shared, self.did)) for uuid in gpus_of_workers])
        self.peer = ThreadPeer(self.engine, num_workers=2)
        self.parts = []

    def call(self, method, *args):
        self.parts += [args[-1]] if method == "load_weights" else []
        return self.peer.call(method, *args)

    @property
    def num_workers(self):
        return 2

    def publish(self, version, models, *, attempt="", timeout_s=20.0):
        """From all ranks at once; what came of it on each."""

        def of_rank(rank):
            engines = {"engine-0": self}
            return send(
                models[rank],
                engines,
                self.ranks[rank],
                version,
                attempt=attempt,
                senders=len(self.ranks),
                sender=rank,
                timeout_s=timeout_s,
            )

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(of_rank, range(len(self.ranks))))


class DividedEngine:
    """Its two workers open buckets by themselves, one after the other, as vLLM's do on one call."""

    num_workers = 2
    opens_buckets = True

    def __init__(self, openers):
        self.openers = openers
        self.held = [{}, {}]
        self.fails_once = False

    async def connect_workers(self, address):
        raise AssertionError("nothing is to be joined")

    async def load(self, weights, version):
        await asyncio.to_thread(self._load, weights)

    def _load(self, arriving):
        unpackers = [Unpacker(), Unpacker()]
        for header, parts in arriving.buckets():
            for opener, unpacker, held in zip(self.openers, unpackers, self.held, strict=True):
                held |= dict(unpacker.unpack(Bucket(header, opener.open(header, parts))))
            if self.fails_once:
                self.fails_once = False
                raise EngineError("worker 1 has no room")
        for unpacker in unpackers:
            unpacker.check(arriving.manifest)

    def fingerprint(self):
        first, second = (weights_fingerprint(held.items()) for held in self.held)
        return first if first == second else "workers differ"


@pytest.fixture
def machine():
    machine = Machine()
    yield machine
    machine.peer.close()


def test_each_worker_takes_weights_from_the_rank_on_its_own_gpu_and_no_byte_goes_by_call(machine):
    assert isinstance(machine.engine, LoadsBuckets)
    for version in (1, 2):
        model = tiny_model(seed=version)
        for found in machine.publish(version, [model, model]):
            assert found.held_by == ("engine-0",) and not found.failed
            assert found.manifest.fingerprint == weights_fingerprint(model.named_weights())
    assert machine.parts and all(isinstance(part, IpcHandle) for part in machine.parts)
    opened = [what[1:] for what in machine.did if what[0] == "open"]
    shared = [what[1:] for what in machine.did if what[0] == "share"]
    assert sorted(opened) == sorted(shared), "each handle was opened once, on its GPU"
    for uuid in ("gpu-a", "gpu-b"):
        did = [what[0] for what in machine.did if what[1] == uuid]
        before = [did[i - 1] for i, what in enumerate(did) if what == "share"]
        assert set(before) == {"synchronize"}, "packed before it is shared"
        after = [did[i + 1] for i, what in enumerate(did) if what == "open"]
        assert set(after) <= {"synchronize", "share"} and "synchronize" in after, "copied before it is packed anew"


def test_workers_find_their_gpu_in_whatever_order_the_ranks_are():
    machine = Machine(gpus_of_workers=("gpu-b", "gpu-a"))
    model = tiny_model(seed=1)
    assert [found.held_by for found in machine.publish(1, [model, model])] == [("engine-0",)] * 2
    machine.peer.close()


def test_a_version_that_one_worker_refused_is_refused_to_both_ranks_and_taken_when_it_is_sent_again(machine):
    machine.engine.fails_once = True
    model = tiny_model(seed=1)
    for found in machine.publish(1, [model, model]):
        assert found.refused == ("engine-0",) and found.failed == {"engine-0": "engine-0: worker 1 has no room"}
    for found in machine.publish(1, [model, model], attempt="again"):
        assert found.held_by == ("engine-0",)


def test_ranks_whose_weights_differ_are_refused(machine):
    for found in machine.publish(1, [tiny_model(seed=1), tiny_model(seed=2)]):
        assert "ranks of the trainer sent different weights" in found.failed["engine-0"]


def test_an_engine_on_another_gpu_is_refused_with_both_names():
    machine = Machine(gpus_of_workers=("gpu-a", "gpu-c"))
    for found in machine.publish(1, [tiny_model(seed=1)] * 2):
        assert "lie on GPU gpu-a, gpu-b, this engine is on gpu-c" in found.failed["engine-0"]
    machine.peer.close()


def test_a_rank_that_stops_is_seen_by_the_other_at_the_deadline(machine):
    machine.ranks.pop()
    model = tiny_model(seed=1)
    found = send(model, {"engine-0": machine}, machine.ranks[0], 1, senders=2, timeout_s=1.0)
    assert found.failed["engine-0"].startswith("engine-0: stuck: it did not ") and not found.refused


def test_an_engine_of_one_process_copies_from_the_handle_too():
    did, shared = [], []
    peer = ThreadPeer(engine := make_engine("good"))

    async def make():
        return Receiver(engine, timeout_s=60.0, opener=PartOpener(CPU, Gpu("gpu-a", shared, did)))

    peer.receiver = peer._run(make()).result(60)
    model = tiny_model(seed=3)
    assert send(model, {"engine-0": peer}, SharedGpu(CPU, Gpu("gpu-a", shared, did)), 3).held_by == ("engine-0",)
    assert engine.fingerprint() == weights_fingerprint(model.named_weights()) and engine.version == 3
    peer.close()


def test_bytes_for_several_workers_go_through_one_file_in_memory(machine):
    """As from Ray's object store, which worker processes cannot read."""
    opened = []
    open_it = PartOpener.open

    class Bytes(SharedGpu):
        def send(self, bucket, engines):
            return dict.fromkeys(engines, np.array(bucket.data.numpy()))

    class Watched(PartOpener):
        def open(self, header, parts):
            opened.append(parts[0])
            return open_it(self, header, parts)

    machine.engine.openers = [Watched(CPU), Watched(CPU)]
    model = tiny_model(seed=4)
    found = send(model, {"engine-0": machine}, Bytes(CPU), 4)
    assert found.held_by == ("engine-0",)
    assert opened[0::2] == opened[1::2] and len(set(opened)) == found.manifest.buckets
    assert not any(path.exists() for path in opened)
