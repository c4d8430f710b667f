"""Weight source of a model on device `meta`: its weights one by one, for ranks that keep a part of each.

A model on device `meta` has names and shapes only; its `contents` are read once the sharding is known, by
`train/materialize.py`.
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
    """Whether reading needs the whole model in memory: one process should read and broadcast."""

    def with_more(self, read: Read) -> Contents:
        """The same, and others behind them."""
        return Contents(partial(_one_after_another, self.read, read), self.is_made_whole)

    def __deepcopy__(self, _memo: Any) -> Contents:
        return self


def _one_after_another(*reads: Read) -> Iterator[tuple[str, Tensor]]:
    return chain.from_iterable(read() for read in reads)
