"""AlarmWatch: evaluates the rules on each line of metrics, and keeps the alarms that began and ended.

The same object serves a run while it goes (one line at a time) and `hone doctor` (all lines of metrics.jsonl).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from hone.doctor.history import History, name_regex
from hone.doctor.rule import LEVELS, AlarmRule, Cause, Level, shown
from hone.doctor.rules import RULES

TOGETHER_STEPS = 10
"""Alarms whose first abnormal steps are no further apart began together: their level decides which is named first."""


@dataclass(slots=True)
class Alarm:
    """One alarm of a run, with what was known when it began."""

    name: str
    level: Level
    stage: str
    since: int
    """First abnormal step."""
    step: int
    """Step at which it was reported."""
    metric: str
    """The abnormal metric."""
    pattern: str
    cause: str
    what: str
    evidence: tuple[str, ...]
    change: str
    confirm: str
    source: str
    ended: int | None = None
    """Step at which it ended; None while it is active."""

    @property
    def is_advice(self) -> bool:
        """Whether it is advice on tuning, which is not an alarm."""
        return self.level == "tuning"

    @property
    def title(self) -> str:
        """What console and log call it."""
        return f"{'advice' if self.is_advice else 'alarm'} {self.name}"

    @property
    def line(self) -> str:
        """One line for console and log."""
        return (
            f"{self.title} since {self.stage} step {self.since}: {self.pattern} ({self.evidence[0]}). "
            f"Likely cause: {self.what} Change: {self.change}"
        )


@dataclass(slots=True)
class _RuleState:
    """Of one rule in one stage."""

    recent: deque[tuple[int, bool]]
    active: Alarm | None = None


@dataclass
class AlarmWatch:
    """Follows one run.

    Args:
        settings: the resolved run file, nested.
    """

    settings: Mapping[str, Any]
    rules: Sequence[AlarmRule] = RULES
    alarms: list[Alarm] = field(default_factory=list, init=False)
    """Every alarm so far, in the order reported."""
    _history: History | None = field(default=None, init=False)
    _states: dict[str, _RuleState] = field(default_factory=dict, init=False)
    _seen: dict[bool, int] = field(default_factory=dict, init=False)

    def add(self, line: Mapping[str, Any]) -> list[Alarm]:
        """Take one line of metrics (`stage`, `step` and values by name). Returns the alarms that began or ended.

        A step that was seen before is ignored: a stage that starts again from a checkpoint repeats its steps.
        """
        stage, step = line["stage"], line["step"]
        values = {name: value for name, value in line.items() if "/" in name}
        changed = self._begin(stage) if self._history is None or self._history.stage != stage else []
        is_evaluation = any(name.startswith("eval/") for name in values)
        if step <= self._seen.get(is_evaluation, -1):
            return changed
        self._seen[is_evaluation] = step
        history = self._history
        assert history is not None
        history.add(step, {name: value for name, value in values.items() if is_read(name)})
        return changed + [alarm for rule in self.rules if (alarm := self._evaluate(rule, history, values))]

    @property
    def active(self) -> list[Alarm]:
        return [alarm for alarm in self.alarms if alarm.ended is None]

    def state(self) -> dict[str, Any]:
        """What `restore` needs to continue from here, as JSON values; alarms that ended are left out."""
        if self._history is None:
            return {}
        return {
            "history": self._history.state(),
            "active": [asdict(alarm) for alarm in self.active],
            "recent": {name: list(state.recent) for name, state in self._states.items() if state.recent},
            "seen": [self._seen.get(is_evaluation, -1) for is_evaluation in (False, True)],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()` of a watch with the same settings."""
        self._begin(state["history"]["stage"])
        assert self._history is not None
        self._history.restore(state["history"])
        self._seen = dict(zip((False, True), state["seen"], strict=True))
        self.alarms = [Alarm(**{**alarm, "evidence": tuple(alarm["evidence"])}) for alarm in state["active"]]
        active = {alarm.name: alarm for alarm in self.alarms}
        for name, of_rule in self._states.items():
            of_rule.recent.extend((step, is_abnormal) for step, is_abnormal in state["recent"].get(name, ()))
            of_rule.active = active.get(name)

    def _begin(self, stage: str) -> list[Alarm]:
        """A stage begins: what was active in the one before has ended."""
        ended = self.active if self._history is not None else []
        for alarm in ended:
            alarm.ended = self._history.step if self._history else 0
        self._history = History(stage, self.settings)
        self._states = {rule.name: _RuleState(deque(maxlen=rule.of[1])) for rule in self.rules}
        self._seen = {}
        return ended

    def _evaluate(self, rule: AlarmRule, history: History, values: Mapping[str, Any]) -> Alarm | None:
        """The alarm of a rule, if it begins or ends with this line."""
        names = history.names(rule.metrics[0])
        if not any(name in values for name in names) or max(map(history.count, names)) <= rule.after:
            return None
        state = self._states[rule.name]
        state.recent.append((history.step, rule.when.holds(history)))
        abnormal = [step for step, is_abnormal in state.recent if is_abnormal]
        if state.active is not None:
            if abnormal:
                return None
            alarm, state.active = state.active, None
            alarm.ended = history.step
            return alarm
        if len(abnormal) < rule.of[0]:
            return None
        if any(alarm.name in rule.silenced_by and alarm.stage == history.stage for alarm in self.active):
            return None
        state.active = _alarm(rule, history, since=abnormal[0])
        self.alarms.append(state.active)
        return state.active


