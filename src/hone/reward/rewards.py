"""Rewards of a run: weighted sum of the components' scores, with faults and a bound on unscored samples.

A reward is the weighted sum of its components' scores. A sample lacks a reward when any weighted component could not
score it: a partial sum would be another reward, and a made-up number for a failed scorer teaches the policy that our
failure was its mistake. How a component comes to its scores is behind `Scorer`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

from hone.config.derived import component_name
from hone.config.rewards import builtin_reward
from hone.config.run import RewardComponent, RewardSection
from hone.errors import ConfigError, RewardError
from hone.reward.aggregate import settled, weighted_sums
from hone.reward.pool import RewardPool, UserFunction
from hone.reward.resolve import Unusable, load, load_stateful, resolve
from hone.reward.signature import MayScoreSample, Range, RewardFunction, check_scores, declared_range
from hone.types import Group, Prompt, Sample, Score

if TYPE_CHECKING:
    from hone.reward.http import Addresses, Counts


class Scorer(Protocol):
    """Where one component's scores come from. A failure of the world is a fault in the scores, never an exception."""

    async def score(self, group: Group) -> tuple[Score, ...]: ...


@runtime_checkable
class StatefulScorer(Scorer, Protocol):
    """A scorer with processes or connections that live from the start of the run to its end."""

    async def start(self) -> list[str]:
        """Start them. Returns problems of the run file; a failure of the world becomes a fault of the scores."""
        ...

    async def close(self) -> None:
        """End them, within seconds; may be called without a start, and twice."""
        ...


@runtime_checkable
class StreamingScorer(Scorer, Protocol):
    """A scorer that can score each sample as soon as it is finished, as most do not depend on their siblings."""

    def begin(self, prompt: Prompt) -> MayScoreSample | None:
        """A function that scores samples of this prompt, each as `score` would; None where args allow only `score`.

        It may return None for a sample that does depend on its siblings: then `score` gets the whole group.
        """
        ...


@runtime_checkable
class RemoteScorer(Scorer, Protocol):
    """A scorer that calls a service over HTTP, which may fail, or be replaced by one with other rules."""

    @property
    def counts(self) -> Counts:
        """HTTP requests and failures since the start."""
        ...

    fingerprint: str | None
    """Of the rules that the service scores by; None while unknown. Set it to hold the service to them."""


@dataclass(frozen=True, slots=True)
class InProcessScorer:
    """A built-in function, called in the run's own process: it is pure and fast."""

    function: RewardFunction
    args: Mapping[str, Any]

    @property
    def hone_range(self) -> Range:
        return declared_range(self.function)

    async def score(self, group: Group) -> tuple[Score, ...]:
        return check_scores(self.function(group, **self.args), group, declared_range(self.function))


@dataclass(frozen=True, slots=True)
class UserFunctionScorer:
    """A user's function, called in a worker process that can be killed."""

    pool: RewardPool
    function: int
    timeout_s: float

    @property
    def hone_range(self) -> Range:
        return self.pool.range_of(self.function)

    async def score(self, group: Group) -> tuple[Score, ...]:
        return await self.pool.score(self.function, group, timeout_s=self.timeout_s)


@dataclass(frozen=True, slots=True)
class Component:
    """One term of the weighted sum."""

    name: str
    weight: float
    scorer: Scorer
    reads: Literal["response", "answer"] = "response"

    def seen(self, sample: Sample) -> Sample:
        """The sample as the scorer sees it, which may be another process: without what is large and the trainer's."""
        if sample.routing is not None:
            sample = replace(sample, routing=None, prompt_routing=None)
        return sample if self.reads == "response" else replace(sample, text=sample.answer_text)


