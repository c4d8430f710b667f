"""What work that may run out of memory asks of whoever watches over it. `plan.ladder.Ladder` is the one that answers.

The shape of it, wherever memory is taken:

    result = guard.attempt(work, undo)        # again from its start, with less memory, for as often as it takes

    def work():
        with guard.phase("update"):           # the named boundary: what runs out in here is of this phase
            for part in parts:
                ...
                guard.check()                 # on a CPU, where nobody refuses an allocation
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

T = TypeVar("T")


class Guard(Protocol):
    """Watches over memory. Any thread may ask."""

    def phase(self, name: str, *, final: bool = False) -> AbstractContextManager[None]:
        """Measure what happens inside, and turn a lack of memory into `ladder.OutOfMemory`.

        Args:
            name: one of `ledger.PHASES`.
            final: what happened inside must not happen twice: too much memory at its end is for the next time.
        """
        ...

    def attempt(self, work: Callable[[], T], undo: Callable[[], object] | None = None) -> T:
        """The result of `work`, which is done again after `undo` whenever it runs out of memory in a phase.

        Raises:
            MemoryExhausted: there is nothing left that would take less.
        """
        ...

    def check(self) -> None:
        """Raises `ladder.OutOfMemory` when the run takes more than its budget. Costs nothing most of the time."""
        ...


class Unguarded:
    """Nobody watches: errors come as they are."""

    def phase(self, name: str, *, final: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def attempt(self, work: Callable[[], T], undo: Callable[[], object] | None = None) -> T:
        return work()

    def check(self) -> None:
        return None


UNGUARDED: Guard = Unguarded()
