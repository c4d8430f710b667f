"""A service and its supervision: started, health-checked, restarted within bounds, offloaded and woken.

The states are `runtime/replicas.py`'s. A start gives a `ServiceProcess`: on this machine (`process.py`), or on devices
of a cluster (`cluster/service_host.py`). All services of a run together are in `supervisor.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx

from hone.errors import ServiceError
from hone.runtime.backoff import FIRST_WAIT_S, Restarts
from hone.runtime.replicas import Replica, ReplicaLost
from hone.services.launch import Launch
from hone.services.log import TAIL_LINES, last_lines
from hone.services.process import ServiceProcess
from hone.services.state import ServiceState

Say = Callable[[str], None]
Begin = Callable[[Launch], Awaitable[ServiceProcess]]

SLEEP_PATH, WAKE_PATH = "/sleep?level=1", "/wake_up"
"""The routes of vLLM and `hone serve policy`; level 1: weights move to the host, the cache is dropped."""


@dataclass(frozen=True)
class ServiceIntervals:
    """Intervals and deadlines of the supervision of services, in seconds."""

    health_s: float = 2.0
    """Between two health checks of a service that is ready."""
    health_timeout_s: float = 5.0
    """Timeout of a health check."""
    progress_s: float = 10.0
    """Between two messages about a service that is not ready."""
    port_timeout_s: float = 3.0
    """Wait for a port that a killed run still holds."""
    first_restart_s: float = FIRST_WAIT_S
    """Before the first restart of a service; see `Restarts`."""
    log_s: float = 0.25
    """Between two reads of the logs."""


DEFAULT_INTERVALS = ServiceIntervals()


class Service:
    """One service through all its restarts."""

    def __init__(
        self,
        launch: Launch,
        begin: Begin,
        *,
        client: httpx.AsyncClient,
        say: Say,
        changed: Callable[[], None],
        intervals: ServiceIntervals,
    ) -> None:
        self.launch, self._intervals = launch, intervals
        self.ready = asyncio.Event()
        """Set when it was ready for the first time."""
        self.restarts = Restarts(launch.service.restarts, first_wait_s=intervals.first_restart_s)
        self._begin, self._client, self._changed = begin, client, changed
        self._say: Say = lambda message: say(f"service {launch.name}: {message}")
        self._process: ServiceProcess | None = None
        self._log_began_at = 0
        self._replica: Replica[ServiceProcess] = Replica(
            launch.name,
            self._start,
            lambda process: process.kill(),
            lost_by=ServiceError,
            restarts=self.restarts,
            changed=lambda _: changed(),
            watch=self._watch,
            say=self._say,
        )

    @property
    def state(self) -> ServiceState:
        launch, pid = self.launch, self._process.pid if self._process else None
        state, log = self._replica.state, str(launch.log)
        return ServiceState(launch.name, launch.url, state, pid, self.restarts.total, launch.fingerprint, log)

    async def keep(self) -> None:
        """Start it, and again when it is lost, until cancelled.

        Raises:
            ServiceError: it does not become ready the first time, or was lost more often than it may.
        """
        try:
            process = await self._replica.start()
        except ServiceError as error:
            raise self._failed(str(error)) from None
        self.ready.set()
        await self._replica.keep(process)
        times, key = self.restarts.count, f"services.{self.launch.section}.restarts = {self.restarts.bound}"
        why = self._replica.why
        raise self._failed(f"{why}, and was started again {times} times within an hour already ({key})")

    async def sleep(self) -> None:
        """Have it release its devices' memory, when no request is in flight; a lost one is not started before `wake`.

        One that fails to is killed, which releases the memory too.
        """
        self._replica.may_start.clear()
        await self._replica.settled.wait()
        if self._replica.state == "ready":
            await self._switch(SLEEP_PATH)

    async def wake(self) -> None:
        """Have it take the memory again, and be ready. A lost one is started."""
        self._replica.may_start.set()
        if self._replica.state == "offloaded":
            await self._switch(WAKE_PATH)

    async def stop(self) -> None:
        """Ask it to end, and wait until it has."""
        if self._process is not None:
            await self._process.stop()
        if self._replica.state != "failed":
            self._replica.enter("stopped")

    async def _start(self, name: str) -> ServiceProcess:
        """Raises ServiceError when it is not ready in time."""
        launch = self.launch
        self._log_began_at = launch.log.stat().st_size if launch.log.exists() else 0
        process = self._process = await self._begin(launch)
        self._changed()
        if (why := await self._not_ready(process)) is not None:
            await process.kill()
            raise ServiceError(why)
        return process

    async def _switch(self, path: str) -> None:
        process = self._replica.instance
        assert process is not None, "it was ready"
        try:
            await process.call(self._post(path), path)
            self._replica.enter("offloaded" if path == SLEEP_PATH else "ready")
        except ReplicaLost:
            await process.kill()

    async def _post(self, path: str) -> None:
        """Raises ServiceError when it does not succeed."""
        headers = {"Authorization": f"Bearer {self.launch.token}"}
        timeout_s = self.launch.service.start_timeout_s
        try:
            answer = await self._client.post(self.launch.url + path, json={}, headers=headers, timeout=timeout_s)
            if answer.is_success:
                return
            said = f"HTTP {answer.status_code}: {answer.text[:200]}"
        except httpx.HTTPError as error:
            said = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ServiceError(f"POST {path} failed ({said}); the service is stopped")

    async def _not_ready(self, process: ServiceProcess) -> str | None:
        """Wait until it is ready. Returns why it is not: it ended, or the timeout passed."""
        began, timeout_s = time.monotonic(), self.launch.service.start_timeout_s
        reported = began
        while True:
            status = await self._health()
            now = time.monotonic()
            if process.has_ended:
                return f"{await process.ended()} before it was ready"
            if status is not None and 200 <= status < 300:
                self._say(f"ready after {now - began:.1f} s at {self.launch.url} (process {process.pid})")
                return None
            said = f"{self.launch.health_url} says {status or 'nothing'}"
            if now - began >= timeout_s:
                return f"was not ready within start_timeout_s = {timeout_s:g} s; {said}"
            if now - reported >= self._intervals.progress_s:
                reported = now
                self._say(f"not ready after {now - began:.0f} s; {said}")
            await process.ended_within(0.1 if now - began < self._intervals.progress_s else 0.5)

    async def _watch(self, process: ServiceProcess) -> None:
        """Wait until it ends or stops answering its health checks, and is lost."""
        heard, timeout_s = time.monotonic(), self.launch.service.silence_timeout_s
        while not await process.ended_within(self._intervals.health_s):
            if await self._health() is not None:
                heard = time.monotonic()
            elif time.monotonic() - heard >= timeout_s and not process.has_ended:
                return process.lose(f"did not answer {self.launch.service.health} for {timeout_s:g} s")
        process.lose(await process.ended())

    async def _health(self) -> int | None:
        """The HTTP status of its health path; None without an answer."""
        with contextlib.suppress(httpx.HTTPError):
            return (await self._client.get(self.launch.health_url)).status_code
        return None

    def _failed(self, cause: str) -> ServiceError:
        log = self.launch.log
        lines = last_lines(log, since=self._log_began_at)
        shown = "\n".join([f"The last lines of {log}, at most {TAIL_LINES}:", *(f"  {line}" for line in lines)])
        return ServiceError(f"service {self.launch.name} {cause}.\n{shown if lines else f'{log} says nothing.'}")
