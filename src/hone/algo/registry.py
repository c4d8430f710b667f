"""Registry entries of the functions that a run file may name: function, formula, paper and requirements.

The tables themselves stand beside their functions (`CREDIT`, `RATIO`, `CLIP`, `AGGREGATE`, `KL`); a test proves that
they and the names allowed by `config/algorithm.py` agree. Adding one is a function, an entry and a name there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry(Generic[FunctionT]):
    """A named choice. Shown to people as `formula` and `paper`; refused by `check` where `needs` cannot be met."""

    function: FunctionT
    formula: str
    paper: str = ""
    needs: frozenset[str] = frozenset()
    """Of: `siblings` (group_size >= 2), `old_logprobs`, `ref_logprobs`, `values`, `greedy_reward`, `scores` (of the
    reward's components), and `policy_logprobs`: the trainer's own, before credit is given."""
