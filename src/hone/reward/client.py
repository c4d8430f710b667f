"""The `service` reward: client of a reward service over HTTP, `POST /v1/rewards`.

    reward:
      components:
        - use: service
          args: {url: "http://127.0.0.1:8899", reward: math}

What the service cannot score now is asked for again until a deadline, and only that. An answer counts only as a whole:
one result per item, in order, each number finite, in its range and the sum of its parts; anything else is a fault of
infrastructure, never a number. How requests travel is `http.py`'s business, what they say is `wire.py`'s.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from hone.config.run import Section, key
from hone.errors import RewardError
from hone.reward.args import address_of, settings_of
from hone.reward.http import (
    FIRST_BACKOFF_S,
    SERVER_SHARE,
    Addresses,
    Counts,
    Endpoints,
    Refused,
    RetryingCall,
    Unavailable,
)
from hone.reward.picture_urls import ShownPictures
from hone.reward.resolve import Unusable
from hone.reward.signature import ScoreSample, all_faulty
from hone.reward.wire import Item, ItemResult, Mode, RewardReply, RewardRequest, items_of, request_parts, score_of
from hone.runtime.user_code import DETAIL_CHARACTERS
from hone.types import Fault, Group, Prompt, Sample, Score

PATH, READY_PATH = "/v1/rewards", "/readyz"
REQUEST_S, MAX_REQUEST_ITEMS = 0.1, 64
"""Finished samples go together while scoring a request's takes no longer; slower ones go by themselves, so that none
waits for another. A request without its item costs both ends 2 to 4 ms of a core."""
_ONE_ITEMS_DOING = frozenset({400, 413, 422})
"""Refusals that one item of several may have earned for all."""


class ServiceSettings(Section):
    """`args` of the `service` reward."""

    url: str | tuple[str, ...] | None = key(None)
    """Base URL of the service; several that serve the same are used together. Exactly one of `url` and `service`."""
    service: str | None = key(None)
    """Name of a service of the run file."""
    reward: str | None = key(None)
    """Which of the service's rewards; null: the weighted sum of all."""
    mode: Mode = key("pointwise")
    """pointwise: each sample is judged by itself, and sent as soon as it is finished, with others that are finished at
    that moment if the service is quick; groupwise: the samples of a prompt together."""
    trace: bool = key(False)
    """Also send tokens, logprobs and turns, for rewards that look inside the sampling."""
    pictures: bool = key(False)
    """Also send the pictures of the prompt."""
    picture_px: int = key(1024, unit="pixels", ge=28)
    """Longest side of a picture as the service is sent it."""
    token_env: str | None = key(None)
    """Environment variable with the service's bearer token."""
    ca_file: str | None = key(None)
    """PEM file, relative to the run file, with the authorities to trust for https; null: the public ones."""
    deadline_s: float = key(120.0, unit="seconds per request", gt=0)
    """Items without a score by then stay unscored; includes retries and a restart of the service."""
    first_backoff_s: float = key(FIRST_BACKOFF_S, unit="seconds", gt=0)
    """Bound of the random wait before the first retry; it doubles with each further one, up to 30 s."""
    max_in_flight: int = key(64, unit="requests per URL", ge=1)
    """Requests at one time; others wait for their turn."""
    allow_other_fingerprint: bool = key(False)
    """Continue if the service has a different fingerprint than at the start of the run: other rules or models."""


