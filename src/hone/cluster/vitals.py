"""Heartbeats of a run's processes: memory metrics, and detection of processes that stopped or deadlocked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from ray.exceptions import RayError

from hone.cluster.actors import Vitals
from hone.cluster.calls import wait_for_one
from hone.errors import HoneError
from hone.rollout.engine import CacheUse

INTERVAL_S, TIMEOUT_S, LOOK_S = 5.0, 5.0, 0.5


class VitalsWatch:
    """Pings each process while it is open. The last answer holds until the next one, or the process's end.

    Args:
        processes: handles of actors by the processes' names, asked for each time: they come and go.
        silence_s: a process that has answered before and then misses pings for so long is silent.
        silent: called once with the name and the handle of such a process.
        interval_s: between an answer and the next `ping`.
        timeout_s: of a `ping`.
        look_s: until a new process is noticed.
    """

    def __init__(
        self,
        processes: Callable[[], Mapping[str, Any]],
        *,
        silence_s: float,
        silent: Callable[[str, Any], None],
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
        look_s: float = LOOK_S,
    ) -> None:
        self._processes, self._silence_s, self._silent = processes, silence_s, silent
        self._interval_s, self._timeout_s, self._look_s = interval_s, timeout_s, look_s
        self._found: dict[Any, Vitals] = {}
        """Newest vitals by handle."""
        self._fullest: dict[Any, CacheUse] = {}
        """Since the previous line of metrics, by handle."""
        self._asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._asking = asyncio.create_task(self._ask())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._asking is not None:
            self._asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._asking

    def metrics(self) -> dict[str, float]:
        """Metrics of the newest vitals."""
        measured = {}
        for name, actor in dict(self._processes()).items():
            if (vitals := self._found.get(actor)) is None:
                continue
            measured[f"memory/{name}_process_rss_gib"] = vitals.rss_bytes / 2**30
            if vitals.cuda_peak_bytes:
                measured[f"memory/{name}_process_cuda_peak_gib"] = vitals.cuda_peak_bytes / 2**30
            if vitals.device_bytes is not None:
                used, total = vitals.device_bytes
                measured[f"memory/{name}_device_used_gib"] = used / 2**30
                measured[f"memory/{name}_device_total_gib"] = total / 2**30
            if cache := self._fullest.pop(actor, vitals.cache):
                measured |= cache.metrics(name)
        return measured

    async def _ask(self) -> None:
        """Have a task for each process that is there."""
        asking: dict[Any, asyncio.Task[None]] = {}
        try:
            while True:
                there = dict(self._processes())
                for actor in [actor for actor in asking if actor not in there.values()]:
                    asking.pop(actor).cancel()
                    self._forget(actor)
                for name, actor in there.items():
                    if actor not in asking:
                        asking[actor] = asyncio.create_task(self._ask_one(name, actor))
                await asyncio.sleep(self._look_s)
        finally:
            for task in asking.values():
                task.cancel()
            await asyncio.gather(*asking.values(), return_exceptions=True)

    async def _ask_one(self, name: str, actor: Any) -> None:
        # Questions, not time: after a pause of this process or of its event loop, all clocks have run out at once.
        missed = 0
        while missed * (self._timeout_s + self._interval_s) < self._silence_s:
            try:
                vitals: Vitals = await wait_for_one(name, actor.ping.remote(), "ping", self._timeout_s)
                self._found[actor], missed = vitals, 0
                if vitals.cache is not None:
                    uses = (vitals.cache, self._fullest.get(actor, vitals.cache))
                    self._fullest[actor] = max(uses, key=lambda use: use.tokens)
            except HoneError as error:  # its owner notices too, and restarts it
                if isinstance(error.__cause__, RayError):
                    self._forget(actor)
                    return
                missed += actor in self._found  # one that has never answered is still starting
            await asyncio.sleep(self._interval_s)
        self._forget(actor)
        self._silent(name, actor)

    def _forget(self, actor: Any) -> None:
        self._found.pop(actor, None)
        self._fullest.pop(actor, None)
