"""Observer of a run: takes metrics, samples, spans and messages; writes files, charts and a report.

`log` writes metrics.jsonl at once; everything slower is left to the background thread. Observing changes nothing
that is computed: a full disk under samples/ or TensorBoard ends that record with a warning, not the run.
"""

from __future__ import annotations

import math
import platform
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from importlib import metadata as packages
from pathlib import Path
from typing import Any

import psutil

from hone.config.run import ObserveSection
from hone.observe.background import PATIENCE_S, Background
from hone.observe.console import LogView, View, open_view
from hone.observe.events import FILE, EventLog
from hone.observe.metrics import find_metric
from hone.observe.recorder import FiguresOf, Recorder
from hone.observe.report import ReadPicture, RunSummary, write_report
from hone.observe.sinks import MetricsFile, SampleRow, TensorBoard, table_rows
from hone.observe.trace import Event, Spans, Timeline, TraceFile
from hone.observe.trackers import Labels, open_trackers
from hone.runtime.files import sync
from hone.types import Group, Position

REPORT_EVERY_S = 120.0
"""How often report.html is written during the run."""
REPORT_SHARE = 0.02
"""Largest share of a run's time spent on reports during it."""

OnMetrics = Callable[[dict[str, Any]], object]
"""Callback for a line of metrics: `stage`, `step` and values by name."""


