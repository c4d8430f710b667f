"""A model in training: its weights in flat buffers, their optimizer, and what a checkpoint needs of both.

What every kind of trainer shares. Not here: what is learnt (`local.py` a policy, `pairs.py` a reward model).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hone.config.run import OptimizerSection
from hone.model.base import CausalModel
from hone.model.fingerprint import weights_fingerprint
from hone.model.heads import ScalarModel
from hone.plan.guard import UNGUARDED, Guard
from hone.train.optim import FlatAdamW, FlatWeights, StepResult

M = TypeVar("M", bound=CausalModel | ScalarModel)
T = TypeVar("T")


class WeightsOf:
    """A model's weights as they are whenever somebody goes through them: loading them may have to begin again."""

    def __init__(self, model: CausalModel | ScalarModel) -> None:
        self._model = model

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._model.named_weights()


class Learner(Generic[M]):
    """Owns `model` and trains it in place.

    Args:
        model: its parameters become views of a flat buffer in `precision`.
        optimizer: learning rate, schedule, clipping.
        total_optimizer_steps: of the whole stage; where the schedule ends.
        precision: arithmetic of forward and backward; the rest is float32.
        guard: watches over memory.
    """

    def __init__(
        self,
        model: M,
        *,
        optimizer: OptimizerSection,
        total_optimizer_steps: int,
        precision: Literal["float32", "bfloat16", "float64"],
        guard: Guard = UNGUARDED,
    ) -> None:
        self.model = model
        self.guard = guard
        self.flat = FlatWeights(model, getattr(torch, precision))
        self.optimizer = FlatAdamW(self.flat, optimizer, total_steps=total_optimizer_steps)

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

    def without_gradient(self, work: Callable[[], T]) -> T:
        """What a pass without gradients computes; done again if it runs out of memory."""

        def guarded() -> T:
            with self.guard.phase("logprobs"):
                return work()

        return self.guard.attempt(guarded)

    @property
    def device(self) -> torch.device:
        return self.flat.master.device

    @property
    def hf_config(self) -> PreTrainedConfig:
        """What describes the model on disk."""
        return self.model.hf_config

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """The model's weights under their Hugging Face names; see `Trainer.weights`."""
        return WeightsOf(self.model)

    def fingerprint(self) -> str:
        """Content hash of the weights; see `Trainer.fingerprint`."""
        return weights_fingerprint(self.weights())

    def master_weights(self) -> list[tuple[str, Tensor]]:
        """Copies of the float32 master weights, under their Hugging Face names; merged, where there is an adapter."""
        dtype = self.flat.master.dtype
        with self.flat.showing_master():
            return [(name, weight.to(dtype, copy=True)) for name, weight in self.model.named_weights()]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything needed to continue bit for bit; see `Trainer.state`."""
        return self.optimizer.state()

    def restore(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """Continue where `state` was taken; CheckpointError if that was another model."""
        self.optimizer.restore(tensors, rest)
