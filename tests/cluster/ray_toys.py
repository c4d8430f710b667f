"""Not a test: a trainer and an engine without a model, for processes of Ray's."""

import asyncio
import ctypes
import hashlib
import os
import signal
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch

from hone.errors import DataError
from hone.memory.guard import UNGUARDED
from hone.model.fingerprint import weights_fingerprint
from hone.train.trainer import PreparedBatch, fetched_routing
from hone.types import Sample, VersionSpan


class PickyError(Exception):
    """Cannot be made again from its `args`, as pickle does."""

    def __init__(self, code, detail):
        super().__init__(f"code {code}: {detail}")


FAILURES = {
    "stumble": RuntimeError("connection to a peer was lost"),
    "value": ValueError("shapes differ"),
    "system": OSError(5, "Input/output error"),
    "own": type("OwnError", (Exception,), {})("of a class made here"),
    "picky": PickyError(7, "no such rank"),
}


class Orders(dict):
    """A batch of `ToyTrainer`, without routing."""

    routing_T, prompt_routing = None, ()


class ToyTrainer:
    """Weights that count updates. Its batch says what a rank is to do: {rank: "die" | "hang" | "hold" | "refuse"}, or
    one of FAILURES."""

    def __init__(self, seat):
        self.seat, self.hf_config, self.updates = seat, {"ranks": seat.world_size}, 0
        self.passes = SimpleNamespace(guard=UNGUARDED)

    def update(self, batch, algorithm):
        what = batch.get(self.seat.rank)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(600)
        if what == "refuse":
            raise DataError(f"rank {self.seat.rank} refuses")
        if what == "hold":
            ctypes.PyDLL(None).sleep(600)  # with Python's lock
        if what in FAILURES:
            raise FAILURES[what]
        self.updates += 1
        return {"rank": self.seat.rank, "updates": self.updates}

    def weights(self):
        return [("a", torch.full((3, 5), float(self.updates))), ("b", torch.arange(1000).to(torch.bfloat16))]

    def fingerprint(self):
        return weights_fingerprint(self.weights())


@contextmanager
def toy_trainer(seat):
    yield ToyTrainer(seat)


class ToyEngine:
    """Draws sample i after i tenths of a second: token = the prompt's first, versions from its weights."""

    def __init__(self):
        self.version, self.held, self.cancelled = -1, [], 0

    async def generate(self, request, on_sample=None):
        if request.prompt.text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if request.prompt.text == "refuse":
            raise DataError("no room for a response")
        if request.prompt.text == "hang":
            time.sleep(600)
        if request.prompt.text == "cancelled?":
            on_sample(self.sample(request, self.cancelled))
            return ()
        samples = []
        try:
            for index in range(request.num_samples):
                await asyncio.sleep(0.1 * index)
                samples.append(self.sample(request, index))
                on_sample(samples[-1])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return tuple(samples)

    def sample(self, request, index):
        return Sample(
            request.prompt.id,
            index,
            (request.prompt.token_ids[0],),
            (-0.5,),
            (VersionSpan(self.version, 1),),
            "stop",
            "",
        )

    async def load(self, weights, version):
        self.held = await asyncio.to_thread(lambda: [(name, weight.clone()) for name, weight in weights])
        self.version = version

    def fingerprint(self):
        return weights_fingerprint(self.held)

    async def sleep(self):
        pass

    async def wake(self):
        pass

    async def close(self):
        pass


async def toy_engine():
    return ToyEngine()


class RoutedEngine(ToyEngine):
    """Draws samples at once, of as many tokens as it may, which went to experts like those of Qwen3-30B-A3B."""

    async def generate(self, request, on_sample=None):
        samples = tuple(self.sample(request, index) for index in range(request.num_samples))
        for sample in samples:
            on_sample(sample)
        return samples

    def sample(self, request, index):
        count, prompt = request.sampling.max_tokens, request.prompt
        tokens = np.arange(count, dtype=np.int32)
        return Sample(
            prompt.id,
            index,
            tokens,
            -np.ones(count, np.float32),
            (VersionSpan(0, count),),
            "stop",
            "",
            routing=experts_of(prompt.index, index, count),
            prompt_routing=None if index else experts_of(prompt.index, -1, len(prompt.token_ids)),
        )


def experts_of(prompt, sample, count):
    """(count, 48, 8) of a sample, or of the prompt (-1)."""
    return np.random.default_rng((prompt, sample + 1)).integers(0, 127, (count, 48, 8), dtype=np.int8)


async def routed_engine():
    return RoutedEngine()


class RoutedTrainer(ToyTrainer):
    """Tells what it fetches of a batch: a hash of each sample's routing and of each prompt's."""

    def logprobs(self, batch, *, reference=False, temperature=None):
        prepared = PreparedBatch.of(batch, [], torch.float32, torch.device("cpu"))
        found = fetched_routing(prepared, np.arange(len(batch.length_S)))
        return None if found is None else [hash_of(found[0]), *map(hash_of, found[1].values())]

    def update(self, batch, algorithm):
        return {"fetched": self.logprobs(batch) is not None}


def hash_of(array):
    return hashlib.sha256(np.ascontiguousarray(array)).hexdigest()


@contextmanager
def routed_trainer(seat):
    yield RoutedTrainer(seat)
