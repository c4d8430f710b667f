"""One component's work in a reward service: what waits for its scorer, what runs, how fast it goes, what is remembered.

Scoring is pure, so work is known by its content: the same work asked for twice is done once, whether it still runs
(the second joins) or was done before (it is remembered). Work without a waiting client, because the client hung
up or its deadline passed, is dropped from the queue, and cancelled if it runs; but not in a killable process, whose
restart costs more than the rest of its work, and a client that asks again will want the result. Those who hold a
`Joined`, for its future; who wakes: the task that ran the work. No queue here has a bound; admission is the service's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import partial

from hone.reward.rewards import Component
from hone.reward.signature import all_faulty
from hone.runtime.user_code import describe
from hone.types import Fault, Group, Score

log = logging.getLogger("hone.serve.reward")
_FADE_S = 10.0
"""Busy time after which a measurement of the pace counts 1/e."""


@dataclass(frozen=True, slots=True)
class Done:
    """The scores of a group by one component."""

    scores: tuple[Score, ...]
    elapsed_s: float


@dataclass(eq=False, slots=True)
class _Unit:
    """A group to be scored, for however many wait for it."""

    key: bytes
    group: Group
    future: asyncio.Future[Done]
    waiters: int = 0
    task: asyncio.Task[None] | None = None

    @property
    def num_items(self) -> int:
        return len(self.group.samples)


@dataclass(eq=False, slots=True)
class Joined:
    """A claim on work: `done` at once if it was remembered, else a future. `leave` it when it is no longer needed."""

    lane: Lane
    done: Done | None = None
    _unit: _Unit | None = None

    @property
    def future(self) -> asyncio.Future[Done] | None:
        return self._unit.future if self._unit is not None else None

    def result(self) -> Done | None:
        """What there is by now."""
        future = self.future
        if future is not None and future.done() and not future.cancelled():
            return future.result()
        return self.done

    def leave(self) -> None:
        if self._unit is not None:
            self.lane._leave(self._unit)


class Memory:
    """Finished work by key: the most recent, for a time."""

    def __init__(self, max_items: int, ttl_s: float) -> None:
        self._max_items, self._ttl_s = max_items, ttl_s
        self._done: OrderedDict[bytes, tuple[float, Done]] = OrderedDict()
        self._num_items = 0

    def get(self, key: bytes) -> Done | None:
        found = self._done.get(key)
        if found is None:
            return None
        if time.monotonic() > found[0]:
            self._forget(key)
            return None
        self._done.move_to_end(key)
        return found[1]

    def put(self, key: bytes, done: Done) -> None:
        """Remember, unless our own failure is in it: that must not be repeated."""
        if any(score.fault is Fault.INFRA for score in done.scores):
            return
        if key in self._done:
            self._forget(key)
        self._done[key] = (time.monotonic() + self._ttl_s, done)
        self._num_items += len(done.scores)
        while self._num_items > self._max_items:
            self._forget(next(iter(self._done)))

    def _forget(self, key: bytes) -> None:
        _, done = self._done.pop(key)
        self._num_items -= len(done.scores)


@dataclass
class Pace:
    """How many seconds an item takes while there is something to do, from when groups were finished lately."""

    _seconds: float = 0.0
    _items: float = 0.0
    """Busy seconds and items finished, both fading: many may finish at one moment, so decay goes by time."""
    _since: float = 0.0

    @property
    def per_item_s(self) -> float:
        return self._seconds / self._items if self._items else 0.0

    def begin(self) -> None:
        """Work arrived where there was none."""
        self._since = time.monotonic()

    def finished(self, num_items: int) -> None:
        now = time.monotonic()
        elapsed = now - self._since
        kept = math.exp(-elapsed / _FADE_S)
        self._seconds = self._seconds * kept + elapsed
        self._items = self._items * kept + num_items
        self._since = now

    def wait_s(self, items_in_front: int, items_running: int) -> float:
        """Estimate for the last of them. That nothing has come out for long counts too, as if all were soon to."""
        stalled = (time.monotonic() - self._since) / items_running if items_running else 0.0
        return items_in_front * max(self.per_item_s, stalled)


class Lane:
    """See the module."""

    def __init__(
        self, component: Component, memory: Memory, *, max_in_flight_groups: int, abandoned_after_s: float
    ) -> None:
        """
        Args:
            abandoned_after_s: how long work may still run without a waiting client.
        """
        self.component, self._abandoned_after_s = component, abandoned_after_s
        self._memory, self._max_in_flight = memory, max_in_flight_groups
        self._units: dict[bytes, _Unit] = {}
        """All that waits or runs."""
        self._queue: deque[_Unit] = deque()
        """What waits, and what was left since and is skipped."""
        self._running = 0
        self.items_waiting = self.items_running = 0
        self._pace = Pace()
        self.last_fault = ""
        """Our own failure with the newest group; empty when it was scored."""

    def find(self, key: bytes) -> Joined | None:
        """A claim on work that was done or is being done."""
        if (done := self._memory.get(key)) is not None:
            return Joined(self, done)
        unit = self._units.get(key)
        return self._join(unit) if unit is not None else None

    def add(self, key: bytes, group: Group) -> Joined:
        """A claim on new work."""
        unit = _Unit(key, group, asyncio.get_running_loop().create_future())
        if not self._units:
            self._pace.begin()
        self._units[key] = unit
        self._queue.append(unit)
        self.items_waiting += unit.num_items
        joined = self._join(unit)
        self._start_next()
        return joined

    def wait_s(self) -> float:
        """Estimate of how long new work would wait before it is scored."""
        return self._pace.wait_s(self.items_waiting + self.items_running, self.items_running)

    def _join(self, unit: _Unit) -> Joined:
        unit.waiters += 1
        return Joined(self, None, unit)

    def _leave(self, unit: _Unit) -> None:
        unit.waiters -= 1
        if unit.task is not None and self._abandoned_after_s:
            asyncio.get_running_loop().call_later(self._abandoned_after_s, self._drop_if_abandoned, unit)
        else:
            self._drop_if_abandoned(unit)

    def _drop_if_abandoned(self, unit: _Unit) -> None:
        if unit.waiters or unit.future.done():
            return
        del self._units[unit.key]
        unit.future.cancel()
        if unit.task is not None:
            unit.task.cancel()
        else:
            self.items_waiting -= unit.num_items

    def _start_next(self) -> None:
        while self._queue and self._running < self._max_in_flight:
            unit = self._queue.popleft()
            if unit.future.cancelled():
                continue
            self._running += 1
            self.items_waiting -= unit.num_items
            self.items_running += unit.num_items
            unit.task = asyncio.create_task(self._run(unit))
            unit.task.add_done_callback(partial(self._ended, unit))  # a task cancelled at once never runs its `finally`

    async def _run(self, unit: _Unit) -> None:
        began = time.monotonic()
        done = Done(await self._score(unit.group), time.monotonic() - began)
        self._pace.finished(unit.num_items)
        if not unit.future.cancelled():
            self._memory.put(unit.key, done)
            del self._units[unit.key]
            unit.future.set_result(done)

    def _ended(self, unit: _Unit, _task: asyncio.Task[None]) -> None:
        self._running -= 1
        self.items_running -= unit.num_items
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
