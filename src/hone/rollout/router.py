"""Several engines as one: each group to the one with the least to do, and to another one when that dies or hangs.

`Router` is itself an `engine.Engine`, so the loop knows nothing of replicas. What it guarantees, whatever dies:

- A replica draws samples only while it holds the version that was published last, or the one being published.
- A sample is handed on once. Samples of a group that were finished when their replica died are kept; the others are
  drawn elsewhere with the same randomness. What a replica says after it was given up is not listened to.
- Replicas that hold a version hold the same bytes: their fingerprints are compared at every publish, and samples with
  tokens of the new version are handed on only when that is done.
- Every wait has a deadline; a run that ends because no engine is left says what each one died of.
- EngineError is a replica's end. Other errors are of the request, the trainer or Hone; whoever waits gets them.

It starts no process: `restart` does. Who waits: `generate` for a replica that may sample, `load` for one that is up.
Who wakes them: `_changed`, whenever a replica comes up, gets a version, goes down or is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from hone.errors import ClusterError, EngineError
from hone.observe.events import Witness, versions_of
from hone.rollout.engine import Engine, OnSample, Request
from hone.rollout.replica import Draft, Life, Replica
from hone.runtime.backoff import Restarts
from hone.types import Sample

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

Restart = Callable[[str], Awaitable[Engine]]
"""Starts the replica of a name again. Whatever it started must be gone when it fails or is cancelled."""
_CLOSE_S = 15.0


@dataclass
class _Offer:
    """A version's weights, for whoever does not have them yet."""

    weights: Iterable[tuple[str, Tensor]] | None
    version: int
    fingerprint: str | None = None
    """Of the first replica that loaded them."""
    failure: ClusterError | None = None
    """Why the trainer cannot give them any more."""


