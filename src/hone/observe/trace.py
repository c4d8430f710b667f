"""Wall-clock spans: time per phase of a step, and trace.json for Perfetto (ui.perfetto.dev).

A span belongs to the thread and the asyncio task that opened it. The outermost span of a task takes a lane of its
own for as long as it is open, so spans in one lane always nest, however many tasks run at once.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

MAX_TRACE_BYTES = 32 * 2**20
"""Perfetto stays fast up to about this; longer runs keep the trace of their beginning."""


@dataclass(frozen=True, slots=True)
class Event:
    """One closed span. Times are seconds of `time.perf_counter`."""

    name: str
    lane: str
    start_s: float
    end_s: float
    args: Mapping[str, Any]


class Spans:
    """Open and closed spans of this process. Thread-safe; opening and closing one costs microseconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lanes: dict[tuple[int, int], tuple[str, int, int]] = {}
        """(thread, task) -> its lane's family and number, and how many spans it has open."""
        self._taken: dict[str, set[int]] = {}
        """Lane family -> numbers in use."""
        self._open: dict[str, tuple[int, float]] = {}
        """Span name -> how many are open, and since when time is counted."""
        self._busy_s: dict[str, float] = {}
        self._events: list[Event] = []

    def span(self, name: str, *, has_lane: bool = True, **args: Any) -> Span:
        """Without a lane it is counted in `take_seconds` and shown nowhere."""
        return Span(self, name, args, has_lane=has_lane)

    def take_seconds(self) -> dict[str, float]:
        """Seconds since the last call in which at least one span of each name was open; a name per such span.

        Two that overlap count once, so that no span takes longer than the clock.
        """
        now = time.perf_counter()
        with self._lock:
            for name, (count, since) in self._open.items():
                self._busy_s[name] = self._busy_s.get(name, 0.0) + now - since
                self._open[name] = (count, now)
            seconds, self._busy_s = self._busy_s, {}
        return seconds

    def take_events(self) -> list[Event]:
        """The spans closed since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def add(self, event: Event) -> None:
        """A span measured elsewhere, in a given lane; it counts in no `take_seconds`."""
        with self._lock:
            self._events.append(event)

    def opened(self, name: str, owner: tuple[int, int], now: float) -> str:
        with self._lock:
            count, since = self._open.get(name, (0, now))
            self._open[name] = (count + 1, since)
            family, number, depth = self._lanes.get(owner, (name, 0, 0))
            if depth == 0:
                taken = self._taken.setdefault(name, set())
                number = next(n for n in range(1, len(taken) + 2) if n not in taken)
                taken.add(number)
            self._lanes[owner] = (family, number, depth + 1)
            return family if number == 1 else f"{family} {number}"

    def closed(self, event: Event, owner: tuple[int, int], *, has_lane: bool) -> None:
        with self._lock:
            if has_lane:
                self._events.append(event)
            count, since = self._open.pop(event.name)
            if count > 1:
                self._open[event.name] = (count - 1, since)
            else:
                self._busy_s[event.name] = self._busy_s.get(event.name, 0.0) + event.end_s - since
            family, number, depth = self._lanes.pop(owner)
            if depth > 1:
                self._lanes[owner] = (family, number, depth - 1)
            else:
                self._taken[family].remove(number)


class Span:
    """A context manager, used once."""

    __slots__ = ("_args", "_has_lane", "_lane", "_name", "_owner", "_spans", "_start_s")

    def __init__(self, spans: Spans, name: str, args: Mapping[str, Any], *, has_lane: bool) -> None:
        self._spans, self._name, self._args, self._has_lane = spans, name, args, has_lane

    def __enter__(self) -> None:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs in this thread
            task = None
        self._owner = threading.get_ident(), id(task)
        self._start_s = time.perf_counter()
        self._lane = self._spans.opened(self._name, self._owner, self._start_s)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        event = Event(self._name, self._lane, self._start_s, time.perf_counter(), self._args)
        self._spans.closed(event, self._owner, has_lane=self._has_lane)


class Timeline:
    """What one role does, in a lane of its own that has no gaps: what began last and has not ended, else `idle`."""

    def __init__(self, spans: Spans, role: str) -> None:
        self._spans, self._role = spans, role
        self._lock = threading.Lock()
        self._doing: list[str] = []
        self._since_s = time.perf_counter()

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """For as long as the role does this; the same may be begun several times at once."""
        self._change(self._doing.append, what)
        try:
            yield
        finally:
            self._change(self._doing.remove, what)

    def _change(self, change: Callable[[str], None], what: str) -> None:
        with self._lock:
            before = self._shown
            change(what)
            if self._shown != before:
                now = time.perf_counter()
                self._spans.add(Event(before, self._role, self._since_s, now, {}))
                self._since_s = now

    @property
    def _shown(self) -> str:
        return self._doing[-1] if self._doing else "idle"


class TraceFile:
    """trace.json in Chrome's trace event format, appended to as the run goes; closed or torn, viewers read it.

    A resumed run continues the file on the same clock, after whatever the interrupted process wrote last.
    """

    def __init__(self, path: Path, *, title: str, resume: bool, max_bytes: int = MAX_TRACE_BYTES) -> None:
        started_unix_s, size = _resume_point(path) if resume else (time.time(), 0)
        self._zero_s = time.perf_counter() - (time.time() - started_unix_s)
        self._file = path.open("r+b" if size else "wb", buffering=0)
        self._file.truncate(size)
        self._file.seek(size)
        self._size, self._max_bytes = size, max_bytes
        self._lanes: set[str] = set()
        self.full = False
        if size == 0:
            self._put("[\n" + _metadata("process_name", 0, name=f"hone {title}", started_unix_s=started_unix_s))

    def write(self, events: Sequence[Event]) -> None:
        """Append closed spans; beyond `max_bytes` they are let go and `full` is true."""
        if self.full:
            return
        text = ""
        for event in events:
            lane = zlib.crc32(event.lane.encode()) >> 1  # the same lane in a resumed process, without a table
            if event.lane not in self._lanes:
                self._lanes.add(event.lane)
                text += ",\n" + _metadata("thread_name", lane, name=event.lane)
            start_us, length_us = (event.start_s - self._zero_s) * 1e6, (event.end_s - event.start_s) * 1e6
            args = f', "args": {json.dumps(event.args, default=str)}' if event.args else ""
            text += (
                f',\n{{"name": {json.dumps(event.name)}, "ph": "X", "pid": 1, "tid": {lane}, '
                f'"ts": {start_us:.1f}, "dur": {length_us:.1f}{args}}}'
            )
        self._put(text)
        self.full = self._size > self._max_bytes

    def close(self) -> None:
        self._put("\n]\n")
        self._file.close()

    def _put(self, text: str) -> None:
        self._size += self._file.write(text.encode())


def _metadata(kind: str, lane: int, **args: Any) -> str:
    return json.dumps({"name": kind, "ph": "M", "pid": 1, "tid": lane, "args": args})


def _resume_point(path: Path) -> tuple[float, int]:
    """When the trace began (Unix seconds) and how many bytes of it are whole; a new one where there is none."""
    try:
        lines = path.read_bytes().removesuffix(b"\n]\n").split(b",\n")
        started_unix_s = json.loads(lines[0].removeprefix(b"[\n"))["args"]["started_unix_s"]
    except (OSError, ValueError, KeyError):
        return time.time(), 0
    try:
        json.loads(lines[-1].removeprefix(b"[\n"))
    except ValueError:
        lines.pop()
    return started_unix_s, len(b",\n".join(lines))
