"""Prometheus metrics of `hone serve policy`. No prompts in labels."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


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
