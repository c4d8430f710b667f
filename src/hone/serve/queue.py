"""Work queue of one component in a reward service: waiting and running groups, micro-batches, rate, score cache.

Scoring is pure, so a group is known by its content: a group that is asked for twice is scored once, whether it is still
running (the second request joins it) or done (its scores are cached). A group that no request needs any more, because
the client disconnected or its deadline passed, is dropped from the queue, or cancelled if it runs; but not in a worker
process, whose restart costs more than the rest of the work, and a retry of the request will want the result. Requests
wait for the future of their `ScoreClaim`; the task that ran the work sets it. The queue has no bound: admission is the
service's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

from hone.reward.rewards import Component, Scorer
from hone.reward.signature import all_faulty
from hone.runtime.bounded_cache import BoundedCache
from hone.runtime.user_code import describe
from hone.types import Fault, Group, Score

log = logging.getLogger("hone.serve.reward")
_FADE_S = 10.0
"""Busy time after which a measurement of the rate counts 1/e."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The scores of a group by one component."""

    scores: tuple[Score, ...]
    elapsed_s: float


@dataclass(eq=False, slots=True)
class _QueueEntry:
    """A group to be scored, and how many claims wait for it."""

    key: bytes
    group: Group
    future: asyncio.Future[ScoredGroup]
    waiters: int = 0
    task: asyncio.Task[None] | None = None

    @property
    def num_items(self) -> int:
        return len(self.group.samples)


@dataclass(eq=False, slots=True)
class ScoreClaim:
    """A claim on work: `done` at once if it was cached, else a future. `leave` it when it is no longer needed."""

    queue: ScoreQueue
    done: ScoredGroup | None = None
    _entry: _QueueEntry | None = None

    @property
    def future(self) -> asyncio.Future[ScoredGroup] | None:
        return self._entry.future if self._entry is not None else None

    def result(self) -> ScoredGroup | None:
        """The scores, if finished."""
        future = self.future
        if future is not None and future.done() and not future.cancelled():
            return future.result()
        return self.done

    def leave(self) -> None:
        if self._entry is not None:
            self.queue._leave(self._entry)


