"""Request handling of the reward service: admission, scoring, one result per item.

Items become groups, one each or by `group_id`; a group is scored by every requested component, each with its own queue;
a score that is missing at the deadline is an error of its item. Scores equal those of the same reward in process.
Routes are in `reward.py`, the request formats of other projects in `foreign.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, Field

from hone.config.load import Loaded
from hone.data.pictures import BrokenPicture
from hone.errors import RewardError
from hone.reward.aggregate import settled, weighted_sums
from hone.reward.fingerprint import fingerprint
from hone.reward.judge.scorer import JudgeReward
from hone.reward.picture_urls import picture_of
from hone.reward.rewards import Component, Rewards, UserFunctionScorer
from hone.reward.signature import Range
from hone.reward.strict_json import printable
from hone.reward.wire import (
    MAX_ITEMS,
    MAX_RESPONSE_BYTES,
    Disagreement,
    Item,
    ItemError,
    ItemResult,
    RewardRequest,
    Work,
    component_result,
    groups_of,
)
from hone.serve.metrics import RewardMetrics
from hone.serve.problem import HttpProblem
from hone.serve.queue import ScoreCache, ScoreClaim, ScoreQueue, batched
from hone.types import Fault, Picture, Score

_MAX_RETRY_AFTER_S = 60.0
_TURN_S = 0.005
"""Time to compute keys of one request before other tasks get the event loop."""
_RESTART_S = 1.0
"""About what a worker process takes to start; abandoned work in one is killed no sooner."""


class ScoringSettings(BaseModel):
    """How much a reward service takes on, for how long, and what it remembers."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    max_items: int = Field(1024, ge=1, le=MAX_ITEMS)
    """Items of one request."""
    max_solution_kib: int = Field(256, ge=1, le=MAX_RESPONSE_BYTES >> 10)
    """Longest response that is scored, in KiB of UTF-8; a longer one earns the least that the reward declares."""
    queue_items: int = Field(4096, ge=1)
    """Items that wait or are being scored; requests beyond that are refused (503)."""
    client_items: int = Field(0, ge=0)
    """The same for one client (by token, else by address), refused with 429; 0: no limit of its own."""
    max_wait_s: float = Field(60.0, gt=0)
    """A request that would wait longer than this, or than its own deadline, before it is scored is refused (503)."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline of a request that has none of its own, in seconds."""
    max_in_flight_groups: int = Field(256, ge=1)
    """Groups that one component is given at one time; what scores them may have a lower limit of its own."""
    batch_items: int = Field(64, ge=1)
    """Items of different requests that a component which can look at many at a time is given together."""
    batch_wait_ms: float = Field(2.0, ge=0)
    """How long the first of them waits for others while that component has nothing to do, in milliseconds."""
    cache_items: int = Field(65_536, ge=0)
    """Scores that are remembered, so that the same item asked again is answered at once and the same."""
    cache_ttl_s: float = Field(3600.0, gt=0)
    """How long, in seconds."""
    allow_request_weights: bool = False
    """Let /compute_reward bring weights of its own for the components."""
    unscored_constant: float | None = None
    """What /get_reward and /slime answer for an item that could not be scored; null, the honest setting: 503."""


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A reward that a request can name: one component, or the weighted whole."""

    name: str
    weights: Mapping[str, float]
    """Component -> its weight in the score."""
    minimum: float | None
    maximum: float | None
    """Of the weighted sum; None where a component declares none."""


@dataclass(slots=True)
class _GroupClaims:
    """A group of a request, and its claims on the work of each component."""

    work: Work
    by_component: dict[str, ScoreClaim]


class ScoringService:
    """Scores the items of requests by the rewards of a run file. Started and closed by `running.serve`."""

    def __init__(self, loaded: Loaded, settings: ScoringSettings, warm_up: Item | None = None) -> None:
        """
        Args:
            warm_up: an item that `start` scores as a request would.
        Raises:
            ConfigError: rewards that cannot be made.
        """
        self._loaded, self._settings, self._warm_up = loaded, settings, warm_up
        # The trainer bounds unscored samples: a service answers for each item.
        section = loaded.config.reward.model_copy(update={"max_unscored_frac": 1.0})
        self._rewards = Rewards.from_config(section, loaded.run_file.parent, window_samples=1)
        self.queues: dict[str, ScoreQueue] = {}
        for component in self._rewards.components:
            in_pool = isinstance(component.scorer, UserFunctionScorer)
            self.queues[component.name] = ScoreQueue(
                batched(component, settings.batch_items, settings.batch_wait_ms / 1000),
                ScoreCache(settings.cache_items, settings.cache_ttl_s),
                # No more than there are processes: what waits here can be dropped, in the pool it cannot.
                max_in_flight_groups=section.workers if in_pool else settings.max_in_flight_groups,
                abandoned_after_s=_RESTART_S if in_pool else 0.0,
            )
        self.fingerprint = ""
        self.metrics = RewardMetrics(
            lambda: self.pending_items,
            lambda: self._rewards.worker_restarts,
            frozenset(c.name for c in self._rewards.components if isinstance(c.scorer, JudgeReward)),
        )
        self.pending_items = 0
        """Items of open requests in which something is still to be scored."""
        self._of_client = Counter[str]()
        self._parts: dict[str, dict[str, None]] = {name: {} for name in self.queues}
        """Metric names seen of each component: every item's result has all of them."""

    async def start(self) -> None:
        """Start the scorers. Raises ConfigError for those that fail to, and RewardError for a warm-up item without a
        score."""
        self.fingerprint = await asyncio.to_thread(fingerprint, self._loaded)
        await self._rewards.start()
        if self._warm_up is not None:
            (result,) = await self.score(RewardRequest(items=[self._warm_up]), client="warm-up")
            if (error := result.error) is not None:
                raise RewardError(f"the warm-up item was not scored: {error.fault} fault: {error.detail}")

    async def close(self) -> None:
        await self._rewards.close()

    def asked(self, name: str | None, weights: Mapping[str, float] | None = None) -> RewardSpec:
        """The named reward, or the weighted whole.

        Args:
            weights: for the whole, instead of the file's.
        Raises:
            Problem: 404, there is none; 422, weights of unknown components or all 0.
        """
        components = {component.name: component for component in self._rewards.components}
        if name is not None:
            if name not in components:
                raise HttpProblem(
                    404, "unknown-reward", f"no reward {name[:80]!r} here; there are: {', '.join(components)}"
                )
            return _asked(name, {name: 1.0}, [components[name]])
        if weights is None:
            return _asked("whole", {c.name: c.weight for c in components.values()}, list(components.values()))
        unknown = sorted(set(weights) - set(components))
        if unknown:
            raise HttpProblem(
                422, "unknown-weight", f"no component {unknown[0][:80]!r}; there are: {', '.join(components)}"
            )
        chosen = {c.name: weights.get(c.name, c.weight) for c in components.values()}
        if not any(chosen.values()):
            raise HttpProblem(422, "no-weight", "all weights are 0")
        return _asked("whole", chosen, list(components.values()))

    async def score(
        self, request: RewardRequest, *, client: str, weights: Mapping[str, float] | None = None
    ) -> list[ItemResult]:
        """A result for each item, in order.

        Raises HttpProblem when the request cannot be taken (404, 422, 429, 503), or nothing was scored in time (504).
        """
        asked = self.asked(request.reward, weights)
        self.metrics.received(len(request.items))
        began = time.monotonic()
        timeout_s = min(self._settings.timeout_s, (request.timeout_ms or float("inf")) / 1000)
        results: dict[int, ItemResult] = {}
        works = await self._works(request, asked, results)
        claims = self._claims(works, asked, client, timeout_s)
        waiting = [future for claim in claims for part in claim.by_component.values() if (future := part.future)]
        num_items = sum(len(claim.work.places) for claim in claims) if waiting else 0
        self._of_client[client] += num_items
        self.pending_items += num_items
        try:
            if waiting:
                await asyncio.wait(waiting, timeout=began + timeout_s - time.monotonic())
            num_late = sum(self._answer(claim, request, asked, timeout_s, results) for claim in claims)
        finally:
            for claim in claims:
                for part in claim.by_component.values():
                    part.leave()
            self.pending_items -= num_items
            self._of_client[client] -= num_items
            if not self._of_client[client]:
                del self._of_client[client]
        if num_late and num_late == len(request.items):
            raise HttpProblem(504, "deadline", f"nothing was scored within {timeout_s:g} s", retryable=True)
        # The same metric names in every result, null where an item has none of that name.
        names = [f"{name}_{part}" for name in asked.weights for part in self._parts[name]]
        return [
            result.model_copy(update={"metrics": {name: result.metrics.get(name) for name in names}})
            for _, result in sorted(results.items())
        ]

    # ---- admission

    async def _works(
        self, request: RewardRequest, asked: RewardSpec, results: dict[int, ItemResult]
    ) -> list[tuple[bytes, Work]]:
        """The groups of a request with their content keys; what cannot be scored at all is put into `results`."""
        try:
            works = groups_of(request.items, request.mode, _pictures(request))
        except Disagreement as error:
            raise HttpProblem(
                422, "unprocessable-body", str(error), errors=[(f"/items/{error.place}", str(error))]
            ) from None
        known, began = [], time.monotonic()
        for work in works:
            work = self._without_too_long(work, request.items, asked, results)
            if work.places:
                try:
                    known.append((_content_key(request, work), work))
                except ValueError:
                    detail = "a number that is not finite"
                    errors = [(f"/items/{work.places[0]}", detail)]
                    raise HttpProblem(422, "unprocessable-body", detail, errors=errors) from None
            if time.monotonic() - began > _TURN_S:  # the keys of 32 MiB take half a second
                await asyncio.sleep(0)
                began = time.monotonic()
        return known

    def _claims(
        self, works: Sequence[tuple[bytes, Work]], asked: RewardSpec, client: str, timeout_s: float
    ) -> list[_GroupClaims]:
        """Claims on the work of a request. Raises HttpProblem when it is too much."""
        claims, new = [], []
        for key, work in works:
            claim = _GroupClaims(work, {})
            for name in asked.weights:
                part = self.queues[name].find(key)
                if part is not None:
                    claim.by_component[name] = part
                else:
                    new.append((claim, name, key))
            claims.append(claim)
        try:
            self._admit(
                sum(len(claim.work.places) for claim in claims), {name for _, name, _ in new}, client, timeout_s
            )
        except HttpProblem:
            for claim in claims:
                for part in claim.by_component.values():
                    part.leave()
            raise
        for claim, name, key in new:
            queue = self.queues[name]
            claim.by_component[name] = queue.find(key) or queue.add(key, claim.work.group)  # it may be there twice
        return claims

    def _admit(self, num_items: int, queues: set[str], client: str, timeout_s: float) -> None:
        """Raises HttpProblem when that many items more are too many."""
        if not queues:
            return
        settings = self._settings
        wait_s = max(self.queues[name].wait_s() for name in queues)
        if self.pending_items + num_items > settings.queue_items:
            raise _refusal(503, "queue-full", f"{self.pending_items} items are waiting or being scored", wait_s / 2)
        if wait_s > min(timeout_s, settings.max_wait_s):
            raise _refusal(503, "too-long-a-wait", f"new items would wait about {wait_s:.0f} s", wait_s / 2)
        limit = settings.client_items
        if limit and self._of_client[client] + num_items > limit:
            raise _refusal(429, "client-limit", f"a client may have {limit} items waiting or being scored", wait_s / 2)

    def _without_too_long(
        self, work: Work, items: Sequence[Item], asked: RewardSpec, results: dict[int, ItemResult]
    ) -> Work:
        """A group without the responses beyond the size limit, which get the minimum at once."""
        limit = self._settings.max_solution_kib << 10
        lengths = {place: len(items[place].solution_str.encode()) for place in work.places}
        for place, length in lengths.items():
            if length > limit:
                detail = f"a response of {length} bytes; the limit is {limit >> 10} KiB (--max-solution-kib)"
                results[place] = self._result(items[place], asked, self._least(asked, detail))
        kept = [number for number, place in enumerate(work.places) if lengths[place] <= limit]
        if len(kept) == len(work.places):
            return work
        samples = tuple(work.group.samples[number] for number in kept)
        return Work(replace(work.group, samples=samples), tuple(work.places[number] for number in kept))

    def _least(self, asked: RewardSpec, detail: str) -> dict[str, Score]:
        """Every component's minimum as the score of a model fault; a data fault where it declares none."""
        scorers = {component.name: component.scorer for component in self._rewards.components}
        least = {name: getattr(scorers[name], "hone_range", Range()).minimum for name in asked.weights}
        return {
            name: Score(None, Fault.DATA, detail) if value is None else Score(value, Fault.MODEL, detail)
            for name, value in least.items()
        }

    # ---- results

    def _answer(
        self,
        claim: _GroupClaims,
        request: RewardRequest,
        asked: RewardSpec,
        timeout_s: float,
        results: dict[int, ItemResult],
    ) -> int:
        """Add the results of a group. Returns how many of its items the deadline left unscored."""
        found = {name: part.result() for name, part in claim.by_component.items()}
        done = {name: scored for name, scored in found.items() if scored is not None}
        cached = all(part.done is not None for part in claim.by_component.values())
        elapsed_ms = 0.0 if cached else 1000 * max((d.elapsed_s for d in done.values()), default=0.0)
        late = Score(None, Fault.INFRA, f"not scored within {timeout_s:g} s")
        late_components = asked.weights.keys() - done.keys()
        num_late = 0
        all_late = (late,) * len(claim.work.places)
        whole = {name: done[name].scores if name in done else all_late for name in asked.weights}
        whole = settled(whole, asked.weights, is_whole_group=request.mode == "groupwise")
        for number, place in enumerate(claim.work.places):
            scores = {name: whole[name][number] for name in asked.weights}
            result = self._result(request.items[place], asked, scores, cached=cached, elapsed_ms=elapsed_ms)
            num_late += result.error is not None and result.error.component in late_components
            results[place] = result
        self.metrics.scored(asked.name, done, [results[place] for place in claim.work.places], cached=cached)
        return num_late

    def _result(
        self,
        item: Item,
        asked: RewardSpec,
        scores: Mapping[str, Score],
        *,
        cached: bool = False,
        elapsed_ms: float = 0.0,
    ) -> ItemResult:
        """The result of an item, from the scores of every requested component."""
        components = {name: component_result(score, asked.weights[name]) for name, score in scores.items()}
        for name, component in components.items():
            self._parts[name] |= dict.fromkeys(component.metrics)
        metrics: dict[str, float | None] = {
            f"{name}_{part}": value for name, c in components.items() for part, value in c.metrics.items()
        }
        error = _first_error(scores, asked)
        flags = ["truncated"] if item.finish_reason == "length" else []
        if any(score.fault is Fault.MODEL for score in scores.values()):
            flags.append("model_fault")
        (value,) = weighted_sums({name: (score,) for name, score in scores.items()}, asked.weights, 1)
        if value is not None and not math.isfinite(value):
            error = ItemError(fault="infra", retryable=False, detail="the weighted sum is out of range")
            value = None
        return ItemResult(
            id=item.id,
            status="ok" if error is None else "error",
            score=value,
            min=asked.minimum,
            max=asked.maximum,
            components=components,
            metrics=metrics,
            flags=flags,
            cached=cached,
            elapsed_ms=elapsed_ms,
            error=error,
        )


