"""`hone up` and `hone stop`: services that outlive a run, under a supervisor process of their own.

The supervisor runs the same `Services` as a training run does, in a folder of its name under the runtime folder:
services.json, logs/, supervisor.log. To stop it is to send it SIGTERM; should it be killed, its services end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from hone.config.load import Loaded
from hone.devices import visible_devices
from hone.errors import ConfigError, DataError, ServiceError
from hone.runtime.processes import stop_signals_handled
from hone.services.gpus import split_devices
from hone.services.log import Follower, last_lines
from hone.services.state import Supervision, read_state
from hone.services.supervisor import Services

_LOCK, _LOG = ".lock", "supervisor.log"
_POLL_S = 0.05
_OVERHEAD_S = 60.0
"""What a supervisor may take beyond the times of its services: starting Python, giving up a process."""

Say = Callable[[str], None]


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

    def relay(name: str, line: str) -> None:
        say(f"[{name}] {line}")

    services = Services.from_config(
        loaded, split, folder=folder, logs=folder / "logs", say=say, relay=relay, stop=stop, may_share=False
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
