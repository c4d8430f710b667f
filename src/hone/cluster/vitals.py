"""What the processes of a run take, asked now and then while they work, for the metrics of every line."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from hone.cluster.actors import Vitals
from hone.cluster.calls import wait_for_one
from hone.errors import HoneError

INTERVAL_S = 5.0
TIMEOUT_S = 5.0


class VitalsWatch:
    """Asks as long as it is open. Who does not answer, or is not there at the time, is left out.

    Args:
        processes: handles of actors by the processes' names, asked for each time: they come and go.
    """

    def __init__(self, processes: Callable[[], Mapping[str, Any]]) -> None:
        self._processes = processes
        self._found: dict[str, Vitals] = {}
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
        """What was found last."""
        measured = {}
        for name, vitals in self._found.items():
            measured[f"memory/{name}_process_rss_gib"] = vitals.rss_bytes / 2**30
            if vitals.cuda_peak_bytes:
                measured[f"memory/{name}_process_cuda_peak_gib"] = vitals.cuda_peak_bytes / 2**30
        return measured

    async def _ask(self) -> None:
        while True:
            processes = self._processes()
            answers = await asyncio.gather(*(_vitals(name, actor) for name, actor in processes.items()))
            self._found = {name: found for name, found in zip(processes, answers, strict=True) if found is not None}
            await asyncio.sleep(INTERVAL_S)


async def _vitals(name: str, actor: Any) -> Vitals | None:
    try:
        return await wait_for_one(name, actor.ping.remote(), "ping", TIMEOUT_S)
    except HoneError:  # whoever works with it notices, too, and does something about it
        return None