class ServiceReward:
    """The scorer (stateful, streaming, remote: see `rewards.py`). The service may start later: requests wait for it."""

    def __init__(self, settings: ServiceSettings, endpoints: Endpoints) -> None:
        self.fingerprint: str | None = None
        """The service's fingerprint, from its first answer or from the run that is resumed."""
        self._settings, self._endpoints = settings, endpoints
        self._item_s = REQUEST_S
        """Seconds that the service recently needed per item; initially so large that each item is sent alone."""
        self._shown = ShownPictures(settings.picture_px)
        self._gathering = Gathering(
            self._score_gathered,
            max_requests=settings.max_in_flight * len(endpoints),
            max_items=lambda: max(1, min(MAX_REQUEST_ITEMS, int(REQUEST_S / max(self._item_s, 1e-6)))),
        )

    @classmethod
    def from_args(cls, args: Mapping[str, Any], *, folder: Path, services: Addresses = MappingProxyType({})) -> Self:
        """The reward for a component's args. Raises Unusable when they do not fit."""
        settings = settings_of(ServiceSettings, args)
        ca_file = None if settings.ca_file is None else str(folder / Path(settings.ca_file).expanduser())
        try:
            address = address_of(settings.url, settings.service, settings.token_env, services)
            endpoints = Endpoints(
                address.urls,
                token=address.token,
                max_in_flight=settings.max_in_flight,
                ready_path=READY_PATH,
                ca_file=ca_file,
                first_backoff_s=settings.first_backoff_s,
            )
        except (ValueError, OSError) as error:
            raise Unusable(f"args of `service`: {error}") from None
        return cls(settings, endpoints)

    async def start(self) -> list[str]:
        """Nothing to do: a service that is still starting is waited for by the first request."""
        return []

    async def close(self) -> None:
        await self._endpoints.close()

    @property
    def counts(self) -> Counts:
        """See `RemoteScorer`."""
        return self._endpoints.counts

    def begin(self, prompt: Prompt) -> ScoreSample | None:
        """See `StreamingScorer`."""

        async def score_sample(sample: Sample) -> Score:
            group = Group(prompt, (sample,))
            try:
                (item,) = await self._items(group)
            except ValueError as error:
                return _unsendable(group, error)[0]
            return await self._gathering.score(item)

        return score_sample if self._settings.mode == "pointwise" else None

    async def score(self, group: Group) -> tuple[Score, ...]:
        """One score per sample. Raises RewardError when the service's rules are not those that the run began with."""
        try:
            items = await self._items(group)
        except ValueError as error:
            return _unsendable(group, error)
        scores, _ = await self._scores(items)
        return tuple(scores[item.id] for item in items)

    async def _items(self, group: Group) -> list[Item]:
        """Raises ValueError for a row that cannot be sent, and DataError for a picture that has changed."""
        pictures = await self._shown.urls(group.prompt.pictures) if self._settings.pictures else ()
        return items_of(group, trace=self._settings.trace, pictures=pictures)

    async def _score_gathered(self, items: Sequence[Item]) -> dict[str, Score]:
        """Scores by id of items that came to be sent together, of which none may cost another its score."""
        scores, refused = await self._scores(items)
        if len(items) > 1 and refused is not None and refused.status in _ONE_ITEMS_DOING:
            for alone in await asyncio.gather(*(self._scores([item]) for item in items)):
                scores |= alone[0]
        return scores

    async def _scores(self, items: Sequence[Item]) -> tuple[dict[str, Score], Refused | None]:
        """Scores by id, and the refusal that left some without a value."""
        results: dict[str, ItemResult] = {}
        why, refused = "", None
        call, asked = self._endpoints.call(deadline_s=self._settings.deadline_s), items
        try:
            while True:
                for result in await self._ask(call, asked):
                    results[result.id] = result
                failed = [item for item in asked if (error := results[item.id].error) is not None and error.retryable]
                if not failed:
                    break
                if self._settings.mode == "pointwise":  # a group without its members would be another group
                    asked = failed
                await call.again(f"{results[failed[0].id].error}")
        except (Unavailable, Refused) as error:
            why = str(error)[:DETAIL_CHARACTERS]
            refused = error if isinstance(error, Refused) else None
        missing = Score(None, Fault.INFRA, why)
        return {item.id: _score(results[item.id]) if item.id in results else missing for item in items}, refused

    async def _ask(self, call: RetryingCall, items: Sequence[Item]) -> list[ItemResult]:
        settings = self._settings
        timeout_ms = max(1, int(1000 * SERVER_SHARE * call.try_s))
        request = RewardRequest(
            reward=settings.reward, mode=settings.mode, timeout_ms=timeout_ms, **request_parts(items)
        )
        reply = await call.post(PATH, request.model_dump(mode="json"), partial(RewardReply.to, items))
        fingerprint = reply.server.fingerprint
        if self.fingerprint is None or self._settings.allow_other_fingerprint:
            self.fingerprint = fingerprint
        if fingerprint != self.fingerprint:
            raise RewardError(
                f"the service has a different fingerprint than at the start: {fingerprint}, not "
                f"{self.fingerprint}. Start it with its former settings and models, or allow the change with "
                "args.allow_other_fingerprint: true."
            )
        if anew := [result.elapsed_ms / 1000 for result in reply.results if not result.cached]:
            self._item_s += (sum(anew) / len(anew) - self._item_s) / 2
        return reply.results


def _unsendable(group: Group, error: ValueError) -> tuple[Score, ...]:
    return all_faulty(len(group.samples), f"the row cannot be sent: {error}", Fault.DATA)


def _score(result: ItemResult) -> Score:
    """The verdict, with what each component of a sum said, so that it is logged by itself."""
    score = score_of(result)
    parts = {name: part.score for name, part in result.components.items() if part.score is not None}
    parts = parts if len(result.components) > 1 else {}
    return replace(score, detail=score.detail[:DETAIL_CHARACTERS], metrics=parts | dict(score.metrics))


GATHER_S = 0.01
"""How long the first of several items waits for others: little beside a request, and a step of a small engine."""


class Gathering:
    """Client-side batching: items that are ready at about the same time share a request. Use in one event loop.

    A caller may stop waiting for its item: an item that was not sent leaves the queue, and a request without waiting
    callers is cancelled.

    Args:
        ask: scores items, whose ids differ, with one request; every caller that waits for one gets what it raises.
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
        """Items, each with the future of the request it went with."""
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
