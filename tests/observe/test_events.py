"""events.jsonl: whole lines in order, gone on with after a kill, and never the reason that a run ends."""

from pathlib import Path

import pytest

from hone.observe.events import EventLog, read_events


def kinds(path):
    return [event["kind"] for event in read_events(path)]


def test_events_are_on_the_disk_at_once_and_read_back_in_order(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", resume=False, warn=pytest.fail)
    log.write("started", step=0, permits=4, max_staleness=0)
    log.write("group_finished", prompt=7, versions=(0, 1))
    first, second = read_events(tmp_path / "events.jsonl")
    assert (first["kind"], first["step"], second["prompt"], second["versions"]) == ("started", 0, 7, [0, 1])
    assert first["at"] <= second["at"]
    log.close()


def test_a_resumed_run_goes_on_after_the_last_whole_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind":"started","step":0}\n{"kind":"trained","st')
    assert kinds(path) == ["started"], "a line that a kill tore is nobody's"
    log = EventLog(path, resume=True, warn=pytest.fail)
    log.write("stopped", outcome="finished")
    log.close()
    assert kinds(path) == ["started", "stopped"]
    EventLog(path, resume=False, warn=pytest.fail).close()
    assert kinds(path) == [], "a new run begins a new file"


def test_a_kind_that_is_not_registered_is_a_mistake(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", resume=False, warn=pytest.fail)
    with pytest.raises(ValueError, match="group_startd"):
        log.write("group_startd")
    log.close()


def test_a_full_disk_ends_the_record_with_one_warning():
    warned = []
    log = EventLog(Path("/dev/full"), resume=False, warn=warned.append)
    log.write("saved", step=1)
    log.write("saved", step=2)
    assert warned == ["events.jsonl cannot be written (No space left on device): the record of events ends here"]
