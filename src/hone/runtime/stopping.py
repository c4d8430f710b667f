"""Work that a stop of the run interrupts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def unless_stopped(stop: asyncio.Event, work: Awaitable[T]) -> asyncio.Future[T] | None:
    """`work` once it is done, its `result()` still to be asked for; or None, with `work` cancelled, when `stop` is set
    first."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working if working.done() else None
    finally:
        stopping.cancel()
        working.cancel()  # of no effect on what is done
