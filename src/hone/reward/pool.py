"""Scoring by the user's reward functions, in worker processes that are killed when one hangs.

Where a function scores one response at a time and declares a hang to be the response's fault
(`reward(overrun=Fault.MODEL)`), a hang costs that response alone: the rest of the group is scored in a fresh process,
with the same scores. Any other hang costs the group. A worker does one task at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hone.reward.resolve import FunctionRef, Unusable, load
from hone.reward.signature import Range, RewardFunction, all_faulty, check_scores, declared_range, overrun_score
from hone.reward.strict_json import decode_json, encode_json
from hone.runtime.user_code import describe
from hone.runtime.worker_pool import WorkerDied, WorkerPool, WorkerProcess, WorkerSession, framed, receive
from hone.types import Fault, Group, Score

BUSY_FRAC = 0.1
"""A worker that overran its time was computing if it had this share of it on a processor; less, and the machine or the
process was held up: no fault of the response. Far below 1, for workers share cores with each other and with the run."""


class CallFailed(Exception):
    """A called function returned nothing; says why."""


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function and its keyword arguments, as the run file gives them."""

    target: FunctionRef
    args: Mapping[str, Any]
    key: str
    """The run file's key that names it, for messages."""


@dataclass(frozen=True, slots=True)
class _Declared:
    """A worker's first reply: what it found of each function."""

    problems: list[str]
    """Problems of the run file."""
    overrun_scores: tuple[float | None, ...]
    """Score of a response on which the function never returns; None: that is not the response's fault."""
    ranges: tuple[Range, ...]


class RewardPool:
    """Calls functions in `num_workers` processes. Callers wait for a free one in the order of their calls."""

    def __init__(self, *, num_workers: int, folder: Path) -> None:
        """`folder`, the run file's, is put on the workers' import path."""
        self._functions: list[UserFunction] = []
        self._declared = _Declared([], (), ())
        self.workers = WorkerPool(__name__, folder, self._functions, num_workers=num_workers)
        self.timeouts = 0
        """Groups, or responses where these are scored one at a time, that took too long since the start."""

    def add(self, function: UserFunction) -> int:
        """Register a function before the start; returns its number."""
        self._functions.append(function)
        return len(self._functions) - 1

    async def start(self) -> list[str]:
        """Start the workers, if there are functions. Returns every problem with these, as `key: problem`."""
        if not self._functions:
            return []
        try:
            self._declared, *_ = await self.workers.start()
        except WorkerDied as error:
            return [f"{', '.join(function.key for function in self._functions)}: the process that imports it {error}"]
        return self._declared.problems

    def range_of(self, function: int) -> Range:
        """What a function declares of its values; nothing before the start."""
        return self._declared.ranges[function] if self._declared.ranges else Range()

    async def score(self, function: int, group: Group, *, timeout_s: float) -> tuple[Score, ...]:
        """Scores of a group. Cancelling kills the worker.

        `timeout_s` is for the group, or for each response where the function scores them one at a time. After a hang
        the rest of such a group queues again, behind the groups that waited.
        """
        scoring = _PooledGroup(function, group, self._declared.overrun_scores[function], timeout_s)
        while not scoring.is_done:
            try:
                async with self.workers.worker() as worker:
                    self.timeouts += await scoring.run(worker)
            except WorkerDied as error:  # it could not be started again
                scoring.fail(f"its process {error}")
            await asyncio.sleep(0)  # lets the next in the queue have the worker
        return tuple(scoring.scores)

    async def call(self, function: int, argument: Any, *, timeout_s: float) -> Any:
        """What a function returns for one argument, converted to JSON and back. Cancelling kills the worker.

        Raises CallFailed when the function raises, hangs or ends its process.
        """
        try:
            async with self.workers.worker() as worker:
                try:
                    async with asyncio.timeout(timeout_s):
                        returned: bytes | str = await worker.ask((function, argument))
                except TimeoutError:
                    await worker.kill()
                    raise CallFailed(f"took longer than {timeout_s:g} s; its process was killed") from None
        except WorkerDied as error:
            raise CallFailed(f"its process {error}") from error
        if isinstance(returned, str):
            raise CallFailed(returned)
        return decode_json(returned)

    async def close(self) -> None:
        """End all workers, within seconds."""
        await self.workers.close()


