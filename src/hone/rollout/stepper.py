"""Stepper interface between scheduler and model: rows that share prompts, advanced by one token at a time.

A row is one sequence being sampled; live rows are always numbered 0 .. count - 1. Prompts are computed once and
shared by their rows. Implementations own all tensors of attention; they know nothing of sampling or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from hone.rollout.engine import CacheUse
from hone.types import Picture, TokenIds


class Stepper(Protocol):
    """Prompts in, next-token logits out."""

    def can_add_rows(self, count: int) -> bool:
        """Whether rows may be added while `count` are live."""
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

    def add_rows(self, prompt_ids: Sequence[int]) -> Tensor:
        """Append a row per entry; returns (new rows, V) logits of their first token."""
        ...

    def advance(self, token_ids_B: Tensor) -> Tensor:
        """Append one token to every live row; returns (B, V) logits of the next."""
        ...

    def move_rows(self, target: np.ndarray, source: np.ndarray, count: int) -> None:
        """Row `target[i]` becomes row `source[i]`; afterwards `count` rows are live."""
        ...

    def cache_use(self) -> CacheUse:
        """How full the cache is now."""
        ...

    def limit(self, *, max_rows: int, prefill_tokens: int) -> None:
        """At most so many rows, and so many prompt tokens computed at one time, from now on."""
        ...

    def clear(self, *, will_return: bool = False) -> None:
        """Forget everything and free all memory. `will_return`: as much will be needed again."""
        ...


def closing_moves(dead_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """How to close the holes that dead rows leave with the fewest moves: the last live rows move into them.

    Returns (target, source, live count), for `Stepper.move_rows`.
    """
    count = len(dead_B) - int(dead_B.sum())
    target = np.flatnonzero(dead_B[:count])
    source = count + np.flatnonzero(~dead_B[count:])
    return target, source, count
