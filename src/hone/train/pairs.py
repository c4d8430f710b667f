"""Reward-model training on pairs: both conversations of a pair in one microbatch, their common prefix computed once.

In one process, or on one rank of many (`ranks.py`), each of which has whole pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hone.algo.loss import pairwise_loss
from hone.data.pack import Shape
from hone.data.pairs import PreferencePair
from hone.errors import DataError
from hone.model.heads import ScalarModel, Sequences, last_token_scores
from hone.ragged import Ints, starts_of
from hone.train.learner import Learner
from hone.train.trainer import Checkpointable


@dataclass(frozen=True)
class Measured:
    """A reward model on pairs."""

    loss: float
    """Mean of the pairs' losses, in nats."""
    accuracy: float
    """Fraction of pairs whose better answer has the higher score; a tie counts half."""
    score_mean: float
    score_std: float
    """Standard deviation (unbiased) of the scores of all answers, better and worse."""


class PairLearner(Checkpointable, Protocol):
    """Trainer interface of a reward-model stage."""

    def update(self, pairs: Sequence[PreferencePair]) -> dict[str, float]:
        """One optimizer step on the mean loss of `pairs`. Returns metrics."""
        ...

    def measure(self, pairs: Sequence[PreferencePair]) -> Measured:
        """The model as it is now, on pairs that it does not learn from."""
        ...


class PairTrainer(Learner[ScalarModel]):
    """Trains a reward model in place; arguments as `Learner`. A microbatch must hold any one pair."""

    def update(self, pairs: Sequence[PreferencePair]) -> dict[str, float]:
        """See `PairLearner.update`."""
        measured, result = self.optimizer_step(lambda: self._accumulate(pairs))
        loss, correct = map(sum, zip(*self.passes.ranks.rows(measured), strict=True))
        return {
            "rm/loss": loss / len(pairs),
            "rm/accuracy": correct / len(pairs),
            "rm/lr": result.lr,
            "rm/grad_norm": result.grad_norm,
        }

    def _accumulate(self, pairs: Sequence[PreferencePair]) -> list[Tensor]:
        """Add the gradient of the mean loss of `pairs`. Returns of each microbatch of this rank (2,): the sum of its
        losses, and how many are right."""
        sequences, plan = self._plan(pairs)
        margin_P = self._margins(pairs)
        measured: list[Tensor] = []
        for samples in self.held.passes(plan):
            score_S = last_token_scores(self.model, sequences, samples, self.device)
            chosen_P, rejected_P = score_S[::2], score_S[1::2]
            loss_P = pairwise_loss(chosen_P, rejected_P, margin_P[samples[::2] // 2])
            (loss_P.sum() / len(pairs)).backward()
            right = _correct(chosen_P.detach(), rejected_P.detach())
            measured.append(torch.stack([loss_P.detach().double().sum(), right]))
            self.passes.guard.check()
        return measured

    def measure(self, pairs: Sequence[PreferencePair]) -> Measured:
        """See `PairLearner.measure`."""
        score_S = self.passes.without_gradient(self.model, lambda: self._scores(pairs))
        chosen_P, rejected_P = score_S.unflatten(0, (-1, 2)).unbind(1)
        loss_P = pairwise_loss(chosen_P, rejected_P, self._margins(pairs).cpu().double())
        return Measured(
            loss=float(loss_P.mean()),
            accuracy=float(_correct(chosen_P, rejected_P)) / len(pairs),
            score_mean=float(score_S.mean()),
            score_std=float(score_S.std()),
        )

    def _scores(self, pairs: Sequence[PreferencePair]) -> Tensor:
        """(2 * pairs,) float64, on the CPU: better and worse of each pair in turn."""
        sequences, plan = self._plan(pairs)
        score_S = torch.zeros(2 * len(pairs), dtype=torch.float64, device=self.device)
        for samples in plan:
            found = last_token_scores(self.model, sequences, samples, self.device)
            score_S[torch.from_numpy(samples).to(self.device)] = found.double()
            self.passes.guard.check()
        return self.passes.ranks.column(score_S).cpu()

    def _plan(self, pairs: Sequence[PreferencePair]) -> tuple[Sequences, list[Ints]]:
        """The conversations of all pairs, sample 2i the better and 2i + 1 the worse of pair i, and this rank's
        microbatches. Raises DataError for a pair that fits into none, whichever rank's it would be."""
        sequences = Sequences.of([(pair.chosen, pair.rejected) for pair in pairs])
        prompt_tokens = np.fromiter(map(len, sequences.prompts), np.int64, len(sequences.prompts))
        pair_S = np.arange(2 * len(pairs)) // 2
        pair_of_prompt = np.zeros_like(prompt_tokens)
        pair_of_prompt[sequences.prompt_S] = pair_S
        shape = Shape(  # as if what a pair shares were one prompt, also where that is nothing: so a pair stays together
            prompt_S=pair_S,
            length_S=sequences.length_S,
            start_S=starts_of(sequences.length_S),
            prompt_tokens_N=np.bincount(pair_of_prompt, weights=prompt_tokens).astype(np.int64),
        )
        each = np.maximum(shape.length_S - 1, 0).reshape(-1, 2).sum(1) + shape.prompt_tokens_N
        if each.max() > self.passes.tokens_per_microbatch:
            longest = max(len(pair.chosen) + len(pair.rejected) for pair in pairs)
            raise DataError(
                f"a pair does not fit into train.tokens_per_microbatch = {self.passes.tokens_per_microbatch}: both its "
                f"conversations must, together. Raise it to at least {longest}, or lower data.max_prompt_tokens or "
                "rollout.max_response_tokens, which bound a conversation."
            )
        samples = np.arange(2 * len(pairs))
        return sequences, self.passes.microbatches(shape, samples, whole_groups=True)

    def _margins(self, pairs: Sequence[PreferencePair]) -> Tensor:
        return torch.tensor([pair.margin for pair in pairs], dtype=self.held.dtype, device=self.device)


def _correct(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    return ((chosen_P > rejected_P).double() + 0.5 * (chosen_P == rejected_P)).sum()
