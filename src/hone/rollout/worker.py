"""One thread that does the arithmetic of an engine, and the only door between it and the event loop.

The event loop puts actions into `_inbox`; the worker takes all of them between two steps of its work, in order. What
callers await are promises: each is kept by the worker, or broken with the reason when the worker ends. Nobody waits
without a deadline: an idle worker looks up every second, a caller gives up on a worker without signs of life.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from hone.errors import EngineError

T = TypeVar("T")
Action = Callable[[], Any]

_IDLE_POLL_S = 1.0
_CLOSE_S = 30.0


class Worker:
    """Runs actions, and `work()` again and again while `busy()`.

    Args:
        timeout_s: an awaited promise fails when the worker shows no sign of life for so long.
    """

    def __init__(self, busy: Callable[[], bool], work: Action, *, name: str, timeout_s: float) -> None:
        self._busy, self._work, self._timeout_s = busy, work, timeout_s
        self._inbox: queue.SimpleQueue[Sequence[Action]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the two below; held for a few instructions only
        self._promises: set[Future[Any]] = set()
        self._ended: BaseException | None = None
        self._closing = threading.Event()
        self._beats = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, actions: Sequence[Action]) -> None:
        """Have the worker run these, together and in order, before its next step."""
        self._inbox.put(actions)

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
        """Nobody waits for this promise any more."""
        with self._lock:
            self._promises.discard(promise)

    async def run(self, action: Callable[[], T], what: str) -> T:
        """Run an action on the worker and wait for its result. An action that raises ends the worker."""
        promise = self.promise()
        self.post([lambda: self.keep(promise, action())])
        return await self.wait_for(promise, what)

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
        self._closing.set()
        self.post([])
        await asyncio.to_thread(self._thread.join, _CLOSE_S)
        if self._thread.is_alive():
            raise EngineError(f"the engine's worker did not end within {_CLOSE_S:g} s of being told to.")

    def _run(self) -> None:
        ended: BaseException = EngineError("it was closed")
        try:
            with torch.no_grad():
                while not self._closing.is_set():
                    self._take_actions(wait=not self._busy())
                    if self._busy():
                        self._work()
                    self._beats += 1
        except BaseException as failure:  # the boundary of the thread: whatever it is, those who wait must hear of it
            ended = failure
        with self._lock:
            self._ended, broken = ended, list(self._promises)
            self._promises.clear()
        for promise in broken:
            promise.set_exception(_described(ended))

    def _take_actions(self, *, wait: bool) -> None:
        try:
            while True:
                for action in self._inbox.get(block=wait, timeout=_IDLE_POLL_S):
                    action()
                wait = False
        except queue.Empty:
            return


def _described(ended: BaseException) -> EngineError:
    if isinstance(ended, EngineError):
        return EngineError(f"the engine ended: {ended}")
    error = EngineError(f"the engine's worker failed: {type(ended).__name__}: {ended}")
    error.__cause__ = ended
    return error
