"""Services on devices of the cluster: a small Ray actor there starts, watches and ends the command.

Supervision is that of any other service (`services/service.py`), over HTTP; only start and end go through Ray. The
command has a reaper (`services/process.py`), so that it ends with the actor. The actor imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import ray

from hone.cluster.calls import BEAT_S, START_KEY, wait_for_one
from hone.cluster.ray import end_with_ray, own_address
from hone.devices import driver_memory_bytes, machine_kind
from hone.errors import HoneError, ServiceError
from hone.services.launch import Launch, environment_with
from hone.services.process import HOST, LocalServiceProcess, ServiceProcess

ANSWER_TIMEOUT_S = 60.0
"""Timeout of a call of a host, which has next to nothing to do."""
ENDING_TIMEOUT_S = 30.0
"""Beyond a service's `stop_timeout_s`, until its host is killed with it."""


class ServiceHostActor:
    """Runs one command. Timeouts and restarts are the run's."""

    def __init__(self) -> None:
        end_with_ray()
        self._process: LocalServiceProcess | None = None

    async def address(self) -> str:
        """Address of this machine for other machines of the cluster."""
        return own_address()

    async def plan(self, make: Callable[[], Launch]) -> Launch:
        """The launch, planned on this machine."""
        return await asyncio.to_thread(make)

    async def begin(self, launch: Launch) -> int | None:
        """Start it; returns its process. Raises ServiceError when its reaper does not start."""
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        self._process = await LocalServiceProcess.begin(
            launch.command,
            log=launch.log,
            folder=launch.folder,
            environment=environment_with(os.environ.get(machine_kind().variable, "")) | dict(launch.environment),
            stop_timeout_s=launch.service.stop_timeout_s,
        )
        return self._process.pid

    async def device_memory(self) -> tuple[int, int] | None:
        """Of the devices that Ray gave this process (`reward.http.DeviceMemory`)."""
        return await asyncio.to_thread(driver_memory_bytes, os.environ.get(machine_kind().variable, ""))

    async def ended(self) -> str | None:
        """How it ended, if it does within a beat."""
        assert self._process is not None, "begin comes first"
        return await self._process.ended() if await self._process.ended_within(BEAT_S) else None

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()

    async def kill(self) -> None:
        if self._process is not None:
            await self._process.kill()


class RayServiceProcess(ServiceProcess):
    """A `ServiceProcess` under a Ray actor. Made by `RayServiceHost`."""

    def __init__(self, name: str, actor: Any, pid: int | None, stop_timeout_s: float) -> None:
        super().__init__()
        self.pid = pid
        self._name, self._actor, self._stop_timeout_s = name, actor, stop_timeout_s
        self._ending = asyncio.create_task(self._listen(), name=f"end of {name}")

    async def stop(self) -> None:
        """See `ServiceProcess`."""
        await self._end(self._actor.stop, self._stop_timeout_s + ENDING_TIMEOUT_S)

    async def kill(self) -> None:
        """See `ServiceProcess`."""
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
                return f"lost its host process: {error}"
            if said is not None:
                return said


class RayServiceHost:
    """Starts one service, again after each loss, on its devices of the cluster.

    Args:
        name: of the service.
        spawn: starts a `ServiceHostActor` there.
        is_one_machine: it listens on loopback only.
        timeout_s: longest wait for a `ServiceHostActor` to be there.
    """

    def __init__(self, name: str, spawn: Callable[[], Any], *, is_one_machine: bool, timeout_s: float) -> None:
        self._name, self._spawn, self._timeout_s = name, spawn, timeout_s
        self._is_one_machine = is_one_machine
        self._actor: Any = None
        """One that has started nothing yet."""
        self._running: Any = None
        """The one that started the service last."""

    async def plan(self, make: Callable[[str], Launch]) -> Launch:
        """The launch that `make` plans, from the machine's address, on the machine of the devices."""
        self._actor = await asyncio.to_thread(self._spawn)
        host = await self._address(self._actor)
        return await self._answer(self._actor.plan.remote(partial(make, host)))

    async def begin(self, launch: Launch) -> RayServiceProcess:
        """Start the service (`service.Begin`).

        Raises:
            ServiceError: its devices are on another machine now, so its address would be wrong.
        """
        actor, self._actor = self._actor or await asyncio.to_thread(self._spawn), None
        try:
            if (host := await self._address(actor)) != launch.host:
                raise ServiceError(
                    f"service {self._name} was at {launch.host}, and could only be started at {host} now: the machine "
                    "is lost. `hone train --resume` places everything again."
                )
            pid = await self._answer(actor.begin.remote(launch))
        except BaseException:
            ray.kill(actor)
            raise
        self._running = actor
        return RayServiceProcess(self._name, actor, pid, launch.service.stop_timeout_s)

    async def device_memory(self) -> tuple[int, int] | None:
        """See `reward.http.DeviceMemory`; None while the service is not there."""
        if self._running is None:
            return None
        try:
            return await wait_for_one(
                self._name, self._running.device_memory.remote(), "its devices' memory", ANSWER_TIMEOUT_S
            )
        except HoneError:  # its supervision notices too
            return None

    def close(self) -> None:
        """End an actor that has started nothing."""
        if self._actor is not None:
            ray.kill(self._actor)

    async def _address(self, actor: Any) -> str:
        return HOST if self._is_one_machine else await self._answer(actor.address.remote())

    async def _answer(self, call: Any) -> Any:
        return await wait_for_one(self._name, call, "starting", self._timeout_s, START_KEY)
