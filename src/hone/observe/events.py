"""events.jsonl: what happened to each group, each version of the weights and each process, one line per event.

For people (`hone status`) and for the checker (`loop/audit.py`), which proves from it that no fault had a sample
trained twice or drawn from weights that were not published. Numbers to look at are in metrics.jsonl. A resumed run goes
on with the file: its `started` says at which step, and what was trained after that step counts as undone.

Written by the caller's thread and handed to the operating system at once, so that a kill loses nothing: some eight
microseconds an event, two events a group. Samples of evaluations are in it only where several engines draw them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from hone.types import Sample

FILE = "events.jsonl"

KINDS: dict[str, str] = {
    "stage": "A stage of the run began (stage, steps): in this process, anew or resumed.",
    "started": "The policy loop began at a step, with so many permits (step, permits, max_staleness).",
    "group_started": "A group got its permit and is being sampled (prompt, id).",
    "sampled": "A replica drew samples of a group (prompt, stream, replica, versions).",
    "group_finished": "A group is sampled, scored and will be trained on (prompt, versions).",
    "group_dropped": "A group is sampled and scored, and will not be trained on (prompt).",
    "requeued": "What a replica was sampling goes to another one (prompt, stream, replica, why).",
    "training": "An update began (step).",
    "trained": "An update was made: its number, its groups, the oldest token's version (step, prompts, oldest).",
    "published": "Weights are live: in a replica, or without one everywhere (version, replica, fingerprint).",
    "evaluating": "An evaluation began (step).",
    "evaluated": "It ended (step).",
    "saving": "A checkpoint is being written (step).",
    "saved": "It is whole and on the disk (step).",
    "replica_up": "An engine's process is there; it may sample once weights are published to it (replica).",
    "replica_down": "An engine died, hung or was given up (replica, why).",
    "replica_restarting": "An engine is started again (replica, attempt).",
    "trainer_up": "The trainer's processes are there (ranks).",
    "trainer_down": "A rank of the trainer died or hung (why).",
    "stopped": "The process ended in order: the run was finished, stopped or failed (outcome).",
}
"""Kind -> what it means, and the fields it has besides `kind` and `at` (Unix seconds). `versions` is [min, max]."""


class Witness(Protocol):
    """Who is told what happens; `observer.Observer` is one."""

    def event(self, kind: str, **fields: Any) -> None:
        """Keep one event."""
        ...

    def during(self, role: str, what: str) -> AbstractContextManager[None]:
        """Keep what a role does meanwhile."""
        ...


class EventLog:
    """Appends to one run's events.jsonl. Every method may be called from any thread."""

    def __init__(self, path: Path, *, resume: bool, warn: Callable[[str], None]) -> None:
        """Go on with the file, after its last whole line, or begin a new one."""
        size = path.read_bytes().rfind(b"\n") + 1 if resume and path.exists() else 0
        self._file = path.open("r+b" if size else "wb", buffering=0)
        if size:
            self._file.truncate(size)
            self._file.seek(size)
        self._warn, self._lock = warn, threading.Lock()

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event. A full disk ends the record with a warning, not the run.

        Raises:
            ValueError: the kind is not in KINDS. That is a mistake in Hone.
        """
        if kind not in KINDS:
            raise ValueError(f"event {kind!r} is not known: add one line for it to KINDS in hone/observe/events.py")
        line = _encode({"at": round(time.time(), 4), "kind": kind, **fields}) + "\n"
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(line.encode())
            except OSError as error:
                self._file.close()
                self._warn(f"{FILE} cannot be written ({error.strerror}): the record of events ends here")

    def close(self) -> None:
        with self._lock:
            self._file.close()


_encode = json.JSONEncoder(separators=(",", ":")).encode


def versions_of(samples: Iterable[Sample]) -> tuple[int, int] | None:
    """The oldest and the newest version among the samples' tokens, as events tell them; None without a token."""
    written = [sample.versions for sample in samples if sample.versions]
    return (min(map(min, written)), max(map(max, written))) if written else None


def read_events(path: Path, *, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The events of a file, in order; nothing when there is none. A kill may have torn the last line, which is left
    out.

    Args:
        last_bytes: read the end of the file only, from a whole line on.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        skipped = 0 if last_bytes is None else max(0, path.stat().st_size - last_bytes)
        lines.seek(skipped)
        if skipped:
            lines.readline()
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)
