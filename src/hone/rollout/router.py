"""Router over engine replicas: least loaded first, with failover, and one version of the weights for all.

`Router` is itself an `engine.Engine`, so the loop knows nothing of replicas. What it guarantees, whatever dies:

- A replica samples only while it holds the version that was published last, or the one being published.
- A sample is delivered once. Finished samples of a group whose replica died are kept; another replica draws the rest
  with the same randomness. Nothing from a replica that was given up is accepted.
- Replicas that hold a version hold the same bytes: their fingerprints are compared at every publish, and samples with
  tokens of the new version are delivered only after that.
- Every wait has a deadline; a run that ends because no engine is left says why each one was lost.
- EngineError means that a replica is lost. Other errors are of the request, the trainer or Hone; the caller gets them.

Restarts, hangs and states are `runtime/replicas.py`'s; versions, publishing and requests are handled here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from hone.errors import ClusterError, EngineError
from hone.observe.events import versions_of
from hone.observe.observer import Observer
from hone.rollout.engine import Engine, OnSample, Request
from hone.runtime.replicas import Instance, Replica, ReplicaLost, Replicas
from hone.types import Sample

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

Restart = Callable[[str], Awaitable[Engine]]
"""Starts the replica of a name again. Whatever it started must be gone when it fails or is cancelled."""
_CLOSE_S = 15.0


class PendingRequest:
    """A request in progress on one replica or, after failures, on several."""

    def __init__(self, request: Request, on_sample: OnSample | None) -> None:
        self.request = request
        self._on_sample = on_sample
        self._samples: dict[int, Sample] = {}

    def keep(self, sample: Sample) -> bool:
        """Keep a finished sample and deliver it; False for one that was there already."""
        if sample.index in self._samples:
            return False
        self._samples[sample.index] = sample
        if self._on_sample is not None:
            self._on_sample(sample)
        return True

    @property
    def num_missing(self) -> int:
        return self.request.num_samples - len(self._samples)

    def missing(self) -> list[Request]:
        """What is still to be drawn, with the same randomness: a request for each run of consecutive samples."""
        request = self.request
        indices = range(request.first_sample, request.first_sample + request.num_samples)
        absent = [index for index in indices if index not in self._samples]
        runs = [[index for _, index in run] for _, run in groupby(enumerate(absent), lambda item: item[1] - item[0])]
        return [replace(request, first_sample=run[0], num_samples=len(run)) for run in runs]

    def samples(self) -> tuple[Sample, ...]:
        return tuple(sample for _, sample in sorted(self._samples.items()))


class EngineInstance(Instance):
    """An engine from its start until it is lost.

    Args:
        is_late: it was started while others already sample.
    """

    def __init__(self, engine: Engine, *, is_late: bool = False) -> None:
        super().__init__()
        self.engine, self.is_late = engine, is_late
        self.version: int | None = None
        """Published to it; None before the first publish."""
        self.drawing: dict[PendingRequest, list[Sample]] = {}
        """Requests in progress, with the finished samples of each."""
        self.num_missing = 0
        """Samples that it has to draw: of all requests in progress."""
        self.seen_at = asyncio.get_running_loop().time()
        """Its last sign of life."""
        self.held: list[Callable[[], None]] = []
        """Deliver samples with tokens of the version being published; run once that is known to be whole."""
        self.turn = asyncio.Lock()
        """Serialises publish, sleep and wake."""
        self.rest = ExitStack()
        """Closed when it wakes."""

    def see(self) -> None:
        self.seen_at = asyncio.get_running_loop().time()

    def has(self, version: int) -> None:
        """A version was published to it: deliver what waited for that."""
        self.version = version
        held, self.held = self.held, []
        for deliver in held:
            deliver()


@dataclass
class _Offer:
    """A version's weights, for the replicas that do not have them yet."""

    weights: Iterable[tuple[str, Tensor]] | None
    version: int
    fingerprint: str | None = None
    """Fingerprint of the first replica that loaded them."""
    failure: ClusterError | None = None
    """Why the trainer can no longer send them."""


