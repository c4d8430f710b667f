"""Ranks that train a model together: the difference between one process and many.

Learners (`policy.py`, `critic.py`, `pairs.py`) are written once. What they ask here is where weights live, which
samples are theirs, and how what each rank found becomes what all found. `Alone` is this process alone;
`fsdp_ranks.py` has the ranks of a process group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from hone.config.run import OptimizerSection
from hone.data.pack import Shape, plan_microbatches
from hone.model.base import CausalModel
from hone.model.heads import ScalarModel
from hone.ragged import Ints
from hone.train.optim import AdamW, FlatAdamW, FlatWeights
from hone.train.tensor_files import Share

RankModelT = TypeVar("RankModelT", bound=CausalModel | ScalarModel)


class Ranks(ABC):
    """Every rank calls everything here, in the same order."""

    @abstractmethod
    def optimizer(
        self, model: CausalModel | ScalarModel, dtype: torch.dtype, *, settings: OptimizerSection, total_steps: int
    ) -> AdamW:
        """Take over a model's parameters, to train them in arithmetic of `dtype`."""

    @abstractmethod
    def freeze(self, model: CausalModel, dtype: torch.dtype) -> None:
        """Take over a model that will not be trained, to compute in `dtype`."""

    @abstractmethod
    def computing(self, model: CausalModel | ScalarModel) -> AbstractContextManager[None]:
        """For passes without gradients: what they gathered of the model's weights goes away at the end."""

    @abstractmethod
    def tensors(self, model: CausalModel) -> dict[str, Tensor | Share]:
        """A model's weights under their Hugging Face names, or this rank's shares of them; live, not copies."""

    @abstractmethod
    def load(self, model: CausalModel, tensors: Mapping[str, Tensor | Share]) -> None:
        """Give a model the weights of `tensors`, of another one of the same architecture, or whole ones."""

    @abstractmethod
    def take(self, model: CausalModel, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Give a model all of its weights, which come whole and one by one under their Hugging Face names."""

    @abstractmethod
    def device(self, model: CausalModel) -> torch.device:
        """Where a model that `freeze` has taken over computes."""

    @abstractmethod
    def microbatches(
        self, shape: Shape, samples: Ints, tokens_per_microbatch: int, *, whole_groups: bool = False
    ) -> list[Ints]:
        """This rank's share of `samples` (ascending), in microbatches: as many on each rank, so that some may be empty.

        Args:
            whole_groups: the samples of a prompt stay together; all of them fit into the budget.
        Raises:
            DataError: one sample alone exceeds the budget, whichever rank's it would be.
        """

    @abstractmethod
    def column(self, value_T: Tensor) -> Tensor:
        """(T,) or (C, T) values of all tokens, from the ones of this rank's samples, 0 elsewhere."""

    @abstractmethod
    def rows(self, measured: Sequence[Tensor]) -> list[list[float]]:
        """What every microbatch of every rank measured, the same list on each."""


class Alone(Ranks):
    """One process, one device."""

    def optimizer(
        self, model: CausalModel | ScalarModel, dtype: torch.dtype, *, settings: OptimizerSection, total_steps: int
    ) -> FlatAdamW:
        return FlatAdamW(FlatWeights(model, dtype), settings, total_steps=total_steps)

    def freeze(self, model: CausalModel, dtype: torch.dtype) -> None:
        """In the policy's own arithmetic: the KL to itself must be 0. Buffers stay, as the policy's do."""
        for parameter in model.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(dtype)

    def computing(self, model: CausalModel | ScalarModel) -> AbstractContextManager[None]:
        return nullcontext()

    def tensors(self, model: CausalModel) -> dict[str, Tensor | Share]:
        return dict(model.named_weights())

    def load(self, model: CausalModel, tensors: Mapping[str, Tensor | Share]) -> None:
        self.take(model, ((name, Share.of(tensor).tensor) for name, tensor in tensors.items()))

    def take(self, model: CausalModel, weights: Iterable[tuple[str, Tensor]]) -> None:
        model.load_weights(weights)

    def device(self, model: CausalModel) -> torch.device:
        return model.output_weight.device

    def microbatches(
        self, shape: Shape, samples: Ints, tokens_per_microbatch: int, *, whole_groups: bool = False
    ) -> list[Ints]:
        return plan_microbatches(shape, samples, tokens_per_microbatch)  # keeps together what fits together

    def column(self, value_T: Tensor) -> Tensor:
        return value_T

    def rows(self, measured: Sequence[Tensor]) -> list[list[float]]:
        return torch.stack(list(measured)).tolist() if measured else []


ALONE = Alone()
