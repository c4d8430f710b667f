"""Learner: a model in training with its optimizer and their checkpoint state.

What every kind of trainer shares. Not here: what is learnt (`policy.py` a policy, `critic.py` values, `pairs.py` a
reward model), what only stands still (`reference.py`), or who else trains it (`ranks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hone.config.run import OptimizerSection
from hone.data.pack import Indices
from hone.memory.guard import UNGUARDED, Guard
from hone.model.base import CausalModel
from hone.model.fingerprint import weights_fingerprint
from hone.model.heads import ScalarModel
from hone.train.optim import StepResult, Weights
from hone.train.ranks import ALONE, Ranks
from hone.train.tensor_files import LiveSnapshot, Share
from hone.train.trainer import PreparedBatch, forward_samples
from hone.types import Batch

M = TypeVar("M", bound=CausalModel | ScalarModel)
T = TypeVar("T")


class WeightsOf:
    """A model's weights as they are whenever somebody goes through them: loading them may have to begin again."""

    def __init__(self, held: Weights) -> None:
        self._held = held

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._held.named()


class Passes:
    """Passes of models without gradients, on some ranks and watched over.

    Args:
        guard: watches over memory; not where there are other ranks, which would not know of a second attempt.
        ranks: who computes together.
    """

    def __init__(self, guard: Guard, ranks: Ranks) -> None:
        self.guard = guard
        self.ranks = ranks

    def without_gradient(self, model: CausalModel | ScalarModel, work: Callable[[], T]) -> T:
        """What passes of `model` without gradients compute; done again if they run out of memory."""

        def guarded() -> T:
            with self.guard.phase("logprobs"), torch.no_grad(), self.ranks.computing(model):
                return work()

        return self.guard.attempt(guarded)

    def logprobs_of(
        self,
        model: CausalModel,
        batch: Batch,
        plan: Callable[[PreparedBatch], Iterable[Indices]],
        *,
        device: torch.device,
        dtype: torch.dtype,
        temperature: float,
        chunk_tokens: int,
    ) -> Tensor:
        """(T,) float32 logprobs of the batch's tokens under `model`; see `Trainer.logprobs`.

        Args:
            plan: this rank's microbatches.
            device, dtype: of the columns that are computed.
        """

        def measure() -> Tensor:
            prepared = PreparedBatch.of(batch, (), dtype, device)
            logprobs_T = torch.zeros(len(batch.token_ids_T), dtype=dtype, device=device)
            for samples in plan(prepared):
                values, _, index = forward_samples(
                    model, prepared, samples, temperature=temperature, chunk_tokens=chunk_tokens
                )
                logprobs_T[index] = values
                self.guard.check()
            return self.ranks.column(logprobs_T).to(batch.loss_mask_T.device)

        return self.without_gradient(model, measure)


class Learner(Passes, Generic[M]):
    """Owns `model` and trains it in place.

    Args:
        model: its parameters are taken over, by `ranks`.
        optimizer: learning rate, schedule, clipping.
        total_optimizer_steps: of the whole stage; where the schedule ends.
        precision: arithmetic of forward and backward; the rest is float32.
        guard, ranks: see `Passes`.
    """

    def __init__(
        self,
        model: M,
        *,
        optimizer: OptimizerSection,
        total_optimizer_steps: int,
        precision: Literal["float32", "bfloat16", "float64"],
        guard: Guard = UNGUARDED,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(guard, ranks)
        self.model = model
        self.optimizer = ranks.optimizer(
            model, getattr(torch, precision), settings=optimizer, total_steps=total_optimizer_steps
        )

    def optimizer_step(self, accumulate: Callable[[], T]) -> tuple[T, StepResult]:
        """One optimizer step: `accumulate` adds up its gradient, which is then applied, once.

        Whatever runs out of memory, it is done again from a gradient of zero. Returns what `accumulate` did.
        """

        def work() -> tuple[T, StepResult]:
            with self.guard.phase("update"):
                measured = accumulate()
            with self.guard.phase("optimizer", final=True):
                return measured, self.optimizer.step()

        return self.guard.attempt(work, self.optimizer.begin_again)

    @property
    def held(self) -> Weights:
        """What is trained of the model."""
        return self.optimizer.weights

    @property
    def device(self) -> torch.device:
        return self.held.device

    @property
    def hf_config(self) -> PreTrainedConfig:
        """What describes the model on disk."""
        return self.model.hf_config

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """The model's weights under their Hugging Face names; see `Trainer.weights`."""
        return WeightsOf(self.held)

    def fingerprint(self) -> str:
        """Content hash of the weights; see `Trainer.fingerprint`."""
        return weights_fingerprint(self.weights())

    def master_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Copies of the float32 master weights; see `Trainer.master_weights`."""
        return self.held.named_master()

    def state(self) -> tuple[dict[str, Tensor | Share], dict[str, Any]]:
        """Everything needed to continue bit for bit: tensors or this rank's shares of them (live, not copies), and the
        rest, fit for JSON."""
        return self.optimizer.state()

    def snapshot(self) -> LiveSnapshot:
        """See `Trainer.snapshot`; for one process."""
        return LiveSnapshot(*self.state())

    def restore(self, tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> None:
        """Continue where `state` was taken; CheckpointError if that was another model."""
        self.optimizer.restore(tensors, rest)
