"""Critic (value model) training: a scalar head on a language model predicts the return from each state of a response.

Not here: advantages and targets (`algo.returns`), the loss (`algo.value`), and the critic's warm-up (`roles.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hone.algo.algorithm import Algorithm
from hone.algo.loss import Values, value_loss
from hone.config.run import OptimizerSection
from hone.data.pack import count_totals
from hone.model.heads import ScalarModel
from hone.ragged import Ints
from hone.train.learner import Learner, Passes
from hone.train.optim import StepResult
from hone.train.trainer import PreparedBatch, expanded, lay_out, samples_of_tokens
from hone.types import Batch, Totals


class Critic(Learner[ScalarModel]):
    """Trains a scalar model in place; arguments as `Learner`.

    Args:
        value_clip: see `algo.value.value_loss`; in reward units.
    """

    def __init__(
        self,
        model: ScalarModel,
        passes: Passes,
        *,
        optimizer: OptimizerSection,
        total_optimizer_steps: int,
        value_clip: float | None,
    ) -> None:
        super().__init__(model, passes, optimizer=optimizer, total_optimizer_steps=total_optimizer_steps)
        self.value_clip = value_clip

    def values(self, batch: Batch) -> Tensor:
        """(T,) float32: the value of the state before each of the batch's tokens, in reward units."""
        return self.passes.without_gradient(self.model, lambda: self._values(batch))

    def _values(self, batch: Batch) -> Tensor:
        prepared = self._prepare(batch, ())
        every = np.arange(len(batch.length_S))
        value_T = torch.zeros(len(batch.token_ids_T), dtype=self.held.dtype, device=self.device)
        for samples in self.passes.microbatches(prepared.shape, every):
            values, index = self._forward(prepared, samples)
            value_T[index] = values
            self.passes.guard.check()
        return self.passes.ranks.column(value_T).to(batch.loss_mask_T.device)

    def update(self, batch: Batch, algorithm: Algorithm, steps: Sequence[Ints]) -> dict[str, float]:
        """Learn from a batch that has `value_T` and `return_T`, in the optimizer steps that the policy makes of it."""
        names = ("loss_mask_T", "value_T", "return_T")
        prepared = self._prepare(batch, names)
        loss_tokens_S = prepared.shape.count(batch.loss_mask_T.cpu().numpy() > 0)
        has_loss_S = loss_tokens_S > 0
        measured: list[Tensor] = []
        results: list[StepResult] = []
        for samples in steps:
            trained, totals = samples[has_loss_S[samples]], count_totals(loss_tokens_S[samples])
            parts, result = self.optimizer_step(partial(self._accumulate, prepared, trained, algorithm, totals))
            measured += parts
            results.append(result)
        rows = self.passes.ranks.rows(measured)
        loss, clipped, value, tokens = torch.tensor(rows, dtype=self.held.dtype).sum(0).tolist() if rows else (0.0,) * 4
        return {
            "critic/loss": loss / len(steps),
            "critic/clip_frac": clipped / max(tokens, 1),
            "critic/value_mean": value / max(tokens, 1),
            "critic/grad_norm": sum(r.grad_norm for r in results) / len(results),
            "critic/lr": results[-1].lr,
            "critic/skipped_steps": sum(not r.applied for r in results),
        }

    def _prepare(self, batch: Batch, names: Sequence[str]) -> PreparedBatch:
        """The policy's routing says nothing about the experts of a critic."""
        return PreparedBatch.of(replace(batch, routing_T=None), names, self.held.dtype, self.device)

    def _accumulate(self, batch: PreparedBatch, samples: Ints, algorithm: Algorithm, totals: Totals) -> list[Tensor]:
        """Add the gradient of one optimizer step. Returns of each microbatch of this rank (4,): loss, and over tokens
        clips, old values and a count."""
        measured: list[Tensor] = []
        for part in self.held.passes(self.passes.microbatches(batch.shape, samples)):
            value_T, index_T = self._forward(batch, part)
            columns = batch.columns_at(index_T)
            values = Values(
                value_T=value_T,
                old_value_T=columns["value_T"],
                return_T=columns["return_T"],
                loss_mask_T=columns["loss_mask_T"],
                sample_T=samples_of_tokens(batch, part),
                num_samples=len(part),
            )
            loss_T, clipped_T = value_loss(values, self.value_clip)
            loss = (algorithm.weigh(values, totals) * loss_T).sum()
            loss.backward()
            per_token = torch.stack([clipped_T.to(value_T.dtype), values.old_value_T, torch.ones_like(value_T)])
            measured.append(torch.cat([loss.detach()[None], per_token.detach() @ values.loss_mask_T]))
            self.passes.guard.check()
        return measured

    def _forward(self, batch: PreparedBatch, samples: Ints) -> tuple[Tensor, Tensor]:
        """(t,) values of every token of `samples`, and (t,) index of these tokens into the batch's columns."""
        layout, index = lay_out(batch, samples)
        return expanded(self.model(layout), layout), index
