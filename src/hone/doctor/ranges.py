"""Healthy ranges of metrics: the bounds of the rules, as pages draw them behind the curves.

A rule may also look at other metrics and at several steps, so leaving a range is no alarm yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hone.doctor.history import History
from hone.doctor.rules import RULES
from hone.doctor.watch import is_read

Range = tuple[float | None, float | None]
"""Lowest and highest healthy value; None: no bound."""


def healthy_ranges(lines: Iterable[Mapping[str, Any]], *, has_every_line: bool = True) -> dict[str, dict[str, Range]]:
    """Stage -> metric -> its range, where several rules bound a metric the narrowest.

    Args:
        lines: of metrics.jsonl.
        has_every_line: otherwise baselines are not known, and bounds relative to them are left out.
    """
    histories: dict[str, History] = {}
    for line in lines:
        history = histories.setdefault(line["stage"], History(line["stage"], {}))
        history.add(line["step"], {name: value for name, value in line.items() if "/" in name and is_read(name)})
    return {stage: _ranges(history, has_every_line) for stage, history in histories.items()}


def _ranges(history: History, has_baseline: bool) -> dict[str, Range]:
    found: dict[str, tuple[float, float]] = {}
    for limit in (limit for rule in RULES for limit in rule.when.limits):
        for name in history.names(limit.metric):
            scale = history.base(name) if limit.of_baseline else 1.0
            if limit.of_baseline and not (has_baseline and scale > 0):
                continue
            low, high = found.get(name, (-math.inf, math.inf))
            found[name] = max(low, scale * limit.low), min(high, scale * limit.high)
    return {name: (_bound(low), _bound(high)) for name, (low, high) in found.items() if low < high}


def _bound(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
