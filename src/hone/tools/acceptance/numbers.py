"""The part on numbers: hidden states, logprobs, gradients and one optimizer step against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hone.model.load import init_model
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import (
    SMALL,
    TINY,
    PartSetting,
    laid_out,
    make_algorithm,
    make_trainer,
    random_batch,
    update,
)
from hone.types import Batch

PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """What a new trainer makes of a batch, in float64 on the CPU."""

    hidden_UH: Tensor
    logprobs_T: Tensor
    grad_norm: float
    gradient: Tensor
    """Of every weight, clipped."""
    moved: Tensor
    """Of every weight: how far one optimizer step moved it."""


def numbers(setting: PartSetting) -> Iterator[Figure]:
    """Each shape of a microbatch, in each precision, with the same weights."""
    shape = TINY if setting.tiny else SMALL
    for case, batch in layout_shapes(setting, shape["vocab_size"]).items():
        exact = computed(shape, batch, torch.float64, "float64", torch.device("cpu"))
        for precision in PRECISIONS:
            found = computed(shape, batch, torch.float32, precision, setting.device)
            for name, error in errors_of(found, exact).items():
                yield Figure("numbers", f"{name}_{precision}", error, case)


def layout_shapes(setting: PartSetting, vocab: int) -> Mapping[str, Batch]:
    """Five ways in which samples share prompts: each has attention of another shape."""
    longest = 24 if setting.tiny else 300

    def batch(lengths: Sequence[int], prompts: int, prompt_tokens: int = 16) -> Batch:
        return random_batch(lengths, prompts, vocab=vocab, prompt_tokens=prompt_tokens)

    return {
        "ragged groups": batch([max(1, longest * (n + 1) // 12) for n in range(12)], 3),
        "one group": batch([longest] * 8, 1),
        "a prompt for each sample": batch([longest] * 4, 4),
        "one long sample": batch([8 * longest], 1),
        "long prompt, short samples": batch([1, 2, 3, longest // 4], 1, prompt_tokens=4 * longest),
    }


def computed(
    shape: Mapping[str, Any], batch: Batch, dtype: torch.dtype, precision: str, device: torch.device
) -> UpdateOutcome:
    """One pass without gradient and one optimizer step."""
    model = init_model(shape, vocab_size=None, seed=0, dtype=dtype, device=device)
    trainer = make_trainer(model, precision, 10**6)
    with torch.no_grad():
        hidden_UH = model.hidden(laid_out(batch, device))
    logprobs_T, before = trainer.logprobs(batch), flat(dict(trainer.master_weights()))
    norm = update(trainer, batch, make_algorithm())["train/grad_norm"]
    tensors, _ = trainer.state()
    # The first average of Adam that starts from zero is the gradient, scaled alike for all weights.
    averages = {name: tensor for name, tensor in tensors.items() if name.startswith("exp_avg/")}
    return UpdateOutcome(
        hidden_UH.double().cpu(),
        logprobs_T.double().cpu(),
        norm,
        flat(averages) / (1 - trainer.optimizer.settings.betas[0]),
        flat(dict(trainer.master_weights())) - before,
    )


def flat(tensors: Mapping[str, Any]) -> Tensor:
    """All numbers of named tensors, in the order of the names, as float64 on the CPU."""
    return torch.cat([tensors[name].detach().double().cpu().flatten() for name in sorted(tensors)])


def errors_of(found: UpdateOutcome, exact: UpdateOutcome) -> dict[str, float]:
    """What each figure says of two outcomes, without the precision in its name."""
    return {
        "hidden_error": apart(found.hidden_UH, exact.hidden_UH),
        "logprob_error": float((found.logprobs_T - exact.logprobs_T).abs().mean()),
        "grad_norm_error": abs(found.grad_norm - exact.grad_norm) / exact.grad_norm,
        "grad_error": apart(found.gradient, exact.gradient),
        "step_error": apart(found.moved, exact.moved),
    }


def apart(found: Tensor, exact: Tensor) -> float:
    """Length of the difference over that of the exact numbers."""
    return float((found - exact).norm() / exact.norm())
