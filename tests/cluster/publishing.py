"""A tiny model with tied weights, engines that hold it, and how to fail: for the tests of publishing."""

from __future__ import annotations

import asyncio
import time

import torch

from hone.config.run import LoraSection
from hone.errors import DataError
from hone.model.base import CausalModel
from hone.model.load import init_model
from hone.model.lora import add_adapter
from hone.rollout.local import LocalEngine

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
BUCKET_BYTES = 16 * 1024
"""The model has 50 KiB in float32: several buckets, and tensors that go over their edges."""


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
        await asyncio.to_thread(lambda: [next(stream), next(stream), time.sleep(30)])


class LateEngine(LocalEngine):
    """Takes all weights and does not come back."""

    async def load(self, weights, version):
        await super().load(weights, version)
        await asyncio.sleep(30)


class ForgetfulEngine(LocalEngine):
    """Takes all weights, and changes one afterwards."""

    async def load(self, weights, version):
        await super().load(weights, version)
        next(iter(self._model.parameters())).data[0, 0] += 1


class PickyEngine(LocalEngine):
    """Takes one weight, and no more."""

    async def load(self, weights, version):
        next(iter(weights))
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
