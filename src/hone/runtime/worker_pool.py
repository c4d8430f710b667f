"""Pool of killable worker processes for the user's code: a hang or a crash ends one process, never the run.

A thread cannot be stopped, and code stuck in C holds the whole interpreter; so user code runs in processes of its own.
A worker is a fresh interpreter, not a fork, so it holds no copy of the model; it is killed together with everything it
started, and never outlives the run. What is sent to a worker, and how long it may take, is decided by its owner:
`reward/pool.py` for rewards, `rollout/env_pool.py` for environments. Both sides import this file: nothing heavy here.

Messages are pickled, so they hold only this project's types and plain values: what user code returns is converted in
the worker, and no object of its own reaches the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import psutil

from hone.runtime.processes import end_with

START_TIMEOUT_S = 60.0
"""Time for a new worker to import the user's code and send its first reply."""
CLOSE_TIMEOUT_S = 2.0
"""Time for a worker to exit after its channel was closed; then it is killed."""
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""Signals that a process causes itself."""
_LENGTH = struct.Struct("!Q")
_MAIN = (
    "import sys; sys.path[:] = {path!r}; from hone.runtime.worker_pool import enter; channel = enter({fd}, {pid}); "
    "from {module} import main; sys.path[:0] = {folders!r}; main(channel)"
)


class WorkerDied(Exception):
    """A worker process ended; the message says how."""

    def __init__(self, how: str, *, crashed: bool = False) -> None:
        super().__init__(how)
        self.crashed = crashed
        """It was ended by a signal that code of its own causes, such as SIGSEGV."""


class WorkerProcess:
    """The run's side of one worker process, from its start to its end. Use in one event loop."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channel: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process, self._channel, self._reader, self._writer = process, channel, reader, writer
        self._sessions: dict[int, WorkerSession] = {}
        self._num_sessions = 0
        self._is_open = True
        self._ending: asyncio.Task[WorkerDied] | None = None
        self._reading = asyncio.create_task(self._read())
        self.died: WorkerDied | None = None
        self.num_replies = 0
        """Replies received so far, of all sessions."""
        self.ready: Any = None
        """The reply to the first message."""

    @classmethod
    async def start(cls, module: str, folder: Path, setup: Any) -> Self:
        """Start a process, send `setup` and wait for its reply. Raises WorkerDied."""
        process, channel = spawn(module, folder)
        self = cls(process, channel, *await asyncio.open_connection(sock=channel))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self.ready = await self.ask(setup)
        except TimeoutError:
            raise await self.kill(f"did not finish within {START_TIMEOUT_S:g} s") from None
        except asyncio.CancelledError:
            await self.kill()
            raise
        return self

    @property
    def alive(self) -> bool:
        """Whether the process still holds its end of the channel; also true to fact before the event loop notices."""
        if not self._is_open:
            return False
        try:
            return self._channel.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:  # open, with nothing to read
            return True
        except ConnectionError:
            return False

    def processor_s(self) -> float:
        """Seconds of processor time that the process has used; 0 when it is gone."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system

    def rss_bytes(self) -> int:
        """Resident memory of the process; 0 when it is gone."""
        try:
            return psutil.Process(self._process.pid).memory_info().rss
        except psutil.Error:
            return 0

    async def ask(self, message: Any) -> Any:
        """Send a message and return the reply. Raises WorkerDied."""
        with contextlib.closing(WorkerSession(self)) as session:
            session.send(message)
            return await session.receive()

    async def kill(self, how: str = "") -> WorkerDied:
        """Kill the process and everything it started. Open sessions raise what is returned.

        Args:
            how: the message, in place of how the process ended.
        """
        return await asyncio.shield(self._end(how))

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Let the process close the channel by itself, as at its end; kill it after `timeout_s`."""
        if self._is_open:
            self._is_open = False
            self._writer.write_eof()
            await asyncio.wait({self._reading}, timeout=timeout_s)
        await self.kill()

    def _end(self, how: str = "") -> asyncio.Task[WorkerDied]:
        self._is_open = False
        if self._ending is None:
            self._ending = asyncio.create_task(self._kill(how))
        return self._ending

    async def _kill(self, how: str) -> WorkerDied:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # before it is reaped: the id cannot have been reused
        code = await asyncio.to_thread(self._process.wait)
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.died = WorkerDied(how or ended, crashed=-code in _CRASHES)
        for session in self._sessions.values():
            session.replies.put_nowait(self.died)
        self._writer.close()
        return self.died

    async def _read(self) -> None:
        """Hand replies to their sessions until the process closes the channel."""
        try:
            while (message := await receive_async(self._reader)) is not None:
                number, reply = message
                self.num_replies += 1
                if session := self._sessions.get(number):
                    session.replies.put_nowait(reply)
        finally:
            self._end()


