"""Prometheus metrics of the services. Labels name routes and components, never anything that was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from hone.reward.wire import ItemResult
from hone.serve.queue import ScoredGroup
from hone.types import Score

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_SCORES = (-10, -5, -2, *(round(-1 + 0.1 * step, 1) for step in range(21)), 2, 5, 10)
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
disable_created_metrics()  # a creation time for every label, which is not used
TOTAL = "total"
"""Stands for the component in the score of the whole."""


class RewardMetrics:
    """One registry of its own per service."""

    def __init__(
        self, pending_items: Callable[[], int], worker_restarts: Callable[[], int], judges: frozenset[str] = frozenset()
    ) -> None:
        """`judges`: the components that are generative judges."""
        self._judges = judges
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("reward_requests", "Responses.", ["route", "code"], registry=registry)
        self._items = Counter("reward_items", "Items answered.", ["reward", "status", "fault"], registry=registry)
        self._seconds = Histogram(
            "reward_item_seconds",
            "Time in the scorer of the group that an item was in; remembered ones not counted.",
            ["reward", "component"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._batch = Histogram("reward_batch_size", "Items of a request.", buckets=_ITEMS, registry=registry)
        self._cache_hits = Counter("reward_cache_hits", "Items answered from memory.", registry=registry)
        self._scores = Histogram("reward_score", "Scores.", ["reward", "component"], buckets=_SCORES, registry=registry)
        self._parse_failures = Counter(
            "reward_parse_failures",
            "Answers of a judge without a score, by what was wrong.",
            ["judge", "method"],
            registry=registry,
        )
        self._canary = Gauge(
            "reward_canary_score",
            "What the judge last gave, of 1, to a response that deserves nothing.",
            ["judge", "kind"],
            registry=registry,
        )
        self._ready = Gauge("reward_ready", "1 while new work is taken.", registry=registry)
        depth = Gauge("reward_queue_depth", "Items waiting or being scored.", registry=registry)
        depth.set_function(pending_items)
        self._in_flight = Gauge("reward_inflight", "Requests being answered.", registry=registry)
        registry.register(_RestartCounter(worker_restarts))

    def watch(self, *, ready: Callable[[], bool], in_flight: Callable[[], int]) -> None:
        """Register functions that read the server's state."""
        self._ready.set_function(lambda: float(ready()))
        self._in_flight.set_function(in_flight)

    def responded(self, route: str, status: int) -> None:
        self._requests.labels(route, status).inc()

    def received(self, num_items: int) -> None:
        self._batch.observe(num_items)

    def scored(
        self, reward: str, done: Mapping[str, ScoredGroup], results: Sequence[ItemResult], *, cached: bool
    ) -> None:
        """A group was answered.

        Args:
            done: what each component came to, of those that did.
            results: of the group's items.
        """
        for result in results:
            self._items.labels(reward, result.status, result.error.fault if result.error else "").inc()
            if result.score is not None:
                self._scores.labels(reward, TOTAL).observe(result.score)
            for name, component in result.components.items():
                if component.score is not None:
                    self._scores.labels(reward, name).observe(component.score)
        if cached:
            self._cache_hits.inc(len(results))
            return
        for name, work in done.items():
            self._seconds.labels(reward, name).observe(work.elapsed_s)
            if name in self._judges:
                self._judged(name, work.scores)

    def _judged(self, judge: str, scores: Sequence[Score]) -> None:
        for score in scores:
            for method, number in _named(score, "parse_"):
                self._parse_failures.labels(judge, method).inc(number)
        for kind, value in _named(scores[0], "canary_"):  # of the group, and so said of each of it
            self._canary.labels(judge, kind).set(value)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


def _named(score: Score, prefix: str) -> Iterable[tuple[str, float]]:
    """Measurements of a score whose names begin so, without that beginning."""
    return ((name.removeprefix(prefix), value) for name, value in score.metrics.items() if name.startswith(prefix))


class _RestartCounter(Collector):
    """Counter whose value is read from a function."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "reward_worker_restarts", "Scorer processes started again after they hung or died.", value=self._read()
        )


class PolicyMetrics:
    """One registry of its own per service."""

    def __init__(self, *, memory_bytes: Callable[[], float], waiting: Callable[[], float]) -> None:
        self._registry = registry = CollectorRegistry()
        self._tokens = Counter("policy_tokens", "Tokens of answered requests.", ["kind"], registry=registry)
        self._samples = Counter("policy_samples", "Samples of answered requests.", registry=registry)
        gauges = {
            "policy_memory_bytes": (
                "GPU memory that the model and its cache hold; on a CPU, the process.",
                memory_bytes,
            ),
            "policy_waiting_samples": ("Samples being drawn or waiting for it.", waiting),
        }
        for name, (meaning, read) in gauges.items():
            Gauge(name, meaning, registry=registry).set_function(read)

    def answered(self, *, prompt_tokens: int, completion_tokens: int, samples: int) -> None:
        self._tokens.labels("prompt").inc(prompt_tokens)
        self._tokens.labels("completion").inc(completion_tokens)
        self._samples.inc(samples)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
