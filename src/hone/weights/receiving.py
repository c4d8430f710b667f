"""An engine's side of groups that come and go: it joins one after another, and takes versions through them.

Bucket for bucket, a version that began in one group continues in the next: the sender begins it again for
all who are left, and what an engine has already is skipped. Which groups there are, the sender decides (`sending.py`).
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from hone.errors import EngineError
from hone.rollout.engine import Engine
from hone.weights.buckets import Bucket, Manifest
from hone.weights.meeting import Interrupted, Link, MeetingInlet
from hone.weights.publish import take
from hone.weights.publish_group import GroupInlet
from hone.weights.publish_ipc import IpcInlet
from hone.weights.sending import Way, device_of


class GroupIntake:
    """What calls of an engine's actor lead to.

    Args:
        timeout_s: the sender's. An engine waits twice as long: it is the sender that finds out who is stuck.
    """

    def __init__(self, engine: Engine, *, timeout_s: float) -> None:
        self._engine, self._timeout_s = engine, 2 * timeout_s
        self._coming = Coming(self._timeout_s)
        self._is_divided = False
        self._loading: asyncio.Task[str] | None = None
        self._version = -1

    async def join(self, way: Way, link: Link, name: str) -> None:
        """Join a group, which takes the place of the one before. Raises RuntimeError when that cannot be done."""
        self._is_divided = name not in link.engines
        if self._is_divided:
            assert isinstance(self._engine, DividedEngine)
            await self._engine.join_transfer({"way": way, "link": link, "name": name, "timeout_s": self._timeout_s})
        else:
            self._coming.go_on(await asyncio.to_thread(new_inlet, way, link, name, device_of(way), self._timeout_s))

    async def take(self, version: int) -> str:
        """Take the version that comes through the group; returns the fingerprint of what the engine holds then.

        Raises:
            EngineError: it does not hold the version.
        """
        is_under_way = self._loading is not None and not self._loading.done()
        if is_under_way and version != self._version:
            raise EngineError(f"version {version} of the weights came while the one before was being taken.")
        if not is_under_way:
            self._version = version
            self._loading = asyncio.create_task(self._load(version))
        assert self._loading is not None
        return await asyncio.shield(self._loading)

    async def _load(self, version: int) -> str:
        if not self._is_divided:
            return await take(self._engine, self._coming, version)
        assert isinstance(self._engine, DividedEngine)
        return await self._engine.take_transfer(version)


@runtime_checkable
class DividedEngine(Protocol):
    """An engine whose ranks are processes that take weights by themselves, each as a member of the group."""

    async def join_transfer(self, info: dict[str, Any]) -> None:
        """Have every rank join; see `vllm_transfer.JoinInfo`."""
        ...

    async def take_transfer(self, version: int) -> str:
        """Have every rank take the version that comes; returns its fingerprint."""
        ...


class Coming:
    """A `publish.Inlet` over one group after another. One thread brings them, the engine's takes messages out of the
    last one."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._new: queue.SimpleQueue[MeetingInlet] = queue.SimpleQueue()
        self._inlet: MeetingInlet | None = None

    def go_on(self, inlet: MeetingInlet) -> None:
        """From here on messages come through this one."""
        self._new.put(inlet)

    def messages(self) -> Iterator[Bucket | Manifest]:
        taken, why = 0, "no weights came"
        while True:
            try:
                inlet = self._newest()
            except queue.Empty:
                raise EngineError(f"{why}, and they did not go on within {self._timeout_s:g} s") from None
            try:
                for message in inlet.messages():
                    if isinstance(message, Bucket) and message.index < taken:
                        continue
                    taken += 1
                    yield message
            except Interrupted as error:
                self._leave()
                why = str(error)

    def held(self, fingerprint: str) -> None:
        if self._inlet is not None:
            self._inlet.held(fingerprint)

    def failed(self, reason: str) -> None:
        if self._inlet is not None:
            self._inlet.failed(reason)

    def _newest(self) -> MeetingInlet:
        """The last that was joined; waits for one if there is none. Raises queue.Empty."""
        while self._inlet is None or not self._new.empty():
            inlet = self._new.get(timeout=self._timeout_s)
            self._leave()
            self._inlet = inlet
        return self._inlet

    def _leave(self) -> None:
        if self._inlet is not None:
            self._inlet.close()
            self._inlet = None


def new_inlet(way: Way, link: Link, name: str, device: torch.device, timeout_s: float) -> MeetingInlet:
    """Join a group under this name."""
    if way == "ipc":
        return IpcInlet(link, name, device=device, timeout_s=timeout_s)
    assert way != "ray"
    return GroupInlet(link, name, backend=way, device=device, timeout_s=timeout_s)
