"""Guard interface around work that may run out of memory; implemented by `memory.ladder.Ladder`.

The shape of it, wherever memory is taken:

    result = guard.attempt(work, undo)        # again from its start, with less memory, for as often as it takes

    def work():
        with guard.phase("update"):           # the named boundary: what runs out in here is of this phase
            for part in parts:
                ...
                guard.check()                 # on a CPU, where no allocation is refused
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

T = TypeVar("T")


class Guard(Protocol):
    """Memory guard of a run. Thread-safe."""

    def phase(
        self, name: str, *, moment: Callable[[], str] | None = None, final: bool = False, measured: bool = True
    ) -> AbstractContextManager[None]:
        """Measure what happens inside, and turn a lack of memory into `ladder.OutOfMemory`.

        Args:
            name: one of `ledger.PHASES`.
            moment: returns, after a failure, at which of the ledger's moments it was; "": not known.
            final: what happened inside must not happen twice; a budget that it went beyond is not a failure then.
            measured: False where `open` and `close` measure, because this happens too often.
        """
        ...

    def open(self, name: str) -> None:
        """Begin a phase that no `with` statement can enclose."""
        ...

    def close(self, name: str) -> None:
        """End a phase begun by `open`."""
        ...

    def attempt(self, work: Callable[[], T], undo: Callable[[], object] | None = None) -> T:
        """The result of `work`, which is done again after `undo` whenever it runs out of memory in a phase.

        Raises:
            MemoryExhausted: there is nothing left that would take less.
        """
        ...

    def agree(self) -> None:
        """Among ranks, the end of what can be done again: all have come so far, or all begin their work again."""
        ...

    def check(self) -> None:
        """Raises when the run takes more than its budget; for inside a phase. Costs nothing most of the time."""
        ...

    def tune(self) -> None:
        """A step is done and logged, and the next one has not begun: what there is room for may be raised."""
        ...


class Unguarded:
    """No guard: errors are raised as they are."""

    def phase(
        self, name: str, *, moment: Callable[[], str] | None = None, final: bool = False, measured: bool = True
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def open(self, name: str) -> None:
        return None

    def close(self, name: str) -> None:
        return None

    def attempt(self, work: Callable[[], T], undo: Callable[[], object] | None = None) -> T:
        return work()

    def agree(self) -> None:
        return None

    def check(self) -> None:
        return None

    def tune(self) -> None:
        return None


UNGUARDED: Guard = Unguarded()
