"""Status of a run, from its folder alone: step, phase, processes, remaining time.

For `hone status`. Reads what the run writes (metrics.jsonl, events.jsonl, the lock), asks no process, and may be called
during the run, after it ended, or after it was killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from hone.doctor.walk import WalkAnswer, walk
from hone.doctor.watch import Alarm, AlarmWatch
from hone.observe.events import events_of, read_events
from hone.observe.report import alarms_of_run
from hone.observe.sinks import metric_lines
from hone.run.folder import RunFolder
from hone.runtime.replicas import ReplicaState

_EVENT_BYTES = 256 << 10
"""Bytes at the end of events.jsonl of which all events are read; before that, only those in `LASTING`."""
LASTING = (
    "stage", "started", "replica_down", "replica_state", "trainer_up", "trainer_down", "alarm", "alarm_ended",
    "stopped",
)  # fmt: skip
"""Events that stay relevant long after."""
_NUM_LINES = 200
"""Last lines of metrics.jsonl, which the pace is computed from."""
_NUM_RECENT = 6

PHASE_AFTER = {
    "stage": "starting",
    "started": "publishing",
    "published": "sampling",
    "training": "training",
    "trained": "publishing",
    "evaluating": "evaluating",
    "evaluated": "sampling",
    "saving": "saving",
    "saved": "sampling",
    "trainer_down": "restarting",
}
"""Event -> what the loop does from then on. `published` counts where it is of all engines."""

NOTABLE = (
    "started", "saved", "requeued", "replica_down", "replica_restarting", "replica_up", "trainer_down", "trainer_up",
    "alarm", "alarm_ended", "stopped",
)  # fmt: skip
"""Events listed in the status; other events are too frequent to list."""


@dataclass(slots=True)
class ReplicaStatus:
    """An engine or a reward model, by the last events."""

    state: ReplicaState = "starting"
    version: int | None = None
    """Version of the weights that an engine holds."""
    why: str = ""
    """Why it was lost the last time."""


@dataclass(slots=True)
class RunStatus:
    """Status of a run, as `hone status RUN_DIR` shows it."""

    running: bool
    stage: str | None = None
    step: int = 0
    steps: int | None = None
    """Steps of the stage."""
    phase: str | None = None
    phase_s: float | None = None
    """How long it has been in that phase."""
    version: int | None = None
    """Version of the weights that are sampled from."""
    step_s: float | None = None
    """Seconds a step, over the last ones, with everything in between."""
    eta_s: float | None = None
    """To the end of the stage."""
    outcome: str | None = None
    """How it ended, if it ended normally."""
    why: str = ""
    """The error that ended it, `Class: message`."""
    ranks: int | None = None
    """Processes of the trainer, where it has any of its own."""
    replicas: dict[str, ReplicaStatus] = field(default_factory=dict)
    in_flight: int = 0
    """Groups being sampled or scored."""
    last: dict[str, Any] | None = None
    """The last value of each metric of the stage."""
    recent: list[dict[str, Any]] = field(default_factory=list)
    """The last notable events."""

    @property
    def state(self) -> str:
        """Running, or how it ended."""
        return "running" if self.running else self.outcome or "not running; it was killed or not started"


def read_status(folder: RunFolder, *, now_s: float | None = None) -> RunStatus:
    """The state of a run.

    Args:
        now_s: Unix seconds.
    """
    status = RunStatus(running=folder.is_in_use())
    before = events_of(folder.events, LASTING, but_last_bytes=_EVENT_BYTES)
    at_s = _follow(status, chain(before, read_events(folder.events, last_bytes=_EVENT_BYTES)))
    if status.phase is not None and at_s is not None and status.running:
        status.phase_s = (time.time() if now_s is None else now_s) - at_s
    lines = folder.last_metrics(_NUM_LINES)
    if lines and lines[-1]["stage"] == (status.stage or lines[-1]["stage"]):
        status.stage, status.step = lines[-1]["stage"], lines[-1]["step"]
        lines = [line for line in lines if line["stage"] == status.stage]
        status.last = {name: value for line in lines for name, value in line.items()}
        first, last = lines[0], lines[-1]
        if last["step"] > first["step"]:
            status.step_s = step_s = (last["time_s"] - first["time_s"]) / (last["step"] - first["step"])
            if status.steps is not None and status.running:
                status.eta_s = max(0, status.steps - last["step"]) * step_s
    return status


def _follow(status: RunStatus, events: Iterable[Mapping[str, Any]]) -> float | None:
    """Go through the events; returns when the current phase began."""
    sampling: set[int] = set()
    phase_at_s: float | None = None
    for event in events:
        kind = event["kind"]
        if kind in PHASE_AFTER and not (kind == "published" and event.get("replica")):
            status.phase, phase_at_s = PHASE_AFTER[kind], event["at"]
        if kind in NOTABLE:
            status.recent = [*status.recent[1 - _NUM_RECENT :], dict(event)]
        name = event.get("replica")
        replica = status.replicas.setdefault(name, ReplicaStatus()) if name else ReplicaStatus()
        match kind:
            case "stage":
                status.stage, status.steps, status.outcome = event["stage"], event["steps"], None
                status.why = ""
            case "started":
                status.step = event["step"]
                sampling.clear()
            case "group_started":
                sampling.update(event["prompts"])
            case "group_finished" | "group_dropped":
                sampling.difference_update(event["prompts"])
            case "published" if name:
                replica.version, replica.why = event["version"], ""
            case "published":
                status.version = event["version"]
            case "replica_state":
                replica.state = event["state"]
            case "replica_down":
                replica.version, replica.why = None, event["why"]
            case "trainer_up":
                status.ranks = event["ranks"]
            case "trainer_down":  # engines are announced again; reward models stay
                status.replicas = {name: one for name, one in status.replicas.items() if one.version is None}
                sampling.clear()
            case "stopped":
                status.outcome, status.why, status.phase = event["outcome"], event.get("why", ""), None
                status.replicas.clear()
                sampling.clear()
    status.in_flight = len(sampling)
    if status.stage in ("sft", "reward_model") and status.phase in ("starting", "sampling"):
        status.phase = "training"  # nothing else is done there
    return phase_at_s


def described(event: Mapping[str, Any]) -> str:
    """An event as a readable line."""
    names = ("name", "stage", "since", "cause") if event["kind"] == "alarm" else event.keys() - {"at", "kind"}
    fields = {name: value for name, value in event.items() if name in names}
    shown = [f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in fields.items()]
    return f"{time.strftime('%H:%M:%S', time.localtime(event['at']))} {event['kind']}: {', '.join(shown)}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong with a run."""

    path: Path
    state: str
    """Running, or how it ended."""
    last_steps: dict[str, int]
    """Stage -> last step with metrics."""
    alarms: tuple[Alarm, ...]
    """Most important first (`doctor.watch.by_importance`)."""
    walk: tuple[WalkAnswer, ...] = ()
    """Questions to go through if it does not learn, in order."""
    broken_lines: tuple[str, ...] = ()
    """Damaged lines of the metrics, which were left out: where, and what is wrong."""


def diagnose(path: Path) -> Diagnosis:
    """Evaluate the rules on every line of a run's metrics.

    Raises:
        RunFolderError: no run is there.
    """
    folder = RunFolder.read(path)
    settings, last_steps = folder.identity(), {}
    watch, broken = AlarmWatch(settings), list[str]()
    for line in metric_lines(folder.metrics, broken):
        watch.add(line)
        last_steps[line["stage"]] = line["step"]
    status = read_status(folder)
    alarms = alarms_of_run(path, watch.alarms, running=status.running)
    answers = walk(settings, metric_lines(folder.metrics))
    return Diagnosis(path, status.state, last_steps, tuple(alarms), answers, tuple(broken))
