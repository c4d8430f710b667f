"""Index arithmetic over ragged sequences: many of different lengths, one after the other in a flat list."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def starts_of(lengths: Ints) -> Ints:
    """Where each sequence begins."""
    return np.cumsum(lengths) - lengths


def ends_of(lengths: Ints) -> Ints:
    """(sequences + 1,) where each begins, and where the last ends."""
    return np.concatenate(([0], np.cumsum(lengths)))


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Concatenates arange(start, start + length) of every pair."""
    return np.arange(lengths.sum()) + np.repeat(starts - starts_of(lengths), lengths)