class ScoreCache:
    """Scores by key: the most recent, for a limited time."""

    def __init__(self, max_items: int, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._kept = BoundedCache[tuple[float, ScoredGroup]](max_items, lambda kept: len(kept[1].scores))
        """Each with the time until which it holds."""

    def get(self, key: bytes) -> ScoredGroup | None:
        kept = self._kept.get(key)
        return kept[1] if kept is not None and time.monotonic() <= kept[0] else None

    def put(self, key: bytes, done: ScoredGroup) -> None:
        """Keep them, unless an infrastructure fault is among them: that must not be repeated."""
        if not any(score.fault is Fault.INFRA for score in done.scores):
            self._kept.put(key, (time.monotonic() + self._ttl_s, done))


@dataclass
class RateEstimate:
    """Seconds per item while there is work, from the groups that finished lately."""

    _seconds: float = 0.0
    _items: float = 0.0
    """Busy seconds and items finished, both decaying with time, as many may finish at one moment."""
    _since: float = 0.0

    def begin(self) -> None:
        """Work arrived at an empty queue."""
        self._since = time.monotonic()

    def finished(self, num_items: int) -> None:
        now = time.monotonic()
        elapsed = now - self._since
        kept = math.exp(-elapsed / _FADE_S)
        self._seconds = self._seconds * kept + elapsed
        self._items = self._items * kept + num_items
        self._since = now

    def wait_s(self, items_in_front: int, items_running: int) -> float:
        """Estimate for the last of them. A long time without a result counts too, as if all were about to finish."""
        stalled = (time.monotonic() - self._since) / items_running if items_running else 0.0
        per_item_s = self._seconds / self._items if self._items else 0.0
        return items_in_front * max(per_item_s, stalled)


class ScoreQueue:
    """The queue; described at the top of this file."""

    def __init__(
        self, component: Component, cache: ScoreCache, *, max_in_flight_groups: int, abandoned_after_s: float
    ) -> None:
        """
        Args:
            abandoned_after_s: how long work may still run once no claim waits for it.
        """
        self.component, self._abandoned_after_s = component, abandoned_after_s
        self._cache, self._max_in_flight = cache, max_in_flight_groups
        self._entries: dict[bytes, _QueueEntry] = {}
        """Waiting and running."""
        self._queue: deque[_QueueEntry] = deque()
        """Waiting; those left since are skipped."""
        self._running = 0
        self.items_waiting = self.items_running = 0
        self._rate = RateEstimate()
        self.last_fault = ""
        """The infrastructure fault of the newest group; empty when it was scored."""

    def find(self, key: bytes) -> ScoreClaim | None:
        """A claim on a group that is cached or being scored."""
        if (done := self._cache.get(key)) is not None:
            return ScoreClaim(self, done)
        entry = self._entries.get(key)
        return self._join(entry) if entry is not None else None

    def add(self, key: bytes, group: Group) -> ScoreClaim:
        """A claim on new work."""
        entry = _QueueEntry(key, group, asyncio.get_running_loop().create_future())
        if not self._entries:
            self._rate.begin()
        self._entries[key] = entry
        self._queue.append(entry)
        self.items_waiting += entry.num_items
        claim = self._join(entry)
        self._start_next()
        return claim

    def wait_s(self) -> float:
        """Estimate of how long new work would wait before it is scored."""
        return self._rate.wait_s(self.items_waiting + self.items_running, self.items_running)

    def _join(self, entry: _QueueEntry) -> ScoreClaim:
        entry.waiters += 1
        return ScoreClaim(self, None, entry)

    def _leave(self, entry: _QueueEntry) -> None:
        entry.waiters -= 1
        if entry.task is not None and self._abandoned_after_s:
            asyncio.get_running_loop().call_later(self._abandoned_after_s, self._drop_if_abandoned, entry)
        else:
            self._drop_if_abandoned(entry)

    def _drop_if_abandoned(self, entry: _QueueEntry) -> None:
        if entry.waiters or entry.future.done():
            return
        del self._entries[entry.key]
        entry.future.cancel()
        if entry.task is not None:
            entry.task.cancel()
        else:
            self.items_waiting -= entry.num_items

    def _start_next(self) -> None:
        while self._queue and self._running < self._max_in_flight:
            entry = self._queue.popleft()
            if entry.future.cancelled():
                continue
            self._running += 1
            self.items_waiting -= entry.num_items
            self.items_running += entry.num_items
            entry.task = asyncio.create_task(self._run(entry))
            entry.task.add_done_callback(
                partial(self._ended, entry)
            )  # a task cancelled at once never runs its `finally`

    async def _run(self, entry: _QueueEntry) -> None:
        began = time.monotonic()
        done = ScoredGroup(await self._score(entry.group), time.monotonic() - began)
        self._rate.finished(entry.num_items)
        if not entry.future.cancelled():
            self._cache.put(entry.key, done)
            del self._entries[entry.key]
            entry.future.set_result(done)

    def _ended(self, entry: _QueueEntry, _task: asyncio.Task[None]) -> None:
        self._running -= 1
        self.items_running -= entry.num_items
        self._start_next()

    async def _score(self, group: Group) -> tuple[Score, ...]:
        try:
            scores = await self.component.scorer.score(group)
        except Exception as error:  # boundary: a scorer must not raise; if it does, the others of a batch are served
            log.exception("component %s", self.component.name)
            scores = all_faulty(len(group.samples), f"raised {describe(error)}")
        if len(scores) != len(group.samples):
            scores = all_faulty(len(group.samples), f"gave {len(scores)} scores for {len(group.samples)} samples")
        self.last_fault = next((score.detail for score in scores if score.fault is Fault.INFRA), "")
        return scores


@runtime_checkable
class BatchScorer(Scorer, Protocol):
    """A scorer that takes several groups at once at less cost than one by one, such as a model. A protocol, as scorers
    know nothing of this layer."""

    async def score_many(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]: ...


def batched(component: Component, max_items: int, max_wait_s: float) -> Component:
    """The component, with a scorer that gathers batches if its own can take them."""
    if not isinstance(component.scorer, BatchScorer):
        return component
    return replace(component, scorer=MicroBatcher(component.scorer, max_items, max_wait_s))


class MicroBatcher:
    """Micro-batches of groups from different requests.

    One batch runs at a time. What waits when the scorer becomes free makes the next one, up to `max_items`; an idle
    scorer waits `max_wait_s` for more after the first group. A group whose claims are gone is left out.
    """

    def __init__(self, scorer: BatchScorer, max_items: int, max_wait_s: float) -> None:
        self._scorer, self._max_items, self._max_wait_s = scorer, max_items, max_wait_s
        self._waiting: dict[asyncio.Future[tuple[Score, ...]], Group] = {}
        self._running: asyncio.Task[None] | None = None

    async def score(self, group: Group) -> tuple[Score, ...]:
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = group
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        try:
            return await future
        finally:
            self._waiting.pop(future, None)

    async def _run(self) -> None:
        try:
            await asyncio.sleep(self._max_wait_s)
            while batch := self._next_batch():
                try:
                    scored = await self._scorer.score_many(list(batch.values()))
                except Exception as error:  # boundary: raised to every caller of the batch
                    for future in batch:
                        if not future.done():
                            future.set_exception(error)
                    continue
                for future, scores in zip(batch, scored, strict=True):
                    if not future.done():
                        future.set_result(scores)
        finally:
            self._running = None

    def _next_batch(self) -> dict[asyncio.Future[tuple[Score, ...]], Group]:
        """At least one group if any waits; more while they fit."""
        batch: dict[asyncio.Future[tuple[Score, ...]], Group] = {}
        num_items = 0
        for future, group in list(self._waiting.items()):
            num_items += len(group.samples)
            if batch and num_items > self._max_items:
                break
            batch[future] = self._waiting.pop(future)
        return batch
