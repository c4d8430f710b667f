"""Alarms during a run: the rules of `hone.doctor` on each line of metrics, to console and events.jsonl."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from hone.doctor.watch import Alarm, AlarmWatch
from hone.errors import Stopped, StoppedByAlarm
from hone.observe.observer import Observer


class LiveAlarms:
    """Reports alarms of one run as they begin and end, and asks it to stop where `observe.stop_on` says so.

    Args:
        settings: the resolved run file, nested.
        saved: `Progress.alarms` of the checkpoint that the run continues from.
        stop_on: names of the alarms that end the run.
        stop: set to end it, as the first stop signal does.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        observer: Observer,
        *,
        saved: Mapping[str, Any],
        stop_on: Collection[str],
        stop: asyncio.Event,
    ) -> None:
        self._watch, self._observer = AlarmWatch(settings), observer
        if saved:
            self._watch.restore(saved)
        self._stop_on, self._stop = frozenset(stop_on), stop
        self._stopped_by: Alarm | None = None
        observer.follow(self._take, self._watch.state)

    def stopped(self, resume_hint: str) -> Stopped:
        """The error that ends a run which was asked to stop."""
        if self._stopped_by is None:
            return Stopped(resume_hint)
        alarm = self._stopped_by
        return StoppedByAlarm(f"stopped by alarm {alarm.name}: {alarm.pattern}. {resume_hint}")

    def _take(self, line: Mapping[str, Any]) -> None:
        for alarm in self._watch.add(line):
            where = {"name": alarm.name, "stage": alarm.stage}
            if alarm.ended is not None:
                self._observer.say(f"alarm {alarm.name} ended at {alarm.stage} step {alarm.ended}")
                self._observer.event("alarm_ended", **where, step=alarm.ended)
                continue
            self._observer.say(alarm.line)
            self._observer.event("alarm", **where, step=alarm.step, since=alarm.since, cause=alarm.cause)
            if alarm.name in self._stop_on and not self._stop.is_set():
                self._observer.say(f"stopping because of alarm {alarm.name} (observe.stop_on)")
                self._stopped_by = alarm
                self._stop.set()
