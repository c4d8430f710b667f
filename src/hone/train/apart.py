"""What a policy's trainer has beside it, where that is elsewhere: a critic, a reference or both, and no policy.

They are called as `PolicyTrainer` is, and a checkpoint has of them what it would have of those beside a policy: a run
may go on in either layout. Who calls them is `cluster.trainer`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from hone.algo.algorithm import Algorithm
from hone.data.pack import optimizer_steps
from hone.train.critic import Critic
from hone.train.policy import CRITIC, REFERENCE
from hone.train.reference import Reference
from hone.train.tensor_files import Share, put_under, under
from hone.train.trainer import measured
from hone.types import Batch


class Apart:
    """Critic, reference or both, on one process or on one rank of many.

    Args:
        samples_per_optimizer_step, passes_per_batch, seed: as of `PolicyTrainer`; the critic's steps are the policy's.
        keeps_reference: whether a checkpoint has the reference, because it does not stay what it was at the start.
    """

    def __init__(
        self,
        *,
        critic: Critic | None,
        reference: Reference | None,
        samples_per_optimizer_step: int | None = None,
        passes_per_batch: int = 1,
        seed: int = 0,
        keeps_reference: bool = False,
    ) -> None:
        self._critic, self._reference = critic, reference
        self._samples_per_optimizer_step, self._passes_per_batch = samples_per_optimizer_step, passes_per_batch
        self._seed = seed
        self._keeps_reference = keeps_reference
        self._update_count = 0

    @property
    def critic(self) -> Critic:
        assert self._critic is not None, "the critic is elsewhere"
        return self._critic

    @property
    def reference(self) -> Reference:
        assert self._reference is not None, "the reference is elsewhere"
        return self._reference

    def logprobs(self, batch: Batch, *, reference: bool = True, temperature: float | None = None) -> Tensor:
        """(T,) float32, of the reference; see `Trainer.logprobs`."""
        assert reference, "the policy is elsewhere"
        return self.reference.logprobs(batch, temperature=temperature)

    def values(self, batch: Batch) -> Tensor:
        """(T,) float32; see `Trainer.values`."""
        return self.critic.values(batch)

    def measure(self, batch: Batch, needs: Collection[str]) -> dict[str, Tensor]:
        """What is held here of `Trainer.measure`."""
        return measured(self, batch, needs)

    def update(self, batch: Batch, algorithm: Algorithm) -> dict[str, float]:
        """The critic's part of a policy update; see `Trainer.update`."""
        steps = optimizer_steps(
            len(batch.length_S),
            samples_per_step=self._samples_per_optimizer_step,
            passes=self._passes_per_batch,
            seed=self._seed,
            update=self._update_count,
        )
        metrics = self.critic.update(batch, algorithm, list(steps))
        self._update_count += 1
        return metrics

    def refresh(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Let the reference become a policy with these weights."""
        self.reference.become(weights)

    def state(self) -> tuple[dict[str, Tensor | Share], dict[str, Any]]:
        """The part of `PolicyTrainer.state` that is held here."""
        tensors: dict[str, Tensor | Share] = {}
        rest: dict[str, Any] = {}
        if self._critic is not None:
            critic_tensors, rest["critic"] = self._critic.state()
            tensors |= put_under(CRITIC, critic_tensors)
        if self._reference is not None and self._keeps_reference:
            tensors |= put_under(REFERENCE, self._reference.tensors())
        return tensors, rest

    def restore(self, tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> None:
        """Continue where a whole trainer's state was taken."""
        self._update_count = int(rest["updates"])
        if self._critic is not None:
            self._critic.restore(under(CRITIC, tensors), rest["critic"])
        if self._reference is not None and self._keeps_reference:
            self._reference.restore(under(REFERENCE, tensors))