class WorkerSession:
    """Messages to a worker and the replies to them, apart from those of its other sessions. `close` when done."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.replies = asyncio.Queue[Any]()
        if worker.died is not None:
            self.replies.put_nowait(worker.died)
        worker._num_sessions += 1
        self._number = worker._num_sessions
        worker._sessions[self._number] = self

    def send(self, message: Any) -> None:
        """Queue a message; never waits. The worker receives it with the number of the session."""
        if self.worker._is_open:
            self.worker._writer.write(framed((self._number, message)))

    async def receive(self) -> Any:
        """The next reply. Raises WorkerDied."""
        reply = await self.replies.get()
        if isinstance(reply, WorkerDied):
            self.replies.put_nowait(reply)  # for every later call
            raise reply
        return reply

    def close(self) -> None:
        """Drop the replies that are still to come."""
        self.worker._sessions.pop(self._number, None)


class WorkerPool:
    """`num_workers` processes, each started at its first use and again after it died.

    Args:
        module: its `main(channel)` runs in each worker. It receives pairs of a session's number and a message, and
            sends pairs of that number and a reply.
        folder: put in front of the workers' import path, once `module` is imported.
        setup: the first message, pickled whenever a worker starts.
    """

    def __init__(self, module: str, folder: Path, setup: Any, *, num_workers: int) -> None:
        self._module, self._folder, self._setup = module, folder.resolve(), setup
        self.restarts = 0
        """Workers started again because they had hung or died."""
        self._closed = False
        self._workers: list[WorkerProcess | None] = [None] * num_workers
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for number in range(num_workers):
            self._free.put_nowait(number)

    async def start(self) -> list[Any]:
        """Start every worker. Returns their replies to `setup`. Raises WorkerDied."""

        async def ready() -> Any:
            async with self.worker() as worker:
                return worker.ready

        replies = await asyncio.gather(*(ready() for _ in self._workers), return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[WorkerProcess]:
        """A worker for the caller alone, in the order of the calls; killed when the caller is cancelled.

        Raises WorkerDied when it cannot be started. The wait for a free worker has no deadline of its own: those of
        the tasks in front bound it.
        """
        number = await self._free.get()
        try:
            if self._closed:
                raise RuntimeError("a worker was asked for after its pool was closed")
            worker = self._workers[number]
            if worker is None or not worker.alive:
                if worker is not None:
                    self.restarts += 1
                    await worker.kill()
                worker = self._workers[number] = await WorkerProcess.start(self._module, self._folder, self._setup)
            yield worker
        except asyncio.CancelledError:
            if worker := self._workers[number]:
                await worker.kill()  # it may be busy with a task whose result is no longer wanted
            raise
        finally:
            self._free.put_nowait(number)

    def memory_metrics(self, name: str) -> dict[str, float]:
        """`memory/<name>_process_rss_gib`, of all workers together; nothing while none has been started."""
        started = [worker for worker in self._workers if worker is not None]
        return {f"memory/{name}_process_rss_gib": sum(w.rss_bytes() for w in started) / 2**30} if started else {}

    async def close(self) -> None:
        """End all workers, within seconds."""
        self._closed = True
        await asyncio.gather(*(worker.close() for worker in self._workers if worker is not None))


def spawn(module: str, folder: Path | None = None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `module.main(channel)` in a fresh interpreter; returns this side's end of the channel too.

    The process has a session of its own: Ctrl-C is for the run to handle, and a kill reaches what the process started.
    Call it from the thread that the process belongs to: Linux ends it with the thread that started it.
    """
    ours, theirs = socket.socketpair()
    folders = [] if folder is None else [str(folder)]
    command = _MAIN.format(path=list(sys.path), folders=folders, module=module, fd=theirs.fileno(), pid=os.getpid())
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", command],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return process, ours


def enter(channel_fd: int, parent_pid: int) -> socket.socket:
    """In the worker: end with the parent, and print to standard error, not into the run's output.

    Where the system is not Linux, the closed channel ends it.
    """
    end_with(parent_pid)
    os.dup2(2, 1)
    channel = socket.socket(fileno=channel_fd)
    # A child that user code forks must neither answer in the worker's place nor take its messages.
    os.register_at_fork(after_in_child=channel.close)
    return channel


def framed(message: Any) -> bytes:
    """A message as it crosses the channel."""
    pickled = pickle.dumps(message)
    return _LENGTH.pack(len(pickled)) + pickled


def receive(channel: socket.socket) -> Any:
    """The next message; None when the other side is gone. Blocks."""
    header = _read(channel, _LENGTH.size)
    return pickle.loads(_read(channel, _LENGTH.unpack(header)[0])) if header else None


def _read(channel: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = channel.recv(num_bytes - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)


async def receive_async(reader: asyncio.StreamReader) -> Any:
    """The next message; None when the other side is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
