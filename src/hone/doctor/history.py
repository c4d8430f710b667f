"""Metric history of one stage, as rules read it: latest values, moving means, a baseline, and the run's settings.

Memory is bounded: the last `RECENT` values of each metric, a baseline and the best moving mean. A value that is unknown
is NaN, and every comparison with NaN is false, so a rule stays silent about a metric that the run does not log.
"""

from __future__ import annotations

import base64
import math
import re
import statistics
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

RECENT = 100
"""Values kept of each metric."""
BASELINE = (4, 20)
"""The baseline is the mean of the 5th to the 20th value: the first ones are often of a warm-up."""
WINDOW = 10
"""Values in the moving mean of `History.best`."""
WITH_BEST = ("rollout/pass_rate",)
"""Metrics whose best moving mean is kept."""


@dataclass(slots=True)
class Series:
    """Values of one metric."""

    first: float
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    count: int = 0
    base_sum: float = 0.0
    best: float = math.nan
    """Largest mean of `WINDOW` successive values."""
    highest: float = math.nan
    """Largest of the values that `recent` no longer has."""

    def add(self, value: float) -> None:
        if len(self.recent) == RECENT and (math.isnan(self.highest) or self.recent[0] > self.highest):
            self.highest = self.recent[0]
        self.recent.append(value)
        if BASELINE[0] <= self.count < BASELINE[1]:
            self.base_sum += value
        self.count += 1

    def mean(self, count: int) -> float:
        values = list(self.recent)[-count:]
        return sum(values) / len(values)


class History:
    """What is known of a stage so far.

    Args:
        settings: the resolved run file, nested as in `.identity.json`.
    """

    def __init__(self, stage: str, settings: Mapping[str, Any]) -> None:
        self.stage, self.step = stage, 0
        self._settings = settings
        self._series: dict[str, Series] = {}
        self._families: dict[str, list[str]] = {}

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """One line of metrics: values by name. None, as in metrics.jsonl, is a value that was not finite."""
        self.step = step
        for name, value in values.items():
            series = self._series.get(name)
            if series is None:
                series = self._series[name] = Series(math.nan if value is None else value)
                self._families.clear()
            series.add(math.nan if value is None else value)
            if name in WITH_BEST and series.count >= WINDOW:
                mean = series.mean(WINDOW)
                series.best = mean if math.isnan(series.best) else max(series.best, mean)

    def read(self, lines: Iterable[Mapping[str, Any]], names: Collection[str]) -> None:
        """Values of these names from lines of metrics.jsonl, those of other stages left out."""
        for line in lines:
            if line["stage"] == self.stage:
                self.add(line["step"], {name: line[name] for name in names if name in line})

    def state(self) -> dict[str, Any]:
        """What `restore` needs to continue from here, as JSON values; the settings are left out."""
        series = {name: asdict(one) for name, one in self._series.items()}
        for one in series.values():  # float64 in base64: exact, and a third of their length in decimals
            one["recent"] = base64.b64encode(array("d", one["recent"]).tobytes()).decode()
        return {"stage": self.stage, "step": self.step, "series": series}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()` of a history of the same stage."""
        self.step = state["step"]
        for name, one in state["series"].items():
            recent = deque(array("d", base64.b64decode(one["recent"])), maxlen=RECENT)
            self._series[name] = Series(**{**one, "recent": recent})

    def count(self, name: str) -> int:
        """Number of values of a metric."""
        series = self._series_of(name)
        return series.count if series else 0

    def now(self, name: str) -> float:
        """Latest value."""
        series = self._series_of(name)
        return series.recent[-1] if series else math.nan

    def first(self, name: str) -> float:
        """The very first value."""
        series = self._series_of(name)
        return series.first if series else math.nan

    def highest(self, name: str, before: int) -> float:
        """Largest value until `before` values before the latest."""
        series = self._series_of(name)
        earlier = [*list(series.recent)[:-before], series.highest] if series else []
        return max((value for value in earlier if not math.isnan(value)), default=math.nan)

    def mean(self, name: str, count: int) -> float:
        """Mean of the last `count` values, or of as many as there are."""
        series = self._series_of(name)
        return series.mean(count) if series else math.nan

    def median(self, name: str, count: int) -> float:
        """Median of the `count` values before the latest; NaN for fewer than ten."""
        earlier = self.recent(name, count + 1)[:-1]
        return statistics.median(earlier) if len(earlier) >= 10 else math.nan

    def base(self, name: str) -> float:
        """Mean of the values 5 to 20, of which there must be six."""
        series = self._series_of(name)
        found = min(series.count, BASELINE[1]) - BASELINE[0] if series else 0
        return series.base_sum / found if series and found >= 6 else math.nan

    def best(self, name: str) -> float:
        """Largest mean of ten successive values; of metrics in `WITH_BEST`."""
        series = self._series_of(name)
        return series.best if series else math.nan

    def recent(self, name: str, count: int) -> list[float]:
        """The last `count` values, oldest first."""
        series = self._series_of(name)
        return list(series.recent)[-count:] if series else []

    def names(self, pattern: str) -> list[str]:
        """Logged metrics of a pattern such as `reward/<component>_mean`, in the order of their first value."""
        if "<" not in pattern:
            return [pattern] if pattern in self._series else []
        if pattern not in self._families:
            regex = name_regex(pattern)
            self._families[pattern] = [name for name in self._series if regex.fullmatch(name)]
        return self._families[pattern]

    def part(self, pattern: str, name: str) -> str:
        """What stands for the `<word>` of a pattern in a metric's name."""
        found = name_regex(pattern).fullmatch(name)
        return found[1] if found else ""

    def key(self, name: str) -> Any:
        """A setting such as `rollout.temperature`; None where the run file has none."""
        value: Any = self._settings
        for word in name.split("."):
            value = value.get(word) if isinstance(value, Mapping) else None
        return value

    def number(self, name: str) -> float:
        """Like `key`, a number; NaN for anything else."""
        value = self.key(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan

    def _series_of(self, name: str) -> Series | None:
        return self._series.get(name)


@lru_cache(maxsize=256)
def name_regex(pattern: str) -> re.Pattern[str]:
    """Matches the metrics of a pattern; `<word>` is any text without a slash."""
    return re.compile(re.sub(r"<\w+>", "([^/]+)", re.escape(pattern)))
