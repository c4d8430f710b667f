"""Policy trainer, in one process or on one rank of many: updates of optimizer steps of microbatches.

Not here: the microbatch itself (`trainer.py`), the weights and their optimizer (`optim.py`, `sharded_weights.py`), and
who else trains it (`ranks.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hone.algo.algorithm import Algorithm
from hone.config.run import OptimizerSection
from hone.data.pack import Indices, computed_tokens, count_totals, optimizer_steps
from hone.errors import CheckpointError
from hone.memory.guard import UNGUARDED, Guard
from hone.model.base import CausalModel
from hone.train.critic import Critic
from hone.train.learner import Learner
from hone.train.optim import StepResult
from hone.train.ranks import ALONE, Ranks
from hone.train.tensor_files import Share, put_under, under
from hone.train.trainer import PreparedBatch, measured, train_microbatch
from hone.types import Batch

CRITIC, REFERENCE = "critic/", "reference/"
"""Prefixes of what a checkpoint holds besides the policy's own tensors."""


class PolicyTrainer(Learner[CausalModel]):
    """Trains `model` in place.

    Args:
        model: the policy; its parameters are taken over. With an adapter, only its parameters are trained: what is
            beneath has no master weights and no optimizer state, and is in no checkpoint.
        optimizer: learning rate, schedule, clipping.
        total_optimizer_steps: of the whole stage; where the schedule ends.
        temperature: of the sampler; logprobs are of the same distribution.
        tokens_per_microbatch, logprob_chunk_tokens: of one rank; memory, never the result.
        precision: arithmetic of forward and backward; the rest is float32.
        reference: the initial weights, where the algorithm needs them; frozen. A copy, or the policy's `AdapterOff`.
        samples_per_optimizer_step: None makes an update one optimizer step per pass.
        passes_per_batch: times that an update goes over its batch.
        seed: of the shuffling of samples over optimizer steps.
        critic: learns in every update, where the algorithm needs values.
        critic_warmup_updates: first updates in which only the critic learns, here or elsewhere.
        reference_refresh_every: updates after which the policy becomes the reference, again and again; 0: never.
        guard, ranks: as `Learner`; a critic has the same.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        optimizer: OptimizerSection,
        total_optimizer_steps: int,
        temperature: float,
        tokens_per_microbatch: int,
        logprob_chunk_tokens: int,
        precision: Literal["float32", "bfloat16", "float64"],
        reference: CausalModel | None = None,
        samples_per_optimizer_step: int | None = None,
        passes_per_batch: int = 1,
        seed: int = 0,
        critic: Critic | None = None,
        critic_warmup_updates: int = 0,
        reference_refresh_every: int = 0,
        guard: Guard = UNGUARDED,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(
            model,
            optimizer=optimizer,
            total_optimizer_steps=total_optimizer_steps,
            precision=precision,
            guard=guard,
            ranks=ranks,
        )
        self.reference = reference
        if reference is not None:
            ranks.freeze(reference, getattr(torch, precision))
        self.temperature = temperature
        self.tokens_per_microbatch = tokens_per_microbatch
        self.logprob_chunk_tokens = logprob_chunk_tokens
        self.samples_per_optimizer_step = samples_per_optimizer_step
        self.passes_per_batch = passes_per_batch
        self.seed = seed
        self.critic = critic
        self.critic_warmup_updates = critic_warmup_updates
        self.reference_refresh_every = reference_refresh_every
        self.update_count = 0
        """Policy updates made; part of the key of the shuffling."""
        self.largest_microbatch = 0
        """Tokens of the largest microbatch of the last pass, gradient or not."""

    def logprobs(self, batch: Batch, *, reference: bool = False, temperature: float | None = None) -> Tensor:
        """(T,) float32 logprobs of the batch's tokens; see `Trainer.logprobs`."""
        model = self.reference if reference else self.model
        if model is None:
            raise ValueError("this trainer was made without a reference: the algorithm did not say that it needs one")
        every = np.arange(len(batch.length_S))
        return self.logprobs_of(
            model,
            batch,
            lambda prepared: self._microbatches(prepared, every),
            device=self.device,
            dtype=self.held.dtype,
            temperature=temperature or self.temperature,
            chunk_tokens=self.logprob_chunk_tokens,
        )

    def values(self, batch: Batch) -> Tensor:
        """(T,) float32; see `Trainer.values`."""
        if self.critic is None:
            raise ValueError("this trainer was made without a critic: the algorithm did not say that it needs values")
        return self.critic.values(batch)

    def measure(self, batch: Batch, needs: Collection[str]) -> dict[str, Tensor]:
        """See `Trainer.measure`; one after another."""
        return measured(self, batch, needs)

    def update(self, batch: Batch, algorithm: Algorithm) -> dict[str, float]:
        """One policy update, of one or several optimizer steps; see `Trainer.update`.

        The critic, if there is one, learns first; the policy only after the critic's warm-up.
        """
        steps = list(
            optimizer_steps(
                len(batch.length_S),
                samples_per_step=self.samples_per_optimizer_step,
                passes=self.passes_per_batch,
                seed=self.seed,
                update=self.update_count,
            )
        )
        metrics: dict[str, float] = {}
        if self.critic is not None:
            metrics |= self.critic.update(batch, algorithm, steps)
        if self.update_count >= self.critic_warmup_updates:
            metrics |= self._update_policy(batch, algorithm, steps)
        self.update_count += 1
        every = self.reference_refresh_every
        if self.reference is not None and every and self.update_count % every == 0:
            self.ranks.load(self.reference, self.ranks.tensors(self.model))
        return metrics

    def _update_policy(self, batch: Batch, algorithm: Algorithm, steps: Sequence[Indices]) -> dict[str, float]:
        """The policy's part of an update.

        `old_logprobs_T` is computed only where the policy moves within the update and the batch does not bring it.
        """
        if len(steps) > 1 and "old_logprobs" in algorithm.needs and "old_logprobs_T" not in batch.columns:
            batch = batch.with_column("old_logprobs_T", self.logprobs(batch))
        prepared = self._prepare(batch, algorithm)
        has_loss_T = batch.loss_mask_T.cpu().numpy() > 0
        loss_tokens_S = prepared.shape.count(has_loss_T)
        if algorithm.only_advantage_has_gradient:
            has_loss_T &= batch.columns["advantages_T"].cpu().numpy() != 0
        trained_S = prepared.shape.count(has_loss_T) > 0
        measured: list[Tensor] = []
        results: list[StepResult] = []
        for samples in steps:
            trained, tokens = samples[trained_S[samples]], loss_tokens_S[samples]
            parts, result = self.optimizer_step(partial(self.accumulate, prepared, trained, algorithm, tokens))
            measured += parts
            results.append(result)
        metrics = algorithm.summarize(self.ranks.rows(measured), len(steps))
        num_trained = sum(int(trained_S[samples].sum()) for samples in steps)
        return metrics | {
            "train/grad_norm": sum(r.grad_norm for r in results) / len(results),
            "train/lr": results[-1].lr,
            "train/optimizer_steps": len(results),
            "train/skipped_steps": sum(not r.applied for r in results),
            "train/microbatches": len(measured),
            "train/masked_frac": 1 - int(loss_tokens_S.sum()) / max(len(batch.token_ids_T), 1),
            "train/samples_trained_frac": num_trained / max(sum(map(len, steps)), 1),
        }

    def accumulate(
        self, batch: PreparedBatch, samples: Indices, algorithm: Algorithm, loss_tokens_S: Indices
    ) -> list[Tensor]:
        """Add up the gradient of one optimizer step.

        Args:
            samples: those that have a gradient, on all ranks.
            loss_tokens_S: loss tokens of all samples of the step, with gradient or not: they set the denominators.
        Returns:
            What each microbatch of this rank measured.
        """
        totals = count_totals(loss_tokens_S)
        measured: list[Tensor] = []
        for part in self.held.passes(self._microbatches(batch, samples)):
            found = train_microbatch(
                self.model,
                batch,
                part,
                algorithm,
                totals,
                temperature=self.temperature,
                chunk_tokens=self.logprob_chunk_tokens,
            )
            measured.append(found)
            self.guard.check()
        return measured

    def _microbatches(self, batch: PreparedBatch, samples: Indices) -> list[Indices]:
        plan = self.ranks.microbatches(batch.shape, samples, self.tokens_per_microbatch)
        self.largest_microbatch = max((computed_tokens(batch.shape, part) for part in plan), default=0)
        return plan

    def _prepare(self, batch: Batch, algorithm: Algorithm) -> PreparedBatch:
        names = ["loss_mask_T", "sampler_logprobs_T", "advantages_T"]
        names += ["old_logprobs_T"] if "old_logprobs_T" in batch.columns else []
        names += ["ref_logprobs_T"] if algorithm.section.kl_loss_coef else []
        names += ["outlier_T"] if "outlier_T" in batch.columns else []
        return PreparedBatch.of(batch, names, self.held.dtype, self.device)

    def state(self) -> tuple[dict[str, Tensor | Share], dict[str, Any]]:
        tensors, rest = super().state()
        tensors, rest = dict(tensors), {**rest, "updates": self.update_count}
        if self.critic is not None:
            critic_tensors, rest["critic"] = self.critic.state()
            tensors |= put_under(CRITIC, critic_tensors)
        if self.reference is not None and self.reference_refresh_every:
            tensors |= put_under(REFERENCE, self.ranks.tensors(self.reference))
        if self.model.adapter is not None:
            rest["base"] = self.model.adapter.base
        return tensors, rest

    def restore(self, tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> None:
        refuse_other_base(self.model, rest)
        super().restore(tensors, rest)
        self.update_count = int(rest["updates"])
        if self.critic is not None:
            self.critic.restore(under(CRITIC, tensors), rest["critic"])
        if self.reference is not None and self.reference_refresh_every:
            self.ranks.load(self.reference, under(REFERENCE, tensors))


def refuse_other_base(model: CausalModel, rest: Mapping[str, Any]) -> None:
    """Raises CheckpointError when what a checkpoint holds was learnt beside other weights than `model`'s."""
    ours, theirs = model.adapter.base if model.adapter else None, rest.get("base")
    if ours != theirs:
        raise CheckpointError(
            f"the checkpoint is of {_called(theirs)}, and here is {_called(ours)}. Put back the model directory that "
            "the stage started from, or start with --fresh."
        )


def _called(base: str | None) -> str:
    return f"an adapter of weights that hash to {base[:12]}" if base else "a model without an adapter"
