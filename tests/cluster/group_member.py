"""Processes that take two versions of weights through groups or a GPU's memory, and tell what they hold."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
from publishing import make_engine

from hone.errors import EngineError
from hone.weights.meeting import Link
from hone.weights.receiving import GroupIntake
from hone.weights.sending import Way


class Member:
    """Our end of one."""

    def __init__(self, process: BaseProcess, channel: Connection) -> None:
        self.process, self._channel = process, channel

    def join(self, link: Link) -> None:
        self._channel.send(link)

    def take(self, version: int) -> None:
        self._channel.send(version)

    def said(self) -> str:
        """What it holds after the next version, or `failed: ` and why."""
        assert self._channel.poll(60)
        return self._channel.recv()

    def kill(self) -> int | None:
        """Returns the exit code: the witness."""
        self.process.kill()
        self.process.join()
        return self.process.exitcode


@contextmanager
def members(kinds: Mapping[str, str], *, timeout_s: float = 60.0, way: Way = "gloo") -> Iterator[dict[str, Member]]:
    """A process for each name, of a kind of `publishing.KINDS`.

    They are forked from a process that has imported torch and the like already: that takes seconds.
    """
    context = multiprocessing.get_context("spawn" if way != "gloo" else "forkserver")
    if way == "gloo":
        context.set_forkserver_preload(["hone.rollout.local", "hone.weights.receiving"])
    started: dict[str, Member] = {}
    try:
        for number, (name, kind) in enumerate(kinds.items()):
            ours, theirs = context.Pipe()
            gpu = number + 1 if way == "nccl" else 0  # one beside the sender's, or the sender's
            arguments = (theirs, gpu, way, kind, name, timeout_s)
            process = context.Process(target=_main, args=arguments, daemon=True)
            process.start()
            started[name] = Member(process, ours)
        yield started
    finally:
        for member in started.values():
            member.kill()


def _main(channel: Connection, gpu: int, way: Way, kind: str, name: str, timeout_s: float) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[gpu]  # as Ray has it: each process sees its own alone
    torch.set_num_threads(1)
    asyncio.run(_obey(channel, way, kind, name, timeout_s))


async def _obey(channel: Connection, way: Way, kind: str, name: str, timeout_s: float) -> None:
    """Join each group and take each version that comes through the channel, as an engine's actor would."""
    intake = GroupIntake(make_engine(kind), timeout_s=timeout_s)
    taking: set[asyncio.Task[None]] = set()

    async def take(version: int) -> None:
        try:
            said = await intake.take(version)
        except EngineError as error:
            said = f"failed: {error}"
        channel.send(said)

    while True:
        told = await asyncio.to_thread(channel.recv)
        if isinstance(told, Link):
            await intake.join(way, told, name)
        else:
            taking.add(asyncio.create_task(take(told)))
