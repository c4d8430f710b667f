"""Stepper interface between scheduler and model: rows that share prompts, advanced by one token at a time.

A row is one sequence being sampled; live rows are always numbered 0 .. count - 1. Prompts are computed once and
shared by their rows. Implementations own all tensors of attention; they know nothing of sampling or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from hone.experts import ExpertIds
from hone.rollout.engine import CacheUse
from hone.types import Picture, TokenIds


class Admission(Protocol):
    """Rows that the cache has room for, counted one by one before they are added."""

    def take(self, begun_tokens: int, most_tokens: int, prompt_tokens: int) -> bool:
        """Count one row more if there is room for it.

        Args:
            begun_tokens: that it has sampled already.
            most_tokens: that it may sample in all.
            prompt_tokens: of its prompt, if that is to be computed first; 0: it is there, or counted already.
        """
        ...


class Stepper(Protocol):
    """Prompts in, next-token logits out."""

    def admission(self, live_most_tokens: int) -> Admission:
        """What rows may be added now.

        Args:
            live_most_tokens: that any of the live rows may sample in all.
        """
        ...

    def rows_that_fit(self, order_B: np.ndarray) -> int:
        """How many of the live rows, the first ones in that order, the cache has room for at the next `advance`."""
        ...

    def add_prompts(self, prompts: Sequence[TokenIds], pictures: Sequence[tuple[Picture, ...]] = ()) -> list[int]:
        """Compute prompts; returns an id for each, good until released and without rows.

        Args:
            pictures: of each prompt; empty where none has any.
        """
        ...

    def release_prompt(self, prompt_id: int) -> None:
        """No more rows of this prompt will be added; it is forgotten with its last row."""
        ...

    def add_rows(self, prompt_ids: Sequence[int], begun: Sequence[TokenIds]) -> Tensor:
        """Append a row per entry; returns (new rows, V) logits of their next token.

        Args:
            begun: tokens that each has sampled already.
        """
        ...

    def advance(self, token_ids_B: np.ndarray) -> Tensor:
        """Append one token to every live row; returns (B, V) logits of the next."""
        ...

    def routing(self, row: int) -> tuple[ExpertIds, ExpertIds] | None:
        """Experts of a row's prompt, and of the tokens that were appended to it; None where they are not recorded."""
        ...

    def move_rows(self, target: np.ndarray, source: np.ndarray, count: int) -> None:
        """Row `target[i]` becomes row `source[i]`; afterwards `count` rows are live."""
        ...

    def cache_use(self) -> CacheUse:
        """How full the cache is now."""
        ...

    def limit(self, *, max_rows: int, prefill_tokens: int) -> None:
        """Bound the rows, and the prompt tokens computed at one time, from now on."""
        ...

    def clear(self) -> None:
        """Forget everything and free all memory."""
        ...


def closing_moves(dead_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """How to close the holes that dead rows leave with the fewest moves: the last live rows move into them.

    Returns (target, source, live count), for `Stepper.move_rows`.
    """
    count = len(dead_B) - int(dead_B.sum())
    target = np.flatnonzero(dead_B[:count])
    source = count + np.flatnonzero(~dead_B[count:])
    return target, source, count


def old_rows(target: np.ndarray, source: np.ndarray, count: int) -> np.ndarray:
    """(count,) which row each one was before `Stepper.move_rows`."""
    order = np.arange(count)
    order[target] = source
    return order
