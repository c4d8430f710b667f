"""Processes of a service, from the start under a reaper to the end of the last one.

The reaper (`reaper.py`) ends them, also when this process is killed. Health and restarts are in `service.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from hone.errors import ServiceError
from hone.runtime.replicas import Instance

_REAPER = Path(__file__).with_name("reaper.py")
_START_TIMEOUT_S = 30.0
"""Until the reaper, which imports next to nothing, must have started the command."""
_KILL_TIMEOUT_S = 15.0
"""Until a reaper that was asked to end everything is killed itself; more than its own timeout."""


class ServiceProcess(Instance):
    """A started command and everything that it starts."""

    pid: int | None
    """The command's process; None when it could not be started."""
    _ending: asyncio.Task[str]
    """Returns how it ended."""

    @property
    def has_ended(self) -> bool:
        return self._ending.done()

    async def ended_within(self, timeout_s: float) -> bool:
        """Wait for the end, at most so long; returns whether it has ended."""
        await asyncio.wait({self._ending}, timeout=timeout_s)
        return self.has_ended

    async def ended(self) -> str:
        """Wait for the end; returns how it ended, such as "ended with exit code 1"."""
        return await asyncio.shield(self._ending)

    async def stop(self) -> None:
        """Ask it to end; it is killed after its service's `stop_timeout_s`."""
        raise NotImplementedError

    async def kill(self) -> None:
        """End it, now."""
        raise NotImplementedError


class LocalServiceProcess(ServiceProcess):
    """One on this machine. Make one with `begin`; `stop` or `kill` it in any case."""

    def __init__(self, reaper: Process, pid: int | None, stop_timeout_s: float) -> None:
        super().__init__()
        self.pid = pid
        self._reaper = reaper
        self._stop_timeout_s = stop_timeout_s
        self._ending = asyncio.create_task(self._read_end(), name="end of a service")

    @classmethod
    async def begin(
        cls, command: Sequence[str], *, log: Path, folder: Path, environment: Mapping[str, str], stop_timeout_s: float
    ) -> Self:
        """Start a command in `folder`, with its output appended to `log`.

        A command that cannot be started has ended at once, and its log says why.
        Raises:
            ServiceError: the reaper itself does not start.
        """
        reaper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_REAPER), str(log), str(stop_timeout_s), str(folder), *command),
            stdin=PIPE,
            stdout=PIPE,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is for the run to handle
        )
        assert reaper.stdout is not None and reaper.stdin is not None
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                word, _, number = (await reaper.stdout.readline()).decode().partition(" ")
            if word not in ("pid", "exit"):
                raise TimeoutError
        except BaseException as error:  # also when cancelled: without a handle the reaper would keep its service
            with contextlib.suppress(ProcessLookupError):
                reaper.kill()
            await reaper.wait()
            if isinstance(error, TimeoutError):
                raise ServiceError(f"{command[0]}: its reaper did not start.") from None
            raise
        return cls(reaper, int(number) if word == "pid" else None, stop_timeout_s)

    async def stop(self) -> None:
        """See `ServiceProcess.stop`."""
        await self._end(b"stop\n", self._stop_timeout_s + _KILL_TIMEOUT_S)

    async def kill(self) -> None:
        """See `ServiceProcess.kill`."""
        await self._end(b"", _KILL_TIMEOUT_S)

    async def _end(self, message: bytes, timeout_s: float) -> None:
        control = self._reaper.stdin
        assert control is not None
        with contextlib.suppress(ConnectionError, RuntimeError):  # it has ended already
            if message:
                control.write(message)
            else:
                control.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self.ended()
        except TimeoutError:
            self._reaper.kill()  # takes the command with it
            await self.ended()
        control.close()

    async def _read_end(self) -> str:
        assert self._reaper.stdout is not None
        last = b""
        async for line in self._reaper.stdout:
            last = line
        await self._reaper.wait()
        word, _, number = last.decode().partition(" ")
        if word != "exit" and self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # what is left of its group; the command died with its reaper
            return "was killed together with its reaper"
        if self.pid is None:
            return "could not be started"
        code = int(number)
        return f"was ended by signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"ended with exit code {code}"


HOST = "127.0.0.1"
OURS = range(20_000, 32_768)
"""Linux gives connections, and servers that ask for any port, ports from 32,768 on: here none is taken meanwhile."""


def free_port(host: str = HOST) -> int:
    """A free port of `OURS`, drawn at random, so that two processes hardly choose the same.

    Raises:
        OSError: the host's address is not of this machine, or its ports are taken.
    """
    *others, last = random.SystemRandom().sample(OURS, 100)
    for port in others:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    with socket.socket() as probe:
        probe.bind((host, last))
        return last


def is_free(port: int) -> bool:
    """Whether a server could listen on the port; connections that are still closing do not keep it from that.

    Raises:
        PermissionError: ports below 1024 are for root.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except PermissionError:
            raise
        except OSError:
            return False
    return True


def holder(port: int) -> str:
    """Who listens on a port, for people: `process 4711 (python server.py)`, as far as this user may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                command = " ".join(psutil.Process(connection.pid).cmdline()) if connection.pid else "another user's"
                return f"process {connection.pid or '?'} ({command[:80]})"
    except psutil.Error:
        pass
    return "another process"
