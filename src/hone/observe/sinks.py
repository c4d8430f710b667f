"""Metric sinks of the run's folder: metrics.jsonl (exact across resumes) and TensorBoard; samples as a small table, for
TensorBoard and trackers.

metrics.jsonl is written by the caller's thread, so that its length at a checkpoint is exact; TensorBoard by the
observer's background thread. Console and report are elsewhere. TensorBoard's file format is written through
tensorboard's own protocol buffers: torch is not imported.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import NoneType
from typing import Any

from hone.doctor.ranges import BASELINE_LINES
from hone.errors import HoneError, RunFolderError
from hone.runtime.files import line_start, mapped, whole_lines
from hone.types import Group

COLUMNS = ("prompt", "response", "reward", "advantage", "answer", "finish")
MAX_TEXT = 4000
"""Characters of one cell."""

SampleRow = tuple[str, str, float | None, float | None, str, str]


def table_rows(groups: Sequence[Group], advantages: Sequence[Sequence[float]], most: int) -> list[SampleRow]:
    """Rows in the order of `COLUMNS`, of at most `most` samples, evenly over all of them.

    Args:
        advantages: one per sample of each group.
    """
    every = [
        (group, place, advantage)
        for group, of_group in zip(groups, advantages, strict=True)
        for place, advantage in enumerate(of_group)
    ]
    count = min(most, len(every))
    rows: list[SampleRow] = []
    for number in range(count):
        group, place, advantage = every[number * len(every) // count]
        sample, answer = group.samples[place], group.prompt.answer
        reward = group.rewards[place] if group.rewards else None
        gold = "" if answer is None else _short(str(answer))
        rows.append((_short(group.prompt.text), _short(sample.text), reward, advantage, gold, sample.finish_reason))
    return rows


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ... ({len(text) - MAX_TEXT} more characters)"


def _cell(value: str | float | None) -> str:
    """In a table in Markdown."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else f"{value:.4g}"
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("`", "&#96;")
    return escaped.replace("\r", "").replace("\n", "<br>")


_START_BYTES = 64 << 10
"""Of metrics.jsonl, which its length in lines is estimated from."""
_NUMBERS = (int, float, NoneType)
"""Types of values of a line: null is a value that was not finite."""
_LINE_BYTES = 16 << 10
"""Upper bound of the bytes of a line of metrics."""


class MetricsFile:
    """metrics.jsonl: one JSON object per line: `stage`, `step`, `time_s` (since the run began) and values, sorted.

    A value that is not finite is written as null: JSON has no word for it.
    """

    def __init__(self, path: Path, resume_bytes: int | None) -> None:
        """Open for appending after the first `resume_bytes`; None begins a new file.

        Raises:
            RunFolderError: the file is shorter than that, or the position is not the end of a line.
        """
        self._path = path
        last = _line_before(path, resume_bytes) if resume_bytes else None
        self.last_step: dict[str, int] = {last["stage"]: last["step"]} if last else {}
        """The stage of the last line when the file was opened -> its step there."""
        self._began_s = time.perf_counter() - (last["time_s"] if last else 0.0)
        self._file = path.open("r+b" if resume_bytes else "wb", buffering=0)
        self._file.truncate(resume_bytes or 0)
        self._file.seek(0, os.SEEK_END)

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Append one line and hand it to the operating system."""
        time_s = round(time.perf_counter() - self._began_s, 3)
        line: dict[str, Any] = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line |= {"stage": stage, "step": step, "time_s": time_s}
        text = json.dumps(line, sort_keys=True).encode() + b"\n"
        try:
            if self._file.write(text) < len(text):  # of a regular file: the disk filled up within the line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise HoneError(
                f"{self._path}: step {step} could not be written: {error.strerror}. Free space there and resume."
            ) from error

    def position(self) -> int:
        """Length in bytes, once all of it is on the disk."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def metric_lines(path: Path, broken: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The whole lines of metrics.jsonl; a kill may have torn the last one. Damaged ones are left out.

    Args:
        broken: takes where each damaged line is, and what is wrong with it; `broken_words` puts it in a sentence.
    """
    for number, text in enumerate(whole_lines(path), 1):
        yield from _intact(text, f"line {number}", broken)


def last_metric_lines(path: Path, count: int) -> list[dict[str, Any]]:
    """The last whole lines of metrics.jsonl, at most `count`. Damaged ones are left out."""
    texts = deque(whole_lines(path, last_bytes=count * _LINE_BYTES), maxlen=count)
    return [line for text in texts for line in _intact(text, "", None)]


def broken_words(broken: Sequence[str]) -> str:
    """A sentence about damaged lines of metrics.jsonl; empty where there are none."""
    if not broken:
        return ""
    count = "1 damaged line was" if len(broken) == 1 else f"{len(broken)} damaged lines were"
    return f"metrics.jsonl: {count} left out ({broken[0]}). Restore the file if there is a copy of it."


def _intact(text: bytes, where: str, broken: list[str] | None) -> Iterator[dict[str, Any]]:
    """The line of metrics that a text is; none where it is damaged."""
    try:
        line = json.loads(text)
        if not isinstance(line, dict):
            raise ValueError("not a JSON object")
        if type(line.get("stage")) is not str or type(line.get("step")) is not int or line.get("time_s") is None:
            raise ValueError("stage, step or time_s is missing")
        if wrong := [name for name, value in line.items() if type(value) not in _NUMBERS and name != "stage"]:
            raise ValueError(f"{wrong[0]} is not a number")
    except ValueError as error:
        if broken is not None and (found := f"{where}: {error}") not in broken:
            broken.append(found)
    else:
        yield line


def some_metric_lines(
    path: Path, most: int | None, broken: list[str] | None = None
) -> tuple[list[dict[str, Any]], bool]:
    """Lines of metrics.jsonl, and whether they are all.

    Args:
        most: of a file with more lines than this, this number is read, evenly spaced, besides the first ones of each
            stage, which baselines are made of, and each that has an evaluation. None: all.
        broken: see `metric_lines`; of the lines that are read.
    """
    with mapped(path) as text:
        start = text[:_START_BYTES]
        if most is None or len(text) * start.count(b"\n") <= most * len(start):
            return list(metric_lines(path, broken)), True
        evaluated = (text.rfind(b"\n", 0, found.start()) + 1 for found in re.finditer(rb'"eval/.*', text))
        places = {text.rfind(b"\n", 0, len(text) * number // most) + 1 for number in range(most)} | set(evaluated)
        lines = dict(_lines_at(text, places, broken))
        for stage in {line["stage"] for line in lines.values()}:
            lines |= _lines_at(text, _first_places(text, stage), broken)
        return [lines[place] for place in sorted(lines)], False


def _lines_at(
    text: mmap.mmap | bytes, places: Iterable[int], broken: list[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines that begin at these places, but for one without an end."""
    for place in places:
        if (end := text.find(b"\n", place)) > place:
            yield from ((place, line) for line in _intact(text[place:end], f"byte {place}", broken))


