"""HTML report of a run: one self-contained page made from its folder, viewed without a network.

Reads what the observer wrote (metrics.jsonl, samples/, logs/summary.json, run.yaml) and puts a bounded part of it
into a page (`page.py`).
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hone.doctor.failure import failure_alarm
from hone.doctor.ranges import healthy_ranges
from hone.doctor.watch import Alarm, by_importance, watch_lines
from hone.errors import RunFolderError
from hone.observe.curves import stages_of
from hone.observe.events import FILE, events_of
from hone.observe.metrics import PHASES, find_metric
from hone.observe.page import page
from hone.observe.recorder import GroupRewards, RecordedSample, read_samples, recorded_steps
from hone.observe.sinks import broken_words, last_metric_lines, some_metric_lines
from hone.observe.thumbnails import read_thumbnails
from hone.observe.trackers import Labels
from hone.runtime.files import set_aside, write_whole

SUMMARY = Path("logs") / "summary.json"

MAX_LINES = 2000
"""Lines of metrics.jsonl that a page uses; of a longer file, evenly spaced ones."""
MAX_SAMPLES = 320
"""In the page, over all steps shown."""
STEPS_SHOWN = 5
"""Steps per stage whose samples are in the page: first, last, and evenly between."""
MAX_TOKENS = 150_000
"""Tokens with logprobs in the page; samples beyond it show their text only."""
MAX_PICTURES = 60
"""In the page: of the best and the worst sample of groups, evenly over the groups shown; as many of prompts."""
MAX_MARKS = 200
"""Events beside the curves; of more these are evenly spaced."""
MAX_MARK_TEXT = 300
"""Characters of one of them."""
MAX_TEXT = 20_000
"""Characters of one prompt or response in the page."""


@dataclass
class RunSummary:
    """Summary of a run besides metrics and samples; logs/summary.json."""

    title: str
    began_unix_s: float
    group: str | None = None
    tags: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Where it comes from: `command`, `git_commit`, `inputs` (hashes by name)."""
    ended_unix_s: float | None = None
    outcome: str = "not finished"

    @classmethod
    def begin(
        cls,
        folder: Path,
        labels: Labels,
        *,
        versions: Mapping[str, str],
        origin: Mapping[str, Any],
        resume: bool,
        warn: Callable[[str], None],
    ) -> RunSummary:
        """A run begins, or continues: then it keeps the time at which it began."""
        summary = cls(labels.name, time.time(), labels.group, labels.tags, versions=versions, origin=origin)
        if resume and (folder / SUMMARY).exists():
            try:
                summary.began_unix_s = cls.read(folder).began_unix_s
            except RunFolderError as error:
                warn(set_aside(folder, folder / SUMMARY, f"is torn ({error.__cause__})"))
        summary._write(folder)
        return summary

    def end(self, folder: Path, outcome: str) -> None:
        self.ended_unix_s, self.outcome = time.time(), outcome
        self._write(folder)

    @classmethod
    def read(cls, folder: Path) -> RunSummary:
        """Of a run; an empty one where there is none. Raises RunFolderError for a damaged one."""
        path = folder / SUMMARY
        try:
            return cls(**json.loads(path.read_text())) if path.exists() else cls(title=folder.name, began_unix_s=0.0)
        except (ValueError, TypeError) as error:
            raise RunFolderError(
                f"{path}: is torn, or of another version of Hone ({error}). Restore it, or move it away: the run can "
                "be read without it."
            ) from error

    def _write(self, folder: Path) -> None:
        write_whole(folder / SUMMARY, json.dumps(asdict(self), indent=1))


ReadPicture = Callable[[str, Any], bytes | None]
"""Draws a response, given its text and the row's answer, as PNG bytes; None where there is nothing to draw."""


def write_report(
    run_folder: Path, *, decode: Callable[[Sequence[int]], str] | None = None, picture: ReadPicture | None = None
) -> Path:
    """Write report.html from what the run's folder holds, finished or not. Returns its path.

    Args:
        decode: token ids to text, for the view of single tokens.
        picture: draws a response. What both give is kept in samples/, so that a report made again from the folder has
            it too.
    """
    data = report_data(run_folder, decode=decode, picture=picture)
    path = run_folder / "report.html"
    write_whole(path, page(data["summary"]["title"], data, "run"))
    return path


