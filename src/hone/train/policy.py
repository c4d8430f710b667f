"""Policy training: an update of one or several optimizer steps, each of microbatches.

Not here: the microbatch itself (`trainer.py`), the weights and their optimizer (`optim.py`, `fsdp.py`), and
the critic and reference beside the policy (`roles.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hone.algo.algorithm import Algorithm
from hone.data.pack import count_totals
from hone.errors import CheckpointError
from hone.model.base import CausalModel
from hone.model.routing import LoadBalance
from hone.ragged import Ints
from hone.train.learner import Learner
from hone.train.optim import StepResult
from hone.train.tensor_files import Share
from hone.train.trainer import PreparedBatch, train_microbatch
from hone.types import Batch


class GradientNoise(NamedTuple):
    """Unbiased estimates of one optimizer step (arXiv:1812.06162, appendix A.1); `signal` may be negative by chance.

    The expected squared norm of a mean gradient over B samples is |G|^2 + tr(S) / B, with the true gradient G and the
    covariance S of one sample's gradient. Two sizes give two equations. One step's estimates are noisy: average both
    over tens of steps before dividing. tr(S) / |G|^2 is the number of samples per step at which noise and signal are
    equal.
    """

    signal: float
    """|G|^2, squared norm of the true gradient."""
    noise: float
    """tr(S), variance of the gradient of one sample, over all weights."""


def gradient_noise(small_norm: float, norm: float, small_frac: float, samples: int) -> GradientNoise:
    """Signal and noise of a step's gradient.

    Args:
        small_norm: norm of the part that the first microbatch adds to the step's gradient.
        norm: norm of the step's gradient.
        small_frac: share of the step's samples in that microbatch, below 1.
        samples: samples of the step.
    """
    small, small_square, square = small_frac * samples, (small_norm / small_frac) ** 2, norm**2
    return GradientNoise(
        signal=(samples * square - small * small_square) / (samples - small),
        noise=(small_square - square) / (1 / small - 1 / samples),
    )


def mean_noise(found: Sequence[GradientNoise]) -> dict[str, float]:
    """Metrics of an update: means over its optimizer steps; nothing where none was measured."""
    if not found:
        return {}
    return {
        "train/gradient_signal": sum(each.signal for each in found) / len(found),
        "train/gradient_noise": sum(each.noise for each in found) / len(found),
    }


@dataclass
class Accumulated:
    """What the microbatches of one optimizer step measured on this rank."""

    small_frac: float
    """Share of the step's samples with a gradient that is in the first microbatch."""
    measured: list[Tensor] = field(default_factory=list)
    """One row per microbatch, see `algo.measures.MEASURES`."""
    small_norm: float | None = None
    """Norm of the gradient after the first of several microbatches; None where it is not known."""
    balance: list[Tensor] = field(default_factory=list)
    """(1,) each: load-balancing loss of a microbatch by its share of the step's tokens; empty where it is off."""


