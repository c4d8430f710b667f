"""The engine's side of publishing: calls of its actor bring buckets, a thread of the engine loads them.

An actor, which must be an async one, has a `Receiver` and four methods that lead to it: `connect_weights`,
`begin_weights`, `load_weights`, `commit_weights`. Calls may overtake each other, and a bucket may come from several
ranks, for one worker each; here they are put in order. An engine that fails to load a version says why, samples
nothing, and can be sent the version again.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from hone.errors import EngineError
from hone.runtime.processes import retrieved
from hone.weights.buckets import Bucket, Header, Manifest, Unpacker
from hone.weights.groups import GroupAddress
from hone.weights.parts import BucketPart, PartOpener, shared_file
from hone.weights.publish import Update


class Loads(Protocol):
    """What takes weights: an engine, or a reference."""

    async def load(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None: ...

    def fingerprint(self) -> str: ...


@runtime_checkable
class LoadsBuckets(Protocol):
    """An engine whose workers open buckets by themselves (vLLM): its `load` reads `Arriving.buckets`. A protocol, as
    engines come from other packages too."""

    @property
    def opens_buckets(self) -> bool:
        """Whether they do so, or `load` takes tensors."""
        ...

    @property
    def num_workers(self) -> int:
        """Processes that load weights, or 1 for this one."""
        ...

    async def connect_workers(self, address: GroupAddress) -> None:
        """Have each worker join a group, with its number + 1 as rank. Raises EngineError."""
        ...


@dataclass(eq=False)
class _BucketCall:
    """A bucket's call, from one rank."""

    header: Header
    part: BucketPart
    loaded: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Arriving:
    """One version on its way: filled in the actor's event loop, read once by a thread of the engine.

    Args:
        timeout_s: longest wait for the next bucket.
        shares_files: bytes are for other processes.
    """

    def __init__(self, update: Update, opener: PartOpener, *, timeout_s: float, shares_files: bool) -> None:
        self.update, self._opener, self._timeout_s = update, opener, timeout_s
        self._shares_files = shares_files
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[list[_BucketCall] | Manifest | EngineError] = queue.SimpleQueue()
        self._calls: dict[int, dict[int, _BucketCall]] = {}
        self._manifests: dict[int, Manifest] = {}
        self._next = 0
        self.manifest: Manifest | None = None
        """Once all of it has arrived."""

    # ---- in the event loop

    def add(self, sender: int, header: Header, part: BucketPart) -> asyncio.Future[None]:
        """A rank's call of a bucket. The future is done when the bucket was loaded."""
        call = self._calls.setdefault(header.index, {})[sender] = _BucketCall(header, part)
        while len(self._calls.get(self._next, ())) == self.update.senders:
            calls = self._calls.pop(self._next)
            self._queue.put([calls[rank] for rank in sorted(calls)])
            self._next += 1
        return call.loaded

    def end(self, sender: int, manifest: Manifest) -> None:
        """A rank has sent all."""
        self._manifests[sender] = manifest
        if len(self._manifests) == self.update.senders:
            same = len(set(self._manifests.values())) == 1
            self._queue.put(manifest if same else EngineError("ranks of the trainer sent different weights"))

    def give_up(self, why: str) -> None:
        """No more comes."""
        self._queue.put(EngineError(why))
        self._opener.leave()

    # ---- in the engine's thread

    def buckets(self) -> Iterator[tuple[Header, list[BucketPart]]]:
        """Each bucket's header, and its parts, one of each rank that sends. A bucket counts as loaded when the next is
        asked for.

        Raises EngineError when nothing more comes.
        """
        while True:
            try:
                news = self._queue.get(timeout=self._timeout_s)
            except queue.Empty:
                raise EngineError(f"no more weights came within {self._timeout_s:g} s; is the trainer stuck?") from None
            if isinstance(news, EngineError):
                raise news
            if isinstance(news, Manifest):
                self.manifest = news
                return
            if any(call.header != news[0].header for call in news):
                raise EngineError("ranks of the trainer packed different buckets")
            with ExitStack() as files:
                parts: list[BucketPart] = []
                for call in news:
                    part = call.part
                    if self._shares_files and isinstance(part, np.ndarray):
                        part = files.enter_context(shared_file(part))
                    parts.append(part)
                yield news[0].header, parts
            for call in news:
                self._loop.call_soon_threadsafe(call.loaded.set_result, None)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, opened here. Raises EngineError, also at the end, when something else arrived than was sent."""
        unpacker = Unpacker()
        for header, parts in self.buckets():
            yield from unpacker.unpack(Bucket(header, self._opener.open(header, parts)))
        assert self.manifest is not None
        unpacker.check(self.manifest)


class Receiver:
    """What an actor's calls lead to.

    Args:
        timeout_s: the sender's. Here the wait is twice as long: it is the sender that finds out who is stuck.
        opener: opens what comes; None: on the first GPU, which Ray shows to an actor as its own.
    """

    def __init__(self, engine: Loads, *, timeout_s: float, opener: PartOpener | None = None) -> None:
        self._engine, self._timeout_s = engine, 2 * timeout_s
        self._opens = engine if isinstance(engine, LoadsBuckets) and engine.opens_buckets else None
        self._opener = opener or PartOpener(torch.device("cuda", 0))
        self._arriving: Arriving | None = None
        self._loading: asyncio.Task[str] | None = None
        self._lock = asyncio.Lock()

    async def connect(self, address: GroupAddress) -> None:
        """Join a group, which takes the place of the one before. Raises EngineError."""
        async with self._lock:
            await self._end_last("the sender makes another group")
            if self._opens is not None:
                await self._opens.connect_workers(address)
            else:
                await asyncio.to_thread(self._opener.join, address, 1)

    async def begin(self, update: Update) -> None:
        """A version will come, or the same one again; one that is still coming is given up.

        Raises EngineError when the engine does not end that.
        """
        async with self._lock:
            if self._arriving is not None and self._arriving.update == update:  # said by another of its ranks
                return
            await self._end_last(f"version {update.version} is sent instead")
            shares_files = self._opens is not None and self._opens.num_workers > 1
            self._arriving = Arriving(update, self._opener, timeout_s=self._timeout_s, shares_files=shares_files)
            self._loading = asyncio.create_task(self._load(self._arriving))
            self._loading.add_done_callback(retrieved)  # where the sender has given up the version, no call waits

    async def load(self, update_id: str, sender: int, header: Header, part: BucketPart) -> None:
        """The next bucket; returns when it was loaded. Raises EngineError with what ended the loading."""
        arriving, loading = self._open(update_id)
        loaded = arriving.add(sender, header, part)
        await asyncio.wait({loaded, loading}, return_when=asyncio.FIRST_COMPLETED)
        if not loaded.done():
            loading.result()
            raise EngineError("the engine stopped loading before all weights had come.")

    async def commit(self, update_id: str, sender: int, manifest: Manifest) -> str:
        """All was sent. Returns the fingerprint of what the engine holds once it is loaded. Raises EngineError."""
        arriving, loading = self._open(update_id)
        arriving.end(sender, manifest)
        return await asyncio.shield(loading)

    async def close(self) -> None:
        """Give up what is still coming, and leave the group."""
        async with self._lock:
            await self._end_last("the engine is closed")
            self._opener.leave()

    def _open(self, update_id: str) -> tuple[Arriving, asyncio.Task[str]]:
        if self._arriving is None or self._loading is None or self._arriving.update.id != update_id:
            raise EngineError("weights came that were not announced, or of an attempt that is over.")
        return self._arriving, self._loading

    async def _end_last(self, why: str) -> None:
        """Have the engine give up what it is loading."""
        if self._arriving is not None and self._loading is not None and not self._loading.done():
            self._arriving.give_up(why)
            done, _ = await asyncio.wait({self._loading}, timeout=self._timeout_s)
            if not done:
                raise EngineError("the engine did not give up the weights that it was loading.")

    async def _load(self, arriving: Arriving) -> str:
        version = arriving.update.version
        try:
            await self._engine.load(arriving, version)
            held = await asyncio.to_thread(self._engine.fingerprint)
            if arriving.manifest is None:
                raise EngineError("the engine did not take all of the weights.")
            return held
        except Exception as error:  # the boundary of the engine: the sender is sent every failure
            self._opener.leave()
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"{type(error).__name__}: {error}") from error
