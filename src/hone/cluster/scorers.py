"""Reward models in Ray actors: equal copies on devices of the cluster, each group scored by one of them.

`ScorerActor` runs in the actor, `ScorerPool` in the run. A copy that dies is restarted, and the group that it was
scoring goes to another one. A group that no copy could score gets faults, never a made-up score.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import ray

from hone.cluster.actors import Vitals
from hone.cluster.calls import wait_for_one
from hone.cluster.ray import HEARTBEAT, end_with_ray
from hone.errors import DataError, HoneError
from hone.observe.observer import Observer
from hone.reward.reward_model import RewardModel
from hone.reward.signature import all_faulty
from hone.runtime.replicas import Instance, Replica, ReplicaLost, Replicas
from hone.runtime.user_code import DETAIL_CHARACTERS
from hone.types import Group, Score

MAX_DEATHS = 2
"""Copies lost over one group before it is unscored: once may be chance, twice is the group's doing."""


class ScorerActor:
    """The reward models of a run, in one Ray actor."""

    def __init__(self) -> None:
        end_with_ray()
        self._scorers: Mapping[str, RewardModel] = {}

    @ray.method(concurrency_group=HEARTBEAT)
    async def ping(self) -> Vitals:
        return Vitals.here()

    async def build(self, make: Callable[[], Mapping[str, RewardModel]]) -> None:
        """Make and load the scorers. Raises DataError with their problems."""
        self._scorers = await asyncio.to_thread(make)
        if problems := [problem for scorer in self._scorers.values() for problem in await scorer.start()]:
            raise DataError("; ".join(problems))

    async def score(self, name: str, group: Group) -> tuple[Score, ...]:
        """The scores by the scorer of this name."""
        return await self._scorers[name].score(group)

    async def sleep(self) -> None:
        await asyncio.gather(*(scorer.sleep() for scorer in self._scorers.values()))

    async def wake(self) -> None:
        await asyncio.gather(*(scorer.wake() for scorer in self._scorers.values()))


class _Copy(Instance):
    """A running `ScorerActor`."""

    def __init__(self, actor: Any) -> None:
        super().__init__()
        self.actor = actor


class ScorerPool:
    """Copies of the same scorers.

    Args:
        start: starts the copy of a name; its actor. Whatever it started must be gone when it fails.
        restarts: bound on restarts within an hour, for each copy.
        timeout_s: a copy without an answer for so long is lost.
        patience_s: how long a group waits for a copy that is up.
    """

    def __init__(
        self,
        names: Sequence[str],
        start: Callable[[str], Awaitable[Any]],
        *,
        observer: Observer,
        restarts: int,
        timeout_s: float,
        patience_s: float,
    ) -> None:
        self._start_actor, self._observer = start, observer
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._copies: Replicas[_Copy] = Replicas(
            dict.fromkeys(names),
            self._start,
            self._end,
            lost_by=HoneError,
            restarts=restarts,
            changed=self._changed,
            say=observer.warn,
        )

    async def start(self) -> None:
        """Start all copies, and wait for them. Raises what prevents one."""
        await self._copies.start()

    async def score(self, name: str, group: Group) -> tuple[Score, ...]:
        """The group's scores by the copy with the least to do; by another one when that is lost."""
        why = "none was started"
        for _ in range(MAX_DEATHS):
            try:
                copy = await self._least_loaded()
            except TimeoutError:
                whys = (replica.why for replica in self._copies.replicas if replica.why)
                return _unscored(group, f"no reward model is up: {'; '.join(whys) or why}")
            try:
                return await self._ask(copy, "score", name, group)
            except ReplicaLost as lost:
                why = str(lost)
        return _unscored(group, f"{MAX_DEATHS} reward models were lost over it: {why}")

    async def sleep(self) -> None:
        """Have all release their devices' memory; one that is down is not started before `wake`. One that fails to is
        lost."""
        self._copies.may_start.clear()
        await asyncio.gather(*(replica.settled.wait() for replica in self._copies.replicas))
        await asyncio.gather(*(self._switch(copy, "sleep") for copy in self._copies.up))

    async def wake(self) -> None:
        """Have all take the memory again; those that are down are started."""
        await asyncio.gather(*(self._switch(copy, "wake") for copy in self._copies.up))
        self._copies.may_start.set()

    async def close(self) -> None:
        """End all copies."""
        for copy in await self._copies.close("closed"):
            ray.kill(copy.actor)

    async def _least_loaded(self) -> _Copy:
        """Raises TimeoutError when none is up in time, or will be."""
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while not self._copies.up:
            if self._copies.all_failed:
                raise TimeoutError
            await self._copies.until_changed(deadline)
        return min(self._copies.up, key=lambda copy: copy.calls)

    async def _ask(self, copy: _Copy, method: str, *args: Any) -> Any:
        what = "scoring" if method == "score" else method
        call = getattr(copy.actor, method).remote(*args)
        return await copy.call(wait_for_one(copy.replica.name, call, what, self._timeout_s), what)

    async def _switch(self, copy: _Copy, method: Literal["sleep", "wake"]) -> None:
        with contextlib.suppress(ReplicaLost):
            await self._ask(copy, method)
            copy.replica.enter("offloaded" if method == "sleep" else "ready")

    async def _start(self, name: str) -> _Copy:
        return _Copy(await self._start_actor(name))

    async def _end(self, copy: _Copy) -> None:
        ray.kill(copy.actor)

    def _changed(self, replica: Replica[_Copy]) -> None:
        self._observer.event("replica_state", replica=replica.name, state=replica.state)
        if replica.state == "failed" and replica.why:
            self._observer.warn(f"{replica.name} is not restarted any more: {replica.why}")


class PooledScorer:
    """`reward.rewards.Scorer` that asks the pool for one component's scores."""

    def __init__(self, pool: ScorerPool, name: str) -> None:
        self._pool, self._name = pool, name

    async def score(self, group: Group) -> tuple[Score, ...]:
        """See `reward.rewards.Scorer`."""
        return await self._pool.score(self._name, group)


def _unscored(group: Group, why: str) -> tuple[Score, ...]:
    return all_faulty(len(group.samples), why[:DETAIL_CHARACTERS])
