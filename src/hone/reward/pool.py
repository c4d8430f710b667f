"""Killable processes that run the user's reward functions: a hang or a crash costs one group, never the run.

Where a function judges one response at a time and says that a hang is the response's fault (`reward(overrun=...)`), it
costs that response alone: the others of the group are scored in a fresh process, and their scores are what they are.

A thread cannot be stopped, and code stuck in C holds the whole interpreter; so each function runs in a process of
its own, one task at a time, and whatever overruns is killed with its children and replaced. A worker is started anew
(not forked), so it never holds a copy of the model. Every wait has a deadline, but one: for a free worker, which is
bounded by the deadlines of the tasks in front.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import psutil

from hone.reward.signature import Range, all_faulty
from hone.reward.wire import decode_json
from hone.reward.worker import Call, Hello, Job, Ready, Returned, Task
from hone.runtime import processes
from hone.types import Fault, Group, Score

START_TIMEOUT_S = 60.0
"""Until a new worker must have imported the rewards."""
CLOSE_TIMEOUT_S = 2.0
"""Until a worker that was asked to end is killed."""
BUSY_FRAC = 0.1
"""A worker that overran its time was computing if it had this share of it on a processor; less, and the machine or the
process was held up: no fault of the response. Far below 1, for workers share cores with each other and with the run."""
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""What a process dies of by its own doing."""


class WorkerDied(Exception):
    """A worker ended in the middle of something; says how."""

    def __init__(self, how: str, *, crashed: bool = False) -> None:
        super().__init__(how)
        self.crashed = crashed
        """By its own doing, as far as one can tell."""


class CallFailed(Exception):
    """A called function gave nothing back; says why."""


class WorkerPool:
    """Runs jobs for groups in `num_workers` processes.

    Waiting: `score` waits for a free worker in the order of the calls; whoever finishes, for whatever reason, hands
    its worker on.
    """

    def __init__(self, *, num_workers: int, folder: Path) -> None:
        """`folder`, the run file's, is put on the workers' import path."""
        self._jobs: list[Job] = []
        self._overrun_scores: tuple[float | None, ...] = ()
        self._ranges: tuple[Range, ...] = ()
        self.restarts = 0
        """Workers started again since the start, because they had hung or died."""
        self.timeouts = 0
        """Groups, or responses where these are judged one at a time, that took too long since the start."""
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
            if outcome.problems:
                return outcome.problems
            self._overrun_scores, self._ranges = outcome.overrun_scores, outcome.ranges
        return []

    def range_of(self, job: int) -> Range:
        """What a job's function declares of its values; nothing before the start."""
        return self._ranges[job] if self._ranges else Range()

    async def _start(self, worker: _Worker) -> Ready:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await worker.start(Hello(tuple(self._jobs), self._python_path))
        except TimeoutError:
            raise WorkerDied(f"did not finish within {START_TIMEOUT_S:g} s") from None

    async def score(self, job: int, group: Group, *, timeout_s: float) -> tuple[Score, ...]:
        """Scores of a group. Cancelling kills the worker.

        `timeout_s` is for the group, or for each response where the function judges them one at a time. After a hang
        the rest of such a group queues again, behind the groups that waited.
        """
        task = _Scoring(job, group, self._overrun_scores[job], timeout_s)
        while not task.is_done:
            worker = await self._free.get()
            try:
                if self._closed:
                    raise RuntimeError("a group came to be scored after the rewards were closed")
                if worker.alive or await self._restarted(worker, task):
                    self.timeouts += await task.run(worker)
            except asyncio.CancelledError:
                await worker.kill()  # busy with a task that nobody waits for any more
                raise
            finally:
                self._free.put_nowait(worker)
            await asyncio.sleep(0)  # whoever waits takes the worker now; asked again at once, it would be ours again
        return tuple(task.scores)

    async def call(self, job: int, argument: Any, *, timeout_s: float) -> Any:
        """What a job's function gives back for one argument, as JSON knows it. Cancelling kills the worker.

        Raises CallFailed when the function raises, hangs or takes its process with it.
        """
        worker = await self._free.get()
        try:
            if not worker.alive:
                self.restarts += 1
                await self._start(worker)
            async with asyncio.timeout(timeout_s):
                returned: Returned = await worker.ask(Call(job, argument))
        except TimeoutError:
            await worker.kill()
            raise CallFailed(f"took longer than {timeout_s:g} s; its process was killed") from None
        except WorkerDied as error:
            raise CallFailed(f"its process {error}") from error
        except asyncio.CancelledError:
            await worker.kill()  # busy with a call that nobody waits for any more
            raise
        finally:
            self._free.put_nowait(worker)
        if returned.problem:
            raise CallFailed(returned.problem)
        return decode_json(returned.body)

    async def _restarted(self, worker: _Worker, task: _Scoring) -> bool:
        """Start a worker that has died; when that fails, nobody can score the rest of the task."""
        self.restarts += 1
        try:
            await self._start(worker)
        except WorkerDied as error:
            task.fail(f"its process {error}")
            return False
        return True

    async def close(self) -> None:
        """End all workers, by force after CLOSE_TIMEOUT_S."""
        self._closed = True
        await asyncio.gather(*(worker.close() for worker in self._workers))


