"""events.jsonl: whole lines in order, gone on with after a kill, and never the reason that a run ends or waits."""

import os
import select
from pathlib import Path

import pytest

from hone.observe.events import EventLog, events_of, read_events


def kinds(path):
    return [event["kind"] for event in read_events(path)]


def log_at(path, resume_bytes=None, *, warn=pytest.fail, **options):
    return EventLog(path, resume_bytes=resume_bytes, warn=warn, **options)


def test_events_are_read_back_in_order_and_as_long_as_it_says(tmp_path):
    path = tmp_path / "events.jsonl"
    log = log_at(path)
    log.write("started", step=0, permits=4, max_staleness=0)
    log.write("group_finished", prompts=[7], versions=(0, 1))
    assert log.position() == path.stat().st_size > 0
    first, second = read_events(path)
    assert (first["kind"], first["step"], second["prompts"], second["versions"]) == ("started", 0, [7], [0, 1])
    assert first["at"] <= second["at"]
    log.close()


def test_groups_to_which_the_same_happens_share_a_line(tmp_path):
    log = log_at(tmp_path / "events.jsonl")
    for prompt in range(3):
        log.write("group_started", prompts=[prompt])
    for prompt, versions in ((0, (0, 0)), (2, (0, 0)), (1, (0, 1))):
        log.write("group_finished", prompts=[prompt], versions=versions)
    log.write("group_started", prompts=[3])
    log.close()
    told = [(event["kind"], event["prompts"]) for event in read_events(tmp_path / "events.jsonl")]
    assert told == [
        ("group_started", [0, 1, 2]), ("group_finished", [0, 2]), ("group_finished", [1]), ("group_started", [3]),
    ]  # fmt: skip
    assert '"prompts":[[0,2]]}' in (tmp_path / "events.jsonl").read_text()


def test_a_resumed_run_continues_after_the_last_whole_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind":"started","step":0}\n{"kind":"trained","st')
    assert kinds(path) == ["started"], "a line that a kill tore is nobody's"
    log = log_at(path, 28)
    log.write("stopped", outcome="finished")
    log.close()
    assert kinds(path) == ["started", "stopped"]
    log_at(path).close()
    assert kinds(path) == [], "a new run begins a new file"


def test_an_end_that_was_lost_is_named(tmp_path):
    path, warned = tmp_path / "events.jsonl", []
    path.write_text('{"kind":"started","step":0}\n')
    log_at(path, 1000, warn=warned.append).close()
    assert "has 28 bytes, the checkpoint was written at 1,000" in warned[0]
    assert kinds(path) == ["started", "gap"]


def test_a_damaged_line_is_read_as_a_gap(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind":"started","step":0}\n\0\0\0\n{"kind":"saved","step":1}\n')
    assert kinds(path) == ["started", "gap", "saved"]


def test_a_kind_that_is_not_registered_is_a_mistake(tmp_path):
    log = log_at(tmp_path / "events.jsonl")
    with pytest.raises(ValueError, match="group_startd"):
        log.write("group_startd")
    log.close()


def test_a_full_disk_ends_the_record_with_one_warning():
    warned = []
    log = log_at(Path("/dev/full"), warn=warned.append)
    log.write("saved", step=1)
    assert log.position() > 0, "what a resumed run then finds is less"
    log.write("saved", step=2)
    log.close()
    assert warned == ["events.jsonl cannot be written (No space left on device): the record of events ends here"]


def test_a_stalled_disk_blocks_no_caller_and_lost_lines_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # which a pipe refuses
    path, warned = tmp_path / "events.jsonl", []
    os.mkfifo(path)  # a pipe that nobody reads takes nothing once it is full
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = log_at(path, warn=warned.append, deadline_s=0.2, most_waiting=5)
    log.write("stopped", outcome="x" * 200_000)
    assert log.position() > 0
    for step in range(12):
        log.write("saved", step=step)
    log.position()
    assert "has taken nothing for 0.2 s" in warned[0] and "more are counted and dropped" in warned[1]
    assert len(warned) == 2, "reported once"
    found = b""
    while found.count(b"\n") < 7:  # the disk is back
        select.select([reader], [], [], 10)
        found += os.read(reader, 1 << 16)
    log.close()
    os.close(reader)
    (tmp_path / "read.jsonl").write_bytes(found)
    assert kinds(tmp_path / "read.jsonl") == ["stopped", *["saved"] * 5, "gap"]
    assert "7 events were dropped" in warned[2]


def test_rare_events_are_found_without_the_others_and_none_is_read_twice(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, resume_bytes=None, warn=pytest.fail)
    for step in range(1, 9):
        log.write("group_started", prompts=[step, step + 1])
        log.write("training", step=step)
        if step in (3, 4, 7):
            log.write("alarm", name=f'"kind":"stopped" {step}', stage="rl", step=step, since=step, cause="c")
    log.write("stopped", outcome="finished")
    log.close()
    with path.open("a") as file:
        file.write('{"at":1,"kind":"stopped"')  # torn
    every = list(read_events(path))
    rare = [event for event in every if event["kind"] in ("alarm", "stopped")]
    assert list(events_of(path, ("alarm", "stopped"))) == rare and len(rare) == 4
    with_steps = [event.get("step") for event in events_of(path, ("alarm", "stopped"), before="training")]
    assert with_steps == [3, 3, 4, 4, 7, 7, 8, None]
    kinds = sorted({event["kind"] for event in every})
    for last_bytes in range(path.stat().st_size + 2):
        ends = [*events_of(path, kinds, but_last_bytes=last_bytes), *read_events(path, last_bytes=last_bytes)]
        assert ends == every, last_bytes
    assert list(events_of(tmp_path / "none", ("alarm",))) == []
