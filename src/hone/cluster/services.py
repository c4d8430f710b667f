"""The services of a run: started together, waited for, watched, started again within bounds, and always ended.

    services = Services.from_config(loaded, split, folder=..., logs=..., say=..., relay=..., stop=...)
    async with services:             # starts all of them and does not wait
        await services.ready()       # raises ServiceError, with the last lines of the log
        ...                          # services.urls by name; a service that ends is started again on its port
                                     # leaving asks them to stop, then kills; nothing of them is left

A service that cannot be had any more sets `stop`, so that training ends with a checkpoint, and is told by `check`.
How one process is started and ended is in `process.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from hone.cluster.devices import Split
from hone.cluster.launch import Launch, plan_launches
from hone.cluster.log import TAIL_LINES, Excerpt, last_lines
from hone.cluster.ports import holder, is_free
from hone.cluster.process import Life
from hone.cluster.state import ServiceState, kept_up, runtime_folder, supervised_by_me, write_state
from hone.config.load import Loaded, load_rewards
from hone.errors import ServiceError
from hone.restarts import Restarts
from hone.reward.fingerprint import fingerprint

Say = Callable[[str], None]
Relay = Callable[[str, str], None]
"""Shows one line of a service's log: its name, the line."""

HEALTH_TIMEOUT_S = 5.0
HEALTH_INTERVAL_S = 2.0
"""Between two looks at a service that is ready."""
PROGRESS_INTERVAL_S = 10.0
"""Between two words about a service that is not."""
PORT_TIMEOUT_S = 3.0
"""For a port that a run which was killed a moment ago is giving back."""
FOLLOW_INTERVAL_S = 0.25


class Service:
    """One service through all its lives."""

    def __init__(self, launch: Launch, *, client: httpx.AsyncClient, say: Say, changed: Callable[[], None]) -> None:
        self.launch = launch
        self.ready = asyncio.Event()
        """Set when it was ready for the first time."""
        self.restarts = 0
        self._client, self._changed = client, changed
        self._say = lambda message: say(f"service {launch.name}: {message}")
        self._state = "starting"
        self._life: Life | None = None
        self._log_began_at = 0
        self._restarts = Restarts(launch.service.restarts)

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
        while True:
            life = await self._begin()
            cause = await self._until_ready(life)
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

    async def stop(self) -> None:
        """Ask it to end and see that it does."""
        if self._life is not None:
            await self._life.stop()
        if self._state != "failed":
            self._enter("stopped")

    async def _begin(self) -> Life:
        launch = self.launch
        self._log_began_at = launch.log.stat().st_size if launch.log.exists() else 0
        self._life = await Life.begin(
            launch.command,
            log=launch.log,
            folder=launch.folder,
            environment=launch.environment,
            stop_timeout_s=launch.service.stop_timeout_s,
        )
        self._changed()
        return self._life

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
            times, key = self._restarts.count, f"services.{self.launch.name}.restarts = {self._restarts.bound}"
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