def report_data(
    run_folder: Path,
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
    picture: ReadPicture | None = None,
    max_lines: int | None = MAX_LINES,
    running: bool = False,
) -> dict[str, Any]:
    """What the page of a run shows, as JSON values.

    Args:
        max_lines: of metrics that are read, evenly spaced, besides every evaluation. In a longer file, alarms are those
            that the run reported. None: all.
        running: see `alarms_of_run`.
    """
    samples = choose_samples(run_folder)
    metrics = run_folder / "metrics.jsonl"
    broken = list[str]()
    lines, has_every_line = some_metric_lines(metrics, max_lines, broken)
    data = {
        "summary": asdict(RunSummary.read(run_folder)),
        "config": _text(run_folder / "run.yaml"),
        "stages": stages_of(lines),
        "phases": PHASES,
        "memory": _memory(run_folder / "memory.json"),
        "timeline": _text(run_folder / "memory.svg"),
        "samples": sample_rows(samples, _pictures(run_folder, samples, picture), thumbnails_of(run_folder, samples)),
        "pieces": _pieces(run_folder, samples, decode),
        "recorded_steps": {stage: len(steps) for stage, steps in recorded_steps(run_folder).items()},
    }
    watched = watch_lines(_settings(run_folder), lines).alarms if has_every_line else None
    data["alarms"] = [asdict(alarm) for alarm in alarms_of_run(run_folder, watched, running=running)]
    data["has_every_line"], data["broken"] = has_every_line, broken_words(broken)
    data["healthy"] = healthy_ranges(lines)
    events = events_of(run_folder / FILE, MARKING, before="training")
    marks = marks_of_events(events)
    for c in (data["memory"] or {}).get("changes", ()):
        what = f"{c['key']}: {c['old']} to {c['new']}, {c['reason']}"
        marks.append({"stage": c["stage"], "step": c["step"], "what": what})
    data["marks"] = _spread(sorted(marks, key=lambda mark: mark["step"]), MAX_MARKS)
    data["metrics"] = {
        name: asdict(metric)
        for stage in data["stages"]
        for part in ("steps", "evals")
        for name in stage[part]["values"]
        if (metric := known_metric(name))
    }
    return data


