"""Engines in processes of their own, which are called through pipes: for tests that kill them."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch
from publishing import make_engine

from hone.errors import EngineError
from hone.weights.publish import NoAnswer
from hone.weights.receive import Receiver


class ProcessPeer:
    """Our end of one."""

    num_workers = 1

    def __init__(self, process, channel: Connection) -> None:
        self.process, self._channel = process, channel
        self._numbers = itertools.count()
        self._answers: dict[int, Future] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, method, *args):
        number, answer = next(self._numbers), Future()
        self._answers[number] = answer
        try:
            self._channel.send((number, method, args))
        except OSError:
            answer.set_exception(NoAnswer("it died"))
        return lambda deadline: answer.result(max(0.0, deadline - time.monotonic()))

    def kill(self) -> int | None:
        """Returns the exit code: the witness."""
        self.process.kill()
        self.process.join()
        return self.process.exitcode

    def _read(self) -> None:
        try:
            while True:
                number, outcome = self._channel.recv()
                if isinstance(outcome, Exception):
                    self._answers[number].set_exception(outcome)
                else:
                    self._answers[number].set_result(outcome)
        except (EOFError, OSError):
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(NoAnswer("it died"))


@contextmanager
def members(kinds: Mapping[str, str], *, timeout_s: float = 60.0, gpus: Mapping[str, int] | None = None) -> Iterator:
    """A `ProcessPeer` for each name, of a kind of `publishing.KINDS`.

    They are forked from a process that has imported torch and the like already: that takes seconds.
    """
    context = multiprocessing.get_context("forkserver" if gpus is None else "spawn")
    if gpus is None:
        context.set_forkserver_preload(["hone.rollout.local", "hone.weights.receive"])
    started: dict[str, ProcessPeer] = {}
    try:
        for name, kind in kinds.items():
            ours, theirs = context.Pipe()
            arguments = (theirs, None if gpus is None else gpus[name], kind, timeout_s)
            process = context.Process(target=_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            started[name] = ProcessPeer(process, ours)
        yield started
    finally:
        for peer in started.values():
            peer.kill()


def _main(channel: Connection, gpu: int | None, kind: str, timeout_s: float) -> None:
    if gpu is not None:  # as Ray has it: each process sees its own alone
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[gpu]
    torch.set_num_threads(1)
    asyncio.run(_obey(channel, kind, timeout_s))


async def _obey(channel: Connection, kind: str, timeout_s: float) -> None:
    """Answer the calls that come through the channel, as an engine's actor would."""
    receiver = Receiver(make_engine(kind), timeout_s=timeout_s)
    running: set[asyncio.Task[None]] = set()

    async def answer(number, method, args):
        try:
            outcome = await getattr(receiver, method.removesuffix("_weights"))(*args)
        except EngineError as error:
            outcome = error
        channel.send((number, outcome))

    while True:
        running.add(asyncio.create_task(answer(*await asyncio.to_thread(channel.recv))))
