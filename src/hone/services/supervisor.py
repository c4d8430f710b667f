"""Supervisor of a run's services: started together, health-checked, restarted within bounds, always ended.

    services = Services.from_config(loaded, split, folder=..., logs=..., say=..., relay=..., stop=...)
    async with services:             # starts all of them and does not wait
        await services.ready()       # raises ServiceError, with the last lines of the log
        ...                          # services.addresses by name; a lost service is restarted on its port
                                     # on exit they are asked to stop, then killed

A service that has failed sets `stop`, so that training ends with a checkpoint, and `check` raises its error. A single
one is in `service.py`. Services on devices of a cluster join later (`add`) and leave earlier (`drop`).

The functions below are those of `hone up` and `hone stop`: services that outlive a run, under a supervisor process of
their own. It runs the same `Services` in a folder of its name under the runtime folder: services.json, logs/,
supervisor.log. To stop it is to send it SIGTERM; should it be killed, its services end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from hone.config.load import Loaded, load_config
from hone.devices import driver_memory_bytes, machine_kind, visible_devices
from hone.errors import ConfigError, DataError, ServiceError
from hone.reward.fingerprint import fingerprint
from hone.reward.http import Address
from hone.runtime.processes import stop_signals_handled, unless_stopped
from hone.services.gpus import Split, split_devices
from hone.services.launch import Launch, plan_launches
from hone.services.log import Excerpt, Follower, last_lines
from hone.services.process import LocalServiceProcess, ServiceProcess, holder, is_free
from hone.services.service import DEFAULT_INTERVALS, Begin, Say, Service, ServiceIntervals
from hone.services.state import (
    TOKEN_FILE,
    Supervision,
    kept_up,
    own_supervision,
    read_state,
    read_token,
    runtime_folder,
    write_state,
    write_token,
)

Relay = Callable[[str, str], None]
"""Shows one line of a service's log: its name, the line."""
_LOCK, _LOG = ".lock", "supervisor.log"
_POLL_S = 0.05
_OVERHEAD_S = 60.0
"""What a supervisor may take beyond the times of its services: starting Python, giving up a process."""


