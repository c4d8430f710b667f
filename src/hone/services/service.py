"""One service through all its lives: started, looked after, started again within bounds, put to sleep and woken.

How one life begins and ends is behind `Begin` and `Life`: a process on this machine (`process.py`), or one on devices
of a cluster (`host.py`). All services of a run together are in `services.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import httpx

from hone.errors import ServiceError
from hone.runtime.backoff import Restarts
from hone.services.launch import Launch
from hone.services.log import TAIL_LINES, last_lines
from hone.services.state import ServiceState

Say = Callable[[str], None]

HEALTH_INTERVAL_S = 2.0
"""Between two looks at a service that is ready."""
PROGRESS_INTERVAL_S = 10.0
"""Between two words about a service that is not."""
SLEEP_PATH, WAKE_PATH = "/sleep?level=1", "/wake_up"
"""As vLLM has them, and `hone serve policy`; level 1: weights wait on the host, the cache is gone."""


class Life(Protocol):
    """A started command and everything it starts."""

    @property
    def pid(self) -> int | None:
        """The command's process; None when it could not be started."""
        ...

    @property
    def has_ended(self) -> bool: ...

    async def ended_within(self, timeout_s: float) -> bool:
        """Wait for the end, but not longer than that; returns whether it has ended."""
        ...

    async def ended(self) -> str:
        """Wait for the end; returns how it ended, such as "ended with exit code 1"."""
        ...

    async def stop(self) -> None:
        """Ask it to end; it is killed after its service's `stop_timeout_s`."""
        ...

    async def kill(self) -> None:
        """End it, now."""
        ...


Begin = Callable[[Launch], Awaitable[Life]]


