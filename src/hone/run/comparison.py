"""Runs side by side, from their folders: settings that differ, where each metric ended, evaluations, alarms.

For `hone compare`. Needs no torch, and may be used while the runs go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.doctor.watch import AlarmWatch, by_importance
from hone.observe.sinks import metric_lines
from hone.run.folder import RunFolder, flat_settings

LAST = 10
"""Steps that an end value is the mean of."""
SHOWN = (
    "rollout/reward_mean", "rollout/pass_rate", "rollout/zero_std_group_frac", "rollout/response_tokens_mean",
    "rollout/truncated_frac", "train/entropy", "train/kl_ref", "train/grad_norm", "train/update_kl",
    "rollout/samples_per_s", "time/step_s", "memory/peak_rss_gib", "sft/loss",
)  # fmt: skip
"""Metrics of the table; the others are in the JSON."""
NOT_COMPARED = ("run.dir",)


@dataclass(slots=True)
class ComparedRun:
    """One run."""

    name: str
    steps: dict[str, int] = field(default_factory=dict)
    """Stage -> last step."""
    samples: int = 0
    """Samples trained on, from steps, prompts per step and group size."""
    time_s: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)
    """Metric -> mean of its last `LAST` finite values."""
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    """Evaluation metric -> its last value, its best, and the step of the best."""
    alarms: tuple[str, ...] = ()
    """`name: cause`, the one to look at first in front."""


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Runs side by side."""

    runs: tuple[ComparedRun, ...]
    settings: dict[str, tuple[Any, ...]]
    """Keys whose values differ -> the value in each run; None where it is not set."""


def compare_runs(paths: Sequence[Path]) -> RunComparison:
    """Read the runs.

    Raises:
        RunFolderError: one of the folders holds no run.
    """
    folders = [RunFolder.read(path) for path in paths]
    settings = [flat_settings(folder.identity()) for folder in folders]
    keys = sorted({key for each in settings for key in each})
    values = {key: tuple(each.get(key) for each in settings) for key in keys if key not in NOT_COMPARED}
    differing = {key: found for key, found in values.items() if any(value != found[0] for value in found)}
    return RunComparison(tuple(map(_read, folders)), differing)


def _read(folder: RunFolder) -> ComparedRun:
    settings = folder.identity()
    run, watch, recent = ComparedRun(str(folder.path)), AlarmWatch(settings), {}
    for line in metric_lines(folder.metrics):
        watch.add(line)
        run.steps[line["stage"]] = max(line["step"], run.steps.get(line["stage"], 0))
        run.time_s = line["time_s"]
        for name, value in line.items():
            if "/" not in name or value is None:
                continue
            if name.startswith("eval/"):
                _evaluate(run.evaluations, name, value, line["step"])
            else:
                recent.setdefault(name, []).append(value)
                del recent[name][:-LAST]
    run.ends = {name: sum(values) / len(values) for name, values in recent.items()}
    run.samples = run.steps.get("rl", 0) * _number(settings, "train", "prompts_per_step")
    run.samples *= _number(settings, "rollout", "group_size")
    run.alarms = tuple(dict.fromkeys(f"{alarm.name}: {alarm.cause}" for alarm in by_importance(watch.alarms)))
    return run


def _evaluate(found: dict[str, dict[str, float]], name: str, value: float, step: int) -> None:
    best = found.setdefault(name, {"last": value, "best": -math.inf, "best_step": step})
    best["last"] = value
    if value > best["best"]:
        best["best"], best["best_step"] = value, step


def _number(settings: Mapping[str, Any], section: str, key: str) -> int:
    return settings.get(section, {}).get(key) or 0
