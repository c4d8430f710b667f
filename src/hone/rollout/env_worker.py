"""The inside of the process in which environments live: make them, ask them, forget them, until told to stop.

Started by `env_pool.py` only, with a socket to it. Steps that await run side by side; a step that blocks holds up the
others, and the whole process is killed when that lasts too long. Imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.rollout.env import Environment, Episode, Observation, Unusable, check_observation
from hone.runtime.processes import begin, framed, receive_async
from hone.runtime.user_code import describe, import_module


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message; answered with a problem, or an empty text when all is well."""

    use: str
    args: Mapping[str, Any]
    timeout_s: float
    """Until a step that awaits is given up."""
    folder: str
    """The run file's; `file.py` is relative to it, and modules beside it can be imported."""
    python_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Ask environment `number` about a turn; make it first if `episode` is given. Answered with an `Answer`."""

    number: int
    turn: str
    episode: Episode | None = None


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody will ask environment `number` again; no answer."""

    number: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What environment `number` said, or why it failed."""

    number: int
    observation: Observation
    fault: str = ""


def main(channel_fd: int, parent_pid: int) -> None:
    """Serve until the pool closes the channel."""
    begin(parent_pid)
    asyncio.run(_serve(socket.socket(fileno=channel_fd)))


async def _serve(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    hello = await receive_async(reader)
    sys.path[:] = [hello.folder, *hello.python_path]
    try:
        make = _load(hello)
    except Unusable as problem:
        send(writer, str(problem))
        await writer.drain()
        return
    send(writer, "")
    host = _Host(make, hello, writer)
    while (message := await receive_async(reader)) is not None:
        host.handle(message)


class _Host:
    """The live environments."""

    def __init__(self, make: Callable[..., Environment], hello: Hello, writer: asyncio.StreamWriter) -> None:
        self._make, self._args, self._timeout_s, self._writer = make, hello.args, hello.timeout_s, writer
        self._live: dict[int, Environment] = {}
        self._awaiting: set[asyncio.Task[None]] = set()

    def handle(self, message: Step | Forget) -> None:
        if isinstance(message, Forget):
            self._live.pop(message.number, None)
            return
        try:
            if message.episode is not None:
                self._live[message.number] = self._make(message.episode, **self._args)
            returned = self._live[message.number].step(message.turn)
        except BaseException as error:  # boundary: a user's code may raise anything, SystemExit included
            self._answer(message.number, fault=f"raised {describe(error)}")
            return
        if inspect.isawaitable(returned):
            task = asyncio.ensure_future(self._await(message.number, returned))
            self._awaiting.add(task)
            task.add_done_callback(self._awaiting.discard)
        else:
            self._check(message.number, returned)

    async def _await(self, number: int, returned: Awaitable[Any]) -> None:
        step = asyncio.ensure_future(returned)
        await asyncio.wait({step}, timeout=self._timeout_s)
        if not step.done():
            step.cancel()  # not awaited: it may refuse
            self._answer(number, fault=f"took longer than {self._timeout_s:g} s")
        elif step.cancelled():
            self._answer(number, fault="was cancelled by its own code")
        elif (error := step.exception()) is not None:
            self._answer(number, fault=f"raised {describe(error)}")
        else:
            self._check(number, step.result())

    def _check(self, number: int, returned: Any) -> None:
        try:
            self._answer(number, check_observation(returned))
        except Unusable as problem:
            self._answer(number, fault=str(problem))

    def _answer(self, number: int, observation: Observation | None = None, fault: str = "") -> None:
        if fault or observation is None or observation.text is None:
            self._live.pop(number, None)
        send(self._writer, Answer(number, observation or Observation(), fault))


def _load(hello: Hello) -> Any:
    """Import what the run file names. Raises Unusable."""
    place, _, name = hello.use.rpartition(":")
    try:
        file = str((Path(hello.folder) / Path(place).expanduser()).resolve()) if place.endswith(".py") else place
        found = getattr(import_module(file, "environment"), name, None)
    except BaseException as error:  # boundary: the user's module may raise anything while it is imported
        raise Unusable(f"{place} cannot be imported: {describe(error)}") from error
    if not callable(found):
        raise Unusable(f"{place} has no class or function {name!r}")
    try:
        inspect.signature(found).bind(None, **hello.args)
    except TypeError as error:
        raise Unusable(f"{name}{inspect.signature(found)} does not fit args {dict(hello.args)}: {error}") from error
    if inspect.isclass(found) and not callable(getattr(found, "step", None)):
        raise Unusable(f"{name} has no method `step(self, turn)`")
    return found


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    """Queue a message; never waits."""
    writer.write(framed(message))
