"""Micro-batching: groups of different requests in one call of a scorer that gains from it, such as a model.

Whatever waits when the scorer becomes free makes the next batch, up to a number of items; when it is idle, the first
group waits a few milliseconds for others. A scorer says that it can by having `score_many`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from hone.reward.rewards import Component, Scorer
from hone.types import Group, Score


@runtime_checkable
class Batched(Scorer, Protocol):
    """A scorer that looks at several groups at one time for less than one by one."""

    async def score_many(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]: ...


def batched(component: Component, max_items: int, max_wait_s: float) -> Component:
    """The component, with a scorer that gathers batches if its own can take them."""
    if not isinstance(component.scorer, Batched):
        return component
    return replace(component, scorer=MicroBatcher(component.scorer, max_items, max_wait_s))


class MicroBatcher:
    """See the module. One batch runs at a time; a group without a waiting request leaves before it starts."""

    def __init__(self, scorer: Batched, max_items: int, max_wait_s: float) -> None:
        self._scorer, self._max_items, self._max_wait_s = scorer, max_items, max_wait_s
        self._waiting: dict[asyncio.Future[tuple[Score, ...]], Group] = {}
        self._running: asyncio.Task[None] | None = None

    async def score(self, group: Group) -> tuple[Score, ...]:
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = group
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        try:
            return await future
        finally:
            self._waiting.pop(future, None)

    async def _run(self) -> None:
        try:
            await asyncio.sleep(self._max_wait_s)
            while batch := self._next_batch():
                try:
                    scored = await self._scorer.score_many(list(batch.values()))
                except Exception as error:  # boundary: handed on to everybody who waits for it
                    for future in batch:
                        if not future.done():
                            future.set_exception(error)
                    continue
                for future, scores in zip(batch, scored, strict=True):
                    if not future.done():
                        future.set_result(scores)
        finally:
            self._running = None

    def _next_batch(self) -> dict[asyncio.Future[tuple[Score, ...]], Group]:
        """At least one group if any waits; more while they fit."""
        batch: dict[asyncio.Future[tuple[Score, ...]], Group] = {}
        num_items = 0
        for future, group in list(self._waiting.items()):
            num_items += len(group.samples)
            if batch and num_items > self._max_items:
                break
            batch[future] = self._waiting.pop(future)
        return batch
