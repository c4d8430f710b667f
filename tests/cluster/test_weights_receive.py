"""The engine's side of publishing, by its calls: in which order they may come, and what ends a version."""

import asyncio

import numpy as np
import pytest
import torch
from publishing import peers, send, tiny_model

from hone.errors import EngineError
from hone.rollout.engine import Request, Sampling
from hone.types import Prompt
from hone.weights.buckets import Manifest, Packer
from hone.weights.publish import Update
from hone.weights.receive import Receiver
from hone.weights.transports import ObjectStore

SAMPLING = Sampling(max_tokens=3, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, stop=(), stop_token_ids=())


class Bytes(ObjectStore):
    """As through Ray's object store, without Ray."""

    def send(self, bucket, engines):
        return dict.fromkeys(engines, bucket.data.numpy().copy())


class Keeps:
    """Keeps what comes."""

    def __init__(self):
        self.names = []

    async def load(self, weights, version):
        def go():
            for name, _ in weights:
                self.names.append(name)

        await asyncio.to_thread(go)

    def fingerprint(self):
        return ""


def packed(names):
    packer = Packer(16, lambda size: torch.empty(size, dtype=torch.uint8))
    buckets = [(bucket.header, bucket.data.numpy()) for bucket in packer.pack((n, torch.ones(4)) for n in names)]
    return buckets, packer.manifest(1)


def test_calls_that_overtake_each_other_are_put_in_order():
    async def run():
        receiver = Receiver(engine := Keeps(), timeout_s=10.0)
        await receiver.begin(Update("one", 1))
        buckets, manifest = packed("abcd")
        loads = [asyncio.create_task(receiver.load("one", 0, *buckets[i])) for i in (2, 1, 3, 0)]
        await asyncio.sleep(0.01)
        commit = asyncio.create_task(receiver.commit("one", 0, manifest))
        await asyncio.gather(*loads)
        await commit
        return engine.names

    assert asyncio.run(run()) == list("abcd")


def test_a_trainer_that_stops_sending_is_noticed_at_twice_its_own_deadline():
    async def run():
        receiver = Receiver(Keeps(), timeout_s=0.1)
        await receiver.begin(Update("one", 1))
        await asyncio.sleep(0.5)
        await receiver.commit("one", 0, Manifest(1, 0, 0, 0, ""))

    with pytest.raises(EngineError, match=r"no more weights came within 0.2 s; is the trainer stuck"):
        asyncio.run(run())


def test_a_version_that_comes_in_the_middle_of_another_takes_its_place():
    async def run():
        receiver = Receiver(engine := Keeps(), timeout_s=10.0)
        buckets, manifest = packed("ab")
        await receiver.begin(Update("one", 1))
        late = asyncio.create_task(receiver.load("one", 0, *buckets[1]))
        await asyncio.sleep(0.01)
        await receiver.begin(Update("two", 2))
        with pytest.raises(EngineError, match="version 2 is sent instead"):
            await late
        with pytest.raises(EngineError, match="of an attempt that is over"):
            await receiver.load("one", 0, *buckets[0])
        await asyncio.gather(
            *(receiver.load("two", 0, *bucket) for bucket in buckets), receiver.commit("two", 0, manifest)
        )
        return engine.names

    assert asyncio.run(run()) == ["a", "b"]


def test_an_engine_that_returns_before_all_has_come_does_not_hold_the_version():
    class Hasty(Keeps):
        async def load(self, weights, version):
            pass

    async def run():
        receiver = Receiver(Hasty(), timeout_s=10.0)
        await receiver.begin(Update("one", 1))
        await receiver.load("one", 0, *packed("a")[0][0])

    with pytest.raises(EngineError, match="did not take all of the weights"):
        asyncio.run(run())


@pytest.mark.parametrize("dies_at", ["begin_weights", "load_weights", "commit_weights"])
def test_an_engine_that_dies_at_any_call_costs_the_other_nothing(dies_at):
    with peers({"engine-0": "good", "engine-1": "good"}) as engines:
        engines["engine-1"].dies_at = dies_at
        found = send(tiny_model(seed=1), engines, Bytes(), 1)
        assert found.held_by == ("engine-0",) and not found.refused
        assert found.failed == {"engine-1": "engine-1: ActorDiedError: it was killed"}
        assert engines["engine-1"].calls[-1] == dies_at or dies_at == "load_weights"


@pytest.mark.parametrize("kind", ["late", "forgetful"])
def test_an_engine_that_does_not_finish_or_holds_something_else_is_found_out(kind):
    with peers({"engine-0": kind, "engine-1": "good"}) as engines:
        found = send(tiny_model(seed=1), engines, Bytes(), 1, timeout_s=2.0)
        assert found.held_by == ("engine-1",)
        said = {"late": "stuck: it did not finish loading within 2 s", "forgetful": "it holds weights that hash to"}
        assert said[kind] in found.failed["engine-0"]


def test_an_engine_with_half_a_version_samples_nothing_until_it_has_a_whole_one():
    prompt = Prompt(id="p", index=0, text="", token_ids=np.array([5, 6], np.int32))
    one = Request(prompt, 1, SAMPLING, seed=0, stream="train")
    with peers({"engine-0": "good"}) as engines:
        peer = engines["engine-0"]
        half = list(tiny_model(seed=1).named_weights())[:5]
        found = send(half, engines, Bytes(), 1)
        assert found.refused == ("engine-0",) and peer.engine.version == 0
        sampling = peer._run(peer.engine.generate(one))
        with pytest.raises(TimeoutError):
            sampling.result(0.3)
        assert send(tiny_model(seed=1), engines, Bytes(), 1, attempt="again").held_by == ("engine-0",)
        (sample,) = sampling.result(20)
        assert [span.version for span in sample.versions] == [1]