class Rewards:
    """Scores groups. `async with` starts and closes the processes that user functions need."""

    def __init__(
        self, components: Sequence[Component], settings: RewardSection, *, window_samples: int, pool: RewardPool
    ) -> None:
        self.components = tuple(components)
        self.streaming = {c.name: c.scorer for c in components if isinstance(c.scorer, StreamingScorer)}
        self._over_http = {c.name: c.scorer for c in components if isinstance(c.scorer, RemoteScorer)}
        self._counted: dict[str, dict[str, int]] = {}
        """Counts that `http_metrics` has reported."""
        self.weights = {component.name: component.weight for component in components}
        self._min_valid_per_group = settings.min_valid_per_group
        self._bound = UnscoredBound(settings.max_unscored_frac, window_samples)
        self._samples = self._unscored = 0
        self._pool = pool

    @classmethod
    def from_config(
        cls,
        settings: RewardSection,
        folder: Path,
        *,
        window_samples: int,
        extra: Sequence[Component] = (),
        services: Addresses = MappingProxyType({}),
        elsewhere: Mapping[str, Scorer] = MappingProxyType({}),
    ) -> Self:
        """The rewards of a run file.

        Args:
            folder: the run file's; `file.py:function` is relative to it, and modules beside it can be imported.
            window_samples: samples of 20 steps, the window of `reward.max_unscored_frac`.
            extra: components that the run file does not list, such as the environment's own.
            services: addresses of the run file's services that are running, by name.
            elsewhere: scorers that replace some components, by their names: other processes of the run.
        Raises:
            ConfigError: every component that names no reward, names used twice, no component with a weight.
        """
        pool = RewardPool(num_workers=settings.workers, folder=folder)
        components: list[Component] = list(extra)
        problems: list[str] = []
        if not any(component.weight for component in (*extra, *settings.components)):
            problems.append("reward.components: none has a weight, so there is nothing to maximise; add one.")
        for number, component in enumerate(settings.components):
            name, key = component_name(component), f"reward.components.{number}"
            if name in (other.name for other in components):
                problems.append(f"{key}.name: {name!r} is taken by another component; give this one a name of its own.")
            try:
                scorer = elsewhere.get(name) or _scorer(component, folder, pool, f"{key}.use", services)
                components.append(Component(name, component.weight, scorer, component.reads))
            except Unusable as error:
                problems.append(f"{key}.use: {error}")
        if problems:
            raise ConfigError(problems)
        return cls(components, settings, window_samples=window_samples, pool=pool)

    async def start(self) -> None:
        """Start what scorers hold. Raises ConfigError for each user function that cannot be imported or called."""
        problems = await self._pool.start()
        for scorer in self._stateful():
            problems += await scorer.start()
        if problems:
            await self.close()
            raise ConfigError(problems)

    async def score(self, group: Group) -> Group:
        """The group with its scores and rewards.

        Raises RewardError when more samples than `reward.max_unscored_frac` allows could not be scored lately.
        """
        async with self.begin(group.prompt) as scoring:
            return await scoring.finish(group.samples)

    async def try_on(self, group: Group) -> Group:
        """Like `score`, for samples that the policy did not draw: they count towards no bound and no summary."""
        async with self.begin(group.prompt) as scoring:
            return await scoring.scored(group.samples)

    def begin(self, prompt: Prompt) -> GroupScoring:
        """Scoring of a prompt whose samples are still being generated; it starts with the first finished one."""
        return GroupScoring(self, prompt)

    def counted(self, group: Group) -> Group:
        """A scored group of the run; raises what `score` does."""
        self._samples += len(group.rewards)
        self._unscored += group.rewards.count(None)
        self._bound.observe(group)
        return group

    def summary(self) -> str:
        """How many samples could not be scored since the start, of how many."""
        return f"{self._unscored:,} of {self._samples:,} samples could not be scored"

    def http_metrics(self) -> dict[str, float]:
        """`reward/<component>_http_*`: failed requests to services since the last call."""
        metrics: dict[str, float] = {}
        for name, scorer in self._over_http.items():
            counts = scorer.counts
            now = {"failed": counts.failed + counts.invalid, "given_up": counts.unavailable + counts.refused}
            before, self._counted[name] = self._counted.get(name, {}), now
            metrics |= {f"reward/{name}_http_{key}": float(now[key] - before.get(key, 0)) for key in now}
        return metrics

    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each component's service, as far as known."""
        known = {name: scorer.fingerprint for name, scorer in self._over_http.items()}
        return {name: fingerprint for name, fingerprint in known.items() if fingerprint is not None}

    def expect(self, fingerprints: Mapping[str, str]) -> None:
        """Require the services to have these fingerprints, those that the run began with."""
        for name, scorer in self._over_http.items():
            scorer.fingerprint = fingerprints.get(name, scorer.fingerprint)

    @property
    def worker_restarts(self) -> int:
        """Worker processes that were restarted because they had hung or died."""
        return self._pool.workers.restarts

    def memory_metrics(self) -> dict[str, float]:
        """Memory of the processes that user functions run in."""
        return self._pool.workers.memory_metrics("reward_workers")

    @property
    def timeouts(self) -> int:
        """How often user functions took too long, see `RewardPool.timeouts`."""
        return self._pool.timeouts

    def enough(self, group: Group) -> bool:
        """Whether a scored group keeps its quorum, `reward.min_valid_per_group` (or all of a smaller group)."""
        num_scored = sum(reward is not None for reward in group.rewards)
        return num_scored >= min(self._min_valid_per_group, len(group.samples))

    async def close(self) -> None:
        """End the processes and connections, within seconds."""
        await asyncio.gather(self._pool.close(), *(scorer.close() for scorer in self._stateful()))

    def _stateful(self) -> list[StatefulScorer]:
        return [component.scorer for component in self.components if isinstance(component.scorer, StatefulScorer)]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class GroupScoring:
    """The scores of one prompt's samples, begun as each sample finishes where the scorer allows it.

        async with rewards.begin(prompt) as scoring:
            samples = await engine.generate(request, scoring.on_sample)
            group = await scoring.finish(samples)

    Leaving it ends what is still being scored.
    """

    def __init__(self, rewards: Rewards, prompt: Prompt) -> None:
        self._rewards, self._prompt = rewards, prompt
        begun = {name: scorer.begin(prompt) for name, scorer in rewards.streaming.items()}
        self._early = {name: score_sample for name, score_sample in begun.items() if score_sample is not None}
        self._seen = {component.name: component.seen for component in rewards.components}
        self._running: dict[tuple[str, int], asyncio.Future[Score | None]] = {}
        """Component name and sample index -> its score."""
        self.on_sample: Callable[[Sample], None] | None = self._start if self._early else None
        """To be called with each finished sample; None when no scorer can use it."""

    def _start(self, sample: Sample) -> None:
        for name, score_sample in self._early.items():
            self._running[name, sample.index] = asyncio.ensure_future(score_sample(self._seen[name](sample)))

    async def finish(self, samples: tuple[Sample, ...]) -> Group:
        """The scored group, as `Rewards.score` would give it; raises what that does."""
        return self._rewards.counted(await self.scored(samples))

    async def scored(self, samples: tuple[Sample, ...]) -> Group:
        """The scored group, as `Rewards.try_on` would give it."""
        group = Group(self._prompt, samples)
        components, weights = self._rewards.components, self._rewards.weights
        if len(components) == 1:  # a task for a function of microseconds would cost more than it
            results = [await self._scores(components[0], group)]
        else:
            results = await asyncio.gather(*(self._scores(component, group) for component in components))
        scores = settled(dict(zip(weights, results, strict=True)), weights)
        return group.scored(scores, weighted_sums(scores, weights, len(samples)))

    async def _scores(self, component: Component, group: Group) -> tuple[Score, ...]:
        if self._running:
            running = [self._running.get((component.name, sample.index)) for sample in group.samples]
            begun = [score for score in running if score is not None]
            scores = await asyncio.gather(*begun) if len(begun) == len(running) else [None]
            found = tuple(score for score in scores if score is not None)
            if len(found) == len(group.samples):
                return found
        return await component.scorer.score(Group(group.prompt, tuple(map(component.seen, group.samples))))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._early = {}  # an engine may still report samples after the call was cancelled
        for score in self._running.values():
            score.cancel()
        if self._running:
            await asyncio.gather(*self._running.values(), return_exceptions=True)


