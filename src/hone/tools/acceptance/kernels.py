"""Part on fused kernels: how much faster they are than torch's own, and how far their numbers are apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from hone.devices import devices_here, synchronize
from hone.model.kernels import use_fused_kernels, uses_fused_kernels
from hone.model.load import init_model
from hone.model.logprobs import token_logprobs
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import (
    PROMPT,
    TINY,
    PartSetting,
    make_algorithm,
    make_trainer,
    random_batch,
    shape_of,
    timed,
    update,
)
from hone.types import Batch

LAYERS = 8
"""Of Qwen3-0.6B's: activations of a microbatch then fit next to anything."""


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """One way of computing the same."""

    logprobs_T: Tensor
    grad_norm: float
    first_s: float
    """First pass without gradient and first update."""
    update_s: float
    logits_s: float
    new_graphs: int
    """Compiled for other lengths than the first."""


def kernels(setting: PartSetting) -> Iterator[Figure]:
    """An update and the passes over logits with fused kernels and without, same weights and samples."""
    dtype = "bfloat16" if setting.is_gpu and devices_here("auto").bfloat16 else "float32"
    shape = TINY if setting.tiny else {**shape_of("0.6b"), "num_hidden_layers": LAYERS}
    length = setting.lengths[0]
    samples = setting.budget // length
    case = f"{samples} x {length} tokens, {dtype}"
    try:
        use_fused_kernels(setting.device.type)
        is_compiled = uses_fused_kernels(setting.device)
        yield Figure("kernels", "kernels_compiled", float(is_compiled))
        if not is_compiled:
            return
        fused = measured(setting, shape, dtype, length, samples)
        use_fused_kernels(None)
        plain = measured(setting, shape, dtype, length, samples)
    finally:
        use_fused_kernels(None)
    yield Figure("kernels", "kernels_compile_s", fused.first_s - plain.first_s, case)
    yield Figure("kernels", "kernels_update_ratio", fused.update_s / plain.update_s, case)
    yield Figure("kernels", "kernels_logits_ratio", fused.logits_s / plain.logits_s, case)
    apart = float((fused.logprobs_T - plain.logprobs_T).abs().mean())
    yield Figure("kernels", "kernels_logprob_difference", apart, case)
    yield Figure("kernels", "kernels_grad_difference", abs(fused.grad_norm / plain.grad_norm - 1), case)
    yield Figure("kernels", "kernels_new_lengths", fused.new_graphs, case)


def measured(setting: PartSetting, shape: Mapping[str, Any], dtype: str, length: int, samples: int) -> KernelFigures:
    """Numbers and seconds with kernels as they are set now."""
    prompt = min(PROMPT, length // 3)

    def of_length(tokens: int) -> Batch:
        vocab = shape["vocab_size"]
        return random_batch([tokens] * samples, max(1, samples // 8), vocab=vocab, prompt_tokens=prompt)

    model = init_model(shape, vocab_size=None, seed=0, dtype=torch.float32, device=setting.device)
    trainer, algorithm, batch = make_trainer(model, dtype, setting.budget), make_algorithm(), of_length(length - prompt)
    started = time.perf_counter()
    logprobs_T = trainer.logprobs(batch).double().cpu()
    grad_norm = update(trainer, batch, algorithm)["train/grad_norm"]
    synchronize()
    first_s = time.perf_counter() - started
    before = counters["stats"]["unique_graphs"]
    for tokens in (length // 2, length - prompt - 1):
        update(trainer, of_length(tokens), algorithm)
    new_graphs = counters["stats"]["unique_graphs"] - before
    update_s, _ = timed(lambda: update(trainer, batch, algorithm))
    logits_s, _ = timed(logits_pass(setting.device, getattr(torch, dtype), shape, chunk_tokens=1024))
    return KernelFigures(logprobs_T, grad_norm, first_s, update_s, logits_s, new_graphs)


def logits_pass(
    device: torch.device, dtype: torch.dtype, shape: Mapping[str, Any], *, chunk_tokens: int
) -> Callable[[], object]:
    """What makes logprobs of two chunks of random tokens, forward and backward, matrix products included."""
    generator = torch.Generator(device).manual_seed(0)
    hidden, vocab, tokens = shape["hidden_size"], shape["vocab_size"], 2 * chunk_tokens
    states, weight = (
        torch.randn(rows, hidden, generator=generator, device=device).to(dtype).requires_grad_()
        for rows in (tokens, vocab)
    )
    target = torch.randint(vocab, (tokens,), generator=generator, device=device)

    def work() -> object:
        logprobs, _ = token_logprobs(states, weight, target, temperature=hidden**0.5, chunk_tokens=chunk_tokens)
        return torch.autograd.grad(logprobs.sum(), (states, weight))

    return work
