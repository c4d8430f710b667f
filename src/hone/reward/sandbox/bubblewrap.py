"""Bubblewrap sandbox, the default on Linux: a read-only interpreter and nothing else, without a network.

Namespaces of its own for everything, no capability, a filter of system calls, a few read-only folders, and a scratch
folder in memory of bounded size. Limits are by user, and root has none, so a run as root drops to a user that owns
nothing: not before bubblewrap (it could then not read an interpreter in root's home) but as the first act of the
warden, before it has seen the program. Each place has a user of its own, because the limit on processes is counted
per user. The warden is process 1 there: bubblewrap's own would be one that a program of the same user can write to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from hone.reward.sandbox.base import Limits, SandboxFault, SandboxUnavailable
from hone.reward.sandbox.interpreter import Interpreter
from hone.reward.sandbox.local import WARDEN, Command, LocalSession, SandboxSlots, environment, user_of_place
from hone.reward.sandbox.probe import prove
from hone.reward.sandbox.seccomp import seccomp_filter

SCRATCH = "/tmp"
SHARED_MEMORY_BYTES = 1 << 20
"""/dev/shm: enough for the locks of multiprocessing."""


class Bubblewrap:
    """Programs in bubblewrap, `num_places` at a time."""

    name = "bubblewrap"

    def __init__(self, limits: Limits, *, num_places: int, python: str | None = None, warden: str = WARDEN) -> None:
        self._limits, self._warden = limits, warden
        self._python = python
        self._places = SandboxSlots(num_places)
        self._arguments: tuple[str, ...] = ()
        self._packages: tuple[str, ...] = ()
        self._filter = seccomp_filter()

    async def start(self) -> None:
        if sys.platform != "linux":
            raise SandboxUnavailable(f"bubblewrap needs Linux, this is {sys.platform}")
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxUnavailable("bwrap is not installed (Debian and Ubuntu: apt-get install bubblewrap)")
        interpreter = await asyncio.to_thread(Interpreter.find, self._python)
        self._packages = interpreter.packages
        self._arguments = (program, *self._walls(interpreter), "--", *interpreter.command)
        await prove(self, isolated=True, processes=self._limits.processes)

    def _walls(self, interpreter: Interpreter) -> list[str]:
        """Options of bubblewrap. As root a user namespace would be one user for all, root again, so there is none."""
        walls = ["--die-with-parent", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
        if os.geteuid() == 0:
            walls += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
            walls += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # gone when the warden changes its user
        else:
            walls += ["--unshare-all"]
        for name, value in environment().items():
            walls += ["--setenv", name, value]
        walls += ["--proc", "/proc", "--dev", "/dev"]
        walls += ["--perms", "1777", "--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
        walls += ["--perms", "1777", "--size", str(self._limits.disk_bytes), "--tmpfs", SCRATCH]
        for path in interpreter.folders:  # after the scratch folder, which would hide those that lie under it
            walls += _shown(path)
        walls += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", SCRATCH]
        return walls

    @contextlib.asynccontextmanager
    async def open(self, source: str) -> AsyncIterator[LocalSession]:
        if not self._arguments:
            raise SandboxFault("the sandbox was not started")
        async with self._places.place() as number:
            with _readable(self._filter) as filter_fd:
                program, *rest = self._arguments
                guarded = [] if filter_fd is None else ["--seccomp", str(filter_fd)]
                command = Command(
                    (program, *guarded, *rest),
                    user_id=user_of_place(number),
                    pass_fds=() if filter_fd is None else (filter_fd,),
                    warden=self._warden,
                )
                session = LocalSession(command, source, self._limits, self._packages)
                async with self._places.started(session):
                    yield session

    async def close(self) -> None:
        await self._places.close()


def _shown(path: str) -> list[str]:
    """Options that show a file, folder or link of this machine at its own place, under folders anyone may pass."""
    options = [part for folder in _above(path) for part in ("--perms", "0755", "--dir", folder)]
    if os.path.islink(path):
        return [*options, "--symlink", os.readlink(path), path]
    return [*options, "--ro-bind", path, path]


def _above(path: str) -> list[str]:
    return [str(folder) for folder in reversed(Path(path).parents) if str(folder) != "/"]


@contextlib.contextmanager
def _readable(data: bytes | None):
    """A descriptor that `data` can be read from, once."""
    if data is None:
        yield None
        return
    end, other = os.pipe()
    try:
        os.write(other, data)  # a kilobyte, well below what a pipe holds
        os.close(other)
        yield end
    finally:
        os.close(end)
