"""The inside of a scorer process: load the user's functions once, then score one group at a time until told to stop.

Started by `pool.py` only, with a socket to it. Everything a user's function does wrong is answered as a fault; what
cannot be answered (a hang, a crash of the interpreter) is the pool's to notice. Imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hone.reward.resolve import Target, Unusable, load
from hone.reward.signature import Range, RewardFunction, all_faulty, check_scores, declared_range, overrun_score
from hone.reward.wire import encode_json
from hone.runtime.processes import begin, framed, receive
from hone.runtime.user_code import describe
from hone.types import Group, Score


@dataclass(frozen=True, slots=True)
class Job:
    """A reward function and its keyword arguments, as the run file gives them."""

    target: Target
    args: Mapping[str, Any]
    key: str
    """The run file's key that named it, for messages."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message to a worker, answered with a Ready."""

    jobs: tuple[Job, ...]
    python_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """What a worker has found of its jobs."""

    problems: list[str]
    """Of the run file; empty when all is well."""
    overrun_scores: tuple[float | None, ...]
    """Of each job: what a response earns that its function does not come back from; None: no fault of the response."""
    ranges: tuple[Range, ...]
    """What each job's function declares of its values."""


@dataclass(frozen=True, slots=True)
class Task:
    """Score `group` by job number `job`.

    The worker answers with tuples of Scores until there is one for each sample: with all at once, or, for a job with an
    overrun score, with an empty tuple when it is done with the row, then one by one.
    """

    job: int
    group: Group


@dataclass(frozen=True, slots=True)
class Call:
    """Call job number `job` with one argument beside its args; the worker answers with a Returned."""

    job: int
    argument: Any


@dataclass(frozen=True, slots=True)
class Returned:
    """What a called function gave back, as JSON: no object of its own can come across; or why it gave nothing."""

    body: bytes = b""
    problem: str = ""


def main(channel_fd: int, parent_pid: int) -> None:
    """Serve until the pool closes the channel."""
    begin(parent_pid)
    with socket.socket(fileno=channel_fd) as channel:
        hello = receive(channel)
        if hello is None:
            return
        sys.path[:] = hello.python_path
        functions, problems = _load_all(hello.jobs)
        _send(channel, Ready(problems, tuple(map(overrun_score, functions)), tuple(map(declared_range, functions))))
        with asyncio.Runner() as runner:  # one event loop for all tasks: async rewards may keep their connections
            while (task := receive(channel)) is not None:
                if isinstance(task, Call):
                    _send(channel, _returned(runner, functions[task.job], hello.jobs[task.job].args, task.argument))
                    continue
                for scores in _answers(runner, functions[task.job], hello.jobs[task.job].args, task.group):
                    _send(channel, scores)


def _load_all(jobs: tuple[Job, ...]) -> tuple[list[RewardFunction], list[str]]:
    functions: list[RewardFunction] = []
    problems: list[str] = []
    for job in jobs:
        try:
            functions.append(load(job.target, job.args))
        except Unusable as error:
            problems.append(f"{job.key}: {error}")
    return functions, problems


def _answers(
    runner: asyncio.Runner, function: RewardFunction, args: Mapping[str, Any], group: Group
) -> Iterator[tuple[Score, ...]]:
    if overrun_score(function) is None:
        yield _score(runner, function, args, group)
        return
    for samples in ((), *((sample,) for sample in group.samples)):
        yield _score(runner, function, args, replace(group, samples=samples))


def _score(
    runner: asyncio.Runner, function: RewardFunction, args: Mapping[str, Any], group: Group
) -> tuple[Score, ...]:
    try:
        returned: Any = function(group, **args)
        if inspect.isawaitable(returned):
            returned = runner.run(_awaited(returned))
        return check_scores(returned, group, declared_range(function))
    except BaseException as error:  # boundary: a user's function may raise anything, SystemExit included
        return all_faulty(len(group.samples), f"raised {describe(error)}")


def _returned(runner: asyncio.Runner, function: Callable[..., Any], args: Mapping[str, Any], argument: Any) -> Returned:
    try:
        value = function(argument, **args)
        return Returned(encode_json(runner.run(_awaited(value)) if inspect.isawaitable(value) else value))
    except BaseException as error:  # boundary: as in `_score`
        return Returned(problem=f"raised {describe(error)}")


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _send(channel: socket.socket, message: Any) -> None:
    channel.sendall(framed(message))