class Observer:
    """Displays and records one run. Every method may be called from any thread."""

    def __init__(
        self,
        folder: Path,
        settings: ObserveSection,
        *,
        title: str,
        group: str | None = None,
        tags: Sequence[str] = (),
        total_steps: int,
        resume: Position | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        picture: ReadPicture | None = None,
        callbacks: Sequence[OnMetrics] = (),
        metadata: Mapping[str, Any] | None = None,
        patience_s: float = PATIENCE_S,
        report_after_s: float = 15.0,
    ) -> None:
        """Open the run's records in `folder`.

        Args:
            title: what the run is called; `group` and `tags`: what it is found by, in reports and trackers.
            total_steps: of the stage that runs first; `begin` announces the next one.
            resume: `position()` at the checkpoint that the run continues from; metrics.jsonl is cut there and samples
                beyond it go. None starts new records and removes old ones.
            decode: token ids to text, for the report's view of single tokens.
            picture: renders a response as an image, for the report.
            callbacks: called with each line of metrics; an exception ends the run.
            metadata: what trackers such as Weights & Biases are given beside versions and hardware: the run's settings
                as `config`, and where it comes from, which the report shows too.
            patience_s: how long a call waits for a disk or network that stalls under all but metrics.jsonl.
            report_after_s: when the first report is due.
        Raises:
            ConfigError: the package or key of a tracker is missing.
            RunFolderError: metrics.jsonl does not match `resume`.
        """
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        is_resumed, labels = resume is not None, Labels(title, group, tuple(tags))
        self._folder, self._decode, self._picture, self._callbacks = folder, decode, picture, tuple(callbacks)
        self._lock = threading.Lock()
        self._metrics = MetricsFile(folder / "metrics.jsonl", resume.metrics_bytes if resume else None)
        log = LogView(folder / "logs" / "training.log", title, total_steps, resume=is_resumed)
        self._views: tuple[View, View] = (log, open_view(settings.console, title, total_steps))
        self._trackers = open_trackers(folder, settings, labels, {**(metadata or {}), "machine": versions()})
        self._tensorboard = TensorBoard(folder / "tensorboard", resume=is_resumed) if settings.tensorboard else None
        self._trace = TraceFile(folder / "trace.json", title=title, resume=is_resumed) if settings.trace else None
        self._spans = Spans()
        self._timelines: dict[str, Timeline] = {}
        self._patience_s = patience_s
        self._background = Background(self._warn_of_gap, patience_s=patience_s)
        self._samples_max_bytes = int(settings.samples_max_mib * 2**20)
        self._samples_step_tokens = settings.samples_step_tokens
        self._tracker_samples = settings.tracker_samples
        self._recorder = self._new_recorder(resume)
        self._summary = RunSummary.begin(
            folder,
            labels,
            versions=versions(),
            origin={name: value for name, value in (metadata or {}).items() if name != "config"},
            resume=is_resumed,
            warn=self.warn,
        )
        self._reporting = threading.Thread(target=self._report)
        self._report_due_s = time.monotonic() + report_after_s
        self._report_failed = False
        self._watched: list[Callable[[], Mapping[str, float]]] = []
        self._alarm_state: Callable[[], Mapping[str, Any]] = dict
        self._process = psutil.Process()
        self._peak_gib = 0.0
        self._not_finite: set[str] = set()
        """Metrics with a logged warning."""
        events_bytes = resume.events_bytes if resume else None
        self._events = EventLog(folder / FILE, resume_bytes=events_bytes, warn=self.warn)

    def begin(self, stage: str, total_steps: int) -> None:
        """Begin a stage of `total_steps`, for progress and remaining time."""
        self.event("stage", stage=stage, steps=total_steps)
        for view in self._views:
            view.begin(stage, total_steps)

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event to events.jsonl; `events.KINDS` has the kinds and their fields."""
        self._events.write(kind, **fields)

    def call(self, callback: OnMetrics) -> None:
        """Call `callback` with each further line of metrics; an exception ends the run."""
        self._callbacks = (*self._callbacks, callback)

    def follow(self, take: OnMetrics, state: Callable[[], Mapping[str, Any]]) -> None:
        """Like `call` for the run's alarms; every `position()` then has their `state()`."""
        self.call(take)
        self._alarm_state = state

    def watch(self, measure: Callable[[], Mapping[str, float]]) -> None:
        """Add these measurements to every line of metrics; they replace the observer's own of the same name."""
        self._watched.append(measure)

    @contextmanager
    def watching(self, measure: Callable[[], Mapping[str, float]]) -> Iterator[None]:
        """Like `watch`, within a context."""
        self.watch(measure)
        try:
            yield
        finally:
            self._watched.remove(measure)

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """Time the body: `time/<name>_s` of the next line, and an event with `args` in trace.json."""
        return self._spans.span(name, **args)

    @contextmanager
    def work(self, role: str, what: str) -> Iterator[None]:
        """Like `span`, in the lane of a role."""
        with self._spans.span(what, has_lane=False), self.during(role, what):
            yield

    def during(self, role: str, what: str) -> AbstractContextManager[None]:
        """Show in trace.json what a role (the trainer, the engine, a replica) does meanwhile, in a lane without gaps:
        the rest is `idle`."""
        with self._lock:
            timeline = self._timelines.setdefault(role, Timeline(self._spans, role))
        return timeline.during(what)

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Log one line of metrics; times of spans and memory are added unless given.

        Raises:
            ValueError: a name is not in the registry (metrics.py).
        """
        line: dict[str, float] = {f"time/{name}_s": seconds for name, seconds in self._spans.take_seconds().items()}
        rss_gib = self._process.memory_info().rss / 2**30
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._peak_gib = max(self._peak_gib, rss_gib, peak / (2**30 if sys.platform == "darwin" else 2**20))
        line["memory/rss_gib"], line["memory/peak_rss_gib"] = rss_gib, self._peak_gib
        line["memory/samples_mib"] = self._recorder.total_bytes / 2**20
        for measure in self._watched:
            line |= measure()
        line |= {name: value if type(value) is int else float(value) for name, value in values.items()}
        for name in line:
            find_metric(name)
        with self._lock:
            self._metrics.write(stage, step, line)
        for name, value in line.items():
            if not math.isfinite(value) and name not in self._not_finite:
                self._not_finite.add(name)
                self.warn(f"{name} is {value} at {stage} step {step} (reported once)")
        for view in self._views:
            view.update(stage, step, line)
        for callback in self._callbacks:
            callback({"stage": stage, "step": step, **line})
        unix_s, events = time.time(), self._spans.take_events()
        self._background.submit(lambda: self._write_slow(stage, step, line, unix_s, events))
        if time.monotonic() >= self._report_due_s and not self._reporting.is_alive():
            self._reporting = threading.Thread(target=self._report, name="report", daemon=True)
            self._reporting.start()

    def record(
        self,
        stage: str,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[float]] | None,
        figures: FiguresOf | None = None,
    ) -> None:
        """Record the samples of these groups, with one advantage per sample of each group, or None: not trained on.

        May be called several times for one step; the samples are stored together. Of many tokens, only some groups are
        recorded (`observe.samples_step_tokens`). A few of those that were trained on go to trackers and TensorBoard as
        a table (`observe.tracker_samples`).

        Args:
            figures: of single tokens; asked for only where groups are recorded.
        """
        self._recorder.record(stage, step, groups, advantages, figures)
        if advantages is not None:
            for view in self._views:
                view.show(groups)
            if self._tracker_samples and groups:
                rows, unix_s = table_rows(groups, advantages, self._tracker_samples), time.time()
                self._background.submit(lambda: self._write_table(stage, step, rows, unix_s))

    def say(self, message: str) -> None:
        """Log one line to the console and logs/training.log."""
        for view in self._views:
            view.say(message)

    def relay(self, name: str, line: str) -> None:
        """A line of another process's log, shown on the console as `[name] line`; it has a file of its own."""
        _, console = self._views
        console.say(f"[{name}] {line}")

    def warn(self, message: str) -> None:
        """Like `say`, and shown even on a quiet console."""
        for view in self._views:
            view.warn(message)

    def position(self) -> Position:
        """Lengths of metrics, events and samples, once everything recorded so far is on the disk."""
        self._background.submit(self._recorder.sync)
        self._background.drain()
        events_bytes = self._events.position()
        with self._lock:
            metrics_bytes = self._metrics.position()
        sync(self._folder)
        return Position(metrics_bytes, events_bytes, self._recorder.num_files, self._alarm_state())

    def rewind(self, position: Position) -> None:
        """Truncate metrics and samples to `position()` at a checkpoint, to continue from there in this process."""
        self._background.drain()
        self._spans.take_seconds()
        with self._lock:
            self._metrics.close()
            self._metrics = MetricsFile(self._folder / "metrics.jsonl", position.metrics_bytes)
        self._recorder = self._new_recorder(position)
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = TensorBoard(self._folder / "tensorboard", resume=True)

    def close(self, outcome: str, why: str = "") -> None:
        """Finish every record and write report.html.

        Args:
            outcome: one line, how the run ended.
            why: the error that ended it.
        """
        events = self._spans.take_events()
        message = outcome
        try:
            self._background.submit(lambda: self._close_slow(events))
            self._background.close()
            self.event("stopped", outcome=outcome, **({"why": why} if why else {}))
            self._events.close()
            self._metrics.close()
            self._summary.end(self._folder, outcome)
            if self._reporting.is_alive():
                self._reporting.join(self._patience_s)
            report = write_report(self._folder, decode=self._decode, picture=self._picture)
            message = f"{outcome}. Report: {report}"
        except OSError as error:
            self.warn(f"report.html cannot be written: {error.strerror}")
        finally:
            for view in self._views:
                view.close(message)  # in any case restore the terminal

    def _report(self) -> None:
        """Write report.html of a run in progress, and say when it is due again."""
        began_s = time.monotonic()
        try:
            write_report(self._folder, decode=self._decode, picture=self._picture)
        except Exception as error:  # boundary: files of a run in progress, and the user's own pictures
            if not self._report_failed:
                self._report_failed = True
                why = f"{type(error).__name__}: {error}"
                self.warn(f"report.html cannot be written during the run, and is tried again later: {why}")
        took_s = time.monotonic() - began_s
        self._report_due_s = time.monotonic() + max(REPORT_EVERY_S, took_s / REPORT_SHARE)

    def _new_recorder(self, resume: Position | None) -> Recorder:
        """Its samples go as far as the metrics do."""
        return Recorder(
            self._folder / "samples",
            max_bytes=self._samples_max_bytes,
            step_tokens=self._samples_step_tokens,
            background=self._background,
            warn=self.warn,
            last_step=self._metrics.last_step,
            expected_files=resume.sample_files if resume else 0,
        )

    def _warn_of_gap(self, message: str) -> None:
        self.warn(message)
        self.event("gap", what="samples", why=message)

    def _write_slow(
        self, stage: str, step: int, line: Mapping[str, float], unix_s: float, events: Sequence[Event]
    ) -> None:
        self._to_tensorboard(stage, step, lambda board: board.write(stage, step, line, unix_s))
        for tracker in self._trackers:
            tracker.write(stage, step, line)
        self._write_trace(events)

    def _write_table(self, stage: str, step: int, rows: Sequence[SampleRow], unix_s: float) -> None:
        self._to_tensorboard(stage, step, lambda board: board.write_samples(stage, step, rows, unix_s))
        for tracker in self._trackers:
            tracker.write_samples(stage, step, rows)

    def _to_tensorboard(self, stage: str, step: int, write: Callable[[TensorBoard], None]) -> None:
        if self._tensorboard is None:
            return
        try:
            write(self._tensorboard)
        except OSError as error:
            self._tensorboard = None
            self.warn(f"tensorboard/ cannot be written ({error.strerror}): TensorBoard ends at {stage} step {step}")

    def _close_slow(self, events: Sequence[Event]) -> None:
        self._write_trace(events)
        if self._trace is not None:
            with suppress(OSError):  # viewers read a trace without its end
                self._trace.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        for tracker in self._trackers:
            tracker.close()

    def _write_trace(self, events: Sequence[Event]) -> None:
        if self._trace is None or self._trace.full:
            return
        try:
            self._trace.write(events)
        except OSError as error:
            self._trace = None
            self.warn(f"trace.json cannot be written ({error.strerror}): the trace ends here")
            return
        if self._trace.full:
            self.warn("trace.json has reached its largest size: the trace ends here")


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions and hardware of the run, without importing the packages."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("hone-rl", "torch", "transformers"):
        try:
            found[package] = packages.version(package)
        except packages.PackageNotFoundError:
            continue
    return found
