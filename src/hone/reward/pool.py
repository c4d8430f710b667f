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
            if not worker.alive:
                await self._start(worker)
            async with asyncio.timeout(timeout_s):
                return await worker.ask(Task(job, group))
        except TimeoutError:
            await worker.kill()
            return all_faulty(len(group.samples), f"took longer than {timeout_s:g} s; its process was killed")
        except WorkerDied as error:
            await worker.kill()
            return all_faulty(len(group.samples), f"its process {error}")
        except asyncio.CancelledError:
            await worker.kill()  # busy with a task that nobody waits for any more
            raise
        finally:
            self._free.put_nowait(worker)

    async def close(self) -> None:
        """End all workers, by force after CLOSE_TIMEOUT_S."""
        await asyncio.gather(*(worker.close() for worker in self._workers))

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are alive."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]


class _Worker:
    """One process and the socket to it; may be started again after it was killed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: socket.socket | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    async def start(self, hello: Hello) -> list[str]:
        """Start the process. Returns its problems with the jobs. Raises WorkerDied."""
        await self.kill()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        command = _MAIN.format(path=list(sys.path), fd=theirs.fileno(), pid=os.getpid())
        with theirs:
            # Its own session: Ctrl-C is for the run to handle, and a kill reaches what the reward itself started.
            self.process = subprocess.Popen(
                [sys.executable, "-c", command],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.channel = ours
        return await self.ask(hello)

    async def ask(self, message: Any) -> Any:
        """Send a message and await the answer. Raises WorkerDied when the process ends first."""
        assert self.channel is not None
        loop = asyncio.get_running_loop()
        body = pickle.dumps(message)
        try:
            await loop.sock_sendall(self.channel, HEADER.pack(len(body)) + body)
            (length,) = HEADER.unpack(await self._read(HEADER.size))
            return pickle.loads(await self._read(length))
        except (ConnectionError, EOFError):
            raise WorkerDied(await self._cause_of_death()) from None

    async def _read(self, num_bytes: int) -> bytes:
        assert self.channel is not None
        data = bytearray()
        while len(data) < num_bytes:
            part = await asyncio.get_running_loop().sock_recv(self.channel, num_bytes - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    async def _cause_of_death(self) -> str:
        assert self.process is not None
        try:
            code = await asyncio.to_thread(self.process.wait, CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    async def kill(self) -> None:
        """End the process and what it started, now. Nothing happens when there is none."""
        if self.channel is not None:
            self.channel.close()
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself, with all that it had started
                os.killpg(self.process.pid, signal.SIGKILL)
            await asyncio.shield(asyncio.to_thread(self.process.wait))
        self.process = self.channel = None

    async def close(self) -> None:
        """Ask the process to end by closing its channel; kill it when it does not."""
        if self.channel is not None and self.process is not None:
            self.channel.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.process.wait, CLOSE_TIMEOUT_S)
        await self.kill()
