"""Healthy ranges of metrics: the bounds of the rules, as pages draw them behind the curves.

A rule may also look at other metrics and at several steps, so leaving a range is not an alarm yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hone.doctor.history import BASELINE, History, name_regex
from hone.doctor.rules import RULES
from hone.doctor.watch import is_read

BASELINE_LINES = 2 * BASELINE[1]
"""Of a stage, from its first one: more than a baseline is of, for metrics that are logged late."""
HealthyRange = tuple[float | None, float | None]
"""Lowest and highest healthy value; None: no bound."""


def healthy_ranges(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, HealthyRange]]:
    """Stage -> metric -> its range, where several rules bound a metric the narrowest.

    Args:
        lines: of metrics.jsonl, the first `BASELINE_LINES` of each stage among them.
    """
    histories: dict[str, History] = {}
    names: dict[str, dict[str, None]] = {}
    for line in lines:
        stage = line["stage"]
        names.setdefault(stage, {}).update(dict.fromkeys(line))
        history = histories.setdefault(stage, History(stage, {}))
        if line["step"] <= BASELINE_LINES:
            history.add(line["step"], {name: value for name, value in line.items() if "/" in name and is_read(name)})
    return {stage: _ranges(tuple(names[stage]), history) for stage, history in histories.items()}


def _ranges(names: tuple[str, ...], history: History) -> dict[str, HealthyRange]:
    found: dict[str, tuple[float, float]] = {}
    for limit in (limit for rule in RULES for limit in rule.when.limits):
        for name in filter(name_regex(limit.metric).fullmatch, names):
            scale = history.base(name) if limit.of_baseline else 1.0
            if not scale > 0:  # NaN where it is not known
                continue
            low, high = found.get(name, (-math.inf, math.inf))
            found[name] = max(low, scale * limit.low), min(high, scale * limit.high)
    return {name: (_bound(low), _bound(high)) for name, (low, high) in found.items() if low < high}


def _bound(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