class PolicyTrainer(Learner[CausalModel]):
    """Trains a policy in place; arguments as `Learner`.

    With an adapter in the model only its parameters are trained: the base weights have no master weights and no
    optimizer state, and are in no checkpoint.
    """

    def logprobs(self, batch: Batch, *, temperature: float | None = None) -> Tensor:
        """(T,) float32 logprobs of the batch's tokens; see `Trainer.logprobs`."""
        return self.passes.logprobs(self.model, batch, temperature)

    def logprobs_and_entropies(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Trainer.logprobs_and_entropies`."""
        return self.passes.logprobs_and_entropies(self.model, batch)

    def update(self, batch: Batch, algorithm: Algorithm, steps: Sequence[Ints]) -> dict[str, float]:
        """Learn from a batch, in optimizer steps of these samples each.

        `old_logprobs_T` is computed only where the policy moves within the update and the batch does not bring it.
        """
        needs_old = len(steps) > 1 and "old_logprobs" in algorithm.needs and "old_logprobs_T" not in batch.columns
        if needs_old or algorithm.picks_by_entropy:
            logprobs_T, entropy_T = self.logprobs_and_entropies(batch)
            batch = batch.with_column("old_logprobs_T", logprobs_T) if needs_old else batch
            batch = algorithm.keep_uncertain(batch, entropy_T) if algorithm.picks_by_entropy else batch
        prepared = self._prepare(batch, algorithm)
        has_loss_T = batch.loss_mask_T.cpu().numpy() > 0
        loss_tokens_S = prepared.shape.count(has_loss_T)
        if algorithm.only_advantage_has_gradient:
            has_loss_T &= batch.columns["advantages_T"].cpu().numpy() != 0
        trained_S = prepared.shape.count(has_loss_T) > 0
        measured: list[Tensor] = []
        results: list[StepResult] = []
        noises: list[GradientNoise] = []
        balance: list[Tensor] = []
        for samples in steps:
            trained, tokens = samples[trained_S[samples]], loss_tokens_S[samples]
            parts, result = self.optimizer_step(partial(self.accumulate, prepared, trained, algorithm, tokens))
            measured += parts.measured
            balance += parts.balance
            results.append(result)
            if parts.small_norm is not None and result.applied:
                noises.append(gradient_noise(parts.small_norm, result.grad_norm, parts.small_frac, len(samples)))
        metrics = algorithm.summarize(self.passes.ranks.rows(measured), len(steps), batch.engines)
        if algorithm.section.load_balancing_coef:
            metrics["train/load_balancing_loss"] = sum(row[0] for row in self.passes.ranks.rows(balance)) / len(steps)
        num_trained = sum(int(trained_S[samples].sum()) for samples in steps)
        return (
            metrics
            | mean_noise(noises)
            | {
                "train/grad_norm": sum(r.grad_norm for r in results) / len(results),
                "train/lr": results[-1].lr,
                "train/optimizer_steps": len(results),
                "train/skipped_steps": sum(not r.applied for r in results),
                "train/microbatches": len(measured),
                "train/masked_frac": 1 - int(loss_tokens_S.sum()) / max(len(batch.token_ids_T), 1),
                "train/samples_trained_frac": num_trained / max(sum(map(len, steps)), 1),
            }
        )

    def accumulate(self, batch: PreparedBatch, samples: Ints, algorithm: Algorithm, loss_tokens_S: Ints) -> Accumulated:
        """Add up the gradient of one optimizer step.

        Args:
            samples: those that have a gradient, on all ranks.
            loss_tokens_S: loss tokens of all samples of the step, with gradient or not: they set the denominators.
        """
        totals = count_totals(loss_tokens_S)
        parts = self.passes.microbatches(batch.shape, samples)
        found = Accumulated(small_frac=len(parts[0]) / len(samples) if parts and len(samples) else 1.0)
        coef, shape = algorithm.section.load_balancing_coef, batch.shape
        tokens_S = shape.prompt_tokens_N[shape.prompt_S] + np.maximum(shape.length_S - 1, 0)  # prompts included
        step_tokens = max(int(tokens_S[samples].sum()), 1)
        for part in self.held.passes(parts):
            share, balance = int(tokens_S[part].sum()) / step_tokens, LoadBalance() if coef else None
            measured = train_microbatch(
                self.model,
                batch,
                part,
                algorithm,
                totals,
                temperature=self.passes.temperature,
                chunk_tokens=self.passes.logprob_chunk_tokens,
                balance=balance,
                balance_weight=coef * share,
            )
            found.measured.append(measured)
            if balance is not None and balance.loss is not None:
                found.balance.append(share * balance.loss.detach()[None])
            if len(found.measured) == 1 and len(parts) > 1:
                found.small_norm = self.optimizer.partial_gradient_norm()
            self.passes.guard.check()
        return found

    def _prepare(self, batch: Batch, algorithm: Algorithm) -> PreparedBatch:
        names = ["loss_mask_T", "sampler_logprobs_T", "advantages_T"]
        names += ["old_logprobs_T"] if "old_logprobs_T" in batch.columns else []
        names += ["ref_logprobs_T"] if algorithm.section.kl_loss_coef else []
        names += [name for name in ("outlier_T", "engine_T") if name in batch.columns]
        return PreparedBatch.of(batch, names, self.held.dtype, self.device)

    def state(self) -> tuple[dict[str, Tensor | Share], dict[str, Any]]:
        tensors, rest = super().state()
        return tensors, rest | ({"base": self.model.adapter.base} if self.model.adapter else {})

    def restore(self, tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> None:
        refuse_other_base(self.model, rest)
        super().restore(tensors, rest)


def refuse_other_base(model: CausalModel, rest: Mapping[str, Any]) -> None:
    """Raises CheckpointError when what a checkpoint holds was learnt beside other weights than `model`'s."""
    ours, theirs = model.adapter.base if model.adapter else None, rest.get("base")
    if ours != theirs:
        raise CheckpointError(
            f"the checkpoint was written for {_called(theirs)}, this run trains {_called(ours)}. Restore the "
            "model directory that the stage started from, or start with --fresh."
        )


def _called(base: str | None) -> str:
    return f"an adapter of weights that hash to {base[:12]}" if base else "a model without an adapter"
