"""Processes that take two versions of weights through a group or a GPU's memory, and tell what they hold."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from publishing import make_engine

from hone.cluster.meeting import Meeting
from hone.cluster.publish import Inlet, take
from hone.cluster.publish_group import GroupInlet
from hone.cluster.publish_ipc import IpcInlet
from hone.errors import EngineError


class Member:
    """Our end of one."""

    def __init__(self, process: BaseProcess, channel: Connection) -> None:
        self.process, self._channel = process, channel

    def said(self) -> str:
        """What it holds after the next version, or `failed: ` and why."""
        assert self._channel.poll(60)
        return self._channel.recv()


@contextmanager
def members(
    meeting: Meeting,
    groups: Mapping[str, str],
    kinds: Mapping[str, str] | None = None,
    *,
    timeout_s: float = 60.0,
    transport: str = "gloo",
) -> Iterator[dict[str, Member]]:
    """A process for each name of `groups`, which says whom it shares a group with: `engine-0+engine-1`.

    They are forked from a process that has imported torch and the like already: that takes seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hone.rollout.local", "hone.cluster.publish_group"])
    started: dict[str, Member] = {}
    try:
        for name, names in groups.items():
            ours, theirs = context.Pipe()
            kind = (kinds or {}).get(name, "good")
            arguments = (theirs, transport, kind, meeting.address, name, names.split("+"), timeout_s)
            process = context.Process(target=_main, args=arguments, daemon=True)
            process.start()
            started[name] = Member(process, ours)
        yield started
    finally:
        for member in started.values():
            member.process.kill()
            member.process.join()


def _main(channel: Connection, transport: str, kind: str, *where: Any) -> None:
    torch.set_num_threads(1)
    asyncio.run(_take_versions(channel, transport, kind, *where))


async def _take_versions(
    channel: Connection, transport: str, kind: str, address: str, name: str, names: list[str], timeout_s: float
) -> None:
    engine = make_engine(kind)
    if transport == "gloo":
        cpu = torch.device("cpu")
        inlet: Inlet = GroupInlet(address, name, names, backend="gloo", device=cpu, timeout_s=timeout_s)
    else:
        inlet = IpcInlet(address, name, names, device=torch.device("cuda:0"), timeout_s=timeout_s)
    try:
        for version in (1, 2):
            channel.send(await take(engine, inlet, version))
    except EngineError as error:
        channel.send(f"failed: {error}")
