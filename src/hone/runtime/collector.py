"""Garbage collection of a process that answers in milliseconds."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 50_000
"""Objects made before a collection of the young generation: a step of a large run makes hundreds of thousands, all of
which live until it ends."""


@contextmanager
def spared_collector() -> Iterator[None]:
    """Leave what exists now out of collections.

    With torch and Transformers imported that is a million objects, and each full collection would stop the process for
    300 ms to look at them.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
