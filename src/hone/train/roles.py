"""Roles of training: policy, critic and reference, of which a process or rank holds some.

In one process all that the algorithm needs are together. On a cluster each pool has the roles that the run file gives
it, and `cluster.trainer` calls all pools. Either way a checkpoint has the same tensors, so a run may be resumed in the
other layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hone.algo.algorithm import Algorithm
from hone.data.pack import optimizer_steps
from hone.model.base import CausalModel
from hone.train.critic import Critic
from hone.train.learner import Passes
from hone.train.policy import PolicyTrainer
from hone.train.tensor_files import LiveSnapshot, Share, put_under, under
from hone.train.trainer import measured
from hone.types import Batch

CRITIC, REFERENCE = "critic/", "reference/"
"""Prefixes of what a checkpoint holds besides the policy's own tensors."""


class Reference:
    """A frozen policy. It computes as the policy does: the KL of a policy to itself must be 0.

    Args:
        model: is taken over: a model of its own, or the policy's `AdapterOff`.
    """

    def __init__(self, model: CausalModel, passes: Passes) -> None:
        self.model, self.passes = model, passes
        passes.ranks.freeze(model, passes.compute_dtype)

    def logprobs(self, batch: Batch, *, temperature: float | None = None) -> Tensor:
        """(T,) float32 logprobs of the batch's tokens; see `Trainer.logprobs`."""
        return self.passes.logprobs(self.model, batch, temperature)


class Roles:
    """The roles of one process or rank: `Trainer`, where it has the policy.

    Args:
        samples_per_optimizer_step: None makes an update one optimizer step per pass.
        passes_per_batch: times that an update goes over its batch.
        seed: of the shuffling of samples over optimizer steps.
        critic_warmup_updates: first updates in which only the critic learns, here or in another pool.
        reference_refresh_every: updates after which the policy becomes the reference, repeatedly; 0: never. The
            reference is then part of a checkpoint. With the policy in another pool, `refresh` is called instead.
    """

    def __init__(
        self,
        *,
        policy: PolicyTrainer | None = None,
        critic: Critic | None = None,
        reference: Reference | None = None,
        samples_per_optimizer_step: int | None = None,
        passes_per_batch: int = 1,
        seed: int = 0,
        critic_warmup_updates: int = 0,
        reference_refresh_every: int = 0,
    ) -> None:
        self._policy, self.critic, self.reference = policy, critic, reference
        self.samples_per_optimizer_step = samples_per_optimizer_step
        self.passes_per_batch = passes_per_batch
        self.seed = seed
        self.critic_warmup_updates = critic_warmup_updates
        self.reference_refresh_every = reference_refresh_every
        self.update_count = 0
        """Policy updates made; part of the key of the shuffling."""

    @property
    def policy(self) -> PolicyTrainer:
        if self._policy is None:
            raise ValueError("this trainer was made without a policy: it is in another pool")
        return self._policy

    @property
    def passes(self) -> Passes:
        """How the roles here compute; they share one."""
        held = self._policy or self.critic or self.reference
        assert held is not None
        return held.passes

    @property
    def trained(self) -> list[CausalModel]:
        """The models here that learn."""
        policy = [] if self._policy is None else [self._policy.model]
        return policy if self.critic is None else [*policy, self.critic.model.body]

    def logprobs(self, batch: Batch, *, reference: bool = False, temperature: float | None = None) -> Tensor:
        """(T,) float32 logprobs of the batch's tokens; see `Trainer.logprobs`."""
        if not reference:
            return self.policy.logprobs(batch, temperature=temperature)
        if self.reference is None:
            raise ValueError("this trainer was made without a reference: the algorithm does not need one")
        return self.reference.logprobs(batch, temperature=temperature)

    def logprobs_and_entropies(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Trainer.logprobs_and_entropies`."""
        return self.policy.logprobs_and_entropies(batch)

    def values(self, batch: Batch) -> Tensor:
        """(T,) float32; see `Trainer.values`."""
        if self.critic is None:
            raise ValueError("this trainer was made without a critic: the algorithm needs no values")
        return self.critic.values(batch)

    def measure(self, batch: Batch, needs: Collection[str]) -> dict[str, Tensor]:
        """See `Trainer.measure`; one after another."""
        return measured(self, batch, needs)

    def update(self, batch: Batch, algorithm: Algorithm) -> dict[str, float]:
        """One policy update, of one or several optimizer steps; see `Trainer.update`.

        The critic learns first; the policy only after the critic's warm-up.
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
        if self._policy is not None and self.update_count >= self.critic_warmup_updates:
            metrics |= self._policy.update(batch, algorithm, steps)
        self.update_count += 1
        if self._policy is not None and self._keeps_reference and self.update_count % self.reference_refresh_every == 0:
            ranks = self._policy.passes.ranks
            self._load_reference(ranks.tensors(self._policy.model))
        return metrics

    def refresh(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Let the reference become a policy of another pool with these weights, whole and one by one."""
        assert self.reference is not None
        self.reference.passes.ranks.take(self.reference.model, weights)

    @property
    def _keeps_reference(self) -> bool:
        return self.reference is not None and self.reference_refresh_every > 0

    def _load_reference(self, tensors: Mapping[str, Tensor | Share]) -> None:
        assert self.reference is not None
        self.reference.passes.ranks.load(self.reference.model, tensors)

    @property
    def device(self) -> torch.device:
        return self.policy.device

    @property
    def hf_config(self) -> PreTrainedConfig:
        return self.policy.hf_config

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """See `Trainer.weights`."""
        return self.policy.weights()

    def fingerprint(self) -> str:
        """See `Trainer.fingerprint`."""
        return self.policy.fingerprint()

    def master_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.master_weights`."""
        return self.policy.master_weights()

    def write_weights(self, folder: Path, dtype: torch.dtype) -> None:
        """See `Checkpointable.write_weights`."""
        self.policy.write_weights(folder, dtype)

    def state(self) -> tuple[dict[str, Tensor | Share], dict[str, Any]]:
        """The state of all roles here; see `Learner.state`."""
        tensors: dict[str, Tensor | Share] = {}
        rest: dict[str, Any] = {}
        if self._policy is not None:
            of_policy, rest = self._policy.state()
            tensors, rest = dict(of_policy), {**rest, "updates": self.update_count}
        if self.critic is not None:
            of_critic, rest["critic"] = self.critic.state()
            tensors |= put_under(CRITIC, of_critic)
        if self.reference is not None and self._keeps_reference:
            tensors |= put_under(REFERENCE, self.reference.passes.ranks.tensors(self.reference.model))
        return tensors, rest

    def snapshot(self) -> LiveSnapshot:
        """See `Trainer.snapshot`; for one process."""
        return LiveSnapshot(*self.state())

    def restore(self, tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> None:
        """Continue where the state of all roles of a run was taken, in this layout or another."""
        if self._policy is not None:
            self._policy.restore(tensors, rest)
        self.update_count = int(rest["updates"])
        if self.critic is not None:
            self.critic.restore(under(CRITIC, tensors), rest["critic"])
        if self._keeps_reference:
            self._load_reference(under(REFERENCE, tensors))