class UnscoredBound:
    """Ends a run in which too many samples stay unscored: a broken reward must not go unnoticed."""

    def __init__(self, max_frac: float, window_samples: int) -> None:
        self._window_samples = window_samples
        self._allowed = max_frac * window_samples
        self._groups: deque[tuple[int, int, str]] = deque()
        """Samples, unscored samples and first cause of each group in the window."""
        self._samples = self._unscored = 0

    def observe(self, group: Group) -> None:
        """Count a scored group; samples still to come in the first window count as scored.

        Raises RewardError when the window holds more unscored samples than allowed.
        """
        unscored = sum(reward is None for reward in group.rewards)
        self._groups.append((len(group.samples), unscored, first_fault(group) if unscored else ""))
        self._samples += len(group.samples)
        self._unscored += unscored
        while self._samples > self._window_samples and len(self._groups) > 1:
            left_samples, left_unscored, _ = self._groups.popleft()
            self._samples -= left_samples
            self._unscored -= left_unscored
        if unscored and self._unscored > self._allowed:
            causes = Counter[str]()
            for _, lost, cause in self._groups:
                if lost:
                    causes[cause] += lost
            most, count = causes.most_common(1)[0]
            raise RewardError(
                f"{self._unscored} of the last {self._samples} samples could not be scored; reward.max_unscored_frac "
                f"allows {self._allowed:g} in a window of {self._window_samples}. Most frequent cause, {count} "
                f"samples: {most} (last seen with prompt {group.prompt.id}). Nothing was trained on these samples. "
                "Fix the reward."
            )


def _scorer(component: RewardComponent, folder: Path, pool: RewardPool, key: str, services: Addresses) -> Scorer:
    runs = builtin_reward(component.use).runs
    if runs == "stateful":
        timeout_s = component.timeout_s
        return load_stateful(component.use, component.args, folder=folder, timeout_s=timeout_s, services=services)
    target = resolve(component.use, folder)
    if runs == "in process":
        return InProcessScorer(load(target, component.args), component.args)
    return UserFunctionScorer(pool, pool.add(UserFunction(target, component.args, key)), component.timeout_s)


def first_fault(group: Group) -> str:
    """The first data or infrastructure fault of a group, as `component: kind fault: cause`; empty without one."""
    for name, scores in group.scores.items():
        for score in scores:
            if score.fault is not None and score.value is None:
                return f"{name}: {score.fault} fault: {score.detail}"
    return ""
