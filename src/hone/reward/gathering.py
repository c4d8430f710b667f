"""Client-side batching: items that are ready at about the same time share a request.

How many is the caller's to say, each time. A caller may stop waiting for its item: an item that was not sent leaves the
line, a request without waiting callers is cancelled. What is asked and how is `client.py`'s business.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

from hone.reward.wire import Item
from hone.types import Score

GATHER_S = 0.01
"""How long the first of several items waits for others: little beside a request, and a step of a small engine."""


class Gathering:
    """Use in one event loop.

    Args:
        ask: scores items, whose ids differ, with one request; what it raises, everybody who waits for one gets.
        max_requests: requests at one time; more items wait, and go together.
        max_items: asked for the most items of a request, whenever one is made.
    """

    def __init__(
        self,
        ask: Callable[[Sequence[Item]], Awaitable[Mapping[str, Score]]],
        *,
        max_requests: int,
        max_items: Callable[[], int],
    ) -> None:
        self._ask, self._max_requests, self._max_items = ask, max_requests, max_items
        self._line: deque[tuple[Item, asyncio.Future[_GatheredRequest]]] = deque()
        """Items, each with the future that tells which request it went with."""
        self._num_requests = 0
        self._is_gathering = False

    async def score(self, item: Item) -> Score:
        """The item's score; raises what `ask` does."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[_GatheredRequest] = loop.create_future()
        self._line.append((item, turn))
        if not self._is_gathering:
            self._is_gathering = True
            loop.call_later(GATHER_S if self._max_items() > 1 else 0, self._gathered)
        try:
            request = await turn
            return (await asyncio.shield(request.scores))[item.id]
        finally:
            if turn.done() and not turn.cancelled():
                await turn.result().leave()

    def _gathered(self) -> None:
        self._is_gathering = False
        self._send()

    def _send(self) -> None:
        while self._num_requests < self._max_requests and (batch := self._next_batch()):
            request = _GatheredRequest(asyncio.ensure_future(self._ask([item for item, _ in batch])), len(batch))
            self._num_requests += 1
            request.scores.add_done_callback(self._ended)
            for _, turn in batch:
                turn.set_result(request)

    def _next_batch(self) -> list[tuple[Item, asyncio.Future[_GatheredRequest]]]:
        """The first in line, as many as fit and differ in their ids."""
        max_items, batch, ids = self._max_items(), [], set()
        while self._line and len(batch) < max_items and self._line[0][0].id not in ids:
            item, turn = self._line.popleft()
            if not turn.cancelled():
                batch.append((item, turn))
                ids.add(item.id)
        return batch

    def _ended(self, _scores: asyncio.Future[Mapping[str, Score]]) -> None:
        self._num_requests -= 1
        self._send()


class _GatheredRequest:
    """One request, and how many wait for it."""

    def __init__(self, scores: asyncio.Future[Mapping[str, Score]], num_waiting: int) -> None:
        self.scores, self._num_waiting = scores, num_waiting

    async def leave(self) -> None:
        """Stop waiting. The request is cancelled when nothing waits for it any more."""
        self._num_waiting -= 1
        if not self._num_waiting and not self.scores.done():
            self.scores.cancel()
            await asyncio.gather(self.scores, return_exceptions=True)
