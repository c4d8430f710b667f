"""Records of a long run stay small, and a resume reads only their ends."""

import json
import re
import tracemalloc

import pytest
from observed import Settings

from hone.memory.record import Record, comparison
from hone.observe.events import EventLog, read_events
from hone.observe.observer import Observer
from hone.observe.report import MAX_LINES
from hone.observe.sinks import MetricsFile

GROUPS = 32


def test_events_take_a_fifth_of_a_line_each_and_all_come_back(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", resume_bytes=None, warn=pytest.fail)
    told, unmerged = [], 0
    for step in range(1, 51):
        prompts = list(range(GROUPS * (step - 1), GROUPS * step))
        events = [("group_started", {"prompts": [prompt]}) for prompt in prompts]
        for late in range(4):  # groups finish out of order, and something else happens in between
            events += [("group_finished", {"prompts": [p], "versions": [step - 1] * 2}) for p in prompts[late::4]]
            events.append(("training", {"step": step}))
        events += [
            ("trained", {"step": step, "prompts": prompts, "oldest": step - 1}),
            ("published", {"version": step}),
        ]
        for kind, fields in events:
            log.write(kind, **fields)
            told += [(kind, prompt) for prompt in fields.get("prompts", [None])]
            unmerged += len(json.dumps({"at": 1732283105.1234, "kind": kind, **fields}, separators=(",", ":"))) + 1
    log.close()
    assert (tmp_path / "events.jsonl").stat().st_size < unmerged / 5
    found = [(e["kind"], prompt) for e in read_events(tmp_path / "events.jsonl") for prompt in e.get("prompts", [None])]
    assert sorted(found, key=str) == sorted(told, key=str)


def test_a_resume_holds_only_the_ends(tmp_path):
    metrics, events = tmp_path / "metrics.jsonl", tmp_path / "events.jsonl"
    line = json.dumps({"stage": "rl", "step": 7, "time_s": 3.5} | {f"train/{i}": 0.1234567 for i in range(60)}) + "\n"
    metrics.write_text(line * 10_000)
    events.write_text('{"kind":"saved","step":1}\n' * 200_000)
    tracemalloc.start()
    file = MetricsFile(metrics, metrics.stat().st_size)
    log = EventLog(events, resume_bytes=events.stat().st_size, warn=pytest.fail)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    log.close()
    file.close()
    assert file.last_step == {"rl": 7} and peak_bytes < 1 << 20 < metrics.stat().st_size / 10


def test_the_end_of_a_long_run_holds_a_part_of_its_metrics(tmp_path):
    """report.html and the comparison of memory are made in the process that trains, whose memory the run needs."""
    steps = 3 * MAX_LINES
    observer = Observer(tmp_path, Settings(), title="t", total_steps=steps)
    Record(device="cpu", what="memory", limit_bytes=1, has_limit=False).write(tmp_path)
    line = {"stage": "rl", "time_s": 0.5, "train/loss": 0.1234567, "memory/update_peak_mib": 100}
    with (tmp_path / "metrics.jsonl").open("w") as lines:
        lines.writelines(json.dumps({**line, "step": step}) + "\n" for step in range(1, steps + 1))
    tracemalloc.start()
    (row,) = comparison(tmp_path)[1]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert row.measured_bytes == 100 << 20 and peak_bytes < (tmp_path / "metrics.jsonl").stat().st_size / 4
    observer.close("finished")
    page = (tmp_path / "report.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert not data["has_every_line"] and data["stages"][0]["steps"]["count"] < 2 * MAX_LINES
