"""Diagnosis of a run from its folder: alarms by importance, for `hone doctor RUN_DIR`. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hone.doctor.watch import Alarm, AlarmWatch, by_importance
from hone.observe.sinks import metric_lines
from hone.run.folder import RunFolder
from hone.run.status import read_status


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong with a run."""

    path: Path
    state: str
    """Running, or how it ended."""
    last_steps: dict[str, int]
    """Stage -> last step with metrics."""
    alarms: tuple[Alarm, ...]
    """The one to look at first in front (`doctor.watch.by_importance`)."""

    @property
    def is_ill(self) -> bool:
        """Whether there is an alarm other than advice on tuning."""
        return any(alarm.level != "tuning" for alarm in self.alarms)


def diagnose(path: Path) -> Diagnosis:
    """Evaluate the rules on every line of a run's metrics.

    Raises:
        RunFolderError: no run is there.
    """
    folder = RunFolder.read(path)
    watch, last_steps = AlarmWatch(folder.identity()), {}
    for line in metric_lines(folder.metrics):
        watch.add(line)
        last_steps[line["stage"]] = line["step"]
    status = read_status(folder)
    state = "running" if status.running else status.outcome or "not running; it was killed or not started"
    return Diagnosis(path, state, last_steps, tuple(by_importance(watch.alarms)))