class Router:
    """`engine.Engine` over named replicas. Made and used in one event loop.

    Args:
        replicas: engines by name. They sample nothing before the first `load`.
        observer: records every event; gets a timeline of each replica.
        silence_s: a replica that samples and finishes nothing for so long is lost.
        call_s: so is one that takes longer to load weights, sleep or wake. Must exceed the sender's timeout per
            engine, or one slow engine takes the others with it.
        patience_s: how long a request waits for a replica that may sample.
        restart: starts a replica again; None: lost replicas stay down.
        restarts: bound on restarts within an hour, for each.
        start_s: timeout of a start.
        threads: where fingerprints are waited for; None: the event loop's own.
        ends_replicas: whether `close` closes the engines; else they are left to another router.
    """

    def __init__(
        self,
        replicas: Mapping[str, Engine],
        observer: Observer,
        *,
        silence_s: float,
        call_s: float,
        patience_s: float,
        restart: Restart | None = None,
        restarts: int = 0,
        start_s: float = 300.0,
        threads: Executor | None = None,
        ends_replicas: bool = True,
    ) -> None:
        self.version = -1
        self._ends_replicas = ends_replicas
        self._observer, self._restart, self._threads = observer, restart, threads
        self._silence_s, self._call_s, self._patience_s, self._start_s = silence_s, call_s, patience_s, start_s
        self._offer: _Offer | None = None
        self._awake, self._closed = True, False
        self._num_requeued = 0
        self._num_drawn, self._most_missing = Counter[str](), Counter[str]()
        for name in replicas:
            observer.event("replica_up", replica=name)
        self._replicas: Replicas[EngineInstance] = Replicas(
            {name: EngineInstance(engine) for name, engine in replicas.items()},
            self._start,
            self._end,
            lost_by=EngineError,
            restarts=restarts if restart else 0,
            changed=self._changed,
            watch=self._bring_up_to_date,
        )

    async def generate(self, request: Request, on_sample: OnSample | None = None) -> tuple[Sample, ...]:
        """See `Engine.generate`."""
        pending = PendingRequest(request, on_sample)
        while pending.num_missing:
            instance = await self._least_loaded(f"prompt {request.prompt.id}")
            if not await self._draw(instance, pending) and pending.num_missing and not self._closed:
                self._num_requeued += 1
                prompt, stream, replica = request.prompt.index, request.stream, instance.replica
                self._observer.event("requeued", prompt=prompt, stream=stream, replica=replica.name, why=replica.why)
        return pending.samples()

    async def load(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """See `Engine.load`: to all replicas at the same time. One that fails is lost; one at least must succeed.

        Args:
            weights: iterated once for each replica, and again for one that is started later. If the trainer has moved
                on by then, their fingerprint differs, and that replica waits for the next call.
        Raises:
            ClusterError: the trainer failed to send them.
        """
        self._offer = _Offer(weights, version)
        deadline = self._now() + self._patience_s
        while True:
            if behind := [instance for instance in self._replicas.up if instance.version != version]:
                await asyncio.gather(*map(self._publish, behind))
            elif self._replicas.up:
                break
            else:
                self._replicas.may_start.set()
                await self._wait_for_change(deadline, f"loading the weights of version {version}")
        self.version = version
        self._replicas.may_start.set()  # not earlier: what senders free of a shared device disturbs a start
        self._replicas.notify()

    async def sleep(self) -> None:
        """See `Engine.sleep`. A start in progress is waited for: it measures and takes memory that the trainer is about
        to use. A replica that is lost now is not restarted before the next `load` or `wake`."""
        if any(instance.drawing for instance in self._replicas.up):
            raise EngineError("the engines cannot sleep while samples are in flight; await or cancel them first.")
        self._awake = False
        self._replicas.may_start.clear()
        await asyncio.gather(*(replica.settled.wait() for replica in self._replicas.replicas))
        await asyncio.gather(*map(self._put_to_sleep, self._replicas.up))

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._awake = True
        self._replicas.may_start.set()
        await asyncio.gather(*map(self._wake, self._replicas.up))
        await asyncio.gather(*map(self._bring_up_to_date, self._replicas.up))  # those that were started to sleep

    async def close(self) -> None:
        """See `Engine.close`. All are closed before the first failure is raised, unless they are left to another."""
        self._closed = True
        instances = await self._replicas.close("the engine was closed")
        self._replicas.notify()
        if self._ends_replicas:
            ended = await asyncio.gather(*(_close(one.engine) for one in instances), return_exceptions=True)
            for failure in filter(None, ended):
                raise failure

    def fingerprint(self) -> str:
        """See `Engine.fingerprint`: of the weights that every replica that may sample holds."""
        if self._offer is None or self._offer.fingerprint is None:
            raise EngineError("the engines hold no weights that were published to them.")
        return self._offer.fingerprint

    def metrics(self) -> dict[str, float]:
        """Since the last call; see `observe/metrics.py`."""
        up = dict.fromkeys((replica.name for replica in self._replicas.replicas), 0)
        up |= {instance.replica.name: instance.num_missing for instance in self._replicas.up}
        measured = {
            "engine/replicas_up": float(len(self._replicas.up)),
            "engine/requeued": float(self._num_requeued),
        }
        for name in up:
            measured[f"engine/{name}_samples"] = float(self._num_drawn[name])
            measured[f"engine/{name}_queue_peak"] = float(self._most_missing[name])
        self._num_requeued, self._num_drawn, self._most_missing = 0, Counter(), Counter(up)
        return measured

    def up(self) -> dict[str, Engine]:
        """The replicas that hold the version that was published last, by name."""
        return {one.replica.name: one.engine for one in self._replicas.up if one.version == self.version}

    # ---- one request

    async def _least_loaded(self, what: str) -> EngineInstance:
        """The replica with the fewest samples to draw among those that may. Waits for one within `patience_s`."""
        deadline = self._now() + self._patience_s
        while True:
            if not self._awake:
                raise EngineError(f"{what}: the engines are asleep; wake them before generating.")
            versions = (self.version, self._offer.version) if self._offer else ()
            if routable := [instance for instance in self._replicas.up if instance.version in versions]:
                return min(routable, key=lambda instance: instance.num_missing)
            await self._wait_for_change(deadline, what)

    async def _draw(self, instance: EngineInstance, pending: PendingRequest) -> bool:
        """Have a replica draw the missing samples of a request. False when it is lost."""
        if not instance.drawing:
            instance.see()
        finished = instance.drawing[pending] = []
        instance.num_missing += pending.num_missing
        name = instance.replica.name
        self._most_missing[name] = max(self._most_missing[name], instance.num_missing)

        def accept(sample: Sample) -> None:
            if pending.keep(sample):
                self._num_drawn[name] += 1
                finished.append(sample)
                if pending in instance.drawing:
                    instance.num_missing -= 1

        def receive(sample: Sample) -> None:
            if instance.lost.done():
                return
            instance.see()
            sample = sample.drawn_by(name)
            if sample.versions and sample.versions[-1].version > (instance.version or 0):
                instance.held.append(partial(accept, sample))
            else:
                accept(sample)

        async def draw() -> None:
            parts = [instance.engine.generate(part, receive) for part in pending.missing()]
            for samples in await asyncio.gather(*parts) if len(parts) > 1 else [await parts[0]]:
                for sample in samples:
                    receive(sample)
            if instance.held:
                async with instance.turn:  # the publish is over then
                    pass

        def seen_at() -> float:
            return self._now() if instance.held else instance.seen_at

        try:
            with self._observer.during(name, "generate"):
                await instance.call(draw(), "sampling", self._silence_s, seen_at=seen_at)
        except ReplicaLost:
            return False
        else:
            self._record_sampled(name, pending, finished)
            return True
        finally:
            del instance.drawing[pending]
            instance.num_missing -= pending.num_missing

    def _record_sampled(self, name: str, pending: PendingRequest, samples: list[Sample]) -> None:
        prompt, stream = pending.request.prompt.index, pending.request.stream
        self._observer.event("sampled", prompts=[prompt], stream=stream, replica=name, versions=versions_of(samples))

    # ---- one replica

    async def _publish(self, instance: EngineInstance, *, is_late: bool = False) -> None:
        """Give a replica the weights on offer, unless it has them. It is lost when it fails, or when it then holds
        other bytes than the others; unless it `is_late`, when they may already be those of the next version."""
        async with instance.turn:
            offer = self._offer  # not earlier: another publish may have replaced it meanwhile
            if offer is None or instance.version == offer.version:
                return
            fingerprint = await self._do(instance, "publish", self._load(instance, offer))
            if fingerprint is None:
                return
            offer.fingerprint, name = offer.fingerprint or fingerprint, instance.replica.name
            if fingerprint == offer.fingerprint:
                self._observer.event("published", version=offer.version, replica=name, fingerprint=fingerprint)
                instance.has(offer.version)
                self._replicas.notify()
            elif not is_late:
                ours, theirs = offer.fingerprint[:12], fingerprint[:12]
                instance.lose(f"version {offer.version} hashes to {theirs} in {name}, elsewhere to {ours}")

    async def _load(self, instance: EngineInstance, offer: _Offer) -> str:
        """Returns the fingerprint of what the engine then holds."""
        await instance.engine.load(offer.weights, offer.version)
        return await asyncio.get_running_loop().run_in_executor(self._threads, instance.engine.fingerprint)

    async def _do(self, instance: EngineInstance, what: str, work: Coroutine[Any, Any, T]) -> T | None:
        """Have a replica do something else than sample. None when it is lost."""
        with contextlib.suppress(ReplicaLost), self._observer.during(instance.replica.name, what):
            return await instance.call(work, what, self._call_s)
        return None

    def _changed(self, replica: Replica[EngineInstance]) -> None:
        """Record a change of state. The instance that is lost is still there."""
        if replica.state in ("restarting", "failed"):
            if (lost := replica.instance) is not None:
                lost.rest.close()
                for pending, finished in lost.drawing.items():
                    if finished:
                        self._record_sampled(replica.name, pending, finished)
            self._observer.event("replica_down", replica=replica.name, why=replica.why)
        self._observer.event("replica_state", replica=replica.name, state=replica.state)

    async def _start(self, name: str) -> EngineInstance:
        assert self._restart is not None, "without it no restart is granted"
        attempt = next(replica for replica in self._replicas.replicas if replica.name == name).restarts.count
        self._observer.event("replica_restarting", replica=name, attempt=attempt)
        try:
            with self._observer.during(name, "start"):
                async with asyncio.timeout(self._start_s):
                    engine = await self._restart(name)
        except TimeoutError:
            raise EngineError(f"no engine within {self._start_s:g} s") from None
        self._observer.event("replica_up", replica=name)
        return EngineInstance(engine, is_late=True)

    async def _end(self, instance: EngineInstance) -> None:
        with contextlib.suppress(EngineError):
            await _close(instance.engine)

    async def _bring_up_to_date(self, instance: EngineInstance) -> None:
        """Publish to a replica that was just restarted. If it fails, it is lost again. While the others sleep it is put
        to sleep without weights: it gets them with the next `load` or `wake`."""
        if not instance.is_late:
            return
        if self._awake and (offer := self._offer) is not None:
            try:
                await self._publish(instance, is_late=True)
            except ClusterError as failure:
                offer.failure = failure
                self._replicas.notify()
        if not instance.lost.done():
            await self._put_to_sleep(instance)

    async def _put_to_sleep(self, instance: EngineInstance) -> None:
        """Unless the others have been woken meanwhile."""
        async with instance.turn:
            if self._awake:
                return
            await self._do(instance, "sleep", instance.engine.sleep())
            if not instance.lost.done():
                instance.rest.enter_context(self._observer.during(instance.replica.name, "asleep"))
                instance.replica.enter("offloaded")

    async def _wake(self, instance: EngineInstance) -> None:
        async with instance.turn:
            instance.rest.close()
            await self._do(instance, "wake", instance.engine.wake())
            if not instance.lost.done():
                instance.replica.enter("ready")

    # ---- waiting

    async def _wait_for_change(self, deadline: float, what: str) -> None:
        """Until a replica changes. Raises EngineError when none can come up any more, or did in time, and the trainer's
        failure when there are no weights."""
        if self._closed:
            raise EngineError(f"{what}: the engine was closed.")
        if self._offer is not None and self._offer.failure is not None:
            raise self._offer.failure
        lost = "; ".join(
            f"{replica.name}: {replica.why or 'is up, but holds no weights yet'}" for replica in self._replicas.replicas
        )
        if self._replicas.all_failed:
            raise EngineError(f"{what}: no engine is left. {lost}")
        try:
            await self._replicas.until_changed(deadline)
        except TimeoutError:
            raise EngineError(f"{what}: no engine could sample within {self._patience_s:g} s. {lost}") from None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


async def _close(engine: Engine) -> None:
    """Close an engine within a deadline."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await engine.close()
    except TimeoutError:
        raise EngineError(f"an engine did not close within {_CLOSE_S:g} s") from None
