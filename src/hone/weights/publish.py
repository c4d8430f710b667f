"""From a trainer's rank to engines: one version's weights, in buckets, with one call per bucket and engine.

    rank      begin   load(0)  load(1) ...  commit(manifest)
    engine            open, load between two tokens; check; answer with the fingerprint of what it holds

The bytes of a bucket go through a transport (`transports.py`); the call says what lies in it, and its answer that it
was taken. So the caller learns of an engine that dies from the call that fails, and of one that hangs at the deadline;
one engine's failure costs the others no more than the wait. An engine that failed may hold half a version: nothing is
sampled from it until it took a whole one. The engine's side is `receive.py`; which rank sends to which engine, and who
is sent a version again, is decided in `routes.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hone.errors import EngineError
from hone.weights.buckets import Bucket, Manifest, Packer

IN_FLIGHT = 2
"""Buckets in memory at the sender: one is sent while the next is packed."""


class NoAnswer(EngineError):
    """An engine died, or did not answer in time: to send it anything again is of no use."""


AwaitAnswer = Callable[[float], Any]
"""Waits for the answer of a call, until a moment of `time.monotonic`. Raises NoAnswer, or the EngineError with which
the engine answered."""


class Peer(Protocol):
    """An engine's process, as a sender calls it."""

    @property
    def num_workers(self) -> int:
        """Its processes that load weights."""
        ...

    def call(self, method: str, *args: Any) -> AwaitAnswer:
        """Start a call of a method of its `EngineActor`."""
        ...


