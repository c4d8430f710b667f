"""Reward models in processes of their own: equal copies on devices of the cluster, each group scored by one of them.

`ScorerActor` runs in such a process, `ScorerPool` in the run. A copy that dies is started again; the group that it was
scoring goes to another one. Nobody makes a score up: a group that no copy could score has faults.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray

from hone.cluster.actors import Vitals
from hone.cluster.calls import wait_for_one
from hone.cluster.ray import HEARTBEAT, end_with_ray
from hone.errors import DataError, HoneError
from hone.reward.rewards import Held
from hone.reward.signature import all_faulty
from hone.runtime.backoff import Restarts
from hone.runtime.user_code import DETAIL_CHARACTERS
from hone.types import Group, Score

MAX_DEATHS = 2
"""Copies that die over one group: once may be chance, twice is the group's doing."""


class Sleeping(Held, Protocol):
    """A scorer that can give its device's memory to somebody else."""

    async def sleep(self) -> None:
        """Give it up once what is being scored is; nothing is to be scored before `wake`."""
        ...

    async def wake(self) -> None:
        """Take it again."""
        ...


class ScorerActor:
    """The reward models of a run, in one process."""

    def __init__(self) -> None:
        end_with_ray()
        self._scorers: Mapping[str, Sleeping] = {}

    @ray.method(concurrency_group=HEARTBEAT)
    async def ping(self) -> Vitals:
        return Vitals.here()

    async def build(self, make: Callable[[], Mapping[str, Sleeping]]) -> None:
        """Make and load them. Raises DataError with what is wrong with them."""
        self._scorers = await asyncio.to_thread(make)
        if problems := [problem for scorer in self._scorers.values() for problem in await scorer.start()]:
            raise DataError("; ".join(problems))

    async def score(self, name: str, group: Group) -> tuple[Score, ...]:
        """What the scorer of this name says."""
        return await self._scorers[name].score(group)

    async def sleep(self) -> None:
        await asyncio.gather(*(scorer.sleep() for scorer in self._scorers.values()))

    async def wake(self) -> None:
        await asyncio.gather(*(scorer.wake() for scorer in self._scorers.values()))


Start = Callable[[str], Awaitable[Any]]
"""Starts the copy of a name and has it build; its actor. Whatever it started must be gone when it fails."""


@dataclass(eq=False)
class _Copy:
    """One copy through all its lives."""

    name: str
    restarts: Restarts
    actor: Any = None
    """None while it is down."""
    num_groups: int = 0
    """That it is scoring, or that wait in it."""
    given_up: bool = False
    is_settled: asyncio.Event = field(default_factory=asyncio.Event)
    """It is not being started."""


