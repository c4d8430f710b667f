"""Environments in a worker process, and a handle for each episode that plays there.

All episodes of a run share one process. Steps that await run side by side, and one that takes too long is given up
there. A step that blocks holds up the others: when no reply has come for too long, the process is killed, every episode
in it fails, and the next episode starts another process.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.errors import ConfigError
from hone.rollout.env import BadEnvironment, Environment, Episode, Observation, check_observation
from hone.runtime.user_code import describe, import_module
from hone.runtime.worker_pool import WorkerDied, WorkerPool, WorkerProcess, WorkerSession, framed, receive_async

if TYPE_CHECKING:
    from hone.config.run import EnvironmentSection

GRACE_S = 1.0
"""Enough for a process that keeps the deadline itself and reports it."""


class EnvironmentFault(Exception):
    """An environment failed; says how. The sample is not scored."""


class EnvironmentPool:
    """All episodes of a run, in one process at a time."""

    def __init__(self, settings: EnvironmentSection, folder: Path, *, grace_s: float = GRACE_S) -> None:
        """
        Args:
            folder: the run file's; `file.py:Class` is relative to it, and modules beside it can be imported.
            grace_s: what a process without any reply gets beyond the deadline of a step.
        """
        place, _, name = str(settings.use).rpartition(":")
        place = str((folder / Path(place).expanduser()).resolve()) if place.endswith(".py") else place
        self.patience_s = settings.timeout_s + grace_s
        setup = (place, name, dict(settings.args), settings.timeout_s)
        self._workers = WorkerPool(__name__, folder, setup, num_workers=1)

    async def start(self) -> None:
        """Start the process. Raises ConfigError when the environment cannot be imported or called."""
        try:
            await self.worker()
        except EnvironmentFault as fault:
            raise ConfigError([f"rollout.environment.use: {fault}"]) from fault

    def open(self, episode: Episode) -> EpisodeHandle:
        """An episode, made in the process at its first step."""
        return EpisodeHandle(self, episode)

    async def worker(self) -> WorkerProcess:
        """The process, restarted if it died. Raises EnvironmentFault."""
        try:
            async with self._workers.worker() as worker:  # given back at once: episodes share it
                if worker.ready:
                    raise EnvironmentFault(worker.ready)
                return worker
        except WorkerDied as died:
            raise EnvironmentFault(f"the process of the environments {died}") from died

    def memory_metrics(self) -> dict[str, float]:
        """Memory of the process."""
        return self._workers.memory_metrics("environments")

    async def close(self) -> None:
        """End the process, within seconds."""
        await self._workers.close()


class EpisodeHandle:
    """One environment, from the first turn to the last."""

    def __init__(self, pool: EnvironmentPool, episode: Episode) -> None:
        self._pool, self._episode = pool, episode
        self._session: WorkerSession | None = None

    async def step(self, turn: str) -> Observation:
        """The environment's answer to a turn. Raises EnvironmentFault; the episode is over then."""
        episode = None
        if self._session is None:
            self._session, episode = WorkerSession(await self._pool.worker()), self._episode
        self._session.send((episode, turn))
        try:
            reply = await self._reply(self._session)
        except WorkerDied as died:
            raise EnvironmentFault(f"the process of the environments {died}") from died
        if isinstance(reply, str):
            raise EnvironmentFault(reply)
        return reply

    def close(self) -> None:
        """Drop the environment."""
        if self._session is not None:
            self._session.send(None)
            self._session.close()

    async def _reply(self, session: WorkerSession) -> Observation | str:
        """The next reply. The deadline counts from the last one that the process sent to any episode."""
        worker, patience_s = session.worker, self._pool.patience_s
        while True:
            seen = worker.num_replies
            try:
                async with asyncio.timeout(patience_s):
                    return await session.receive()
            except TimeoutError:
                if worker.num_replies == seen:
                    await worker.kill(f"sent no reply for {patience_s:g} s: a step blocked it; killed")


# ---- in the worker


def main(channel: socket.socket) -> None:
    """Serve until the pool closes the channel."""
    asyncio.run(_serve(channel))


async def _serve(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    number, (place, name, args, timeout_s) = await receive_async(reader)
    try:
        host = _Host(_load(place, name, args), args, timeout_s, writer)
    except BadEnvironment as problem:
        writer.write(framed((number, str(problem))))
        await writer.drain()
        return
    writer.write(framed((number, "")))
    while (message := await receive_async(reader)) is not None:
        host.handle(*message)


def _load(place: str, name: str, args: Mapping[str, Any]) -> Any:
    """Import what the run file names. Raises BadEnvironment."""
    try:
        found = getattr(import_module(place, "environment"), name, None)
    except BaseException as error:  # boundary: the user's module may raise anything while it is imported
        raise BadEnvironment(f"{place} cannot be imported: {describe(error)}") from error
    if not callable(found):
        raise BadEnvironment(f"{place} has no class or function {name!r}")
    try:
        inspect.signature(found).bind(None, **args)
    except TypeError as error:
        raise BadEnvironment(f"{name}{inspect.signature(found)} does not fit args {args}: {error}") from error
    if inspect.isclass(found) and not callable(getattr(found, "step", None)):
        raise BadEnvironment(f"{name} has no method `step(self, turn)`")
    return found


class _Host:
    """The live environments, by the number of their session. A reply is an Observation, or a text: what failed."""

    def __init__(
        self, make: Callable[..., Environment], args: Mapping[str, Any], timeout_s: float, writer: asyncio.StreamWriter
    ) -> None:
        self._make, self._args, self._timeout_s, self._writer = make, args, timeout_s, writer
        self._live: dict[int, Environment] = {}
        self._awaiting: set[asyncio.Task[None]] = set()

    def handle(self, number: int, message: tuple[Episode | None, str] | None) -> None:
        """A turn, with the episode if it is the first; None: the environment is no longer needed."""
        if message is None:
            self._live.pop(number, None)
            return
        episode, turn = message
        try:
            if episode is not None:
                self._live[number] = self._make(episode, **self._args)
            returned = self._live[number].step(turn)
        except BaseException as error:  # boundary: a user's code may raise anything, SystemExit included
            self._reply(number, f"raised {describe(error)}")
            return
        if inspect.isawaitable(returned):
            task = asyncio.ensure_future(self._await(number, returned))
            self._awaiting.add(task)
            task.add_done_callback(self._awaiting.discard)
        else:
            self._check(number, returned)

    async def _await(self, number: int, returned: Awaitable[Any]) -> None:
        step = asyncio.ensure_future(returned)
        await asyncio.wait({step}, timeout=self._timeout_s)
        if not step.done():
            step.cancel()  # not awaited: it may refuse
            self._reply(number, f"took longer than {self._timeout_s:g} s")
        elif step.cancelled():
            self._reply(number, "was cancelled by its own code")
        elif (error := step.exception()) is not None:
            self._reply(number, f"raised {describe(error)}")
        else:
            self._check(number, step.result())

    def _check(self, number: int, returned: Any) -> None:
        try:
            self._reply(number, check_observation(returned))
        except BadEnvironment as problem:
            self._reply(number, str(problem))

    def _reply(self, number: int, reply: Observation | str) -> None:
        if isinstance(reply, str) or reply.text is None:
            self._live.pop(number, None)
        self._writer.write(framed((number, reply)))