@lru_cache(maxsize=4096)
def is_read(name: str) -> bool:
    """Whether a rule may read a metric: it stands in its `metrics` or in a cause's `reads`."""
    return any(regex.fullmatch(name) for regex in _read())


@lru_cache(maxsize=1)
def _read() -> tuple[re.Pattern[str], ...]:
    patterns = {p for rule in RULES for p in (*rule.metrics, *(name for cause in rule.causes for name in cause.reads))}
    return tuple(name_regex(pattern) for pattern in patterns if "/" in pattern)


def watch_lines(settings: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> AlarmWatch:
    """The alarms of a run after the fact."""
    watch = AlarmWatch(settings)
    for line in lines:
        watch.add(line)
    return watch


def by_importance(alarms: Iterable[Alarm]) -> list[Alarm]:
    """Alarms with the one to look at first in front: the first that began; of those that began together, by level.

    Tuning advice comes last, whenever it began. An alarm that ended within `TOGETHER_STEPS` comes after those that
    lasted.
    """
    found = list(alarms)
    stages = list(dict.fromkeys(alarm.stage for alarm in found))

    def kind(alarm: Alarm) -> tuple[bool, bool, int]:
        is_short = alarm.ended is not None and alarm.ended - alarm.since <= TOGETHER_STEPS
        return alarm.level == "tuning", is_short, stages.index(alarm.stage)

    def rank(alarm: Alarm) -> tuple[tuple[bool, bool, int], int, int, int]:
        first = min(other.since for other in found if kind(other) == kind(alarm))
        began = 0 if alarm.since <= first + TOGETHER_STEPS else alarm.since
        return kind(alarm), began, LEVELS.index(alarm.level), alarm.since

    return sorted(found, key=rank)


def _alarm(rule: AlarmRule, history: History, *, since: int) -> Alarm:
    cause = next(cause for cause in rule.causes if cause.applies(history))
    return Alarm(
        name=rule.name,
        level=rule.level,
        stage=history.stage,
        since=since,
        step=history.step,
        metric=_worst(rule, history),
        pattern=rule.pattern,
        cause=cause.name,
        what=cause.what,
        evidence=tuple(_evidence(rule, cause, history)),
        change=cause.change,
        confirm=cause.confirm,
        source=rule.source,
    )


def _worst(rule: AlarmRule, history: History) -> str:
    """Of a pattern's metrics the one that the alarm is about."""
    return max(history.names(rule.metrics[0]), key=lambda name: rule.worst(history, name))


def _evidence(rule: AlarmRule, cause: Cause, history: History) -> Iterable[str]:
    """Figures that the rule and the cause rest on: latest value, mean of steps 5 to 20, limit; and settings."""
    for place, pattern in enumerate(dict.fromkeys((*rule.metrics, *cause.reads))):
        if history.key(pattern) is not None:
            yield f"{pattern} = {history.key(pattern)}"
            continue
        names = [_worst(rule, history)] if place == 0 else history.names(pattern)
        for name in names:
            base = history.base(name)
            before = f", {shown(base)} in steps 5 to 20" if base == base and history.count(name) > 20 else ""
            limit = f"; alarm: {rule.when.text}" if place == 0 else _crossed(rule, name, history)
            yield f"{name} = {shown(history.now(name))}{before}{limit}"


def _crossed(rule: AlarmRule, name: str, history: History) -> str:
    """The limit that the latest value of a metric is beyond, of this rule or of another; empty where there is none."""
    for limit in (limit for one in (rule, *RULES) for limit in one.when.limits):
        if name_regex(limit.metric).fullmatch(name):
            scale = history.base(name) if limit.of_baseline else 1.0
            if history.now(name) > scale * limit.high:
                return f"; healthy: up to {shown(scale * limit.high)}"
            if history.now(name) < scale * limit.low:
                return f"; healthy: from {shown(scale * limit.low)}"
    return ""
