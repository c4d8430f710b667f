"""Runs side by side, from their folders: settings that differ, where each metric ended, evaluations, alarms.

For `hone compare`, and as a page. Needs no torch, and may be used while the runs go.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hone.config.render import flattened
from hone.doctor.watch import AlarmWatch
from hone.observe.curves import stages_of
from hone.observe.metrics import error_name
from hone.observe.report import alarms_of_run, known_metric
from hone.observe.sinks import some_metric_lines
from hone.run.folder import RunFolder
from hone.run.status import read_status

LAST = 10
"""Steps that an end value is the mean of."""
SHOWN = (
    "rollout/reward_mean", "rollout/pass_rate", "rollout/zero_std_group_frac", "rollout/response_tokens_mean",
    "rollout/truncated_frac", "train/entropy", "train/kl_ref", "train/grad_norm", "train/update_kl",
    "rollout/samples_per_s", "time/step_s", "memory/peak_rss_gib", "sft/loss",
)  # fmt: skip
"""Metrics of the table; the others are in the JSON."""
NOT_COMPARED = ("run.dir",)
AXES = "x/"
"""How the columns of a page begin that curves are drawn over."""
HIGHER_IS_BETTER = ("eval/accuracy", "eval/pass@", "eval/reward_mean")
"""How the evaluation metrics begin that have a best value."""
Z_95 = 1.96
"""Standard errors to each side of a mean that hold 95 % of a normal distribution."""


@dataclass(slots=True)
class ComparedRun:
    """One run."""

    name: str
    state: str = ""
    """Running, or how it ended."""
    steps: dict[str, int] = field(default_factory=dict)
    """Stage -> last step."""
    samples: int = 0
    """Samples trained on, from steps, prompts per step and group size."""
    time_s: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)
    """Metric -> mean of its last `LAST` finite values."""
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    """Evaluation metric -> `last`; where higher is better `best` and `best_step`; `error`, half of the last value's
    95 % confidence interval, where its standard error was logged."""
    alarms: tuple[str, ...] = ()
    """`name: cause`, the one to look at first in front; the error that ended the run, if one did."""
    advice: tuple[str, ...] = ()
    """Advice on tuning, which is not an alarm, likewise."""
    broken_lines: tuple[str, ...] = ()
    """Damaged lines of the metrics, which were left out: where, and what is wrong."""


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Runs side by side."""

    runs: tuple[ComparedRun, ...]
    settings: dict[str, tuple[Any, ...]]
    """Keys whose values differ -> the value in each run; None where it is not set."""


def compare_runs(paths: Sequence[Path], *, max_lines: int | None = None) -> RunComparison:
    """Read the runs.

    Args:
        max_lines: of the metrics of each run that are read, evenly spaced, besides the last ones and every evaluation.
            Alarms are then those that the run reported.
    Raises:
        RunFolderError: one of the folders holds no run.
    """
    folders = [RunFolder.read(path) for path in paths]
    settings = [flattened(folder.identity()) for folder in folders]
    keys = sorted({key for each in settings for key in each})
    values = {key: tuple(each.get(key) for each in settings) for key in keys if key not in NOT_COMPARED}
    differing = {key: found for key, found in values.items() if any(value != found[0] for value in found)}
    return RunComparison(tuple(_read(folder, max_lines) for folder in folders), differing)


def comparison_data(paths: Sequence[Path], *, max_lines: int | None = None) -> dict[str, Any]:
    """What the page of a comparison shows, as JSON values; arguments as of `compare_runs`.

    Raises:
        RunFolderError: one of the folders holds no run.
    """
    found = compare_runs(paths, max_lines=max_lines)
    curves = [curves_of(RunFolder.read(path), max_lines) for path in paths]
    runs = [{**asdict(run), "stages": stages} for run, stages in zip(found.runs, curves, strict=True)]
    names = {
        name for stages in curves for stage in stages for name in (*stage["steps"]["values"], *stage["evals"]["values"])
    }
    known = {name: asdict(metric) for name in names if (metric := known_metric(name))}
    return {"runs": runs, "settings": found.settings, "shown": SHOWN, "metrics": known, "alarms": []}


def curves_of(folder: RunFolder, max_lines: int | None) -> list[dict[str, Any]]:
    """Columns of each stage as the report has them, each with what its curves may be drawn over: `time_s`, and
    `samples` and `tokens` so far. Of steps whose lines are not read, tokens are taken to be those of the next one."""
    settings = folder.identity()
    each = {
        "rl": _number(settings, "train", "prompts_per_step") * _number(settings, "rollout", "group_size"),
        "sft": _number(settings, "sft", "rows_per_step"),
    }
    lines, _ = some_metric_lines(folder.metrics, max_lines)
    tokens, before = Counter[str](), Counter[str]()
    for line in lines:
        stage, samples = line["stage"], each.get(line["stage"], 0)
        if length := line.get("rollout/response_tokens_mean"):
            tokens[stage] += round(length * samples * (line["step"] - before[stage]))
            before[stage] = line["step"]
        line[f"{AXES}samples"], line[f"{AXES}tokens"] = line["step"] * samples, tokens[stage]
        line[f"{AXES}time_s"] = line["time_s"]
    return stages_of(lines)


def _read(folder: RunFolder, max_lines: int | None) -> ComparedRun:
    settings = folder.identity()
    run, watch, recent = ComparedRun(str(folder.path)), AlarmWatch(settings), dict[str, list[float]]()
    broken = list[str]()
    lines, has_every_line = some_metric_lines(folder.metrics, max_lines, broken)
    for line in lines if has_every_line else [*lines, *folder.last_metrics(LAST)]:
        if has_every_line:
            watch.add(line)
        run.steps[line["stage"]] = max(line["step"], run.steps.get(line["stage"], 0))
        run.time_s = line["time_s"]
        for name, value in line.items():
            if "/" not in name or value is None:
                continue
            if name.startswith("eval/"):
                step = line["step"]
                of_metric = run.evaluations.setdefault(name, {"last": value})
                of_metric["last"] = value
                if name.startswith(HIGHER_IS_BETTER) and value > of_metric.get("best", -math.inf):
                    of_metric["best"], of_metric["best_step"] = value, step
            else:
                recent.setdefault(name, []).append(value)
                del recent[name][:-LAST]
    for name in list(run.evaluations):
        if name in run.evaluations and (error := run.evaluations.pop(error_name(name), None)):
            run.evaluations[name]["error"] = Z_95 * error["last"]
    run.broken_lines = tuple(broken)
    run.ends = {name: sum(values) / len(values) for name, values in recent.items()}
    run.samples = run.steps.get("rl", 0) * _number(settings, "train", "prompts_per_step")
    run.samples *= _number(settings, "rollout", "group_size")
    status = read_status(folder)
    run.state = status.state
    alarms = alarms_of_run(folder.path, watch.alarms if has_every_line else None, running=status.running)
    run.alarms, run.advice = (
        tuple(dict.fromkeys(f"{alarm.name}: {alarm.cause}" for alarm in alarms if alarm.is_advice is is_advice))
        for is_advice in (False, True)
    )
    return run


def _number(settings: Mapping[str, Any], section: str, key: str) -> int:
    return settings.get(section, {}).get(key) or 0
