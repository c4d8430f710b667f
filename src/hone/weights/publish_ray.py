"""Weights through Ray's object store: a bucket is put there once, and each engine reads it where it lies.

Engines on one node share one copy; Ray brings it to other nodes once each. Every engine answers for itself, so one that
is dead or stuck costs the others nothing but the wait. Pickle is Ray's own and carries a string and an array.

An engine's actor, which must be an async one, has an `Intake` and three methods that lead to it:

    async def begin_weights(self, version: int) -> None:
        await self.intake.begin(version)

    async def take_bucket(self, header: str, data: np.ndarray) -> None:
        await self.intake.bucket(header, data)

    async def finish_weights(self, manifest: str) -> str:
        return await self.intake.manifest(manifest)
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from hone.errors import EngineError
from hone.weights.buckets import Bucket, Manifest
from hone.weights.publish import Loads, take


class RayOutlet:
    """The sending end; see `publish.Outlet`. For one version.

    Args:
        engines: handles of the engines' actors, by the engines' names.
        timeout_s: an engine that does not take a bucket, or load what it took, for so long is stuck.
    """

    device = torch.device("cpu")
    bystanders = ()

    def __init__(self, engines: Mapping[str, Any], *, version: int, timeout_s: float) -> None:
        self._actors, self._version, self._timeout_s = dict(engines), version, timeout_s
        self.failed: dict[str, str] = {}
        self._answers("begin_weights", "did not answer", version)()

    @property
    def engines(self) -> Sequence[str]:
        return list(self._actors)

    def send(self, bucket: Bucket) -> Callable[[], object]:
        data = ray.put(bucket.data.numpy())
        return self._answers("take_bucket", f"did not take bucket {bucket.index}", bucket.header(), data)

    def finish(self, manifest: Manifest) -> dict[str, str]:
        return self._answers("finish_weights", "did not finish loading", manifest.as_json())()

    def _answers(self, method: str, what_is_wrong: str, *args: Any) -> Callable[[], dict[str, Any]]:
        """Calls a method of every engine that has not failed. The call that is returned gives their answers; an engine
        without one at the deadline has failed."""
        taking = {name: actor for name, actor in self._actors.items() if name not in self.failed}
        calls = {name: getattr(actor, method).remote(*args) for name, actor in taking.items()}
        deadline = time.monotonic() + self._timeout_s

        def wait() -> dict[str, Any]:
            answers = {}
            for name, call in calls.items():
                try:
                    answers[name] = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
                except GetTimeoutError:
                    self.failed[name] = (
                        f"{name} is stuck at version {self._version}: it {what_is_wrong} within {self._timeout_s:g} s"
                    )
                except (RayError, EngineError) as error:
                    self.failed[name] = f"{name}: {reason(error)}"
            return answers

        return wait


def reason(error: Exception) -> str:
    """Why a call of an actor failed, in a line."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0]}"


class Intake:
    """The receiving end of `RayOutlet`: what calls of the actor bring, one thread of the engine takes.

    Args:
        timeout_s: longest wait for the next bucket, once a version has begun to come.
    """

    def __init__(self, engine: Loads, *, timeout_s: float) -> None:
        self._engine, self._timeout_s = engine, timeout_s
        self._coming: _PendingWeights | None = None
        self._loading: asyncio.Task[str] | None = None

    async def begin(self, version: int) -> None:
        """Weights of a version will come. Raises EngineError when another version is still coming."""
        if self._loading is not None and not self._loading.done():
            raise EngineError(f"version {version} of the weights came while the one before was being taken.")
        self._coming = _PendingWeights(self._timeout_s)
        self._loading = asyncio.create_task(take(self._engine, self._coming, version))

    async def bucket(self, header: str, data: NDArray[np.uint8]) -> None:
        """The next bucket; returns when there is room for another one. Raises what ended the loading."""
        coming, loading = self._state()
        bucket = Bucket.of(header, _as_tensor(data))
        room = asyncio.create_task(coming.put(bucket))
        await asyncio.wait({room, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            room.cancel()
            loading.result()

    async def manifest(self, manifest: str) -> str:
        """All was sent. Returns the fingerprint of what the engine holds once it is loaded."""
        coming, loading = self._state()
        await coming.put(Manifest.of(manifest))
        return await loading

    def _state(self) -> tuple[_PendingWeights, asyncio.Task[str]]:
        if self._coming is None or self._loading is None:
            raise EngineError("weights came that were not announced.")
        return self._coming, self._loading


class _PendingWeights:
    """A `publish.Inlet`. The actor's event loop puts messages in, the engine's thread takes them out; who puts one in
    waits until the one before was taken."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._messages: queue.SimpleQueue[Bucket | Manifest] = queue.SimpleQueue()
        self._room = asyncio.Semaphore(1)
        self._early: dict[int, Bucket] = {}
        self._next = 0

    async def put(self, message: Bucket | Manifest) -> None:
        """Calls of an actor may overtake each other; what comes early waits for its turn."""
        if isinstance(message, Manifest):
            self._messages.put(message)
            return
        self._early[message.index] = message
        while self._next in self._early:
            self._messages.put(self._early.pop(self._next))
            self._next += 1
        await self._room.acquire()

    def messages(self) -> Iterator[Bucket | Manifest]:
        while True:
            try:
                message = self._messages.get(timeout=self._timeout_s)
            except queue.Empty:
                raise EngineError(f"no more weights came within {self._timeout_s:g} s; is the trainer stuck?") from None
            self._loop.call_soon_threadsafe(self._room.release)
            yield message

    def held(self, fingerprint: str) -> None:
        """The sender learns it from the call of `Intake.manifest`, like a failure."""

    def failed(self, reason: str) -> None:
        """See `held`."""


class _Writable:
    """An array that numpy takes for writable, although Ray made it read-only: torch knows no read-only tensors."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _as_tensor(array: NDArray[np.uint8]) -> Tensor:
    """The same memory, in the object store, which is kept there as long as a view of it lives. Not to be written to."""
    return torch.from_numpy(np.asarray(_Writable(array)))
