"""Tiny models, an alphabet of tokens, and engines that are closed at the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import MinPLogitsWarper

from hone.model.base import CausalModel
from hone.model.load import init_model
from hone.rollout.engine import Request, Sampling
from hone.rollout.local import LocalEngine
from hone.types import Prompt, Sample

T = TypeVar("T")

VOCAB = 48
EOS = 0

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "gpt_neox": {"model_type": "gpt_neox"},
}


def tiny_model(architecture: str = "qwen3", seed: int = 0, **keys: Any) -> CausalModel:
    """Two layers, grouped-query attention, weights wide enough that the next token is far from uniform."""
    config = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        "bos_token_id": None,
        "eos_token_id": EOS,
        **ARCHITECTURES[architecture],
        **keys,
    }
    return init_model(config, vocab_size=VOCAB, seed=seed, dtype=torch.float32, device="cpu")


def reference_of(model: CausalModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Transformers' own model with the same weights, which it takes under the names of its repository."""
    weights = {name: weight.clone() for name, weight in model.named_weights()}
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(model.hf_config)]
    return kind.from_pretrained(None, config=model.hf_config, state_dict=weights, dtype=dtype).eval()


def warped(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Transformers' own processors, in its order."""
    if temperature == 0:
        return logits
    logits = logits / temperature
    nothing = torch.tensor([])  # they look at no tokens so far
    if top_k:
        logits = TopKLogitsWarper(top_k)(nothing, logits)
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(nothing, logits)
    if min_p:
        logits = MinPLogitsWarper(min_p)(nothing, logits)
    return logits


def letters(token_ids: Sequence[int]) -> str:
    """One character per token, EOS left out as a tokenizer leaves out special tokens."""
    return "".join(chr(ord("A") + t) for t in token_ids if t != EOS)


def request(
    token_ids: Sequence[int], *, index: int = 0, samples: int = 1, seed: int = 7, stream: Any = "train", **sampling: Any
) -> Request:
    settings: dict[str, Any] = {
        "max_tokens": 12,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "stop": (),
        "stop_token_ids": (),
    }
    prompt = Prompt(id=f"p{index}", index=index, text=letters(token_ids), token_ids=tuple(token_ids))
    return Request(prompt, samples, Sampling(**(settings | sampling)), seed, stream)


def random_prompts(count: int, *, longest: int = 20, seed: int = 0) -> list[list[int]]:
    """Ragged prompts without EOS."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


class Gate:
    """A `decode` that holds the worker still when the first sample finishes, until it is opened.

    What a test does in between meets an engine with work in flight, however slow or busy the machine.
    """

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def __call__(self, token_ids: Sequence[int]) -> str:
        self._reached.set()
        assert self._open.wait(30)
        return letters(token_ids)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 30)

    def open(self) -> None:
        self._open.set()


def with_engine(
    model: CausalModel, use: Callable[[LocalEngine], Awaitable[T]], *, longest_s: float = 60, **settings: Any
) -> T:
    """Run an async function on a fresh engine, and close the engine whatever happens."""

    async def main() -> T:
        options: dict[str, Any] = {"decode": letters, "eos_ids": (EOS,), "max_concurrent": 64, "timeout_s": 30.0}
        engine = LocalEngine(model, **(options | settings))
        try:
            async with asyncio.timeout(longest_s):
                return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def generate(model: CausalModel, requests: Sequence[Request], **settings: Any) -> list[tuple[Sample, ...]]:
    """All requests at once, in one pass of the event loop; their samples."""

    async def use(engine: LocalEngine) -> list[tuple[Sample, ...]]:
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return with_engine(model, use, **settings)
