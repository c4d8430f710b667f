"""Restarts of a stage whose trainer lost a process: from its newest checkpoint, as `--resume` would.

A loss arrives as a ClusterError. Lost engines are restarted by the router; after the loss of this process itself the
user resumes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from hone.errors import ClusterError, PlacementError
from hone.observe.observer import Observer
from hone.runtime.backoff import Restarts
from hone.train.checkpoint import SavedCheckpoint

Attempt = Callable[[SavedCheckpoint | None, Callable[[], None]], Awaitable[None]]
"""Runs the stage from a checkpoint, or from its beginning, to its end; calls its second argument when all processes
are ready. When it fails it leaves nothing behind that it could not use again."""


async def run_with_restarts(
    attempt: Attempt,
    saved: SavedCheckpoint | None,
    *,
    newest: Callable[[], SavedCheckpoint | None],
    observer: Observer,
    restarts: Restarts,
    stop: asyncio.Event,
) -> None:
    """Run a stage to its end, restarting its trainer within the bound.

    Args:
        saved: the stage's checkpoint to begin with; None begins it.
        newest: reads the newest whole checkpoint of the stage; None when there is none yet.
        observer: its records are taken back to that checkpoint.
        restarts: their bound.
        stop: set when the run is to stop.
    Raises:
        ClusterError: a process was lost once too often, or before all were ready for the first time.
    """
    was_ready = False

    def ready() -> None:
        nonlocal was_ready
        was_ready = True

    first = saved.progress.position if saved else observer.position()
    while True:
        try:
            await attempt(saved, ready)
            return
        except (ClusterError, BaseExceptionGroup) as error:
            lost = lost_process(error)
            if lost is None or not was_ready:
                raise
            observer.event("trainer_down", why=str(lost))
            wait_s = restarts.next_wait_s()
            if wait_s is None:
                bound = f"cluster.restarts = {restarts.bound}"
                raise ClusterError(f"{lost} Started again {restarts.count} times within an hour ({bound}).") from error
        saved = newest()
        where = f"step {saved.progress.step}" if saved else "the beginning of the stage: no checkpoint was written yet"
        count = f"{restarts.count} of {restarts.bound} an hour"
        observer.warn(f"{lost} Started again in {wait_s:g} s from {where} ({count})")
        observer.rewind(saved.progress.position if saved else first)
        try:
            async with asyncio.timeout(wait_s):
                await stop.wait()
            return
        except TimeoutError:
            continue


def lost_process(error: BaseException) -> ClusterError | None:
    """The loss of a process among what happened together, unless starting anew would not help."""
    if isinstance(error, BaseExceptionGroup):
        return next((lost for inner in error.exceptions if (lost := lost_process(inner)) is not None), None)
    return error if isinstance(error, ClusterError) and not isinstance(error, PlacementError) else None
