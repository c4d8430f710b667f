"""What is to be in a model that has no memory yet: its weights one after another, for whoever keeps a part of each.

A model made on device `meta` has names and shapes only. Its `contents` say what belongs there, and may be gone through
when it is known which part of which weight is to be where. Not here: who keeps what (`train/materialize.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

Read = Callable[[], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class Contents:
    """Weights by their Hugging Face names, each once, and what else a model cannot compute without.

    A copy of a model has the same contents as the model.
    """

    read: Read
    """One at a time, on the CPU, in any dtype; of a file no more is read than is looked at."""
    is_made_whole: bool = False
    """Whether the whole model is in memory on the way: one process should read, and tell the others."""

    def with_more(self, read: Read) -> Contents:
        """The same, and others behind them."""
        return Contents(partial(_one_after_another, self.read, read), self.is_made_whole)

    def __deepcopy__(self, _memo: Any) -> Contents:
        return self


def _one_after_another(*reads: Read) -> Iterator[tuple[str, Tensor]]:
    return chain.from_iterable(read() for read in reads)
