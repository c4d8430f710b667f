"""Event log (events.jsonl): what happened to each group, weight version and process, as lines of JSON.

Read by `hone status` and by the audit (`run/audit.py`), which checks that no sample was trained on twice or drawn from
unpublished weights. A resumed run appends to the file: its `started` event has the step, and updates after that step
count as undone.

A thread writes, so that a stalled disk does not delay training. It batches events for `BATCH_S` and merges successive
groups with the same event into one line, which keeps the order that the audit needs. A kill loses at most one batch,
never what a checkpoint relies on: `position` waits until all events are on the disk. Samples of evaluations are
logged only where several engines draw them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.runtime.files import line_start, mapped, whole_lines
from hone.types import Sample

FILE = "events.jsonl"
BATCH_S = 0.1
"""Batching window before events are written."""
MOST_WAITING = 20_000
"""Some megabytes."""
OF_GROUPS = ("group_started", "sampled", "group_finished", "group_dropped")
"""Kinds with a list of groups; they are merged."""

KINDS: dict[str, str] = {
    "stage": "A stage began in this process, new or resumed (stage, steps).",
    "started": "The policy loop began (step, permits, max_staleness).",
    "group_started": "Sampling of groups began (prompts).",
    "sampled": "A replica drew samples of groups (prompts, stream, replica, versions).",
    "group_finished": "Groups are sampled, scored and will be trained on (prompts, versions).",
    "group_dropped": "Groups are sampled and scored, and will not be trained on (prompts).",
    "requeued": "A request was re-sent to another replica (prompt, stream, replica, why).",
    "training": "An update began (step).",
    "trained": "An update was made; `oldest` is its oldest token's version (step, prompts, oldest).",
    "published": "Weights are live in a replica, or everywhere (version, replica, fingerprint).",
    "evaluating": "An evaluation began (step).",
    "evaluated": "An evaluation ended (step).",
    "saving": "A checkpoint is being written (step).",
    "saved": "A checkpoint is complete and on the disk (step).",
    "replica_up": "An engine is running; it samples once weights are published to it (replica).",
    "replica_down": "An engine died or hung (replica, why).",
    "replica_restarting": "An engine is restarting (replica, attempt).",
    "replica_state": "An engine or reward model changed its state (replica, state).",
    "trainer_up": "The trainer is running (ranks, pids by name).",
    "trainer_down": "A rank of the trainer died or hung (why).",
    "alarm": "An alarm began, or advice where `level` is tuning (name, level, stage, step, since, metric, pattern, "
    "cause, what, evidence, change, confirm, source).",
    "alarm_ended": "An alarm or advice ended (name, stage, step).",
    "stopped": "The process ended: the run finished, was stopped, or failed (outcome, why: the error).",
    "gap": "Records are missing; of events, those between the previous line and this one (what, why).",
}
"""Kind -> meaning, and the fields besides `kind` and `at` (Unix seconds). `versions` is [min, max]."""


class EventLog:
    """Appends to one run's events.jsonl. Every method may be called from any thread."""

    def __init__(
        self,
        path: Path,
        *,
        resume_bytes: int | None,
        warn: Callable[[str], None],
        deadline_s: float = 10.0,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        """Continue the file after its last whole line, or begin a new one.

        Args:
            resume_bytes: `position()` at the checkpoint that the run resumes from; a shorter file lost its end, which
                is warned of and recorded. None begins a new file.
            deadline_s: how long `position` and `close` wait for the disk.
            most_waiting: events kept while the disk stalls.
        """
        size = 0
        if resume_bytes is not None and path.exists():
            with path.open("rb") as file:
                size = line_start(file, path.stat().st_size)
        self._file = path.open("r+b" if size else "wb", buffering=0)
        if size:
            self._file.truncate(size)
            self._file.seek(size)
        self._bytes, self._warn, self._deadline_s, self._most_waiting = size, warn, deadline_s, most_waiting
        self._changed = threading.Condition()
        self._waiting: list[dict[str, Any]] = []
        self._dropped = 0
        self._to_sync = self._is_closing = self._is_stalled = self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="hone-events", daemon=True)
        self._thread.start()
        if resume_bytes is not None and size < resume_bytes:
            why = f"{FILE} has {size:,} bytes, the checkpoint was written at {resume_bytes:,}"
            warn(f"{why}: the end of it was lost")
            self.write("gap", what="events", why=why)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event. A full disk ends the record with a warning, not the run; while a disk stalls, events beyond
        the first `most_waiting` are counted and dropped.

        Raises:
            ValueError: the kind is not in KINDS, a bug in Hone.
        """
        if kind not in KINDS:
            raise ValueError(f"event {kind!r} is not known: add one line for it to KINDS in hone/observe/events.py")
        event = {"at": round(time.time(), 4), "kind": kind, **fields}
        with self._changed:
            if self._has_failed or self._is_closing:
                return
            if len(self._waiting) < self._most_waiting and not self._dropped:
                self._waiting.append(event)
                if len(self._waiting) == 1:
                    self._changed.notify_all()
                return
            self._dropped += 1
        if self._dropped == 1:
            self._warn(
                f"{FILE}: the disk takes nothing; {self._most_waiting:,} events wait, more are counted and dropped"
            )

    def position(self) -> int:
        """Length of the file, once all events so far are on the disk.

        A disk that stalls longer causes a warning; the returned length is then more than the file has.
        """
        with self._changed:
            self._to_sync = True
            self._changed.notify_all()
            wait_s = 0.0 if self._is_stalled else self._deadline_s
            is_done = self._changed.wait_for(lambda: not self._to_sync or self._has_failed, wait_s)
            is_news, self._is_stalled = not is_done and not self._is_stalled, not is_done
            size = self._bytes + (self._has_failed or not is_done)
        if is_news:
            self._warn(f"{FILE}: the disk has taken nothing for {self._deadline_s:g} s; the run continues without it")
        return size

    def close(self) -> None:
        with self._changed:
            self._is_closing = self._to_sync = True
            self._changed.notify_all()
        self._thread.join(0.0 if self._is_stalled else self._deadline_s)

    def _run(self) -> None:
        with self._file:
            try:
                while self._write_batch():
                    pass
            except OSError as error:
                self._warn(f"{FILE} cannot be written ({error.strerror}): the record of events ends here")
                with self._changed:
                    self._has_failed = True
                    self._changed.notify_all()

    def _write_batch(self) -> bool:
        """Write waiting events after the batching window. False: the log is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._to_sync or self._is_closing)
            self._changed.wait_for(lambda: self._to_sync or self._is_closing, BATCH_S)
            events, self._waiting = self._waiting, []
            dropped, self._dropped = self._dropped, 0
            to_sync, is_last = self._to_sync, self._is_closing
        if dropped:
            why = f"the disk took nothing for a while: {dropped:,} events were dropped"
            events.append({"at": round(time.time(), 4), "kind": "gap", "what": "events", "why": why})
            self._warn(f"{FILE}: {why}")
        text = b"".join(_encode(_packed(event)).encode() + b"\n" for event in merged(events))
        if text and self._file.write(text) < len(text):  # of a regular file: the disk filled up within a line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if to_sync:
            os.fsync(self._file.fileno())
        with self._changed:
            self._bytes += len(text)
            self._is_stalled = False
            if to_sync:
                self._to_sync = False
                self._changed.notify_all()
        return not is_last


