"""Environments from the run's side: a process that can be killed, and a handle for each episode that plays in it.

A thread cannot be stopped, and code stuck in C holds the whole interpreter; so environments live in a process of their
own. It gives up a step that awaits too long by itself. When it stops answering altogether it is killed with what it
started, every episode in it has a fault, and the next episode starts another one. Waiting: each step waits for its own
answer, which one reading task hands out; the deadline counts from the last answer that the process gave to anyone.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from hone.config.run import EnvironmentSection
from hone.errors import ConfigError
from hone.rollout.env import Episode, Observation
from hone.rollout.env_worker import Answer, Forget, Hello, Step, send
from hone.runtime import processes

START_TIMEOUT_S = 60.0
"""Until a new process must have imported the environment."""
GRACE_S = 1.0
"""What a process without any answer gets beyond the deadline of a step, which it keeps itself if it can."""
CLOSE_TIMEOUT_S = 2.0
"""Until a process that was asked to end is killed."""


class EnvironmentFault(Exception):
    """An environment failed; says how. The sample is not scored."""


class EnvironmentPool:
    """All episodes of a run, in one process at a time."""

    def __init__(self, settings: EnvironmentSection, folder: Path) -> None:
        """`folder`: the run file's; `file.py:Class` is relative to it."""
        self._settings, self._folder = settings, folder.resolve()
        self._process: _Process | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the process. Raises ConfigError when the environment cannot be imported or called."""
        try:
            await self.running()
        except EnvironmentFault as fault:
            raise ConfigError([f"rollout.environment.use: {fault}"]) from fault

    def open(self, episode: Episode) -> EpisodeHandle:
        """An episode, made in the process at its first step."""
        return EpisodeHandle(self, episode)

    async def close(self) -> None:
        """End the process, within seconds."""
        process, self._process = self._process, None
        if process is not None:
            await process.close()

    async def running(self) -> _Process:
        """The process, started anew if it died. Raises EnvironmentFault."""
        async with self._starting:  # held while a process starts; whoever waits then finds it running
            if self._process is None or self._process.dead:
                hello = Hello(
                    str(self._settings.use),
                    dict(self._settings.args),
                    self._settings.timeout_s,
                    str(self._folder),
                    tuple(sys.path),
                )
                self._process = await _Process.start(hello)
            return self._process


class EpisodeHandle:
    """One environment, from the first turn to the last."""

    def __init__(self, pool: EnvironmentPool, episode: Episode) -> None:
        self._pool = pool
        self._episode = episode
        self._process: _Process | None = None
        self._number = -1

    async def step(self, turn: str) -> Observation:
        """The environment's answer to a turn. Raises EnvironmentFault; the episode is over then."""
        if self._process is None:
            self._process = await self._pool.running()
            self._number = self._process.next_number()
            return await self._process.ask(Step(self._number, turn, self._episode))
        return await self._process.ask(Step(self._number, turn))

    def close(self) -> None:
        """Let the process forget the environment. It has done so already if the episode came to its end."""
        if self._process is not None:
            self._process.forget(self._number)


class _Process:
    """One process, the socket to it, and the steps that wait for its answers."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        timeout_s: float,
    ) -> None:
        self._process, self._reader, self._writer, self._timeout_s = process, reader, writer, timeout_s
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._live: set[int] = set()
        self._last_number = 0
        self._num_answers = 0
        self._reading: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[str] | None = None

    @classmethod
    async def start(cls, hello: Hello) -> _Process:
        """Raises EnvironmentFault when it cannot import the environment, or does not come up."""
        started, channel = processes.start("hone.rollout.env_worker")
        reader, writer = await asyncio.open_connection(sock=channel)
        self = cls(started, reader, writer, hello.timeout_s)
        send(writer, hello)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                problem = await processes.receive_async(reader)
        except TimeoutError:
            problem = f"its import did not finish within {START_TIMEOUT_S:g} s"
        except asyncio.CancelledError:
            await self.end()
            raise
        if problem != "":
            ended = await self.end()
            raise EnvironmentFault(problem or ended)
        self._reading = asyncio.create_task(self._read())
        return self

    @property
    def dead(self) -> bool:
        return self._ending is not None

    def next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    async def ask(self, step: Step) -> Observation:
        """The answer to a step. Raises EnvironmentFault."""
        if self.dead:
            raise EnvironmentFault(await self.end())
        waiting = self._waiting[step.number] = asyncio.get_running_loop().create_future()
        self._live.add(step.number)
        send(self._writer, step)
        try:
            answer = await self._answered(waiting)
        finally:
            del self._waiting[step.number]
        if answer.fault or answer.observation.text is None:
            self._live.discard(step.number)
        if answer.fault:
            raise EnvironmentFault(answer.fault)
        return answer.observation

    async def _answered(self, waiting: asyncio.Future[Answer]) -> Answer:
        patience_s = self._timeout_s + GRACE_S
        while True:
            seen = self._num_answers
            done, _ = await asyncio.wait({waiting}, timeout=patience_s)
            if done:
                return waiting.result()
            if self._num_answers == seen:
                await self.end(f"no environment answered for {patience_s:g} s: a step blocked their process; killed")

    def forget(self, number: int) -> None:
        if number in self._live and not self.dead:
            self._live.discard(number)
            send(self._writer, Forget(number))

    async def end(self, cause: str = "") -> str:
        """End the process and what it started, now. Returns why it ended; whoever waits hears it as a fault."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(cause))
        return await asyncio.shield(self._ending)

    async def _end(self, cause: str) -> str:
        code = await processes.kill(self._process)
        cause = cause or f"the process of the environments {processes.how_it_ended(code)}"
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EnvironmentFault(cause))
        self._writer.close()
        return cause

    async def close(self) -> None:
        """Let the process end by itself, so that exit handlers run; kill it when it does not."""
        assert self._reading is not None
        if not self.dead:
            self._writer.write_eof()  # it reads the end of its messages
        await asyncio.wait({self._reading}, timeout=CLOSE_TIMEOUT_S)
        await self.end()
        await self._reading

    async def _read(self) -> None:
        """Hand answers to those who wait, until the process is gone."""
        while (answer := await processes.receive_async(self._reader)) is not None:
            self._num_answers += 1
            waiting = self._waiting.get(answer.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        await self.end()
