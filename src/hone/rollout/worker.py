"""Worker thread of an engine, and its interface to the event loop.

The event loop puts actions into `_inbox`; the worker takes all of them between two steps of its work, in order, and
gives its thread back when nothing is left to do. The thread comes from an executor: a synchronous run hands in the one
that trains, because two threads that each bring a team of OpenMP threads slow each other down by half even when they
take turns (libgomp stops spinning when there are more threads than cores). What callers await are promises: each is
kept by the worker, or broken with the reason when the worker ends. Every wait has a deadline: a caller gives up
on a worker without signs of life.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from hone.errors import DataError, EngineError, MemoryExhausted

T = TypeVar("T")
Action = Callable[[], Any]

_CLOSE_S = 30.0


def in_loop(callback: Callable[[T], object] | None) -> Callable[[T], object] | None:
    """The callback as another thread may call it, to run in the event loop of the one that asks for this."""
    loop = asyncio.get_running_loop()
    return callback and (lambda value: loop.call_soon_threadsafe(callback, value))


class EngineWorker:
    """Runs actions, and `work()` again and again while `busy()`.

    Args:
        executor: whose thread does the work, one task at a time; None makes a thread of the worker's own.
        timeout_s: an awaited promise fails when the worker shows no sign of life for so long.
    """

    def __init__(
        self, busy: Callable[[], bool], work: Action, *, executor: Executor | None, name: str, timeout_s: float
    ) -> None:
        self._busy, self._work, self._timeout_s = busy, work, timeout_s
        self._inbox: queue.SimpleQueue[Sequence[Action]] = queue.SimpleQueue()
        self._own = ThreadPoolExecutor(1, thread_name_prefix=name) if executor is None else None
        self._executor = executor or self._own
        self._lock = threading.Lock()  # guards the four below; held for a few instructions only
        self._turn: Future[None] | None = None  # runs from the first action until nothing is left to do
        self._promises: set[Future[Any]] = set()
        self._ended: BaseException | None = None
        self._closing = False
        self._beats = 0
        self._thread: int | None = None  # whose turn it is

    def do(self, action: Action) -> None:
        """Run an action now if this is the worker's own thread, else before its next step."""
        if threading.get_ident() == self._thread:
            action()
        else:
            self.post([action])

    def post(self, actions: Sequence[Action]) -> None:
        """Have the worker run these, together and in order, before its next step."""
        self._inbox.put(actions)
        with self._lock:
            if self._turn is None and self._ended is None:
                assert self._executor is not None
                self._turn = self._executor.submit(self._take_turn)

    def promise(self) -> Future[Any]:
        """Something that the worker will `keep`. Raises EngineError when it has ended."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # from here on only the worker settles it
        with self._lock:
            if self._ended is not None:
                raise EngineError(f"the engine cannot be used any more: {self._ended}") from self._ended
            self._promises.add(future)
        return future

    def keep(self, promise: Future[Any], value: Any) -> None:
        """On the worker: settle a promise."""
        with self._lock:
            self._promises.discard(promise)
        promise.set_result(value)

    def forget(self, promise: Future[Any]) -> None:
        """The caller has given up."""
        with self._lock:
            self._promises.discard(promise)

    async def run(self, action: Callable[[], T], what: str) -> T:
        """Run an action on the worker and wait for its result. An action that raises ends the worker."""
        promise = self.promise()
        self.post([lambda: self.keep(promise, action())])
        return await self.wait_for(promise, what)

    async def attempt(self, action: Callable[[], T], what: str) -> T:
        """Like `run`, but EngineError and DataError are the caller's, and the worker stays."""

        def tried() -> T | EngineError | DataError:
            try:
                return action()
            except (EngineError, DataError) as error:
                return error

        if isinstance(outcome := await self.run(tried, what), EngineError | DataError):
            raise outcome
        return outcome

    async def wait_for(self, promise: Future[T], what: str) -> T:
        """The promise's value, awaited for as long as the worker is alive and moving."""
        waiting = asyncio.wrap_future(promise)
        try:
            while True:
                beats = self._beats
                done, _ = await asyncio.wait({waiting}, timeout=self._timeout_s)
                if done:
                    return waiting.result()
                if self._beats == beats:
                    raise EngineError(
                        f"{what}: the engine made no step in {self._timeout_s:g} s. "
                        "Is the machine swapping, or rollout.timeout_s too short for one step?"
                    )
        finally:
            waiting.cancel()

    async def close(self) -> None:
        """End the worker between two steps and wait for it; outstanding promises are broken."""
        with self._lock:
            self._closing = True
            turn = self._turn
        if turn is None:
            self._end(EngineError("it was closed"))
        else:
            done, _ = await asyncio.wait({asyncio.wrap_future(turn)}, timeout=_CLOSE_S)
            if not done:
                raise EngineError(f"the engine's worker did not end within {_CLOSE_S:g} s of the request to close.")
        if self._own is not None:
            self._own.shutdown(wait=False)

    def _take_turn(self) -> None:
        """Work until nothing is left to do, or until closed."""
        self._thread = threading.get_ident()
        try:
            with torch.no_grad():
                while not self._nothing_left():
                    self._take_actions()
                    if self._busy():
                        self._work()
                    self._beats += 1
        except BaseException as failure:  # the boundary of the thread: callers that wait are sent every failure
            self._end(failure)
        else:
            if self._closing:
                self._end(EngineError("it was closed"))

    def _nothing_left(self) -> bool:
        with self._lock:
            over = self._closing or (self._inbox.empty() and not self._busy())
            if over and not self._closing:
                self._turn = None  # the next action starts another
            return over

    def _take_actions(self) -> None:
        try:
            while True:
                for action in self._inbox.get_nowait():
                    action()
        except queue.Empty:
            return

    def _end(self, reason: BaseException) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = reason
            broken = list(self._promises)
            self._promises.clear()
        for promise in broken:
            promise.set_exception(_described(reason))


def _described(ended: BaseException) -> EngineError | MemoryExhausted:
    if isinstance(ended, MemoryExhausted):
        return MemoryExhausted(str(ended))
    if isinstance(ended, EngineError):
        return EngineError(f"the engine ended: {ended}")
    error = EngineError(f"the engine's worker failed: {type(ended).__name__}: {ended}")
    error.__cause__ = ended
    return error
