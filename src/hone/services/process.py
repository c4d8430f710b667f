"""One life of a service: from its start, under a reaper, to the end of its last process.

The reaper (`reaper.py`) does the ending, so that it happens also when this process is killed. What a service is for,
whether it is well and whether it starts again is `services.py`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from hone.errors import ServiceError

_REAPER = Path(__file__).with_name("reaper.py")
_START_TIMEOUT_S = 30.0
"""Until the reaper, which imports next to nothing, must have started the command."""
_KILL_TIMEOUT_S = 15.0
"""Until a reaper that was told to end everything is killed itself; more than it takes to give a process up."""


class Ending:
    """The end of something that runs, for any number of who wait for it."""

    _ending: asyncio.Task[str]
    """Returns how it ended."""

    @property
    def has_ended(self) -> bool:
        return self._ending.done()

    async def ended_within(self, timeout_s: float) -> bool:
        """Wait for the end, but not longer than that; returns whether it has ended."""
        await asyncio.wait({self._ending}, timeout=timeout_s)
        return self.has_ended

    async def ended(self) -> str:
        """Wait for the end; returns how it ended, such as "ended with exit code 1"."""
        return await asyncio.shield(self._ending)


class Life(Ending):
    """A started command and everything it starts. Make one with `begin`; `stop` or `kill` it in any case."""

    def __init__(self, reaper: Process, pid: int | None, stop_timeout_s: float) -> None:
        self.pid = pid
        """The command's process; None when it could not be started."""
        self._reaper = reaper
        self._stop_timeout_s = stop_timeout_s
        self._ending = asyncio.create_task(self._read_end(), name="life of a service")

    @classmethod
    async def begin(
        cls, command: Sequence[str], *, log: Path, folder: Path, environment: Mapping[str, str], stop_timeout_s: float
    ) -> Self:
        """Start a command in `folder`, with its output appended to `log`.

        A command that cannot be started is a life that has ended, and its log says why.
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
        except BaseException as error:  # also when cancelled: a reaper that nobody holds would keep its service
            with contextlib.suppress(ProcessLookupError):
                reaper.kill()
            await reaper.wait()
            if isinstance(error, TimeoutError):
                raise ServiceError(f"{command[0]}: the process that looks after it did not start.") from None
            raise
        return cls(reaper, int(number) if word == "pid" else None, stop_timeout_s)

    async def stop(self) -> None:
        """Ask it to end; it is killed after its `stop_timeout_s`."""
        await self._end(b"stop\n", self._stop_timeout_s + _KILL_TIMEOUT_S)

    async def kill(self) -> None:
        """End it, now."""
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
