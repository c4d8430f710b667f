"""Plain processes with resource limits instead of a sandbox: protection against accidents, not against malice.

A program can read and change whatever the user can, use the network, and start processes that outlive it. For machines
where nothing else works and programs are trusted; the run file must allow it explicitly. If this process runs as root,
programs run as an unprivileged user, or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator

from hone.reward.sandbox.base import Limits, SandboxFault, SandboxUnavailable
from hone.reward.sandbox.local import WARDEN, Command, Interpreter, LocalSession, SandboxSlots, user_of_slot
from hone.reward.sandbox.probe import prove


class BareProcess:
    """Programs as plain processes, `num_slots` at a time. Holds: CPU, address space, file size, time and output of a
    run. Does not hold: the number of processes, memory of all together, files, the network."""

    name = "bare"

    def __init__(self, limits: Limits, *, num_slots: int, python: str | None = None, warden: str = WARDEN) -> None:
        self._limits, self._warden = limits, warden
        self._python = python
        self._interpreter: Interpreter | None = None
        self._slots = SandboxSlots(num_slots)

    async def start(self) -> None:
        if sys.platform != "linux":
            raise SandboxUnavailable(f"local processes need Linux, this is {sys.platform}; use a remote sandbox")
        self._interpreter = await asyncio.to_thread(Interpreter.find, self._python)
        try:
            await prove(self, isolated=False)
        except SandboxUnavailable as error:
            if (user := user_of_slot(0)) is None:
                raise
            raise SandboxUnavailable(
                f"{error} (as root, programs run as user {user}, who must be able to read {self._interpreter.prefix}; "
                "set `python` to an interpreter that every user can read)"
            ) from error

    @contextlib.asynccontextmanager
    async def open(self, source: str) -> AsyncIterator[LocalSession]:
        if self._interpreter is None:
            raise SandboxFault("the sandbox was not started")
        async with self._slots.free_slot() as number:
            with tempfile.TemporaryDirectory(prefix="hone-code-", ignore_cleanup_errors=True) as folder:
                if (user := user_of_slot(number)) is not None:
                    os.chown(folder, user, user)
                command = Command(
                    self._interpreter.command, folder=folder, user_id=user, isolated=False, warden=self._warden
                )
                session = LocalSession(command, source, self._limits, self._interpreter.packages)
                async with self._slots.started(session):
                    yield session

    async def close(self) -> None:
        await self._slots.close()
