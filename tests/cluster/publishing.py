"""A tiny model with tied weights, engines that hold it, how to fail, and how to call them: for tests of publishing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from hone.config.run import LoraSection
from hone.errors import DataError
from hone.model.base import CausalModel
from hone.model.load import init_model
from hone.model.lora import add_adapter
from hone.rollout.local import LocalEngine
from hone.weights.publish import NoAnswer, Published, Update, publish
from hone.weights.receive import Receiver

ARCHITECTURE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
BUCKET_BYTES = 4 * 1024
"""The model has 60 KiB in float32: many buckets, and tensors that are larger than one."""


def tiny_model(seed: int, dtype: torch.dtype = torch.float32) -> CausalModel:
    return init_model(ARCHITECTURE, vocab_size=48, seed=seed, dtype=dtype, device="cpu")


def tiny_model_with_adapter(seed: int) -> CausalModel:
    """Its adapter changes what it computes."""
    model = tiny_model(seed)
    add_adapter(model, LoraSection(rank=2), seed=seed, dtype=torch.float32)
    assert model.adapter is not None
    for name in model.adapter.names:
        model.adapter.factors(name)[1].normal_()
    return model


def tiny_engine(seed: int = 99, dtype: torch.dtype = torch.float32) -> LocalEngine:
    return LocalEngine(tiny_model(seed, dtype), decode=lambda ids: "", eos_ids=(0,), max_concurrent=4, timeout_s=60.0)


class HangingEngine(LocalEngine):
    """Takes the first two weights of what comes, and then nothing more."""

    async def load(self, weights, version):
        stream = iter(weights)
        await asyncio.to_thread(lambda: [next(stream), next(stream), time.sleep(5)])


class LateEngine(LocalEngine):
    """Takes all weights and does not come back."""

    async def load(self, weights, version):
        await super().load(weights, version)
        await asyncio.sleep(5)


class ForgetfulEngine(LocalEngine):
    """Takes all weights, and changes one afterwards."""

    async def load(self, weights, version):
        await super().load(weights, version)
        next(iter(self._model.parameters())).data[0, 0] += 1


class PickyEngine(LocalEngine):
    """Takes one weight of the first version that comes, and no more; then it is as others are."""

    async def load(self, weights, version):
        stream = iter(weights)
        await asyncio.to_thread(next, stream)
        self.__class__ = LocalEngine
        raise DataError("not these weights")


KINDS = {
    "good": LocalEngine,
    "hanging": HangingEngine,
    "late": LateEngine,
    "forgetful": ForgetfulEngine,
    "picky": PickyEngine,
}


def make_engine(kind: str, dtype: torch.dtype = torch.float32) -> LocalEngine:
    engine = tiny_engine(dtype=dtype)
    engine.__class__ = KINDS[kind]
    return engine


class ThreadPeer:
    """A receiver on an event loop in a thread of this process; `calls` records what it was asked."""

    def __init__(self, engine, *, timeout_s: float = 60.0, num_workers: int = 1) -> None:
        self.engine, self.num_workers = engine, num_workers
        self.calls: list[str] = []
        self.dies_at: str | None = None
        """A call that is never answered, nor any after it: the process has died."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.receiver = self._run(self._make(timeout_s)).result(60)

    async def _make(self, timeout_s: float) -> Receiver:
        return Receiver(self.engine, timeout_s=timeout_s)

    def call(self, method, *args):
        self.calls.append(method)
        if self.dies_at is not None and self.dies_at in self.calls:

            def dead(deadline):
                raise NoAnswer("ActorDiedError: it was killed")

            return dead
        started = self._run(getattr(self.receiver, method.removesuffix("_weights"))(*args))
        return lambda deadline: started.result(max(0.0, deadline - time.monotonic()))

    def _run(self, work) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        async def end():
            if not self.receiver._lock.locked():
                await self.receiver.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            if isinstance(self.engine, LocalEngine):
                await self.engine.close()

        self._run(end()).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        self.loop.close()


@contextmanager
def peers(kinds: Mapping[str, str], **settings) -> Iterator[dict[str, ThreadPeer]]:
    """One for each name, of a kind of `KINDS`."""
    made = {name: ThreadPeer(make_engine(kind), **settings) for name, kind in kinds.items()}
    try:
        yield made
    finally:
        for peer in made.values():
            peer.close()


def send(
    model, engines, transport, version, *, attempt="", senders=1, sender=0, timeout_s=60.0, dtype=None
) -> Published:
    """One version to engines, from this thread."""
    update = Update(f"{version}.{attempt}", version, senders)
    weights = model.named_weights() if isinstance(model, CausalModel) else model
    return publish(
        weights,
        engines,
        transport,
        updates=dict.fromkeys(engines, update),
        sender=sender,
        bucket_size=BUCKET_BYTES,
        timeout_s=timeout_s,
        dtype=dtype,
    )