class Services:
    """All services of a run. `async with` starts and ends them."""

    def __init__(
        self,
        launches: Sequence[Launch],
        *,
        folder: Path,
        run_file: Path,
        say: Say,
        relay: Relay,
        stop: asyncio.Event,
        may_share: bool = True,
        intervals: ServiceIntervals = DEFAULT_INTERVALS,
    ) -> None:
        """
        Args:
            folder: where services.json is written.
            stop: set when a service has failed, or to end all waiting.
            may_share: use what `hone up` keeps running; False starts each in any case.
        """
        self._may_share, self._intervals = may_share, intervals
        self._folder, self._run_file, self._stop = folder, run_file, stop
        self._say, self._relay = say, relay
        self._launches = tuple(launches)
        self._client: httpx.AsyncClient | None = None
        self._services: dict[str, Service] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None
        self._logs: dict[str, Excerpt] = {}
        self.failure: Exception | None = None
        """Why a service has failed."""
        self.addresses: Mapping[str, Address] = {}
        """By name; a restarted service keeps its own."""

    @classmethod
    def from_config(
        cls,
        loaded: Loaded,
        split: Split,
        *,
        folder: Path,
        logs: Path,
        without: Collection[str] = (),
        **options: Any,
    ) -> Self:
        """The services of a run file, with the GPUs that `split` gives them; each log goes into `logs`.

        Args:
            without: services that are started elsewhere.
            options: those of the class.
        """
        token = secrets.token_urlsafe(32)
        launches = plan_launches(loaded.config, loaded.run_file.parent, logs, split, without, token=token)
        return cls(launches, folder=folder, run_file=loaded.run_file, **options)

    async def start(self) -> None:
        """Start all of them, without waiting until they are ready.

        Raises:
            ServiceError: a port is taken; nothing was started then.
        """
        if not self._launches:
            return
        shared = {launch.name: await self._kept_up(launch) if self._may_share else None for launch in self._launches}
        own = [launch for launch in self._launches if shared[launch.name] is None]
        for launch in own:
            await self._see_that_port_is_free(launch)
        addresses = {
            launch.name: Address((launch.url,), launch.token, partial(device_memory, launch)) for launch in own
        }
        self.addresses = {launch.name: shared[launch.name] or addresses[launch.name] for launch in self._launches}
        if own:
            with contextlib.suppress(OSError):  # a full disk: the services run, but are not shared
                write_token(self._folder, own[0].token)
        for launch in own:
            self.add(launch, begin_here)

    def add(self, launch: Launch, begin: Begin) -> Service:
        """Start and supervise one more service."""
        if self._client is None:
            # Services are local: proxies of the environment do not apply.
            self._client = httpx.AsyncClient(timeout=self._intervals.health_timeout_s, trust_env=False)
            self._following = asyncio.create_task(self._follow(), name="logs of services")
        service = Service(
            launch, begin, client=self._client, say=self._say, changed=self._write, intervals=self._intervals
        )
        if (before := self._services.get(launch.name)) is not None:  # of an earlier attempt at the stage
            service.restarts.total = before.restarts.total
        self._services[launch.name] = service
        self._logs.setdefault(launch.name, Excerpt(launch.log))
        if launch.note:
            self._say(f"service {launch.name}: {launch.note}")
        self._say(f"service {launch.name}: starting; waiting for {launch.health_url}, log in {launch.log}")
        self._keeping[launch.name] = asyncio.create_task(self._keep(service), name=f"service {launch.name}")
        return service

    async def drop(self, services: Iterable[Service]) -> None:
        """Stop these services; their last states stay in services.json."""
        leaving = list(services)
        tasks = [self._keeping.pop(service.launch.name) for service in leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(service.stop() for service in leaving))

    async def ready(self) -> None:
        """Wait until all are ready for the first time, or a stop is asked for.

        Raises:
            ServiceError: one of them ended or took too long.
        """

        async def all_ready() -> None:
            for name in [*self._keeping]:
                await self._services[name].ready.wait()

        await unless_stopped(self._stop, all_ready())
        self.check()

    def check(self) -> None:
        """Raises the error of a service that has failed, if one has."""
        if self.failure is not None:
            raise self.failure

    async def stop(self) -> None:
        """Stop all services, and show the last lines of their logs."""
        await self.drop([self._services[name] for name in self._keeping])
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        self._show_new_lines()
        for name, log in self._logs.items():
            for line in log.left_out():
                self._relay(name, line)
        if self._client is not None:
            await self._client.aclose()
            (self._folder / TOKEN_FILE).unlink(missing_ok=True)

    def summary(self) -> str:
        """Restarts of each service, on one line; empty without services."""
        return ", ".join(
            f"{name} {(n := one.restarts.total)} restart{'s' * (n != 1)}" for name, one in self._services.items()
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _kept_up(self, launch: Launch) -> Address | None:
        """Address of a service of `hone up` with these settings, if it is ready and its files have not changed."""
        for name, supervision in kept_up(runtime_folder()).items():
            for service in supervision.services:
                if service.fingerprint != launch.fingerprint or service.state != "ready":
                    continue
                if launch.service.reward and not await self._scores_alike(launch, service.url):
                    self._say(
                        f"service {launch.name}: {name} at {service.url} scores by other rewards; `hone stop {name}`"
                    )
                    continue
                self._say(f"service {launch.name}: the one that `hone up` keeps as {name}, at {service.url}")
                return Address((service.url,), read_token(runtime_folder() / name), partial(device_memory, launch))
        return None

    async def _scores_alike(self, launch: Launch, url: str) -> bool:
        loaded = await asyncio.to_thread(
            load_config, launch.folder / Path(str(launch.service.reward)).expanduser(), needed="reward"
        )
        ours = await asyncio.to_thread(fingerprint, loaded)
        with contextlib.suppress(httpx.HTTPError, ValueError):
            async with httpx.AsyncClient(timeout=self._intervals.health_timeout_s, trust_env=False) as client:
                return (await client.get(f"{url}/health")).json()["fingerprint"] == ours
        return False

    async def _see_that_port_is_free(self, launch: Launch) -> None:
        deadline = time.monotonic() + self._intervals.port_timeout_s
        try:
            while not is_free(launch.port):
                if time.monotonic() >= deadline:
                    raise ServiceError(
                        f"services.{launch.name}.port = {launch.port} is taken by {holder(launch.port)}. End that, "
                        "choose another port, or 0 for a free one."
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
            await asyncio.sleep(self._intervals.log_s)
            self._show_new_lines()

    def _show_new_lines(self) -> None:
        for name, log in self._logs.items():
            for line in log.new_lines(time.monotonic()):
                self._relay(name, line)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the services run all the same
            states = tuple(service.state for service in self._services.values())
            longest_s = max(service.launch.service.stop_timeout_s for service in self._services.values())
            write_state(self._folder, own_supervision(self._run_file, states, longest_s))


async def device_memory(launch: Launch) -> tuple[int, int] | None:
    """See `Address`: of a service on this machine."""
    return await asyncio.to_thread(driver_memory_bytes, launch.environment.get(machine_kind().variable, ""))


async def begin_here(launch: Launch) -> ServiceProcess:
    """Start a service on this machine, beside the run."""
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    return await LocalServiceProcess.begin(
        launch.command,
        log=launch.log,
        folder=launch.folder,
        environment=launch.environment,
        stop_timeout_s=launch.service.stop_timeout_s,
    )


# ---- hone up and hone stop


def keep_up(loaded: Loaded, folder: Path, say: Say) -> None:
    """Start the services of a file and keep them until a signal asks to stop.

    Raises:
        ServiceError: one of them cannot be had (any more); the others are stopped.
        DataError: the folder's services are up already.
    """
    _refuse_no_services(loaded)
    folder.mkdir(exist_ok=True)
    with (folder / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(_is_up(folder)) from None
        asyncio.run(_keep_up(loaded, folder, say))


async def _keep_up(loaded: Loaded, folder: Path, say: Say) -> None:
    split, stop = split_devices(loaded.config, visible_devices()), asyncio.Event()
    for note in split.notes:
        say(note)
    services = Services.from_config(
        loaded,
        split,
        folder=folder,
        logs=folder / "logs",
        say=say,
        relay=lambda name, line: say(f"[{name}] {line}"),
        stop=stop,
        may_share=False,
    )
    with stop_signals_handled(lambda _: stop.set()):
        async with services:
            await services.ready()
            await stop.wait()
            services.check()
    say(f"stopped: {services.summary()}")


def start_supervisor(loaded: Loaded, folder: Path, arguments: Sequence[str], say: Say) -> Supervision:
    """Start `hone up --foreground` with these arguments apart from this terminal; returns when all is ready.

    Raises:
        ServiceError: it ended instead, or did not get ready. It is stopped then.
        DataError: the folder's services are up already.
    """
    _refuse_no_services(loaded)
    state = read_state(folder)
    if state is not None and state.process() is not None:
        raise DataError(_is_up(folder))
    folder.mkdir(exist_ok=True)
    log = folder / _LOG
    log.write_text("")
    pid = os.posix_spawn(  # not `subprocess`, whose handle would have to be closed by waiting
        sys.executable,
        [sys.executable, "-m", "hone.cli.main", "up", *arguments, "--foreground"],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_APPEND, 0),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    try:
        return _wait_until_up(pid, loaded, folder, Follower(log, from_start=True), say)
    except BaseException:  # Ctrl-C too
        with contextlib.suppress(ChildProcessError):  # it was taken in, and its number may be another's
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)  # bounded by its services' stop_timeout_s
        raise


def _wait_until_up(pid: int, loaded: Loaded, folder: Path, log: Follower, say: Say) -> Supervision:
    longest_s = max(service.start_timeout_s for service in loaded.config.services.values())
    deadline = time.monotonic() + longest_s + _OVERHEAD_S
    while time.monotonic() < deadline:
        ended, _ = os.waitpid(pid, os.WNOHANG)
        for line in log.new_lines():
            say(line)
        if ended:
            raise ServiceError(f"the services did not start; {folder / _LOG} says why.")
        state = read_state(folder)
        if state is not None and state.pid == pid and all(service.state == "ready" for service in state.services):
            return state
        time.sleep(_POLL_S)
    last = "\n".join(last_lines(folder / _LOG, count=5))
    raise ServiceError(f"the services were not ready within {longest_s + _OVERHEAD_S:g} s:\n{last}")


def stop_supervisor(supervision: Supervision) -> None:
    """Stop the services, in their order; returns when nothing of them is left."""
    process = supervision.process()
    if process is None:
        return
    try:
        process.terminate()
        process.wait(supervision.stop_timeout_s + _OVERHEAD_S)
    except psutil.TimeoutExpired:
        process.kill()  # its services end with it
        process.wait(_OVERHEAD_S)
    except psutil.NoSuchProcess:
        return


def _refuse_no_services(loaded: Loaded) -> None:
    if not loaded.config.services:
        raise ConfigError([f"{loaded.run_file}  services: there are none in this file to start."])


def _is_up(folder: Path) -> str:
    return (
        f"{folder.name} is up already. `hone status` shows it, `hone stop {folder.name}` ends it; or choose a --name."
    )