def _asked(name: str, weights: Mapping[str, float], components: Sequence[Component]) -> RewardSpec:
    terms = [(weights[c.name], getattr(c.scorer, "hone_range", Range())) for c in components if weights[c.name]]
    return RewardSpec(
        name,
        weights,
        minimum=_sum((weight, declared.minimum if weight > 0 else declared.maximum) for weight, declared in terms),
        maximum=_sum((weight, declared.maximum if weight > 0 else declared.minimum) for weight, declared in terms),
    )


def _sum(terms: Iterable[tuple[float, float | None]]) -> float | None:
    """Sum of weight times bound; None when a bound is not declared."""
    total = 0.0
    for weight, bound in terms:
        if bound is None:
            return None
        total += weight * bound
    return total if math.isfinite(total) else None


def _first_error(scores: Mapping[str, Score], asked: RewardSpec) -> ItemError | None:
    """Of the components that have a weight."""
    for name, score in scores.items():
        if score.value is None and score.fault is not None and asked.weights[name]:
            fault = "data" if score.fault is Fault.DATA else "infra"
            return ItemError(fault=fault, retryable=fault == "infra", component=name, detail=printable(score.detail))
    return None


def _refusal(status: int, kind: str, detail: str, retry_after_s: float) -> HttpProblem:
    retry_after_s = min(max(1.0, retry_after_s), _MAX_RETRY_AFTER_S)
    return HttpProblem(status, kind, detail, retryable=True, retry_after_s=retry_after_s)


def _pictures(request: RewardRequest) -> dict[str, Picture]:
    """Those of a request, by name. Raises HttpProblem for one that is none."""
    found: dict[str, Picture] = {}
    for name, url in request.pictures.items():
        try:
            found[name] = picture_of(url)
        except BrokenPicture as error:
            raise HttpProblem(422, "unprocessable-body", f"picture {name!r} {error}") from None
    return found


def _content_key(request: RewardRequest, work: Work) -> bytes:
    """What a group's scores depend on, besides the rewards: everything in its items but their ids, and the seed.

    Raises ValueError for a number that is not finite: pydantic lets those through where any JSON may be.
    """
    left_out = {"id", "pictures"}  # of pictures there are names alone
    items = [request.items[place].model_dump(exclude=left_out, exclude_defaults=True) for place in work.places]
    content = [request.mode, request.seed, items, *(picture.digest for picture in work.group.prompt.pictures)]
    text = json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()