def _first_places(text: mmap.mmap | bytes, stage: str) -> Iterator[int]:
    """Where the first lines of a stage begin."""
    place = text.rfind(b"\n", 0, text.find(json.dumps({"stage": stage})[1:-1].encode())) + 1
    for _ in range(BASELINE_LINES):
        yield place
        place = text.find(b"\n", place) + 1
        if not place:
            return


def _line_before(path: Path, num_bytes: int) -> dict[str, Any]:
    """The last line of so much of a file."""
    found = path.stat().st_size if path.exists() else 0
    if found < num_bytes:
        raise RunFolderError(
            f"{path}: has {found} bytes, the checkpoint was written at {num_bytes}: metrics are missing. "
            "Restore the file, resume from an older checkpoint, or start over with --fresh."
        )
    with path.open("rb") as file:
        start = line_start(file, num_bytes - 1)
        file.seek(start)
        line = file.read(num_bytes - start)
    if not line.endswith(b"\n"):
        raise RunFolderError(f"{path}: byte {num_bytes} is not the end of a line: the file is not the checkpoint's.")
    return json.loads(line)


class TensorBoard:
    """Event files in tensorboard/<stage>/, one run per stage since each counts its own steps."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self._folder, self._resume = folder, resume
        self._files: dict[str, FileIO] = {}

    def write(self, stage: str, step: int, values: Mapping[str, float], unix_s: float) -> None:
        event_pb2, summary_pb2 = _protocol_buffers()
        if stage not in self._files:
            self._open(stage, step, unix_s)
        points = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = summary_pb2.Summary(value=points)
        self._put(stage, event_pb2.Event(wall_time=unix_s, step=step, summary=summary))

    def write_samples(self, stage: str, step: int, rows: Sequence[SampleRow], unix_s: float) -> None:
        """Samples of a step, as a table of the Text page."""
        event_pb2, summary_pb2 = _protocol_buffers()
        tensor_pb2, tensor_shape_pb2, types_pb2 = _tensor_buffers()
        if stage not in self._files:
            self._open(stage, step, unix_s)
        lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
        markdown = "\n".join([*lines, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)])
        shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        text = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[markdown.encode()], tensor_shape=shape)
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        value = summary_pb2.Summary.Value(
            tag="samples", metadata=summary_pb2.SummaryMetadata(plugin_data=plugin), tensor=text
        )
        summary = summary_pb2.Summary(value=[value])
        self._put(stage, event_pb2.Event(wall_time=unix_s, step=step, summary=summary))

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _open(self, stage: str, step: int, unix_s: float) -> None:
        event_pb2, _ = _protocol_buffers()
        folder = self._folder / stage
        folder.mkdir(parents=True, exist_ok=True)
        self._files[stage] = (folder / f"events.out.tfevents.{int(unix_s):010d}.hone.{os.getpid()}").open(
            "wb", buffering=0
        )
        self._put(stage, event_pb2.Event(wall_time=unix_s, file_version="brain.Event:2"))
        if self._resume:  # purges what an interrupted process wrote from this step on
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._put(stage, event_pb2.Event(wall_time=unix_s, step=step, session_log=start))

    def _put(self, stage: str, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self._files[stage]).write(event.SerializeToString())


def _protocol_buffers() -> tuple[Any, Any]:
    """tensorboard's event and summary modules; their classes are made at import, so no type checker sees them."""
    from tensorboard.compat.proto import event_pb2, summary_pb2

    return event_pb2, summary_pb2


def _tensor_buffers() -> tuple[Any, Any, Any]:
    """Like `_protocol_buffers`, its modules of tensors, their shapes and their types."""
    from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2, types_pb2

    return tensor_pb2, tensor_shape_pb2, types_pb2