class ScorerPool:
    """Copies of the same scorers.

    Who waits: `score` for a copy that is up, a copy that is down for the devices while all sleep. Who wakes them:
    `_change`, whenever a copy comes up or is given up, and `wake`.

    Args:
        start: see `Start`.
        say: tells people.
        restarts: of each copy, within an hour.
        timeout_s: a copy that has not answered after this time is stuck.
        patience_s: how long a group waits for a copy that is up.
    """

    def __init__(
        self,
        names: Sequence[str],
        start: Start,
        *,
        say: Callable[[str], None],
        restarts: int,
        timeout_s: float,
        patience_s: float,
    ) -> None:
        self._start, self._say = start, say
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._copies = [_Copy(name, Restarts(restarts)) for name in names]
        self._change = asyncio.Event()
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._last_why = "none was started"

    async def start(self) -> None:
        """Start all copies, and wait for them. Raises what keeps one from it."""
        async with asyncio.TaskGroup() as tasks:
            for copy in self._copies:
                tasks.create_task(self._bring_up(copy))

    def scorer(self, name: str) -> PooledScorer:
        """One of the scorers that each copy has."""
        return PooledScorer(self, name)

    async def score(self, name: str, group: Group) -> tuple[Score, ...]:
        """The group's scores by the copy with the least to do; by another one when that dies."""
        for _ in range(MAX_DEATHS):
            copy = await self._least_loaded()
            if copy is None:
                return _unscored(group, f"no reward model is up: {self._last_why}")
            copy.num_groups += 1
            actor = copy.actor
            try:
                return await wait_for_one(copy.name, actor.score.remote(name, group), "scoring", self._timeout_s)
            except HoneError as error:
                self._lose(copy, actor, str(error))
            finally:
                copy.num_groups -= 1
        return _unscored(group, f"{MAX_DEATHS} reward models were lost over it: {self._last_why}")

    async def sleep(self) -> None:
        """Have all give their devices' memory back; one that is down is not started before `wake`. One that does not
        obey is ended."""
        self._may_start.clear()
        for copy in self._copies:
            await copy.is_settled.wait()
        await self._tell_all("sleep")

    async def wake(self) -> None:
        """Have all take the memory again; those that are down are started."""
        await self._tell_all("wake")
        self._may_start.set()

    async def close(self) -> None:
        """End all copies."""
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        for copy in self._copies:
            if copy.actor is not None:
                ray.kill(copy.actor)
                copy.actor = None

    async def _least_loaded(self) -> _Copy | None:
        """The copy with the least to do. None: there will be none any more, or was none in time."""
        try:
            async with asyncio.timeout(self._patience_s):
                while True:
                    up = [copy for copy in self._copies if copy.actor is not None]
                    if up:
                        return min(up, key=lambda copy: copy.num_groups)
                    if all(copy.given_up for copy in self._copies):
                        return None
                    await self._change.wait()
        except TimeoutError:
            return None

    async def _tell_all(self, method: str) -> None:
        async def tell(copy: _Copy, actor: Any) -> None:
            try:
                await wait_for_one(copy.name, getattr(actor, method).remote(), method, self._timeout_s)
            except HoneError as error:
                self._lose(copy, actor, str(error))

        await asyncio.gather(*(tell(copy, copy.actor) for copy in self._copies if copy.actor is not None))

    async def _bring_up(self, copy: _Copy) -> None:
        copy.is_settled.clear()
        try:
            copy.actor = await self._start(copy.name)
        finally:
            copy.is_settled.set()
        self._tell_change()

    def _lose(self, copy: _Copy, actor: Any, why: str) -> None:
        """Give a life of a copy up, once, and see that it is started again."""
        self._last_why = why
        if copy.actor is actor:
            ray.kill(actor)
            copy.actor = None
            task = asyncio.create_task(self._replace(copy, why), name=f"replacing {copy.name}")
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    async def _replace(self, copy: _Copy, why: str) -> None:
        while (wait_s := copy.restarts.next_wait_s()) is not None:
            self._say(f"{why} Started again in {wait_s:g} s ({copy.restarts.count} of {copy.restarts.bound} an hour)")
            await asyncio.sleep(wait_s)
            while not self._may_start.is_set():  # they may sleep again before this task has its turn
                await self._may_start.wait()
            try:
                await self._bring_up(copy)
                return
            except HoneError as error:
                why = self._last_why = str(error)
        copy.given_up = True
        self._say(
            f"{why} {copy.name} was started again {copy.restarts.count} times within an hour, and is not any more"
        )
        self._tell_change()

    def _tell_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


class PooledScorer:
    """One component's scorer (`reward.rewards.Scorer`): the copies' of this name."""

    def __init__(self, pool: ScorerPool, name: str) -> None:
        self._pool, self._name = pool, name

    async def score(self, group: Group) -> tuple[Score, ...]:
        """See `reward.rewards.Scorer`."""
        return await self._pool.score(self._name, group)


def _unscored(group: Group, why: str) -> tuple[Score, ...]:
    return all_faulty(len(group.samples), why[:DETAIL_CHARACTERS])