class Service:
    """One service through all its lives.

    Who waits: `keep` for the devices while it is asleep, `sleep` for a start under way. Who wakes them: `wake`, and
    the end of the start.
    """

    def __init__(
        self, launch: Launch, begin: Begin, *, client: httpx.AsyncClient, say: Say, changed: Callable[[], None]
    ) -> None:
        self.launch = launch
        self.ready = asyncio.Event()
        """Set when it was ready for the first time."""
        self.restarts = 0
        self._begin_life, self._client, self._changed = begin, client, changed
        self._say = lambda message: say(f"service {launch.name}: {message}")
        self._state = "starting"
        self._life: Life | None = None
        self._log_began_at = 0
        self._restarts = Restarts(launch.service.restarts)
        self._may_start = asyncio.Event()
        """Not while it sleeps: its devices are somebody else's."""
        self._may_start.set()
        self._is_settled = asyncio.Event()
        """No start is under way."""

    @property
    def state(self) -> ServiceState:
        launch, pid = self.launch, self._life.pid if self._life else None
        return ServiceState(
            launch.name, launch.url, self._state, pid, self.restarts, launch.fingerprint, str(launch.log)
        )

    async def keep(self) -> None:
        """Start it, and again when it ends, until cancelled.

        Raises:
            ServiceError: it does not become ready the first time, or ended more often than it may.
        """
        try:
            while True:
                while not self._may_start.is_set():  # it may sleep again before this task has its turn
                    await self._may_start.wait()
                self._is_settled.clear()
                life = await self._begin()
                cause = await self._until_ready(life)
                self._is_settled.set()
                if cause is None:
                    self.ready.set()
                    cause = await self._until_lost(life)
                elif not self.ready.is_set():
                    raise self._failed(cause)
                await life.kill()
                wait_s = self._count_restart(cause)
                self._enter("restarting")
                bound = self._restarts.bound
                self._say(f"{cause}; started again in {wait_s:g} s ({self._restarts.count} of {bound} an hour)")
                await asyncio.sleep(wait_s)
        finally:
            self._is_settled.set()

    async def sleep(self) -> None:
        """Have it give its devices' memory back; one that ends now is not started before `wake`.

        Nobody may be asking it anything. One that does not obey is ended, which gives the memory back too.
        """
        self._may_start.clear()
        await self._is_settled.wait()
        if self._state == "ready" and await self._told(SLEEP_PATH):
            self._enter("asleep")

    async def wake(self) -> None:
        """Have it take the memory again, and be ready to answer. One that ended meanwhile is started."""
        self._may_start.set()
        if self._state == "asleep" and await self._told(WAKE_PATH):
            self._enter("ready")

    async def stop(self) -> None:
        """Ask it to end and see that it does."""
        if self._life is not None:
            await self._life.stop()
        if self._state != "failed":
            self._enter("stopped")

    async def _begin(self) -> Life:
        launch = self.launch
        self._log_began_at = launch.log.stat().st_size if launch.log.exists() else 0
        self._life = await self._begin_life(launch)
        self._changed()
        return self._life

    async def _told(self, path: str) -> bool:
        """Whether it did what it was told; else it is ended."""
        assert self._life is not None, "it was ready"
        headers = {"Authorization": f"Bearer {self.launch.token}"}
        try:
            answer = await self._client.post(
                self.launch.url + path, json={}, headers=headers, timeout=self.launch.service.start_timeout_s
            )
        except httpx.HTTPError as error:
            said = f"{type(error).__name__}: {error}".rstrip(": ")
        else:
            if answer.is_success:
                return True
            said = f"HTTP {answer.status_code}: {answer.text[:200]}"
        self._say(f"did not do POST {path} ({said}) and is ended")
        self._enter("restarting")
        await self._life.kill()
        return False

    async def _until_ready(self, life: Life) -> str | None:
        """Wait until it is ready. Returns why it is not: it ended, or its time is over."""
        began, timeout_s = time.monotonic(), self.launch.service.start_timeout_s
        told = began
        while True:
            status = await self._ask()
            now = time.monotonic()
            if life.has_ended:
                return f"{await life.ended()} before it was ready"
            if status is not None and 200 <= status < 300:
                self._enter("ready")
                self._say(f"ready after {now - began:.1f} s at {self.launch.url} (process {life.pid})")
                return None
            said = f"{self.launch.health_url} says {status or 'nothing'}"
            if now - began >= timeout_s:
                return f"was not ready within start_timeout_s = {timeout_s:g} s; {said}"
            if now - told >= PROGRESS_INTERVAL_S:
                told = now
                self._say(f"not ready after {now - began:.0f} s; {said}")
            await life.ended_within(0.1 if now - began < PROGRESS_INTERVAL_S else 0.5)

    async def _until_lost(self, life: Life) -> str:
        """Wait until it ends or falls silent; returns which."""
        heard, timeout_s = time.monotonic(), self.launch.service.silence_timeout_s
        while not await life.ended_within(HEALTH_INTERVAL_S):
            if await self._ask() is not None:
                heard = time.monotonic()
            elif time.monotonic() - heard >= timeout_s and not life.has_ended:
                return f"did not answer {self.launch.service.health} for {timeout_s:g} s"
        return await life.ended()

    async def _ask(self) -> int | None:
        """The HTTP status of its health path; None when it gives no answer."""
        with contextlib.suppress(httpx.HTTPError):
            return (await self._client.get(self.launch.health_url)).status_code
        return None

    def _count_restart(self, cause: str) -> float:
        """Returns how long to wait before it is started again. Raises ServiceError when it may not be."""
        wait_s = self._restarts.next_wait_s()
        if wait_s is None:
            times, key = self._restarts.count, f"services.{self.launch.section}.restarts = {self._restarts.bound}"
            raise self._failed(f"{cause}, and was started again {times} times within an hour already ({key})")
        self.restarts += 1
        return wait_s

    def _failed(self, cause: str) -> ServiceError:
        self._enter("failed")
        log = self.launch.log
        lines = last_lines(log, since=self._log_began_at)
        shown = "\n".join([f"The last lines of {log}, at most {TAIL_LINES}:", *(f"  {line}" for line in lines)])
        return ServiceError(f"service {self.launch.name} {cause}.\n{shown if lines else f'{log} says nothing.'}")

    def _enter(self, state: str) -> None:
        self._state = state
        self._changed()
