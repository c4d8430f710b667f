"""Local sandbox process: started with its warden, controlled over a socket, always ended.

`bubblewrap.py` gives the command that isolates it; `BareProcess` is the sandbox without isolation. A slot holds one
sandbox at a time; `open` waits for a free slot, in the order of the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hone.reward.sandbox.base import (
    Call,
    Input,
    Limits,
    ProgramEnding,
    ProgramRun,
    SandboxFault,
    SandboxLost,
    SandboxUnavailable,
    Stdin,
)
from hone.reward.sandbox.probe import prove

WARDEN = (Path(__file__).parent / "warden.py").read_text()
START_TIMEOUT_S = 30.0
"""Timeout for the first answer of a new sandbox."""
END_TIMEOUT_S = 1.0
"""Timeout after which a sandbox that was asked to end is killed."""
MAX_HEADER_BYTES = 1 << 16
FIRST_USER, NUM_USERS = 61_184, 4_336
"""Users that Linux distributions leave to services without an account (systemd's DynamicUser)."""
_FRAME = struct.Struct("!II")
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",  # each arena takes 64 MiB of address space, and that is what the memory limit counts
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # sets come out in the same order every time: scoring the same program twice gives the same
}
"""The whole environment of a program."""


@dataclass(frozen=True, slots=True)
class Command:
    """How to start one sandbox."""

    arguments: tuple[str, ...]
    folder: str | None = None
    """Working directory outside; None leaves it."""
    user_id: int | None = None
    """The user that the warden switches to first; None keeps the current one."""
    isolated: bool = True
    """Whether it has a PID namespace, so that everything in it can be killed at once."""
    pass_fds: tuple[int, ...] = ()
    warden: str = WARDEN
    """Source of the program that supervises the user's program inside; the last argument of the process."""


def user_of_slot(number: int) -> int | None:
    """An unprivileged user for each slot if this process runs as root; else None, which keeps the current user."""
    return FIRST_USER + (64 * os.getpid() + number) % NUM_USERS if os.geteuid() == 0 else None


