"""Tiny models as Hugging Face directories, and vLLM engines over them that are closed at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from tiny_engines import EOS, letters, tiny_model
from torch import Tensor

from hone.config.engine import EngineSection
from hone.model.base import CausalModel
from hone.model.load import save_hf
from hone.rollout.engine import Request
from hone.rollout.vllm import VllmEngine
from hone.rollout.vllm_args import VllmPlace
from hone.types import Sample
from hone.weights.buckets import Packer
from hone.weights.publish import Update
from hone.weights.receive import Receiver

T = TypeVar("T")


def model_for_vllm(architecture: str = "qwen3", seed: int = 0, **keys: Any) -> CausalModel:
    """With heads of 32, which vLLM's attention on a CPU needs."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.15}
    if architecture == "qwen3":
        sizes["head_dim"] = 32
    return tiny_model(architecture, seed, **(sizes | keys))


def save(model: CausalModel, folder: Path) -> Path:
    save_hf(folder, model.hf_config, model.named_weights())
    return folder


class Vllm:
    """An event loop and one engine in it, for many tests: starting takes seconds."""

    def __init__(self, folder: Path, settings: dict[str, Any] | None = None, **place: Any) -> None:
        self._runner = asyncio.Runner()
        sizes = {"precision": "float32", "longest_tokens": 96, "max_concurrent": 32, "prefill_tokens": 256}
        self.engine = self.run(
            VllmEngine.start(
                VllmPlace(folder, **(sizes | place)),
                EngineSection.model_validate(settings or {}),
                decode=letters,
                eos_ids=(EOS,),
                timeout_s=60.0,
                start_timeout_s=200.0,
            )
        )

    def run(self, what: Awaitable[T]) -> T:
        async def soon() -> T:
            async with asyncio.timeout(220):
                return await what

        return self._runner.run(soon())

    def generate(self, requests: Sequence[Request], on_sample: Callable[[Sample], object] | None = None) -> list[Any]:
        """All at once; their samples."""

        async def use() -> list[tuple[Sample, ...]]:
            return await asyncio.gather(*(self.engine.generate(r, on_sample) for r in requests))

        return self.run(use())

    def load(self, weights: CausalModel | Iterable[tuple[str, Tensor]], version: int) -> None:
        """Publish, as from Ray's object store. Raises EngineError when the engine refuses them."""
        named = weights.named_weights() if isinstance(weights, CausalModel) else weights
        self.run(self._send(list(named), version))

    async def _send(self, weights: list[tuple[str, Tensor]], version: int) -> None:
        receiver, update = Receiver(self.engine, timeout_s=60.0), Update("one", version)
        packer = Packer(16 * 1024, lambda size: torch.empty(size, dtype=torch.uint8))
        await receiver.begin(update)
        for bucket in packer.pack(weights):
            await receiver.load(update.id, 0, bucket.header, bucket.data.numpy())
        await receiver.commit(update.id, 0, packer.manifest(version))

    def close(self) -> None:
        self.run(self.engine.close())
        self._runner.close()
