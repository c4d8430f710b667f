"""Killable processes that run the user's reward functions: a hang or a crash costs one group, never the run.

A thread cannot be stopped, and code stuck in C holds the whole interpreter; so each function runs in a process of
its own, one task at a time, and whatever overruns is killed with its children and replaced. A worker is started anew
(not forked), so it never holds a copy of the model. Every wait has a deadline, but one: for a free worker, which is
bounded by the deadlines of the tasks in front.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hone.reward.signature import all_faulty
from hone.reward.worker import HEADER, Hello, Job, Task
from hone.types import Group, Score

START_TIMEOUT_S = 60.0
"""Until a new worker must have imported the rewards."""
CLOSE_TIMEOUT_S = 2.0
"""Until a worker that was asked to end is killed."""
_MAIN = "import sys; sys.path[:] = {path!r}; from hone.reward.worker import main; main({fd}, {pid})"


class WorkerDied(Exception):
    """A worker ended in the middle of something; says how."""


class WorkerPool:
    """Runs jobs for groups in `num_workers` processes.

    Waiting: `score` waits for a free worker in the order of the calls; whoever finishes, for whatever reason, hands
    its worker on.
    """

    def __init__(self, *, num_workers: int, folder: Path) -> None:
        """`folder`, the run file's, is put on the workers' import path."""
        self._jobs: list[Job] = []
        self._closed = False
        self._python_path = (str(folder.resolve()), *sys.path)
        self._workers = [_Worker() for _ in range(num_workers)]
        self._free: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._workers:
            self._free.put_nowait(worker)

    def add(self, job: Job) -> int:
        """Take on a job before the start; returns its number."""
        self._jobs.append(job)
        return len(self._jobs) - 1

    async def start(self) -> list[str]:
        """Start the workers, if there are jobs. Returns every problem with the jobs, as `key: problem`."""
        if not self._jobs:
            return []
        started = await asyncio.gather(*(self._start(worker) for worker in self._workers), return_exceptions=True)
        for outcome in started:
            if isinstance(outcome, WorkerDied):
                return [f"{', '.join(job.key for job in self._jobs)}: the process that imports it {outcome}"]
            if isinstance(outcome, BaseException):
                raise outcome
            if outcome:
                return outcome
        return []

    async def _start(self, worker: _Worker) -> list[str]:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await worker.start(Hello(tuple(self._jobs), self._python_path))
        except TimeoutError:
            raise WorkerDied(f"did not finish within {START_TIMEOUT_S:g} s") from None

    async def score(self, job: int, group: Group, *, timeout_s: float) -> tuple[Score, ...]:
        """Scores of a group, or one fault for all its samples when the worker hangs or dies. Cancelling kills it."""
        worker = await self._free.get()
        try:
            if self._closed:
                raise RuntimeError("a group came to be scored after the rewards were closed")
            if not worker.alive:
                await self._start(worker)
            async with asyncio.timeout(timeout_s):
                return await worker.ask(Task(job, group))
        except TimeoutError:
            await worker.kill()
            return all_faulty(len(group.samples), f"took longer than {timeout_s:g} s; its process was killed")
        except WorkerDied as error:
            return all_faulty(len(group.samples), f"its process {error}")
        except asyncio.CancelledError:
            await worker.kill()  # busy with a task that nobody waits for any more
            raise
        finally:
            self._free.put_nowait(worker)

    async def close(self) -> None:
        """End all workers, by force after CLOSE_TIMEOUT_S."""
        self._closed = True
        await asyncio.gather(*(worker.close() for worker in self._workers))


class _Worker:
    """One process and the socket to it; may be started again after it was killed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: socket.socket | None = None

    @property
    def alive(self) -> bool:
        """Whether the process still holds its end of the channel. It may have died while it had nothing to do."""
        if self.channel is None:
            return False
        try:
            return self.channel.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:  # nothing to read is how a waiting worker looks
            return True
        except ConnectionError:
            return False

    async def start(self, hello: Hello) -> list[str]:
        """Start the process. Returns its problems with the jobs. Raises WorkerDied."""
        await self.kill()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        command = _MAIN.format(path=list(sys.path), fd=theirs.fileno(), pid=os.getpid())
        with theirs:
            # Its own session: Ctrl-C is for the run to handle, and a kill reaches what the reward itself started.
            # From this very thread: Linux lets the worker live no longer than the thread that started it.
            self.process = subprocess.Popen(
                [sys.executable, "-c", command],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.channel = ours
        return await self.ask(hello)

    async def ask(self, message: Any) -> Any:
        """Send a message and await the answer. Raises WorkerDied, saying how, when the process ends first."""
        channel = self.channel
        assert channel is not None
        body = pickle.dumps(message)
        try:
            await asyncio.get_running_loop().sock_sendall(channel, HEADER.pack(len(body)) + body)
            (length,) = HEADER.unpack(await self._read(channel, HEADER.size))
            return pickle.loads(await self._read(channel, length))
        except (ConnectionError, EOFError):
            code = await self.kill()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise WorkerDied(how) from None

    @staticmethod
    async def _read(channel: socket.socket, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            part = await asyncio.get_running_loop().sock_recv(channel, num_bytes - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    async def kill(self) -> int:
        """End the process and what it started, now. Returns its exit code, negative for a signal; 0 without one."""
        process, channel = self.process, self.channel
        self.process = self.channel = None
        if channel is not None:
            channel.close()
        if process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # before it is reaped, while the number is surely its own
        return await asyncio.shield(asyncio.to_thread(process.wait))

    async def close(self) -> None:
        """Let the process end by itself, so that exit handlers run; kill it when it does not."""
        if self.channel is not None and self.process is not None:
            self.channel.shutdown(socket.SHUT_WR)  # it reads the end of its tasks, and can still answer the last one
            deadline = time.monotonic() + CLOSE_TIMEOUT_S
            while self.alive and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
        await self.kill()
