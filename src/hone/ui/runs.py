"""What the pages show of a folder of runs: the list, one run, samples of a step, runs side by side. Read only."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.errors import RunFolderError
from hone.observe.recorder import is_whole, recorded_steps, samples_file
from hone.observe.report import (
    MAX_LINES,
    RunSummary,
    alarms_of_events,
    report_data,
    sample_rows,
    step_samples,
    thumbnails_of,
)
from hone.run.comparison import comparison_data
from hone.run.folder import RunFolder
from hone.run.status import described, read_status
from hone.services.state import FILE as SERVICES_FILE
from hone.services.state import read_state

MAX_DEPTH = 3
"""Of run folders below the folder that is shown."""
LOG_BYTES, LOG_LINES = 64 << 10, 100
"""Of the end of each log."""
MAX_LOGS = 12
"""training.log, and those of engines and services that changed last."""
LISTED = ("eval/accuracy", "rollout/reward_mean", "sft/loss", "rm/eval_accuracy")
"""Metrics of a run in the list, as far as they are logged."""


class Runs:
    """Runs in a folder, or the run that the folder is.

    Args:
        folder: may be without runs yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """Their paths below the folder, newest first; `.` is the folder itself."""
        found: list[Path] = []
        for path, folders, _ in os.walk(self.folder):
            place = Path(path)
            if _is_run(place):
                found.append(place)
            if _is_run(place) or len(place.relative_to(self.folder).parts) >= MAX_DEPTH:
                folders.clear()
        found.sort(key=_changed_s, reverse=True)
        return [str(place.relative_to(self.folder)) for place in found]

    def path(self, name: str) -> Path:
        """Of one of them. Raises RunFolderError: no run has this name; nothing else is ever read."""
        if name not in self.names():
            raise RunFolderError(f"{name}: there is no such run in {self.folder}.")
        return self.folder / name

    def list(self) -> dict[str, Any]:
        """The page of all runs, as JSON values."""
        return {"folder": str(self.folder.resolve()), "runs": [self._entry(name) for name in self.names()]}

    def run(self, name: str) -> dict[str, Any]:
        """The page of one run: that of its report, and what is happening now. Raises RunFolderError."""
        path = self.path(name)
        folder = RunFolder.read(path)
        status = read_status(folder)
        now = status.as_dict()
        now["recent"] = [described(event) for event in status.recent]
        data = report_data(path)
        if status.running:
            data["summary"] |= {"outcome": "running", "ended_unix_s": None}
        return data | {
            "now": now,
            "services": _services(path),
            "logs": _logs(folder.logs),
            "recorded": recorded_steps(path),
        }

    def samples(self, name: str, stage: str, step: int) -> list[dict[str, Any]]:
        """Recorded samples of a step. Raises RunFolderError."""
        path = self.path(name)
        if not is_whole(samples_file(path / "samples", stage, step)):
            raise RunFolderError(f"{name}: samples of {stage} step {step} are not there.")
        samples = step_samples(path, stage, step)
        return sample_rows(samples, {}, thumbnails_of(path, samples))

    def comparison(self, names: Sequence[str]) -> dict[str, Any]:
        """The page of runs side by side. Raises RunFolderError."""
        return comparison_data([self.path(name) for name in names], max_lines=MAX_LINES)

    def state(self, names: Sequence[str]) -> str:
        """A hash that differs when something changed in these runs, or, without names, in the list of them."""
        sizes = [(name, *_sizes(self.folder / name)) for name in names or self.names()]
        return hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]

    def _entry(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        folder = RunFolder.read(path)
        status = read_status(folder)
        summary = RunSummary.read(path)
        last = status.last or {}
        alarms = [alarm["name"] for alarm in alarms_of_events(path) if alarm["ended"] is None]
        return {
            "name": name,
            "title": summary.title,
            "group": summary.group,
            "tags": list(summary.tags),
            "running": status.running,
            "outcome": status.outcome,
            "stage": status.stage,
            "step": status.step,
            "steps": status.steps,
            "eta_s": status.eta_s,
            "changed_unix_s": _changed_s(path),
            "metrics": {metric: last[metric] for metric in LISTED if last.get(metric) is not None},
            "alarms": alarms,
        }


def _is_run(path: Path) -> bool:
    return (path / ".identity.json").is_file()


def _sizes(path: Path) -> tuple[int, ...]:
    return tuple(_size(path / name) for name in ("metrics.jsonl", "events.jsonl", SERVICES_FILE))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _changed_s(path: Path) -> float:
    """Unix seconds of the last metrics, or of the start."""
    for name in ("metrics.jsonl", ".identity.json"):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def _services(path: Path) -> list[dict[str, Any]]:
    """The services of a run, as their supervisor last wrote of them; `ended` where it is gone."""
    found = read_state(path)
    if found is None:
        return []
    is_there = found.process() is not None
    return [
        {"name": one.name, "state": one.state if is_there else "ended", "url": one.url, "restarts": one.restarts}
        for one in found.services
    ]


def _logs(folder: Path) -> dict[str, str]:
    """Name -> the end of a log; that of the run first, then those that changed last."""
    try:
        found = sorted(folder.glob("*.log"), key=lambda log: log.stat().st_mtime, reverse=True)
    except OSError:  # one went meanwhile
        found = []
    found.sort(key=lambda log: log.name != "training.log")
    return {log.name: _end_of(log) for log in found[:MAX_LOGS]}


def _end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, _size(log) - LOG_BYTES))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:])
    except OSError:
        return ""
