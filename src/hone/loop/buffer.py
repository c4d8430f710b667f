"""In-flight groups in start order, with a fixed number of permits: this alone bounds staleness.

Why staleness is bounded. Let S = max_staleness and P = prompts per update; there are (S + 1) * P permits. Fix a
group g that starts while version v is live. Every group ahead of it holds a permit, so at most (S + 1) * P - 1
are ahead. Each update consumes the P oldest and returns their permits only once the next version is live in the
engines, so g is trained at version <= v + S. Groups that are dropped only move g forward. Returning the permits
before publishing breaks the bound by one; `tests/loop/test_staleness.py` keeps that mutant.

Who waits: `reserve` (the producer) for a permit, `take` (the loop) for the oldest group. Who wakes: `release`,
and the group's own task. Neither needs a deadline of its own: each group's task has one, and ends both waits.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class GroupBuffer(Generic[T]):
    """FIFO of tasks that each end in a group, or in None for a group with nothing to learn from."""

    def __init__(self, permits: int) -> None:
        self._permits = asyncio.Semaphore(permits)
        self._inflight: asyncio.Queue[asyncio.Task[T | None]] = asyncio.Queue()
        self._waiting: set[asyncio.Task[T | None]] = set()  # the same, to be counted

    async def reserve(self) -> None:
        """Wait for a permit to start a group."""
        await self._permits.acquire()

    def add(self, task: asyncio.Task[T | None]) -> None:
        """Append a started group; its permit was reserved before."""
        self._inflight.put_nowait(task)
        self._waiting.add(task)

    async def take(self, count: int, *, on_drop: Callable[[int], None] = lambda dropped: None) -> list[T]:
        """The `count` oldest groups that are worth training on, in start order.

        A dropped group's permit goes back only when nothing is in flight any more or the permits of a whole
        update are dropped: replacements then start together, so that a synchronous run batches them the same
        way every time. `on_drop` gets the number dropped so far and may raise to end the wait.
        """
        kept: list[T] = []
        dropped = unreturned = 0
        while len(kept) < count:
            if unreturned and (self._inflight.empty() or unreturned >= count):
                self.release(unreturned)
                unreturned = 0
            task = await self._inflight.get()
            group = await task
            self._waiting.discard(task)
            if group is None:
                dropped += 1
                unreturned += 1
                on_drop(dropped)
            else:
                kept.append(group)
        self.release(unreturned)
        return kept

    def depths(self) -> dict[str, float]:
        """How many groups wait to be trained on, and how many are still being sampled or scored."""
        ready = sum(task.done() for task in self._waiting)
        return {"rollout/groups_ready": float(ready), "rollout/groups_in_flight": float(len(self._waiting) - ready)}

    def release(self, count: int) -> None:
        """Return permits. For trained groups: only after the weights trained on them are live in the engines."""
        for _ in range(count):
            self._permits.release()

    def cancel(self) -> None:
        """Abandon every group in flight."""
        while not self._inflight.empty():
            self._inflight.get_nowait().cancel()
