"""A service on devices of the cluster: a small process of Ray's there starts its command, watches and ends it.

The run looks after it as after any other service (`service.py`), over HTTP; only beginning and ending a life go through
Ray. The command has a reaper (`process.py`), so that it ends when Ray's process does, however that goes. What runs in
that process imports neither torch nor anything else heavy.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import ray

from hone.cluster.calls import START_KEY, wait_for_one
from hone.cluster.ray import end_with_ray, own_address
from hone.errors import HoneError, ServiceError
from hone.services.gpus import VARIABLE
from hone.services.launch import Launch, environment_with
from hone.services.ports import HOST
from hone.services.process import Ending, Life

BEAT_S = 2.0
"""A host whose service goes on says so after this time."""
ANSWER_TIMEOUT_S = 60.0
"""Until a host, which has next to nothing to do, must have answered."""
ENDING_TIMEOUT_S = 30.0
"""Beyond a service's own `stop_timeout_s`, until its host is ended with it."""


class ServiceHostActor:
    """Runs one command. All times and decisions are the run's."""

    def __init__(self) -> None:
        end_with_ray()
        self._life: Life | None = None

    async def address(self) -> str:
        """Of this machine, as other machines of the cluster reach it."""
        return own_address()

    async def plan(self, make: Callable[[], Launch]) -> Launch:
        """What would be started here."""
        return await asyncio.to_thread(make)

    async def begin(self, launch: Launch) -> int | None:
        """Start it; returns the process. Raises ServiceError when nothing looks after it."""
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        self._life = await Life.begin(
            launch.command,
            log=launch.log,
            folder=launch.folder,
            environment=environment_with(os.environ.get(VARIABLE, "")) | dict(launch.environment),
            stop_timeout_s=launch.service.stop_timeout_s,
        )
        return self._life.pid

    async def ended(self) -> str | None:
        """How it ended, if it does within a beat."""
        assert self._life is not None, "begin comes first"
        return await self._life.ended() if await self._life.ended_within(BEAT_S) else None

    async def stop(self) -> None:
        if self._life is not None:
            await self._life.stop()

    async def kill(self) -> None:
        if self._life is not None:
            await self._life.kill()


class RayServiceProcess(Ending):
    """A `service.Life` in another process. Made by `RayServiceHost`."""

    def __init__(self, name: str, actor: Any, pid: int | None, stop_timeout_s: float) -> None:
        self.pid = pid
        self._name, self._actor, self._stop_timeout_s = name, actor, stop_timeout_s
        self._ending = asyncio.create_task(self._listen(), name=f"life of {name}")

    async def stop(self) -> None:
        """See `service.Life`."""
        await self._end(self._actor.stop, self._stop_timeout_s + ENDING_TIMEOUT_S)

    async def kill(self) -> None:
        """See `service.Life`."""
        await self._end(self._actor.kill, ENDING_TIMEOUT_S)

    async def _end(self, method: Any, timeout_s: float) -> None:
        try:
            if not self.has_ended:
                await wait_for_one(self._name, method.remote(), "ending", timeout_s)
        except HoneError:  # it is ended below, and its service by its reaper
            pass
        ray.kill(self._actor)
        await self.ended()

    async def _listen(self) -> str:
        while True:
            try:
                said = await wait_for_one(self._name, self._actor.ended.remote(), "watching", ANSWER_TIMEOUT_S)
            except HoneError as error:
                ray.kill(self._actor)
                return f"lost the process that looks after it: {error}"
            if said is not None:
                return said


class RayServiceHost:
    """Devices of the cluster that have one service, in one life after the other.

    Args:
        name: of the service.
        spawn: starts a `ServiceHostActor` there.
        is_one_machine: nobody on another machine needs to reach it.
        timeout_s: longest wait for a `ServiceHostActor` to be there.
    """

    def __init__(self, name: str, spawn: Callable[[], Any], *, is_one_machine: bool, timeout_s: float) -> None:
        self._name, self._spawn, self._timeout_s = name, spawn, timeout_s
        self._is_one_machine = is_one_machine
        self._actor: Any = None
        """One that has begun nothing yet."""

    async def plan(self, make: Callable[[str], Launch]) -> Launch:
        """What is to be started, as `make` says on the machine that has the devices when it is given its address."""
        self._actor = await asyncio.to_thread(self._spawn)
        host = await self._address(self._actor)
        return await self._answer(self._actor.plan.remote(partial(make, host)))

    async def begin(self, launch: Launch) -> RayServiceProcess:
        """A life of it (`service.Begin`).

        Raises:
            ServiceError: its devices are on another machine now, where nobody would look for it.
        """
        actor, self._actor = self._actor or await asyncio.to_thread(self._spawn), None
        try:
            if (host := await self._address(actor)) != launch.host:
                raise ServiceError(
                    f"service {self._name} was at {launch.host}, and could only be started at {host} now: the machine "
                    "is lost. `hone train --resume` places everything anew."
                )
            pid = await self._answer(actor.begin.remote(launch))
        except BaseException:
            ray.kill(actor)
            raise
        return RayServiceProcess(self._name, actor, pid, launch.service.stop_timeout_s)

    def close(self) -> None:
        """End what was not begun."""
        if self._actor is not None:
            ray.kill(self._actor)

    async def _address(self, actor: Any) -> str:
        return HOST if self._is_one_machine else await self._answer(actor.address.remote())

    async def _answer(self, call: Any) -> Any:
        return await wait_for_one(self._name, call, "starting", self._timeout_s, START_KEY)
