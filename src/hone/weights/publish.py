"""From a trainer to its engines: one version's weights, sent once, taken by each engine between two tokens.

The sending end runs where the trainer's rank 0 does, the receiving end in each engine's process:

    published = publish(trainer.weights(), outlet, version=7, bucket_size=...)      # blocks
    held = await take(engine, inlet, version=7)                                     # meanwhile, there

What lies between an outlet and its inlets is a transport: `publish_ray` (Ray's object store), `publish_group` (gloo or
NCCL), `publish_ipc` (the memory of one GPU). All of them bring the same bytes, wait no longer than a deadline, and
never let one engine's failure hide another's success. An engine that failed may hold half a version: nothing may be
sampled from it until it took a whole one, which for most engines means to start again.

Not here: which transport a run uses (`config/transport.py`, `sending.py`, `receiving.py`), who publishes when (the
loop), and which engine may be used (the router).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hone.errors import EngineError
from hone.weights.buckets import Bucket, Manifest, Packer, Unpacker

IN_FLIGHT = 2
"""Buckets in memory at the sender: one is sent while the next is packed."""


class Outlet(Protocol):
    """The sending end of a transport, to engines with names."""

    device: torch.device
    """Where buckets are packed."""
    failed: dict[str, str]
    """Engines that take nothing any more, and why. Those that are not in it still do."""

    @property
    def engines(self) -> Sequence[str]:
        """All engines, failed ones too."""
        ...

    @property
    def bystanders(self) -> Sequence[str]:
        """Those of the failed that another one's failure has interrupted: what they took so far is as it should be, and
        they wait for the rest."""
        ...

    def send(self, bucket: Bucket) -> Callable[[], object]:
        """Begin to send. The call that is returned waits until the bucket's memory may be written to again, or for the
        deadline; it raises nothing: see `failed`."""
        ...

    def finish(self, manifest: Manifest) -> dict[str, str]:
        """Say that all was sent, and wait until the engines hold it: the fingerprint that each of them found."""
        ...


@dataclass(frozen=True, slots=True)
class Published:
    """What became of one version."""

    manifest: Manifest
    held_by: tuple[str, ...]
    """Engines that hold the version, to the last bit."""
    failed: Mapping[str, str]
    """Engines that do not, and why: nothing may be sampled from them."""
    bystanders: tuple[str, ...]
    """Those of the failed that wait for the same version once more, without the one that failed; see `Outlet`."""
    sent_bytes: int
    """Of all buckets, once, however many engines took them."""


def publish(
    weights: Iterable[tuple[str, Tensor]],
    outlet: Outlet,
    *,
    version: int,
    bucket_size: int,
    dtype: torch.dtype | None = None,
) -> Published:
    """Send one version to every engine of an outlet.

    Args:
        weights: a trainer's; gone through once, to its end, so that a sharded trainer's other ranks, which go through
            theirs meanwhile, are never left alone.
        bucket_size: bytes that are sent at once; twice that is taken.
        dtype: what the engines compute in, if not what the weights are in: half the bytes for float32 masters.
    """
    coming = iter(weights)
    buffers = _Buffers(bucket_size, outlet.device)
    packer, sent_bytes = Packer(buffers.empty, dtype=dtype), 0
    for bucket in packer.pack(coming):
        if len(outlet.failed) == len(outlet.engines):
            break
        buffers.sent(outlet.send(bucket))
        sent_bytes += len(bucket.data)
    for _ in coming:  # no engine is left to take them
        pass
    buffers.drain()
    manifest = packer.manifest(version)
    held = outlet.finish(manifest)
    for engine, found in held.items():
        if found != manifest.fingerprint:
            outlet.failed[engine] = (
                f"{engine} holds weights that hash to {found[:12]} after taking version {version}, "
                f"whose hash is {manifest.fingerprint[:12]}"
            )
    held_by = tuple(engine for engine in outlet.engines if engine not in outlet.failed)
    return Published(manifest, held_by, dict(outlet.failed), tuple(outlet.bystanders), sent_bytes)


class _Buffers:
    """`IN_FLIGHT` buffers; the one that was sent first is the next to be empty."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self._taken: deque[Tensor] = deque()
        self._waits: deque[Callable[[], object]] = deque()

    def empty(self) -> Tensor:
        if len(self._taken) < IN_FLIGHT:
            buffer = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        else:
            self._waits.popleft()()
            buffer = self._taken.popleft()
        self._taken.append(buffer)
        return buffer

    def sent(self, wait: Callable[[], object]) -> None:
        self._waits.append(wait)

    def drain(self) -> None:
        while self._waits:
            self._waits.popleft()()


class Inlet(Protocol):
    """The receiving end of a transport, in an engine's process."""

    def messages(self) -> Iterator[Bucket | Manifest]:
        """What was sent, a manifest at its end. Waits for each no longer than a deadline.

        Each bucket's data is memory of its own: what is taken from it stays as it is.

        Raises:
            EngineError: nothing more comes, and why.
        """
        ...

    def held(self, fingerprint: str) -> None:
        """Tell the sender what the engine holds now."""
        ...

    def failed(self, reason: str) -> None:
        """Tell the sender that the engine takes nothing any more."""
        ...


class Incoming:
    """One version's weights as they arrive, for `Engine.load` to go through, once."""

    def __init__(self, inlet: Inlet, version: int) -> None:
        self._inlet, self._version = inlet, version
        self._begun = False
        self.fingerprint: str | None = None
        """Of what was sent, once all of it arrived and was found to be the same."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._begun:
            raise EngineError(f"the weights of version {self._version} are sent once; loading them cannot begin again.")
        self._begun = True
        unpacker, manifest = Unpacker(), None

        def buckets() -> Iterator[Bucket]:
            nonlocal manifest
            for message in self._inlet.messages():
                if isinstance(message, Manifest):
                    manifest = message
                    return
                yield message

        yield from unpacker.unpack(buckets())
        if manifest is None or manifest.version != self._version:
            raise EngineError(
                f"weights of version {self._version} were awaited, and those of "
                f"{'none' if manifest is None else manifest.version} came."
            )
        unpacker.check(manifest)
        self.fingerprint = manifest.fingerprint


class Loads(Protocol):
    """Who takes weights: an engine."""

    async def load(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None: ...

    def fingerprint(self) -> str: ...


async def take(engine: Loads, inlet: Inlet, version: int) -> str:
    """Have an engine load the weights that arrive. Returns, and tells the sender, the fingerprint of what it holds.

    Raises:
        EngineError: it does not hold the version; the sender knows.
    """
    incoming = Incoming(inlet, version)
    try:
        await engine.load(incoming, version)
        held = await asyncio.to_thread(engine.fingerprint)
    except Exception as error:  # the boundary of the engine: whatever it is, the sender must hear of it
        inlet.failed(f"{type(error).__name__}: {error}")
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"weights of version {version} could not be loaded: {error}") from error
    inlet.held(held)
    return held