class Router:
    """`engine.Engine` over named replicas. To be made and used in one event loop.

    Args:
        replicas: engines by name. They sample nothing before the first `load`.
        witness: told of every event; gets a timeline of each replica.
        silence_s: a replica that samples and finishes nothing for so long is given up.
        call_s: so is one that needs longer to load weights, sleep or wake. Longer than whoever sends weights to several
            replicas waits for one of them: else that one takes the others with it.
        patience_s: how long a request waits for a replica that may sample.
        restart: starts a replica again; None: what is down stays down.
        restarts: how often within an hour, each.
        start_s: longest that a start may take.
        threads: where fingerprints are waited for; None: the event loop's own.
        ends_replicas: whether `close` closes those that are up; else they are whoever's made them, for another router.
    """

    def __init__(
        self,
        replicas: Mapping[str, Engine],
        witness: Witness,
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
        self._witness, self._restart, self._threads = witness, restart, threads
        self._silence_s, self._call_s, self._patience_s, self._start_s = silence_s, call_s, patience_s, start_s
        self._replicas = [Replica(name, Restarts(restarts), Life(engine)) for name, engine in replicas.items()]
        self._offer: _Offer | None = None
        self._change = asyncio.Event()
        self._awake = True
        self._may_start = asyncio.Event()  # not while asleep: the devices are the trainer's
        self._may_start.set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()  # engines that were given up
        self._closed = False
        self._num_requeued = 0
        for replica in self._replicas:
            witness.event("replica_up", replica=replica.name)

    async def generate(self, request: Request, on_sample: OnSample | None = None) -> tuple[Sample, ...]:
        """See `Engine.generate`."""
        draft = Draft(request, on_sample)
        while draft.num_missing:
            replica, life = await self._least_loaded(f"prompt {request.prompt.id}")
            if not await self._draw(replica, life, draft) and draft.num_missing and not self._closed:
                self._num_requeued += 1
                prompt, stream = request.prompt.index, request.stream
                self._witness.event("requeued", prompt=prompt, stream=stream, replica=replica.name, why=replica.why)
        return draft.samples()

    async def load(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """See `Engine.load`: to all replicas at the same time. One that fails is down; one at least must succeed.

        Args:
            weights: gone through once for each replica, and again for one that is started later. Where the trainer has
                moved on by then, their fingerprint tells, and that replica waits for the next call.
        Raises:
            ClusterError: the trainer failed to give them.
        """
        self._offer = _Offer(weights, version)
        self._may_start.set()
        deadline = self._now() + self._patience_s
        while True:
            behind = [(replica, life) for replica, life in self._up() if life.version != version]
            if behind:
                await asyncio.gather(*(self._publish(replica, life) for replica, life in behind))
            elif self._up():
                break
            else:
                await self._wait_for_change(deadline, f"loading the weights of version {version}")
        self.version = version
        self._changed()

    async def sleep(self) -> None:
        """See `Engine.sleep`. A replica that dies now is not started before the next `load` or `wake`."""
        if any(life.drawing for _, life in self._up()):
            raise EngineError("the engines cannot sleep while samples are in flight; await or cancel them first.")
        self._awake = False
        self._may_start.clear()
        await asyncio.gather(*(self._put_to_sleep(replica, life) for replica, life in self._up()))

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._awake = True
        self._may_start.set()
        await asyncio.gather(*(self._wake(replica, life) for replica, life in self._up()))

    async def close(self) -> None:
        """See `Engine.close`. All are closed before the first failure is raised, unless they are to outlive it."""
        self._closed = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, *self._ending, return_exceptions=True)
        lives = [life for _, life in self._up()]
        for replica in self._replicas:
            replica.life, replica.given_up = None, True
        for life in lives:
            life.end.set_result("the engine was closed")
        self._changed()
        if not self._ends_replicas:
            return
        ended = await asyncio.gather(*(_close(life.engine) for life in lives), return_exceptions=True)
        for failure in filter(None, ended):
            raise failure

    def fingerprint(self) -> str:
        """See `Engine.fingerprint`: what every replica that may sample had when it was published to."""
        if self._offer is None or self._offer.fingerprint is None:
            raise EngineError("the engines hold no weights that were published to them.")
        return self._offer.fingerprint

    def metrics(self) -> dict[str, float]:
        """Since the last call; see `observe/metrics.py`."""
        measured = {"engine/replicas_up": float(len(self._up())), "engine/requeued": float(self._num_requeued)}
        self._num_requeued = 0
        for replica in self._replicas:
            measured[f"engine/{replica.name}_samples"] = float(replica.num_drawn)
            measured[f"engine/{replica.name}_queue_peak"] = float(replica.most_missing)
            replica.num_drawn, replica.most_missing = 0, replica.life.num_missing if replica.life else 0
        return measured

    # ---- one request

    async def _least_loaded(self, what: str) -> tuple[Replica, Life]:
        """The replica with the fewest samples to draw among those that may. Waits for one within `patience_s`."""
        deadline = self._now() + self._patience_s
        while True:
            if not self._awake:
                raise EngineError(f"{what}: the engines are asleep; wake them before generating.")
            versions = (self.version, self._offer.version) if self._offer else ()
            routable = [(replica, life) for replica, life in self._up() if life.version in versions]
            if routable:
                return min(routable, key=lambda up: up[1].num_missing)
            await self._wait_for_change(deadline, what)

    async def _draw(self, replica: Replica, life: Life, draft: Draft) -> bool:
        """Have a replica draw what a draft misses. False when it is lost."""
        if not life.drawing:
            life.see()
        finished = life.drawing[draft] = []
        replica.most_missing = max(replica.most_missing, life.num_missing)

        def accept(sample: Sample) -> None:
            if draft.keep(sample):
                replica.num_drawn += 1
                finished.append(sample)

        def hear(sample: Sample) -> None:
            if life.end.done():
                return
            life.see()
            if max(sample.versions, default=-1) > (life.version or 0):
                life.held.append(partial(accept, sample))
            else:
                accept(sample)

        async def draw() -> None:
            for samples in await asyncio.gather(*(life.engine.generate(part, hear) for part in draft.missing())):
                for sample in samples:
                    hear(sample)
            if life.held:
                async with life.turn:  # the publish is over then
                    pass

        def alive_at() -> float:
            return self._now() if life.held else life.seen_at

        try:
            with self._witness.during(replica.name, "generate"):
                await self._alive(replica, life, draw(), "sampling", self._silence_s, since=alive_at)
        except EngineError as error:
            self._lose(replica, life, str(error))
            return False
        else:
            self._tell_sampled(replica, draft, finished)
            return True
        finally:
            del life.drawing[draft]

    def _tell_sampled(self, replica: Replica, draft: Draft, samples: list[Sample]) -> None:
        prompt, stream = draft.request.prompt.index, draft.request.stream
        self._witness.event(
            "sampled", prompts=[prompt], stream=stream, replica=replica.name, versions=versions_of(samples)
        )

    # ---- one replica

    async def _publish(self, replica: Replica, life: Life, *, is_late: bool = False) -> None:
        """Give a replica what is on offer, unless it has it. One that fails is lost, and so is one that then holds
        other bytes than the others; unless it `is_late`, when they may be those of the next version already."""
        async with life.turn:
            offer = self._offer  # not earlier: it may have been replaced while another publish went on
            if offer is None or life.version == offer.version:
                return
            fingerprint = await self._do(replica, life, "publish", lambda: self._load(life, offer))
            if fingerprint is None:
                return
            offer.fingerprint = offer.fingerprint or fingerprint
            if fingerprint == offer.fingerprint:
                self._witness.event("published", version=offer.version, replica=replica.name, fingerprint=fingerprint)
                life.has(offer.version)
                self._changed()
            elif not is_late:
                ours, theirs = offer.fingerprint[:12], fingerprint[:12]
                self._lose(
                    replica, life, f"version {offer.version} hashes to {theirs} in {replica.name}, elsewhere to {ours}"
                )

    async def _load(self, life: Life, offer: _Offer) -> str:
        """Returns the fingerprint of what the engine then holds."""
        await life.engine.load(offer.weights, offer.version)
        return await asyncio.get_running_loop().run_in_executor(self._threads, life.engine.fingerprint)

    async def _do(
        self, replica: Replica, life: Life, what: str, work: Callable[[], Coroutine[Any, Any, T]]
    ) -> T | None:
        """Have a replica do something else than sample. None when it is lost."""
        began = self._now()
        try:
            with self._witness.during(replica.name, what):
                return await self._alive(replica, life, work(), what, self._call_s, since=lambda: began)
        except EngineError as error:
            self._lose(replica, life, str(error))
            return None

    async def _alive(
        self,
        replica: Replica,
        life: Life,
        work: Coroutine[Any, Any, T],
        what: str,
        timeout_s: float,
        *,
        since: Callable[[], float],
    ) -> T:
        """What comes of some work of a replica. Raises EngineError when it is given up, or when its time is over, which
        runs anew from each sign of life."""
        working = asyncio.ensure_future(work)
        working.add_done_callback(_heard)
        try:
            while True:
                left_s = since() + timeout_s - self._now()
                done, _ = await asyncio.wait(
                    {working, life.end}, timeout=max(left_s, 0.0), return_when=asyncio.FIRST_COMPLETED
                )
                if life.end.done():
                    raise EngineError(life.end.result())
                if working in done:
                    return working.result()
                if since() + timeout_s <= self._now():
                    raise EngineError(f"{what}: {replica.name} gave no sign of life for {timeout_s:g} s")
        finally:
            working.cancel()

    def _lose(self, replica: Replica, life: Life, why: str) -> None:
        """Give a replica up, once, and see that it is started again."""
        if life.end.done():
            return
        life.end.set_result(why)
        life.rest.close()
        for draft, finished in life.drawing.items():
            if finished:
                self._tell_sampled(replica, draft, finished)
        self._tell_down(replica, why)
        replica.life = None
        self._changed()
        ending = _kept(self._ending, _end(life.engine))
        _kept(self._replacing, self._replace(replica, ending))

    def _tell_down(self, replica: Replica, why: str) -> None:
        replica.why = why
        self._witness.event("replica_down", replica=replica.name, why=why)

    async def _replace(self, replica: Replica, ending: asyncio.Task[None]) -> None:
        """Start a replica again, as often as it may be, once nothing is left of it."""
        await asyncio.wait({ending})
        while self._restart is not None and (wait_s := replica.restarts.next_wait_s()) is not None:
            await asyncio.sleep(wait_s)
            await self._may_start.wait()
            self._witness.event("replica_restarting", replica=replica.name, attempt=replica.restarts.count)
            try:
                with self._witness.during(replica.name, "start"):
                    async with asyncio.timeout(self._start_s):
                        engine = await self._restart(replica.name)
            except TimeoutError:
                self._tell_down(replica, f"was not started within {self._start_s:g} s")
                continue
            except Exception as error:  # boundary: whatever it is, those who wait for the replica must hear of it
                self._tell_down(replica, f"could not be started: {error}")
                continue
            self._witness.event("replica_up", replica=replica.name)
            replica.life = Life(engine)
            await self._bring_up_to_date(replica, replica.life)
            return
        replica.given_up = True
        self._changed()

    async def _bring_up_to_date(self, replica: Replica, life: Life) -> None:
        """Publish to a replica that was just started. If it fails, that is its end, and another start."""
        if (offer := self._offer) is not None:
            try:
                await self._publish(replica, life, is_late=True)
            except ClusterError as failure:
                offer.failure = failure
                self._changed()
        if not life.end.done():
            await self._put_to_sleep(replica, life)

    async def _put_to_sleep(self, replica: Replica, life: Life) -> None:
        """Unless the others have been woken meanwhile."""
        async with life.turn:
            if self._awake:
                return
            await self._do(replica, life, "sleep", life.engine.sleep)
            if not life.end.done():
                life.rest.enter_context(self._witness.during(replica.name, "asleep"))

    async def _wake(self, replica: Replica, life: Life) -> None:
        async with life.turn:
            life.rest.close()
            await self._do(replica, life, "wake", life.engine.wake)

    # ---- waiting

    def up(self) -> dict[str, Engine]:
        """The replicas that hold the version that was published last, by name."""
        return {replica.name: life.engine for replica, life in self._up() if life.version == self.version}

    def _up(self) -> list[tuple[Replica, Life]]:
        return [(replica, replica.life) for replica in self._replicas if replica.life is not None]

    async def _wait_for_change(self, deadline: float, what: str) -> None:
        """Until something happens to a replica. Raises EngineError when nothing can any more, or did in time, and what
        the trainer failed with when there are no weights."""
        if self._closed:
            raise EngineError(f"{what}: the engine was closed.")
        if self._offer is not None and self._offer.failure is not None:
            raise self._offer.failure
        died = "; ".join(f"{r.name}: {r.why or 'is up, but holds no weights yet'}" for r in self._replicas)
        if all(replica.given_up for replica in self._replicas):
            raise EngineError(f"{what}: no engine is left. {died}")
        try:
            async with asyncio.timeout_at(deadline):
                await self._change.wait()
        except TimeoutError:
            raise EngineError(f"{what}: no engine could sample within {self._patience_s:g} s. {died}") from None

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _heard(ended: asyncio.Future[Any]) -> None:
    """However it ended: who waited may have given it up, and asyncio warns of failures that nobody asks for."""
    if not ended.cancelled():
        ended.exception()


def _kept(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Begin some work that a set remembers until it has ended."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def _end(engine: Engine) -> None:
    """Close an engine that was given up, as far as it can be."""
    with contextlib.suppress(EngineError):
        await _close(engine)


async def _close(engine: Engine) -> None:
    """Close an engine within a deadline."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await engine.close()
    except TimeoutError:
        raise EngineError(f"an engine did not close within {_CLOSE_S:g} s") from None