class Services:
    """All services of a run. `async with` starts them, and ends them in any case."""

    def __init__(
        self,
        launches: Sequence[Launch],
        *,
        folder: Path,
        run_file: Path,
        say: Say,
        relay: Relay,
        stop: asyncio.Event,
        may_reuse: bool = True,
    ) -> None:
        """
        Args:
            folder: where services.json is written.
            stop: set when a service is lost for good, and by others; waiting ends then.
            may_reuse: heed `reuse`; False starts each in any case.
        """
        self._may_reuse = may_reuse
        self._folder, self._run_file, self._stop = folder, run_file, stop
        self._say, self._relay = say, relay
        self._launches = tuple(launches)
        self._client: httpx.AsyncClient | None = None
        self._services: list[Service] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._logs: dict[str, Excerpt] = {}
        self.failure: Exception | None = None
        """Why a service is lost for good."""
        self.urls: Mapping[str, str] = {}
        """Base URLs by name; they stay what they are when a service is started again."""

    @classmethod
    def from_config(cls, loaded: Loaded, split: Split, *, folder: Path, logs: Path, **options: Any) -> Self:
        """The services of a run file, with the GPUs that `split` gives them; each log goes into `logs`.

        `options` are those of the class.
        """
        launches = plan_launches(loaded.config, loaded.run_file.parent, logs, split)
        return cls(launches, folder=folder, run_file=loaded.run_file, **options)

    async def start(self) -> None:
        """Start all of them, without waiting until they are ready.

        Raises:
            ServiceError: a port is taken; nothing was started then.
        """
        if not self._launches:
            return
        borrowed = {launch.name: url for launch in self._launches if (url := self._borrow(launch))}
        for launch in self._launches:
            if launch.name not in borrowed and await self._serves_the_same(launch):
                borrowed[launch.name] = launch.url
        own = [launch for launch in self._launches if launch.name not in borrowed]
        for launch in own:
            await self._see_that_port_is_free(launch)
        self.urls = {launch.name: borrowed.get(launch.name, launch.url) for launch in self._launches}
        # Ours are on the loopback: what the environment says of proxies is not for them.
        self._client = httpx.AsyncClient(timeout=HEALTH_TIMEOUT_S, trust_env=False)
        for launch in own:
            launch.log.parent.mkdir(parents=True, exist_ok=True)
            self._logs[launch.name] = Excerpt(launch.log)
            service = Service(launch, client=self._client, say=self._say, changed=self._write)
            self._services.append(service)
            if launch.note:
                self._say(f"service {launch.name}: {launch.note}")
            self._say(f"service {launch.name}: starting; waiting for {launch.health_url}, log in {launch.log}")
            self._tasks.append(asyncio.create_task(self._keep(service), name=f"service {launch.name}"))
        self._tasks.append(asyncio.create_task(self._follow(), name="logs of services"))

    async def ready(self) -> None:
        """Wait until all are ready for the first time, or a stop is asked for.

        Raises:
            ServiceError: one of them ended or took too long.
        """

        async def all_ready() -> None:
            for service in self._services:
                await service.ready.wait()

        ready, stopping = asyncio.ensure_future(all_ready()), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({ready, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            stopping.cancel()
        self.check()

    def check(self) -> None:
        """Raises what a service was lost by, if one was."""
        if self.failure is not None:
            raise self.failure

    async def stop(self) -> None:
        """Ask all to end, kill what does not in time, and say the last lines of their logs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(service.stop() for service in self._services))
        self._show_new_lines()
        for name, log in self._logs.items():
            for line in log.left_out():
                self._relay(name, line)
        if self._client is not None:
            await self._client.aclose()

    def summary(self) -> str:
        """How often which was started again, on one line; empty without services."""
        return ", ".join(f"{service.launch.name} {_times(service.restarts, 'restart')}" for service in self._services)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _borrow(self, launch: Launch) -> str | None:
        """Where `hone up` keeps the same service running, if this one may be it."""
        if not (launch.service.reuse and self._may_reuse):
            return None
        for name, supervision in kept_up(runtime_folder()).items():
            for service in supervision.services:
                if service.fingerprint == launch.fingerprint and service.state == "ready":
                    self._say(f"service {launch.name}: the one that `hone up` keeps as {name}, at {service.url}")
                    return service.url
        return None

    async def _serves_the_same(self, launch: Launch) -> bool:
        """Whether a healthy service of these rewards is at the port that the file sets, whoever started it."""
        service = launch.service
        if not (service.reuse and self._may_reuse and service.reward and service.port):
            return False
        with contextlib.suppress(httpx.HTTPError, ValueError):  # nobody, or somebody else, who is in the way then
            async with httpx.AsyncClient(timeout=HEALTH_TIMEOUT_S, trust_env=False) as client:
                answer = await client.get(f"{launch.url}/health")
            said = answer.json() if answer.status_code == 200 else None
            loaded = await asyncio.to_thread(load_rewards, launch.folder / Path(service.reward).expanduser())
            if isinstance(said, dict) and said.get("fingerprint") == await asyncio.to_thread(fingerprint, loaded):
                self._say(f"service {launch.name}: the one of the same fingerprint that runs at {launch.url} already")
                return True
        return False

    async def _see_that_port_is_free(self, launch: Launch) -> None:
        deadline = time.monotonic() + PORT_TIMEOUT_S
        try:
            while not is_free(launch.port):
                if time.monotonic() >= deadline:
                    raise ServiceError(
                        f"services.{launch.name}.port = {launch.port} is taken by {holder(launch.port)}. End that, "
                        "choose another port, or 0 for a free one; reuse: true takes a service of the same settings."
                    )
                await asyncio.sleep(0.1)
        except PermissionError:
            message = f"services.{launch.name}.port = {launch.port} is not for this user. Choose one from 1024 on."
            raise ServiceError(message) from None

    async def _keep(self, service: Service) -> None:
        try:
            await service.keep()
        except Exception as error:  # boundary: a background task's failure must end the run, whatever it is
            self.failure = self.failure or error
            self._say(str(error).partition("\n")[0])
            self._stop.set()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_INTERVAL_S)
            self._show_new_lines()

    def _show_new_lines(self) -> None:
        for name, log in self._logs.items():
            for line in log.new_lines(time.monotonic()):
                self._relay(name, line)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the services run all the same
            states = tuple(service.state for service in self._services)
            longest_s = max(launch.service.stop_timeout_s for launch in self._launches)
            write_state(self._folder, supervised_by_me(self._run_file, states, longest_s))


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
