"""Proxy for an engine in a Ray actor.

Requests made in one pass of the event loop are sent together and in order, and so are finished samples. While requests
are in progress one `take` is, and its result, with or without samples, is the engine's sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import ray
from torch import Tensor

from hone.cluster.actors import MakeEngine
from hone.cluster.calls import BEAT_S, CALL_KEY, START_KEY, wait_for_one
from hone.cluster.stored import arrived
from hone.cluster.trainer import RemoteWeights
from hone.errors import ClusterError, EngineError, HoneError
from hone.rollout.engine import OnSample, Request
from hone.types import Sample

CLOSE_S = 10.0
"""Timeout of the calls made before an engine is closed or reused."""


@dataclass
class _Waiting:
    """A request in progress."""

    done: asyncio.Future[tuple[Sample, ...]]
    on_sample: OnSample | None
    samples: list[Sample] = field(default_factory=list)


class RemoteEngine:
    """`Engine` of one process.

    Args:
        name: for errors: `engine-0`.
        actor: handle of an `EngineActor`.
        timeout_s: an engine without an answer for so long is lost.
    """

    def __init__(self, name: str, actor: Any, *, timeout_s: float) -> None:
        self.name, self.version = name, -1
        self._actor, self._timeout_s = actor, timeout_s
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._unsent: list[tuple[int, Request]] = []
        self._listener: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self._fingerprint: str | None = None

    async def build(self, make: MakeEngine, *, timeout_s: float) -> None:
        """Make the engine in its process."""
        await self._call(self._actor.build.remote(make, timeout_s=self._timeout_s), "starting", timeout_s, START_KEY)

    async def generate(self, request: Request, on_sample: OnSample | None = None) -> tuple[Sample, ...]:
        """See `Engine.generate`. Raises EngineError naming this engine when its process died or is stuck."""
        self._refuse_if_failed()
        number, waiting = next(self._numbers), _Waiting(asyncio.get_running_loop().create_future(), on_sample)
        self._waiting[number] = waiting
        self._unsent.append((number, request))
        if len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._send_when_quiet, 1)
        try:
            return await waiting.done
        except asyncio.CancelledError:
            if self._failure is None:
                self._actor.cancel.remote(number)
            raise
        finally:
            self._waiting.pop(number, None)

    async def load(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """See `Engine.load`. Weights of a `RemoteTrainer` go from its rank to this engine."""
        if not isinstance(weights, RemoteWeights):
            raise TypeError("an engine in another process takes weights from another process")
        self._refuse_if_failed()
        self._fingerprint = None
        try:
            self._fingerprint = await weights.send_to(self.name, self._actor, version)
        except EngineError as error:
            self._fail(error)  # it may hold half of them
            raise
        self.version = version

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        await self._call(self._actor.sleep.remote(), "sleep")

    async def wake(self) -> None:
        """See `Engine.wake`."""
        await self._call(self._actor.wake.remote(), "wake")

    def fingerprint(self) -> str:
        """See `Engine.fingerprint`: of its own weights, as it computed it when they were published. Raises EngineError
        while it has none."""
        self._refuse_if_failed()
        if self._fingerprint is None:
            raise EngineError(f"{self.name} holds no weights that were published to it")
        return self._fingerprint

    async def is_well(self) -> bool:
        """Whether its process answers, and holds the weights of one version, whole."""
        if self._failure is not None or self._fingerprint is None:
            return False
        try:
            await self._call(self._actor.ping.remote(), "ping", CLOSE_S)
        except EngineError:
            return False
        return True

    async def close(self) -> None:
        """See `Engine.close`; the process ends."""
        if self._listener is not None:
            self._listener.cancel()  # a call after Ray's end would start another Ray
        if self._failure is None:
            self._fail(EngineError(f"{self.name} was closed"))
            with contextlib.suppress(HoneError):  # it is ended below in any case
                await wait_for_one(self.name, self._actor.close.remote(), "close", CLOSE_S)
        ray.kill(self._actor)

    async def _call(self, call: Any, what: str, timeout_s: float | None = None, key: str = CALL_KEY) -> Any:
        self._refuse_if_failed()
        try:
            return await wait_for_one(self.name, call, what, timeout_s or self._timeout_s, key)
        except ClusterError as error:
            failure = EngineError(str(error))
            self._fail(failure)
            raise failure from error

    def _send_when_quiet(self, seen: int) -> None:
        """Send new requests all at once, after a pass of the event loop that brought no more of them."""
        if len(self._unsent) != seen:
            asyncio.get_running_loop().call_soon(self._send_when_quiet, len(self._unsent))
            return
        requests = [(number, request) for number, request in self._unsent if number in self._waiting]
        self._unsent = []
        if requests and self._failure is None:
            self._actor.submit.remote(requests)
            if self._listener is None:
                self._listener = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        """Poll for samples while requests are in progress."""
        try:
            while self._waiting and self._failure is None:
                taken, records = self._actor.take.remote()
                news = await wait_for_one(self.name, taken, "sampling", self._timeout_s + BEAT_S)
                for number, what in news:
                    self._hear(number, arrived(what, records) if isinstance(what, Sample) else what)
        except HoneError as error:
            self._fail(EngineError(str(error)))
        except Exception as error:  # Ray raises plain ones where it cannot even send: callers wait
            self._fail(EngineError(f"sampling: {self.name}: {type(error).__name__}: {error}"))
        finally:
            self._listener = None

    def _hear(self, number: int, what: Sample | HoneError | None) -> None:
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done.done():  # cancelled meanwhile
            return
        if isinstance(what, Sample):
            waiting.samples.append(what)
            if waiting.on_sample is not None:
                waiting.on_sample(what)
        elif what is None:
            waiting.done.set_result(tuple(waiting.samples))
        else:
            waiting.done.set_exception(what)

    def _fail(self, failure: EngineError) -> None:
        """Fail all requests, now and later."""
        self._failure = self._failure or failure
        for waiting in self._waiting.values():
            if not waiting.done.done():
                waiting.done.set_exception(EngineError(str(failure)))

    def _refuse_if_failed(self) -> None:
        if self._failure is not None:
            raise EngineError(str(self._failure))
