"""The reference where the policy is not: a policy as it was, frozen, that says how likely it finds a batch.

On the policy's own ranks it is a model that `PolicyTrainer` holds beside its own; here it is alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hone.memory.guard import UNGUARDED, Guard
from hone.model.base import CausalModel
from hone.train.learner import Passes
from hone.train.ranks import ALONE, Ranks
from hone.train.tensor_files import Share
from hone.types import Batch


class Reference(Passes):
    """Computes as the policy does: the KL of a policy to itself must be 0.

    Args:
        model: is taken over, by `ranks`.
        temperature, tokens_per_microbatch, logprob_chunk_tokens, precision: as of `PolicyTrainer`.
        guard, ranks: see `Passes`.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        temperature: float,
        tokens_per_microbatch: int,
        logprob_chunk_tokens: int,
        precision: Literal["float32", "bfloat16", "float64"],
        guard: Guard = UNGUARDED,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(guard, ranks)
        self.model = model
        self.temperature = temperature
        self.tokens_per_microbatch = tokens_per_microbatch
        self.logprob_chunk_tokens = logprob_chunk_tokens
        self._dtype = getattr(torch, precision)
        ranks.freeze(model, self._dtype)

    def logprobs(self, batch: Batch, *, temperature: float | None = None) -> Tensor:
        """(T,) float32 logprobs of the batch's tokens; see `Trainer.logprobs`."""
        every = np.arange(len(batch.length_S))
        return self.logprobs_of(
            self.model,
            batch,
            lambda prepared: self.ranks.microbatches(prepared.shape, every, self.tokens_per_microbatch),
            device=self.ranks.device(self.model),
            dtype=torch.promote_types(self._dtype, torch.float32),
            temperature=temperature or self.temperature,
            chunk_tokens=self.logprob_chunk_tokens,
        )

    def become(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take a policy's weights, which come whole and one by one under their Hugging Face names."""
        self.ranks.take(self.model, weights)

    def tensors(self) -> dict[str, Tensor | Share]:
        """What a checkpoint has of it, where it does not stay what it was at the start."""
        return self.ranks.tensors(self.model)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Be what `tensors` was."""
        self.ranks.load(self.model, tensors)
