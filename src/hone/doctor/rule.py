"""AlarmRule: one abnormal pattern of metrics, and its possible causes. The rules themselves are in `rules/`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hone.doctor.history import History

Level = Literal["liveness", "data", "optimisation", "tuning"]
LEVELS: tuple[Level, ...] = ("liveness", "data", "optimisation", "tuning")
"""By urgency: of alarms that begin together, the first level is named first."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound of a metric's healthy range, as pages draw it beside the curve."""

    metric: str
    """A name or a pattern such as `reward/<component>_mean`."""
    low: float = -math.inf
    high: float = math.inf
    of_baseline: bool = False
    """The bounds are multiples of the metric's baseline (`History.base`)."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Whether the latest line is abnormal, and the limit in words."""

    holds: Callable[[History], bool]
    text: str
    limits: tuple[Limit, ...] = ()
    """Bounds that the condition compares single metrics with; none where it compares metrics with each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One possible cause of a pattern.

    Causes of a rule are tried in order; the first whose `applies` is true is named. `confirm` is the test that
    separates it from the next likely cause.
    """

    name: str
    what: str
    change: str
    """What to change: key and value of the run file, or a command."""
    confirm: str
    applies: Callable[[History], bool] = lambda _: True
    reads: tuple[str, ...] = ()
    """Metrics and settings shown as evidence, besides the rule's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmRule:
    """A pattern that should not be there."""

    name: str
    level: Level
    pattern: str
    metrics: tuple[str, ...]
    """Metrics that it reads; the first is the curve that it is about, and it is evaluated when that is logged."""
    when: Condition
    of: tuple[int, int] = (3, 5)
    """Begins when k of the last n evaluations are abnormal; ends when none of them is."""
    after: int = 0
    """Values of the first metric before the first evaluation."""
    silenced_by: tuple[str, ...] = ()
    """Stronger alarms: while one of them is active, this one is not reported."""
    causes: tuple[Cause, ...]
    source: str
    """Where the limit comes from."""
    worst: Callable[[History, str], float] = History.now
    """Of several metrics that fit the first pattern, the one with the largest of these is the alarm's."""


def shown(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not finite"


def above(metric: str, limit: float, *, mean: int = 1) -> Condition:
    """The mean of the last values is above a limit, of any metric that fits the pattern."""
    return Condition(
        lambda h: any(h.mean(name, mean) > limit for name in h.names(metric)),
        f"above {limit:g}",
        (Limit(metric, high=limit),),
    )


def below(metric: str, limit: float, *, mean: int = 1) -> Condition:
    return Condition(
        lambda h: any(h.mean(name, mean) < limit for name in h.names(metric)),
        f"below {limit:g}",
        (Limit(metric, low=limit),),
    )


def outside(metric: str, low: float, high: float, *, mean: int = 1) -> Condition:
    def holds(h: History) -> bool:
        return any(not low <= value <= high for name in h.names(metric) if not math.isnan(value := h.mean(name, mean)))

    return Condition(holds, f"outside {low:g} to {high:g}", (Limit(metric, low, high),))


def grows(metric: str, factor: float, *, mean: int = 10) -> Condition:
    """The mean of the last values is above a multiple of the baseline."""
    return Condition(
        lambda h: any(h.mean(name, mean) > factor * h.base(name) for name in h.names(metric)),
        f"above {factor:g} times its mean of steps 5 to 20",
        (Limit(metric, high=factor, of_baseline=True),),
    )


def spikes(metric: str, factor: float) -> Condition:
    """The latest value is above a multiple of the median of the 50 before it."""
    return Condition(
        lambda h: any(h.now(name) > factor * h.median(name, 50) > 0 for name in h.names(metric)),
        f"above {factor:g} times the median of the 50 steps before",
    )


def both(*conditions: Condition) -> Condition:
    return Condition(lambda h: all(c.holds(h) for c in conditions), " and ".join(c.text for c in conditions))


def either(*conditions: Condition) -> Condition:
    """In words, a condition on another metric than the first one's names it."""
    limits = tuple(limit for c in conditions for limit in c.limits)
    texts = [
        f"{c.limits[0].metric} {c.text}" if c.limits and c.limits[0].metric != limits[0].metric else c.text
        for c in conditions
    ]
    return Condition(lambda h: any(c.holds(h) for c in conditions), " or ".join(texts), limits)


def when(text: str, holds: Callable[[History], bool], *limits: Limit) -> Condition:
    return Condition(holds, text, limits)