class _Scoring:
    """A group on its way through the workers: the scores so far, and what a hang or a death means for the next ones."""

    def __init__(self, job: int, group: Group, overrun_score: float | None, timeout_s: float) -> None:
        self.scores: list[Score] = []
        self._job, self._group, self._timeout_s = job, group, timeout_s
        self._overrun_score = overrun_score
        self._row_done = False
        self._deaths = 0
        """Under the response that is next."""

    @property
    def is_done(self) -> bool:
        return len(self.scores) >= len(self._group.samples)

    async def run(self, worker: _Worker) -> bool:
        """Take the scores that are missing from a worker, up to its first hang or death. Returns whether it hung."""
        rest = replace(self._group, samples=self._group.samples[len(self.scores) :])
        self._row_done = False
        used_s = worker.processor_s()
        try:
            async with asyncio.timeout(self._timeout_s):
                scores = await worker.ask(Task(self._job, rest))
            while not self._take(scores):
                used_s = worker.processor_s()
                async with asyncio.timeout(self._timeout_s):
                    scores = await worker.receive()
        except TimeoutError:
            used_s = worker.processor_s() - used_s
            await worker.kill()
            self._hung(used_s)
            return True
        except WorkerDied as error:
            self._died(error)
        return False

    def _take(self, scores: tuple[Score, ...]) -> bool:
        self.scores += scores
        self._row_done = True
        if scores:
            self._deaths = 0
        return self.is_done

    def fail(self, detail: str, fault: Fault = Fault.INFRA) -> None:
        """The same fault for every sample that has no score yet."""
        self.scores += all_faulty(len(self._group.samples) - len(self.scores), detail, fault)

    def _hung(self, used_s: float) -> None:
        detail = f"took longer than {self._timeout_s:g} s; its process was killed"
        was_busy = used_s >= BUSY_FRAC * self._timeout_s
        if self._overrun_score is None:
            self.fail(detail)
        elif not self._row_done:
            self.fail(f"the row {detail}", Fault.DATA if was_busy else Fault.INFRA)
        elif was_busy:
            self._next(self._overrun_score, Fault.MODEL, detail)
        else:
            self._next(None, Fault.INFRA, f"{detail} after {used_s:.1f} s of processor time")

    def _died(self, error: WorkerDied) -> None:
        self._deaths += 1
        if self._overrun_score is None:
            self.fail(f"its process {error}")
        elif self._deaths == 1:
            return  # once may be chance or a hand from outside: the same response again, in a fresh process
        elif not self._row_done:
            self.fail(f"with the row, its process {error}, twice")
        elif error.crashed:
            self._next(self._overrun_score, Fault.MODEL, f"its process {error}, twice")
        else:
            self._next(None, Fault.INFRA, f"its process {error}, twice")

    def _next(self, value: float | None, fault: Fault, detail: str) -> None:
        self.scores.append(Score(value, fault, detail))
        self._deaths = 0


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

    def processor_s(self) -> float:
        """Seconds of processor time that the process has used; 0 when it is gone."""
        try:
            times = psutil.Process(self.process.pid).cpu_times() if self.process is not None else None
        except psutil.Error:
            return 0.0
        return times.user + times.system if times is not None else 0.0

    async def start(self, hello: Hello) -> Ready:
        """Start the process. Returns what it found of the jobs. Raises WorkerDied."""
        await self.kill()
        self.process, self.channel = processes.start("hone.reward.worker")
        self.channel.setblocking(False)
        return await self.ask(hello)

    async def ask(self, message: Any) -> Any:
        """Send a message and await its first answer. Raises WorkerDied, saying how, when the process ends first."""
        assert self.channel is not None
        try:
            await asyncio.get_running_loop().sock_sendall(self.channel, processes.framed(message))
        except ConnectionError:
            await self._bury()
        return await self.receive()

    async def receive(self) -> Any:
        """Await the next answer. Raises as `ask`."""
        assert self.channel is not None
        try:
            (length,) = processes.HEADER.unpack(await self._read(self.channel, processes.HEADER.size))
            return pickle.loads(await self._read(self.channel, length))
        except (ConnectionError, EOFError):
            await self._bury()

    async def _bury(self) -> NoReturn:
        code = await self.kill()
        raise WorkerDied(processes.how_it_ended(code), crashed=-code in _CRASHES) from None

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
        running, channel = self.process, self.channel
        self.process = self.channel = None
        if channel is not None:
            channel.close()
        return 0 if running is None else await processes.kill(running)

    async def close(self) -> None:
        """Let the process end by itself, so that exit handlers run; kill it when it does not."""
        if self.channel is not None and self.process is not None:
            self.channel.shutdown(socket.SHUT_WR)  # it reads the end of its tasks, and can still answer the last one
            deadline = time.monotonic() + CLOSE_TIMEOUT_S
            while self.alive and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
        await self.kill()