def choose_samples(run_folder: Path) -> list[RecordedSample]:
    """Whole groups from a few steps of each stage, `MAX_SAMPLES` in all; of each step those with signal come first."""
    steps = recorded_steps(run_folder)
    places = [(stage, step) for stage, found in steps.items() for step in _spread(found, STEPS_SHOWN)]
    found: list[RecordedSample] = []
    for place in places:
        with suppress(RunFolderError):  # a damaged file takes no other step's samples away
            found += step_samples(run_folder, *place, MAX_SAMPLES // len(places))
    return found


def step_samples(run_folder: Path, stage: str, step: int, most: int = MAX_SAMPLES) -> list[RecordedSample]:
    """Whole groups of a step, at most `most` samples; those with signal come first. Raises as `read_samples` does."""

    def chosen(groups: Sequence[GroupRewards]) -> list[int]:
        telling = [place for place, rewards in enumerate(groups) if has_signal(rewards)]
        silent = [place for place, rewards in enumerate(groups) if not has_signal(rewards)]
        room = max(1, most // max(map(len, groups), default=1))
        shown = _spread(telling, room)
        return shown + _spread(silent, room - len(shown))

    return read_samples(run_folder, step, stage, chosen=chosen)[:most]


def has_signal(rewards: GroupRewards) -> bool:
    """Whether the samples of a group differ in reward, so that something can be learnt from it."""
    return len({reward for reward in rewards if reward is not None}) > 1


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """`most` of the items, evenly: the first and the last among them when there is room for two."""
    if len(items) <= most:
        return list(items)
    if most <= 0:
        return []
    if most == 1:
        return [items[0]]
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def alarms_of_run(run_folder: Path, watched: Iterable[Alarm] | None, *, running: bool) -> list[Alarm]:
    """The alarms of a run, the one to look at first in front: the error that ended it, if one did.

    Args:
        watched: those found in every line of its metrics; None: those that the run reported.
        running: whether a process holds the run now, so that no error has ended it.
    """
    found = by_importance(alarms_of_events(run_folder) if watched is None else watched)
    failed = None if running else _failure(run_folder)
    return [failed, *found] if failed else found


def alarms_of_events(run_folder: Path) -> list[Alarm]:
    """The alarms that a run reported, in this order. A resumed run may report one again, which replaces the first."""
    names = [field.name for field in fields(Alarm) if field.name != "ended"]
    found: dict[tuple[str, str], list[Alarm]] = {}
    for event in events_of(run_folder / FILE, ("alarm", "alarm_ended")):
        of_name = found.setdefault((event["stage"], event["name"]), [])
        if event["kind"] == "alarm":
            values = {name: event[name] for name in names}
            alarm = Alarm(**{**values, "evidence": tuple(values["evidence"])})
            of_name[:] = [other for other in of_name if other.ended is not None and other.since < alarm.since]
            of_name.append(alarm)
        elif of_name:
            of_name[-1].ended = event["step"]
    return sorted((alarm for of_name in found.values() for alarm in of_name), key=lambda alarm: alarm.step)


def _failure(run_folder: Path) -> Alarm | None:
    """The alarm of the error that ended a run, if one did."""
    stage, why = "start", ""
    for event in events_of(run_folder / FILE, ("stage", "stopped")):
        if event["kind"] == "stage":
            stage, why = event["stage"], ""
        else:
            why = event.get("why", "")
    if not why:
        return None
    last = {line["stage"]: line["step"] for line in last_metric_lines(run_folder / "metrics.jsonl", 1)}
    return failure_alarm(why, stage=stage, step=last.get(stage, 0) + 1)


WORDS = {
    "replica_down": "engine {replica} failed: {why}",
    "trainer_down": "the trainer failed: {why}",
    "gap": "records of {what} are missing: {why}",
}
"""Events beside the curves, in words."""
MARKING = ("stage", "started", *WORDS)


def marks_of_events(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What happened to the run, for the curves: `stage`, the `step` it happened in, and `what`."""
    marks: list[dict[str, Any]] = []
    stage, steps = "", dict[str, int]()
    for event in events:
        kind = event["kind"]
        if kind == "stage":
            stage = event["stage"]
        elif kind == "training":
            steps[stage] = event["step"]
        elif kind == "started":
            steps[stage] = event["step"]
            if event["step"]:
                marks.append({"stage": stage, "step": event["step"], "what": "continued from a checkpoint"})
        elif stage:
            what = WORDS[kind].format_map(defaultdict(str, event))[:MAX_MARK_TEXT]
            marks.append({"stage": stage, "step": steps.get(stage, 0), "what": what})
    return marks


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _kept(path: Path) -> dict[str, str]:
    """What an earlier report kept in samples/; empty where there is none, or it is damaged."""
    try:
        found = json.loads(_text(path) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _settings(run_folder: Path) -> dict[str, Any]:
    """The resolved run file, nested; empty where it was not kept. Raises RunFolderError for a damaged one."""
    path = run_folder / ".identity.json"
    try:
        return json.loads(_text(path) or '{"config": {}}')["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}. Restore it, or start again with --fresh.") from error


def _memory(path: Path) -> Any:
    """What the run's memory was planned and measured to be (`memory.record`); None where that was not kept."""
    try:
        return json.loads(_text(path) or "null")
    except ValueError:
        return None


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def known_metric(name: str) -> Any:
    """The registry's entry, or None for a run folder of another version of Hone."""
    try:
        return find_metric(name)
    except ValueError:
        return None


def thumbnails_of(run_folder: Path, samples: Sequence[RecordedSample]) -> dict[str, str]:
    """Digest -> thumbnail as base64 text, of the pictures in prompts of these samples."""
    return read_thumbnails(run_folder, (digest for one in samples for digest in one.pictures), most=MAX_PICTURES)


def sample_rows(
    samples: Sequence[RecordedSample], pictures: Mapping[str, str], thumbnails: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Samples as a page has them. The first row with a picture in its prompt brings its thumbnail for all."""
    rows, tokens_left, waiting = [], MAX_TOKENS, dict(thumbnails)
    for recorded in samples:
        sample = recorded.sample
        row = {
            "stage": recorded.stage,
            "step": recorded.step,
            "group": recorded.prompt_id,
            "prompt": recorded.prompt[:MAX_TEXT],
            "answer": None if recorded.answer is None else str(recorded.answer)[:MAX_TEXT],
            "response": sample.text[:MAX_TEXT],
            "index": sample.index,
            "num_tokens": len(sample.token_ids),
            "finish_reason": sample.finish_reason,
            "versions": sorted({span.version for span in sample.versions}),
            "reward": _short(recorded.reward),
            "advantage": _short(recorded.advantage),
            "scores": {name: _short(value) for name, value in recorded.scores.items()},
            "faults": recorded.faults,
        }
        if _place(recorded) in pictures:
            row["picture"] = pictures[_place(recorded)]
        if shown := [digest for digest in recorded.pictures if digest in thumbnails]:
            row["shows"] = shown
            if new := {digest: waiting.pop(digest) for digest in shown if digest in waiting}:
                row["thumbnails"] = new
        if len(sample.token_ids) <= tokens_left:
            tokens_left -= len(sample.token_ids)
            row["token_ids"] = sample.token_ids.tolist()
            row["logprobs"] = _rounded(sample.sampler_logprobs, 3)
            if recorded.figures.advantages_T is not None:
                row["advantages"] = _rounded(recorded.figures.advantages_T, 3)
            if recorded.figures.mismatch_T is not None:
                row["mismatch"] = _rounded(recorded.figures.mismatch_T, 4)
            if recorded.figures.entropy_T is not None:
                row["entropy"] = _rounded(recorded.figures.entropy_T, 3)
        rows.append(row)
    return rows


def _rounded(value_T: NDArray[Any], digits: int) -> list[float | None]:
    return [round(value, digits) if math.isfinite(value) else None for value in value_T.tolist()]


def _pieces(
    run_folder: Path, samples: Sequence[RecordedSample], decode: Callable[[Sequence[int]], str] | None
) -> dict[str, str]:
    """Token id -> its text, for the tokens in the page; empty without a decoder."""
    kept = run_folder / "samples" / "tokens.json"
    if decode is None:
        return _kept(kept)
    pieces = {
        str(token): decode([token]) for token in sorted({t for s in samples for t in s.sample.token_ids.tolist()})
    }
    if pieces:
        write_whole(kept, json.dumps(pieces))
    return pieces


def _pictures(run_folder: Path, samples: Sequence[RecordedSample], picture: ReadPicture | None) -> dict[str, str]:
    """Place of a sample -> its picture as base64 text; empty without a renderer."""
    kept = run_folder / "samples" / "pictures.json"
    if picture is None:
        return _kept(kept)
    groups: dict[tuple[str, int, str], list[RecordedSample]] = {}
    for sample in samples:
        if sample.reward is not None:
            groups.setdefault((sample.stage, sample.step, sample.prompt_id), []).append(sample)
    ends = [(max(group, key=_reward), min(group, key=_reward)) for group in groups.values()]
    shown = {_place(sample): sample for pair in _spread(ends, MAX_PICTURES // 2) for sample in pair}
    drawn = {place: picture(shot.sample.text, shot.answer) for place, shot in shown.items()}
    found = {place: base64.b64encode(png).decode() for place, png in drawn.items() if png is not None}
    if found:
        write_whole(kept, json.dumps(found))
    return found


def _place(recorded: RecordedSample) -> str:
    return f"{recorded.stage}/{recorded.step}/{recorded.prompt_id}/{recorded.sample.index}"


def _reward(recorded: RecordedSample) -> float:
    return recorded.reward or 0.0