class LocalSession:
    """One program in one process tree of this machine."""

    def __init__(self, command: Command, source: str, limits: Limits, packages: Sequence[str]) -> None:
        self._command = command
        self._limits = limits
        self._setup = {
            **asdict(limits),
            "source": source,
            "uid": command.user_id,
            "isolated": command.isolated,
            "packages": list(packages),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._process_fd: int | None = None

    async def start(self) -> None:
        """Start it and wait until its warden is ready. Raises SandboxFault."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._channel = ours
        with theirs:
            try:
                # From this very thread: Linux lets the sandbox live no longer than the thread that started it.
                self._process = subprocess.Popen(
                    [*self._command.arguments, "-c", self._command.warden],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    cwd=self._command.folder,
                    env=ENVIRONMENT,
                    pass_fds=self._command.pass_fds,
                    start_new_session=True,  # no terminal; and what is killed as one group, warden included
                )
            except OSError as error:
                raise SandboxFault(f"no process for a sandbox: {error}") from error
        self._process_fd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._process_fd, self._process_ended)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._send(self._setup)
                ready, _ = await self._receive()
        except TimeoutError:
            raise SandboxFault(f"a sandbox did not start within {START_TIMEOUT_S:g} s") from None
        except SandboxLost:
            raise SandboxFault(f"a sandbox did not start: {await self._complaint()}") from None
        if ready != {"ready": True}:
            raise SandboxFault(f"a sandbox did not start: it answered {ready}")

    async def run(self, given: Input) -> ProgramRun:
        match given:
            case Stdin(text):
                message: dict[str, Any] = {"stdin": text}
            case Call(function, args, kwargs):
                message = {"call": function, "args": list(args), "kwargs": dict(kwargs)}
        try:
            async with asyncio.timeout(self._limits.wall_s + self._limits.grace_s):
                await self._send(message)
                header, output = await self._receive()
        except TimeoutError:
            raise SandboxLost(
                f"the sandbox did not answer within {self._limits.grace_s:g} s after the run's time limit"
            ) from None
        try:
            return ProgramRun(
                ProgramEnding(header["ending"]), output, str(header["detail"])[:200], float(header["elapsed_s"])
            )
        except (KeyError, TypeError, ValueError):
            raise SandboxLost("the sandbox sent an answer that is not the end of a run") from None

    async def close(self) -> None:
        """End all of its processes, by force if the warden does not. On return they have ended."""
        channel, process = self._channel, self._process
        self._stop_watching()
        self._channel = self._process = None
        if channel is not None:
            channel.close()  # the warden exits then
        if process is not None:
            await asyncio.shield(asyncio.to_thread(_end, process))

    def _process_ended(self) -> None:
        """End the sandbox when its outermost process ends. The kernel does not: bubblewrap without capabilities may not
        signal a warden that has changed its user."""
        self._stop_watching()
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)

    def _stop_watching(self) -> None:
        if self._process_fd is not None:
            asyncio.get_running_loop().remove_reader(self._process_fd)
            os.close(self._process_fd)
            self._process_fd = None

    async def _send(self, message: Any) -> None:
        assert self._channel is not None
        body = json.dumps(message).encode()
        try:
            await asyncio.get_running_loop().sock_sendall(self._channel, _FRAME.pack(len(body), 0) + body)
        except ConnectionError:
            await self._raise_if_killed_from_outside()
            raise SandboxLost("the sandbox ended") from None

    async def _receive(self) -> tuple[Any, bytes]:
        header_bytes, output_bytes = _FRAME.unpack(await self._read(_FRAME.size))
        if header_bytes > MAX_HEADER_BYTES or output_bytes > self._limits.output_bytes:
            raise SandboxLost("the sandbox sent more than the output limit")
        header = await self._read(header_bytes)
        output = await self._read(output_bytes)
        try:
            return json.loads(header), output
        except (ValueError, RecursionError):
            raise SandboxLost("the sandbox sent an answer that is not JSON") from None

    async def _read(self, num_bytes: int) -> bytes:
        assert self._channel is not None
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < num_bytes:
            try:
                part = await loop.sock_recv(self._channel, num_bytes - len(data))
            except ConnectionError:
                part = b""
            if not part:
                await self._raise_if_killed_from_outside()
                raise SandboxLost("the sandbox ended")
            data += part
        return bytes(data)

    async def _raise_if_killed_from_outside(self) -> None:
        """Programs cannot reach the outermost process: when it was killed, the cause is outside of the sandbox."""
        if self._process is None or not self._command.isolated:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = await asyncio.to_thread(self._process.wait, 1.0)
            if code == -signal.SIGKILL:
                raise SandboxFault("a sandbox was killed from outside; was the machine out of memory?")

    async def _complaint(self) -> str:
        """Last line of the process's standard error."""
        assert self._process is not None and self._process.stderr is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = await asyncio.to_thread(self._process.wait)
        said = os.read(self._process.stderr.fileno(), 4096).decode("utf-8", "replace")
        return said.strip().rpartition("\n")[2].strip() or f"exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that was asked to end. Blocks for END_TIMEOUT_S at most, then it is killed."""
    assert process.stderr is not None
    process.stderr.close()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # before it is reaped, while the number is surely its own
        process.wait()


class SandboxSlots:
    """Bounds the number of sandboxes at one time; slots are numbered from 0."""

    def __init__(self, num_slots: int) -> None:
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for number in range(num_slots):
            self._free.put_nowait(number)
        self._sessions: set[LocalSession] = set()

    @contextlib.asynccontextmanager
    async def free_slot(self) -> AsyncIterator[int]:
        """Wait for a free slot and hold it within the context."""
        number = await self._free.get()
        try:
            yield number
        finally:
            self._free.put_nowait(number)

    @contextlib.asynccontextmanager
    async def started(self, session: LocalSession) -> AsyncIterator[LocalSession]:
        """Start a session; ends it however it is left."""
        self._sessions.add(session)
        try:
            await session.start()
            yield session
        finally:
            self._sessions.discard(session)
            await session.close()

    async def close(self) -> None:
        """End every sandbox that is open."""
        await asyncio.gather(*(session.close() for session in tuple(self._sessions)))


_ASK = """
import json, os, sys, sysconfig
paths = sysconfig.get_paths()
print(json.dumps([os.path.realpath(sys.executable), sys.base_prefix, [paths["purelib"], paths["platlib"]]]))
"""
ASK_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Interpreter:
    """A Python with its standard library, and packages where they are asked for."""

    executable: str
    """Absolute, links followed."""
    prefix: str
    """Where its standard library is under."""
    packages: tuple[str, ...] = ()
    """Folders of installed packages that programs may import."""

    @classmethod
    def find(cls, python: str | None) -> Interpreter:
        """This process's Python, standard library alone; or another one by path, with the packages installed for it.

        Raises:
            SandboxUnavailable: the other one does not run.
        """
        if python is None:
            return cls(os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix))
        try:
            asked = subprocess.run(
                [python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxUnavailable(f"the interpreter {python} does not run: {error}") from error
        executable, prefix, packages = json.loads(asked.stdout)
        return cls(executable, os.path.realpath(prefix), tuple(dict.fromkeys(packages)))

    @property
    def command(self) -> tuple[str, ...]:
        """Its start, without user settings: no site packages, no working directory on the path, no files written."""
        return (self.executable, "-P", "-s", "-S", "-B")

    @cached_property
    def folders(self) -> tuple[str, ...]:
        """Folders and files that a sandbox must show, read-only, each once and none below another."""
        needed = [self.executable, *self.packages, "/usr/lib", "/usr/lib64", "/lib", "/lib64"]
        needed += [f"{self.prefix}/lib", f"{self.prefix}/lib64"]
        shown: list[str] = []
        for path in sorted(dict.fromkeys(needed), key=lambda path: len(Path(path).parts)):
            real_or_link = os.path.lexists(path)
            if real_or_link and not any(Path(path).is_relative_to(other) for other in shown):
                shown.append(path)
        return tuple(shown)


class BareProcess:
    """Programs as plain processes with resource limits, `num_slots` at a time: against accidents, not against malice.

    A program can read and change whatever the user can, use the network, and start processes that outlive it. Holds:
    CPU, address space, file size, time and output of a run. Does not hold: the number of processes, memory of all
    together, files, the network. For machines where nothing else works and programs are trusted; the run file must
    allow it explicitly. If this process runs as root, programs run as an unprivileged user, or not at all.
    """

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