class _PooledGroup:
    """The scores of a group so far, and what a hang or a death of the worker means for the next ones."""

    def __init__(self, function: int, group: Group, overrun_score: float | None, timeout_s: float) -> None:
        self.scores: list[Score] = []
        self._function, self._group, self._timeout_s = function, group, timeout_s
        self._overrun_score = overrun_score
        self._row_done = False
        self._deaths = 0
        """While the next response was scored."""

    @property
    def is_done(self) -> bool:
        return len(self.scores) >= len(self._group.samples)

    async def run(self, worker: WorkerProcess) -> bool:
        """Take the missing scores from a worker, up to its first hang or death. Returns whether it hung."""
        rest = replace(self._group, samples=self._group.samples[len(self.scores) :])
        self._row_done = False
        used_s = 0.0
        try:
            with contextlib.closing(WorkerSession(worker)) as session:
                session.send((self._function, rest))
                while not self.is_done:
                    used_s = worker.processor_s()
                    async with asyncio.timeout(self._timeout_s):
                        scores: tuple[Score, ...] = await session.receive()
                    self.scores += scores
                    self._row_done = True
                    self._deaths = 0 if scores else self._deaths
        except TimeoutError:
            used_s = worker.processor_s() - used_s
            await worker.kill()
            self._hung(used_s)
            return True
        except WorkerDied as error:
            self._died(error)
        return False

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
            return  # once may be chance or a kill from outside: the same response again, in a fresh process
        elif not self._row_done:
            self.fail(f"with the row, its process {error}, twice")
        elif error.crashed:
            self._next(self._overrun_score, Fault.MODEL, f"its process {error}, twice")
        else:
            self._next(None, Fault.INFRA, f"its process {error}, twice")

    def _next(self, value: float | None, fault: Fault, detail: str) -> None:
        self.scores.append(Score(value, fault, detail))
        self._deaths = 0


# ---- in the worker


def main(channel: socket.socket) -> None:
    """Serve until the pool closes the channel. Every error of a function becomes a reply.

    A Group is answered by tuples of Scores until there is one for each sample: with all at once, or, by a function with
    an overrun score, with an empty tuple after the row, then one by one. Any other argument is answered by the returned
    value as JSON, or by a text that says why there is none.
    """
    number, specs = receive(channel)
    functions: list[RewardFunction] = []
    problems: list[str] = []
    for spec in specs:
        try:
            functions.append(load(spec.target, spec.args))
        except Unusable as error:
            problems.append(f"{spec.key}: {error}")
    declared = _Declared(problems, tuple(map(overrun_score, functions)), tuple(map(declared_range, functions)))
    channel.sendall(framed((number, declared)))
    with asyncio.Runner() as runner:  # one event loop for all tasks: async rewards may keep their connections
        while (message := receive(channel)) is not None:
            number, (index, argument) = message
            answer = _scores if isinstance(argument, Group) else _returned
            for reply in answer(runner, functions[index], specs[index].args, argument):
                channel.sendall(framed((number, reply)))


def _scores(
    runner: asyncio.Runner, function: RewardFunction, args: Mapping[str, Any], group: Group
) -> Iterator[tuple[Score, ...]]:
    parts = [group]
    if overrun_score(function) is not None:
        parts = [replace(group, samples=samples) for samples in ((), *((sample,) for sample in group.samples))]
    for part in parts:
        try:
            scores = check_scores(_call(runner, function, args, part), part, declared_range(function))
        except BaseException as error:  # boundary: a user's function may raise anything, SystemExit included
            scores = all_faulty(len(part.samples), f"raised {describe(error)}")
        yield scores


def _returned(
    runner: asyncio.Runner, function: Callable[..., Any], args: Mapping[str, Any], argument: Any
) -> Iterator[bytes | str]:
    try:
        returned: bytes | str = encode_json(_call(runner, function, args, argument))
    except BaseException as error:  # boundary: as in `_scores`
        returned = f"raised {describe(error)}"
    yield returned


def _call(runner: asyncio.Runner, function: Callable[..., Any], args: Mapping[str, Any], argument: Any) -> Any:
    returned = function(argument, **args)
    return runner.run(_awaited(returned)) if inspect.isawaitable(returned) else returned


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