class Transport(ABC):
    """How a bucket's bytes get from this rank to engines. Where the call of a bucket carries what there is to send,
    nothing is kept for an engine: the other methods do nothing then.

    Args:
        device: where buckets are packed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def connect(self, peers: Mapping[str, Peer], timeout_s: float) -> dict[str, EngineError]:
        """Before a version: be ready to send to these engines. Returns those that cannot be reached, and why."""
        return {}

    @abstractmethod
    def send(self, bucket: Bucket, engines: Sequence[str]) -> Mapping[str, Any]:
        """Begin to send a bucket. Returns what the call of each engine carries (`parts.BucketPart`)."""

    def wait(self, engine: str, deadline: float) -> None:  # noqa: B027 - may be nothing to do
        """Once an engine has taken a bucket: wait until its memory may be written to again. Raises EngineError."""

    def drop(self, engine: str) -> None:  # noqa: B027 - may be nothing to do
        """An engine failed: send it no more, and give up what is under way."""


@dataclass(frozen=True, slots=True)
class Update:
    """One attempt to bring a version to engines."""

    id: str
    """Unique; calls of an earlier attempt are refused by it."""
    version: int
    """Policy updates made."""
    senders: int = 1
    """Ranks that send to the same engine, each to one of its workers; the engine waits for all."""


@dataclass(frozen=True, slots=True)
class Published:
    """Outcome of publishing one version."""

    manifest: Manifest
    held_by: tuple[str, ...]
    """Engines that hold the version, to the last bit."""
    failed: Mapping[str, str]
    """Engines that do not, and why: nothing may be sampled from them."""
    refused: tuple[str, ...]
    """Failed engines that are alive and reported a reason: the version can be sent to them again."""
    sent_bytes: int
    """Bytes of all buckets, counted once for all engines."""


def publish(
    weights: Iterable[tuple[str, Tensor]],
    peers: Mapping[str, Peer],
    transport: Transport,
    *,
    updates: Mapping[str, Update],
    sender: int = 0,
    bucket_size: int,
    timeout_s: float,
    dtype: torch.dtype | None = None,
) -> Published:
    """Send one version to engines. Blocks until each of them holds it or has failed.

    Args:
        weights: a trainer's; gone through once, to its end, so that a sharded trainer's other ranks, which go through
            theirs meanwhile, are never left alone.
        updates: what it is to each engine; all have one version.
        sender: rank of this process.
        bucket_size: bytes that are sent at once, unless a tensor is larger; twice that is taken.
        timeout_s: an engine that does not connect, take a bucket or finish loading for so long is stuck.
        dtype: what the engines compute in, if not what the weights are in: half the bytes for float32 masters.
    """
    stream = _WeightStream(peers, transport, updates, sender, timeout_s)
    stream.begin()
    buffers, waits = deque[Tensor](), deque[Callable[[], object]]()

    def buffer(size: int) -> Tensor:
        """The one that was sent first is the next to be empty. A tensor that is larger than a bucket gets a buffer of
        its own, which is not kept."""
        empty: Tensor | None = None
        if len(waits) == IN_FLIGHT:
            waits.popleft()()
            empty = buffers.popleft()
        if empty is None or len(empty) != size:
            empty = torch.empty(size, dtype=torch.uint8, device=transport.device)
        buffers.append(empty)
        return empty

    packer = Packer(bucket_size, buffer, dtype=dtype)
    coming, sent_bytes = iter(weights), 0
    for bucket in packer.pack(coming):
        if not stream.taking:
            break
        waits.append(stream.load(bucket))
        sent_bytes += bucket.header.num_bytes
    for _ in coming:  # no engine is left to take them
        pass
    for wait in waits:
        wait()
    (version,) = {update.version for update in updates.values()}
    manifest = packer.manifest(version)
    stream.commit(manifest)
    refused = tuple(name for name, error in stream.failed.items() if not isinstance(error, NoAnswer))
    failed = {name: f"{name}: {error}" for name, error in stream.failed.items()}
    return Published(manifest, tuple(stream.taking), failed, refused, sent_bytes)


class _WeightStream:
    """The calls of one version."""

    def __init__(
        self,
        peers: Mapping[str, Peer],
        transport: Transport,
        updates: Mapping[str, Update],
        sender: int,
        timeout_s: float,
    ) -> None:
        self._peers, self._transport, self._updates = peers, transport, updates
        self._sender, self._timeout_s = sender, timeout_s
        self.failed: dict[str, EngineError] = {}

    @property
    def taking(self) -> list[str]:
        """Engines that have not failed."""
        return [name for name in self._peers if name not in self.failed]

    def begin(self) -> None:
        for name, error in self._transport.connect(self._peers, self._timeout_s).items():
            self._drop(name, error)
        calls = {name: self._peers[name].call("begin_weights", self._updates[name]) for name in self.taking}
        self._settle(calls, "did not answer")()

    def load(self, bucket: Bucket) -> Callable[[], object]:
        """Send a bucket. The call that is returned waits until its memory may be written to again, or for the deadline;
        it raises nothing: see `failed`."""
        parts = self._transport.send(bucket, self.taking)
        calls = {
            name: self._peers[name].call("load_weights", self._updates[name].id, self._sender, bucket.header, part)
            for name, part in parts.items()
        }
        return self._settle(calls, f"did not take bucket {bucket.header.index}", then=self._transport.wait)

    def commit(self, manifest: Manifest) -> None:
        """Wait until the engines hold it, and compare the fingerprint that each of them found."""
        calls = {
            name: self._peers[name].call("commit_weights", self._updates[name].id, self._sender, manifest)
            for name in self.taking
        }
        for name, found in self._settle(calls, "did not finish loading")().items():
            if found != manifest.fingerprint:
                why = (
                    f"it holds weights that hash to {found[:12]} after taking version {manifest.version}, whose hash "
                    f"is {manifest.fingerprint[:12]}"
                )
                self._drop(name, EngineError(why))

    def _settle(
        self, calls: Mapping[str, AwaitAnswer], what_is_late: str, *, then: Callable[[str, float], None] | None = None
    ) -> Callable[[], dict[str, Any]]:
        """The call that is returned waits for the answers; engines that do not answer have failed."""
        deadline = time.monotonic() + self._timeout_s

        def answers() -> dict[str, Any]:
            found = {}
            for name, answer in calls.items():
                if name in self.failed:
                    continue
                try:
                    found[name] = answer(deadline)
                    if then is not None:
                        then(name, deadline)
                except TimeoutError:
                    why = f"stuck: it {what_is_late} within {self._timeout_s:g} s"
                    self._drop(name, NoAnswer(why))
                except EngineError as error:
                    self._drop(name, error)
            return found

        return answers

    def _drop(self, name: str, error: EngineError) -> None:
        self.failed[name] = error
        self._transport.drop(name)
