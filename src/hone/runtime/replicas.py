"""Supervision of replicas: workers that may die or hang, are restarted with back-off, and are offloaded together.

A replica keeps its name; the instance behind it (an engine, a reward model, a service) changes at each restart. Its
states are drawn in `docs/recovery.md`. What an instance is, and how one is started and ended, is its owner's:
`rollout/router.py` (engines), `cluster/scorers.py` (reward models), `services/service.py`. For one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, Literal, TypeVar

from hone.runtime.backoff import Restarts
from hone.runtime.processes import retrieved

ReplicaState = Literal["starting", "ready", "busy", "offloaded", "restarting", "failed", "stopped"]
InstanceT = TypeVar("InstanceT", bound="Instance")
T = TypeVar("T")


class ReplicaLost(Exception):
    """A call's instance died, hung or was given up; its replica is restarted."""


class Instance:
    """What runs behind a replica, from its start until it is lost."""

    replica: Replica[Any]

    def __init__(self) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the instance was given up."""
        self.calls = 0
        """In progress."""

    def lose(self, why: str) -> None:
        """Give it up, once: calls in progress raise ReplicaLost, and its replica is restarted."""
        if not self.lost.done():
            self.lost.set_result(why)
            self.replica.went_down(why)

    async def call(
        self,
        work: Coroutine[Any, Any, T],
        what: str,
        timeout_s: float | None = None,
        *,
        seen_at: Callable[[], float] | None = None,
    ) -> T:
        """The result of some work of the instance.

        Args:
            timeout_s: it is lost after so long without a sign of life; None: `work` has its own deadline.
            seen_at: when the last sign of life was, in the loop's time; by default, when the call began.
        Raises:
            ReplicaLost: it is lost.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        working = asyncio.ensure_future(work)
        working.add_done_callback(retrieved)
        self._count(1)
        try:
            while not self.lost.done():
                if working.done():
                    return working.result()
                left_s = None
                if timeout_s is not None:
                    left_s = (seen_at() if seen_at else began) + timeout_s - loop.time()
                    if left_s <= 0:
                        self.lose(f"{what}: {self.replica.name} gave no sign of life for {timeout_s:g} s")
                await asyncio.wait({working, self.lost}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        except self.replica.lost_by as error:
            self.lose(str(error))
        finally:
            working.cancel()
            self._count(-1)
        raise ReplicaLost(self.lost.result())

    def _count(self, change: int) -> None:
        before = self.replica.state
        self.calls += change
        if self.replica.state != before:
            self.replica.changed(self.replica)


class Replica(Generic[InstanceT]):
    """One replica through all its restarts.

    Args:
        start: starts an instance; cleans up after itself when it fails or is cancelled.
        end: ends a lost instance.
        lost_by: what a call raises when its instance is lost; other errors are of the call.
        changed: called after each change of `state`.
        watch: awaited with each new instance, before its loss is; may itself `lose` it.
        say: takes a message for each restart.
        may_start: cleared while no instance may be started, because its devices are in use.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[str], Awaitable[InstanceT]],
        end: Callable[[InstanceT], Awaitable[object]],
        *,
        lost_by: type[Exception],
        restarts: Restarts,
        changed: Callable[[Replica[InstanceT]], object],
        watch: Callable[[InstanceT], Awaitable[object]] | None = None,
        say: Callable[[str], object] = lambda _: None,
        may_start: asyncio.Event | None = None,
    ) -> None:
        self.name, self.restarts, self.lost_by, self.changed = name, restarts, lost_by, changed
        self.instance: InstanceT | None = None
        self.why = ""
        """Why the last instance was lost."""
        self.settled = asyncio.Event()
        """No start is in progress."""
        self.settled.set()
        self.may_start = may_start or asyncio.Event()
        self.may_start.set()
        self._start, self._end, self._watch, self._say = start, end, watch, say
        self._state: ReplicaState = "starting"
        self._wait_s: float | None = None

    @property
    def state(self) -> ReplicaState:
        is_busy = self._state == "ready" and self.instance is not None and self.instance.calls > 0
        return "busy" if is_busy else self._state

    def enter(self, state: ReplicaState) -> None:
        """Change the state: to `offloaded` and back, or to one that ends the replica."""
        self._state = state
        self.changed(self)

    def adopt(self, instance: InstanceT) -> InstanceT:
        """Take an instance that is ready."""
        self.instance, instance.replica = instance, self
        self.enter("ready")
        return instance

    async def start(self) -> InstanceT:
        """Start the first instance. Raises what prevents it; the replica has failed then."""
        try:
            return await self._started()
        except Exception:
            self.enter("failed")
            raise

    async def keep(self, instance: InstanceT | None) -> None:
        """Restart the first instance, and its successors, whenever one is lost; until the replica has failed."""
        while True:
            if instance is not None:
                if self._watch is not None:
                    await self._watch(instance)
                await asyncio.wait({instance.lost})
                ending = asyncio.ensure_future(self._end(instance))
                try:
                    await asyncio.shield(ending)
                finally:
                    await ending  # also when this is cancelled
            if self._wait_s is None:
                return
            await asyncio.sleep(self._wait_s)
            try:
                instance = await self._started()
            except Exception as error:  # boundary: callers that wait are sent every failure
                instance = None
                self.went_down(f"could not be started: {error}")

    def went_down(self, why: str) -> None:
        """Count a loss or a failed start; `changed` is called while the lost instance is still there."""
        self.why, self._wait_s = why, self.restarts.next_wait_s()
        self.enter("failed" if self._wait_s is None else "restarting")
        self.instance = None
        if self._wait_s is not None:
            count = f"{self.restarts.count} of {self.restarts.bound} an hour"
            self._say(f"{why.rstrip('.')}; started again in {self._wait_s:g} s ({count})")

    async def _started(self) -> InstanceT:
        while not self.may_start.is_set():  # it may be cleared again before this task has its turn
            await self.may_start.wait()
        self.settled.clear()
        try:
            return self.adopt(await self._start(self.name))
        finally:
            self.settled.set()


class Replicas(Generic[InstanceT]):
    """Equal replicas, for an owner that gives work to the one with the least to do.

    Args:
        instances: by name; None for one that `start` has to start.
        changed: called after each change of a replica's state.
        options: of `Replica`.
    """

    def __init__(
        self,
        instances: Mapping[str, InstanceT | None],
        *args: Any,
        restarts: int,
        changed: Callable[[Replica[InstanceT]], object],
        **options: Any,
    ) -> None:
        def change(replica: Replica[InstanceT]) -> None:
            changed(replica)
            self.notify()

        self.may_start, self._change = asyncio.Event(), asyncio.Event()
        options |= {"changed": change, "may_start": self.may_start}
        self.replicas = [Replica(name, *args, restarts=Restarts(restarts), **options) for name in instances]
        for replica in self.replicas:
            if (instance := instances[replica.name]) is not None:
                replica.adopt(instance)
        self._keeping = [asyncio.create_task(one.replica.keep(one)) for one in self.up]

    async def start(self) -> None:
        """Start all replicas, and wait for them. Raises what prevents one."""
        async with asyncio.TaskGroup() as tasks:
            for replica in self.replicas:
                tasks.create_task(replica.start())
        self._keeping = [asyncio.create_task(one.replica.keep(one)) for one in self.up]

    @property
    def up(self) -> list[InstanceT]:
        return [replica.instance for replica in self.replicas if replica.instance is not None]

    @property
    def all_failed(self) -> bool:
        return all(replica.state in ("failed", "stopped") for replica in self.replicas)

    async def until_changed(self, deadline: float) -> None:
        """Wait for a change of any replica, or for `notify`. Raises TimeoutError at `deadline`, in the loop's time."""
        async with asyncio.timeout_at(deadline):
            await self._change.wait()

    def notify(self) -> None:
        """Wake everything in `until_changed`."""
        self._change.set()
        self._change = asyncio.Event()

    async def close(self, why: str) -> list[InstanceT]:
        """Restart nothing any more. Returns the instances that were up, which are the caller's to end."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        up = self.up
        for replica in self.replicas:
            replica.instance, replica._state = None, "stopped"
        for instance in up:
            instance.lost.set_result(why)
        return up