def merged(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same events, where neighbours differ only in when and to which groups they happened as one."""
    last: dict[str, Any] | None = None
    for event in events:
        if last is not None and event["kind"] in OF_GROUPS and _but_groups(last) == _but_groups(event):
            last["prompts"] += event["prompts"]
            last["at"] = event["at"]
            continue
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last


def _but_groups(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("at", "prompts")}


def _packed(event: dict[str, Any]) -> dict[str, Any]:
    """With successive groups as [first, last]: {'prompts': [3, 4, 5, 9]} -> {'prompts': [[3, 5], 9]}."""
    if "prompts" not in event:
        return event
    runs: list[list[int]] = []
    for prompt in sorted(event["prompts"]):
        if runs and prompt == runs[-1][1] + 1:
            runs[-1][1] = prompt
        else:
            runs.append([prompt, prompt])
    return {**event, "prompts": [run[0] if run[0] == run[1] else run for run in runs]}


_encode = json.JSONEncoder(separators=(",", ":")).encode


def versions_of(samples: Iterable[Sample]) -> tuple[int, int] | None:
    """Oldest and newest version among the samples' tokens, as in events; None without a token."""
    versions = [span.version for sample in samples for span in sample.versions]
    return (min(versions), max(versions)) if versions else None


def read_events(path: Path, *, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The events of a file, in order; nothing when there is none. A kill may have torn the last line, which is left
    out.

    Args:
        last_bytes: read the end of the file only, from a whole line on.
    """
    return map(_decoded, whole_lines(path, last_bytes=last_bytes))


def events_of(
    path: Path, kinds: Sequence[str], *, before: str | None = None, but_last_bytes: int = 0
) -> Iterator[dict[str, Any]]:
    """The events of some kinds, in order, found without decoding the others: of a long run in a fraction of a second.

    Args:
        before: a kind; in front of each event comes the last one of this kind before it, once.
        but_last_bytes: leave out what `read_events(last_bytes=...)` reads.
    """
    wanted = re.compile(b'"kind":"(?:%s)"' % b"|".join(kind.encode() for kind in kinds))
    with mapped(path) as text:
        last, limit = -1, len(text) - but_last_bytes
        for found in wanted.finditer(text):
            start, end = text.rfind(b"\n", 0, found.start()) + 1, text.find(b"\n", found.end())
            if end < 0 or not start <= limit > 0:
                return
            if before is not None:
                place = text.rfind(b'"kind":"%s"' % before.encode(), 0, start)
                if place > last:
                    yield _decoded(text[text.rfind(b"\n", 0, place) + 1 : text.find(b"\n", place)])
                    last = place
            yield _decoded(text[start:end])


def _decoded(line: bytes) -> dict[str, Any]:
    """An event; a damaged line is one of kind `gap`."""
    try:
        event = json.loads(line)
        if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
            raise ValueError("not an event")
        if "prompts" in event:
            runs = [run if isinstance(run, list) else [run, run] for run in event["prompts"]]
            event["prompts"] = [prompt for first, last in runs for prompt in range(first, last + 1)]
        return event
    except ValueError as error:
        return {"at": 0.0, "kind": "gap", "what": "events", "why": f"a line is damaged: {error}"}
