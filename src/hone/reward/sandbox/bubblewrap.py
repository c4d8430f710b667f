"""Bubblewrap sandbox, the default on Linux: a read-only interpreter and nothing else, without a network.

Namespaces of its own for everything, no capability, a filter of system calls, a few read-only folders, and a scratch
folder in memory of bounded size. Limits are by user, and root has none, so a run as root switches to an
unprivileged user: not before bubblewrap (which could then not read an interpreter in root's home) but in the warden,
before it receives the program. Each slot has a user of its own, because the limit on processes is counted per user. The
warden is process 1: a program of the same user could write to bubblewrap's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import platform
import shutil
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from hone.reward.sandbox.base import Limits, SandboxFault, SandboxUnavailable
from hone.reward.sandbox.local import (
    ENVIRONMENT,
    WARDEN,
    Command,
    Interpreter,
    LocalSession,
    SandboxSlots,
    user_of_slot,
)
from hone.reward.sandbox.probe import prove

SCRATCH = "/tmp"
SHARED_MEMORY_BYTES = 1 << 20
"""/dev/shm: enough for the locks of multiprocessing."""


class Bubblewrap:
    """Runs programs in bubblewrap, `num_slots` at a time."""

    name = "bubblewrap"

    def __init__(self, limits: Limits, *, num_slots: int, python: str | None = None, warden: str = WARDEN) -> None:
        self._limits, self._warden = limits, warden
        self._python = python
        self._slots = SandboxSlots(num_slots)
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
        self._arguments = (program, *self._isolation(interpreter), "--", *interpreter.command)
        await prove(self, isolated=True, processes=self._limits.processes)

    def _isolation(self, interpreter: Interpreter) -> list[str]:
        """Options of bubblewrap. As root a user namespace would be one user for all, root again, so there is none."""
        walls = ["--die-with-parent", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
        if os.geteuid() == 0:
            walls += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
            walls += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # dropped when the warden changes its user
        else:
            walls += ["--unshare-all"]
        for name, value in ENVIRONMENT.items():
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
        async with self._slots.free_slot() as number:
            with _readable(self._filter) as filter_fd:
                program, *rest = self._arguments
                guarded = [] if filter_fd is None else ["--seccomp", str(filter_fd)]
                command = Command(
                    (program, *guarded, *rest),
                    user_id=user_of_slot(number),
                    pass_fds=() if filter_fd is None else (filter_fd,),
                    warden=self._warden,
                )
                session = LocalSession(command, source, self._limits, self._packages)
                async with self._slots.started(session):
                    yield session

    async def close(self) -> None:
        await self._slots.close()


def _shown(path: str) -> list[str]:
    """Options that bind a file, folder or link at its own path, under folders that anyone may enter."""
    above = [str(folder) for folder in reversed(Path(path).parents) if str(folder) != "/"]
    options = [part for folder in above for part in ("--perms", "0755", "--dir", folder)]
    if os.path.islink(path):
        return [*options, "--symlink", os.readlink(path), path]
    return [*options, "--ro-bind", path, path]


@contextlib.contextmanager
def _readable(data: bytes | None):
    """A file descriptor from which `data` can be read once."""
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


_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_NEW_NAMESPACE = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_X32_BIT = 0x40000000
_CLONE3 = 435
_COMMON = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
"""io_uring_*, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, pidfd_getfd, mount_setattr, memfd_secret."""
_REFUSED = {
    # ptrace, shmget, shmat, shmctl, semget, msgget, process_vm_readv, process_vm_writev, memfd_create, unshare, setns,
    # mount, umount2, pivot_root, chroot, keyctl, add_key, request_key, bpf, perf_event_open, userfaultfd, kexec_load,
    # init_module, finit_module, open_by_handle_at, name_to_handle_at, personality, kcmp
    "x86_64": (
        *(101, 29, 30, 31, 64, 68, 310, 311, 319, 272, 308, 165, 166, 155, 161, 250, 248, 249, 321, 298, 323, 246),
        *(175, 313, 304, 303, 135, 312),
    ),
    "aarch64": (
        *(117, 194, 196, 195, 190, 186, 270, 271, 279, 97, 268, 40, 39, 41, 51, 219, 217, 218, 280, 241, 282, 104),
        *(105, 273, 265, 264, 92, 272),
    ),
}
_OWN_PROCESS_ONLY = {"x86_64": (302, 203, 144, 142, 314), "aarch64": (261, 122, 119, 118, 274)}
"""prlimit64, sched_setaffinity, sched_setscheduler, sched_setparam, sched_setattr: not those of the warden, which is a
process of the same user. Their first argument is a process, 0 being the caller."""
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """The filter of system calls in the kernel's format (classic BPF); None for an architecture not listed here.

    It refuses, with EPERM, memory that no limit counts (shared memory segments, memfd), access to other processes,
    changes of their limits, namespaces inside the sandbox, and parts of the kernel with a long record of holes.
    """
    machine = machine or platform.machine()
    if machine not in _REFUSED:
        return None
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
        (_EQUAL, 0, 1, _CLONE3),  # its flags are behind a pointer; the C library falls back to clone
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    for number in (*_REFUSED[machine], *_COMMON):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    for number in _OWN_PROCESS_ONLY[machine]:
        program += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT), (_EQUAL, 0, 1, 0)]
        program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    program += [
        (_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACE),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
