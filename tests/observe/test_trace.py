import asyncio
import itertools
import json
import random
import threading
import time

import pytest

from hone.observe import trace
from hone.observe.trace import Spans, Timeline, TraceFile


def assert_nested(events):
    """In every lane two spans are apart or one holds the other."""
    by_lane: dict[str, list] = {}
    for event in events:
        by_lane.setdefault(event.lane, []).append(event)
    for lane, found in by_lane.items():
        for a, b in itertools.combinations(found, 2):
            a, b = sorted((a, b), key=lambda e: (e.start_s, -e.end_s))
            assert b.start_s >= a.end_s or b.end_s <= a.end_s, (lane, a, b)


def test_spans_nest_in_one_lane():
    spans = Spans()
    with spans.span("train"), spans.span("backward", microbatch=3):
        pass
    inner, outer = spans.take_events()
    assert (inner.name, inner.lane, outer.name, outer.lane) == ("backward", "train", "train", "train")
    assert outer.start_s <= inner.start_s <= inner.end_s <= outer.end_s
    assert inner.args == {"microbatch": 3}
    assert spans.take_events() == []


def test_a_role_has_one_lane_without_gaps():
    spans = Spans()
    engine = Timeline(spans, "engine-0")
    with engine.during("generate"), engine.during("generate"), engine.during("publish"):
        pass
    with engine.during("asleep"):
        pass
    events = spans.take_events()
    assert [e.name for e in events] == ["idle", "generate", "publish", "generate", "idle", "asleep"]
    assert {e.lane for e in events} == {"engine-0"}
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(events))
    assert spans.take_seconds() == {}, "a lane is to be looked at, not counted"


def test_a_span_without_a_lane_is_counted_and_not_shown():
    spans = Spans()
    with spans.span("train", has_lane=False):
        time.sleep(0.002)
    assert spans.take_events() == [] and spans.take_seconds()["train"] >= 0.002


def test_concurrent_tasks_and_threads_never_share_a_lane():
    spans = Spans()
    rng = random.Random(0)

    async def score():
        await asyncio.sleep(rng.random() * 0.01)
        with spans.span("reward"):
            await asyncio.sleep(rng.random() * 0.01)
            with spans.span("call"):
                await asyncio.sleep(rng.random() * 0.01)

    def work():
        for _ in range(20):
            with spans.span("reward"), spans.span("call"):
                time.sleep(0.0005)

    async def run():
        with spans.span("step"):
            await asyncio.gather(*(score() for _ in range(30)), asyncio.to_thread(work), asyncio.to_thread(work))

    asyncio.run(run())
    events = spans.take_events()
    assert len(events) == 1 + 60 + 80
    assert_nested(events)
    assert {e.lane for e in events} >= {"step", "reward", "reward 2"}
    assert len({e.lane for e in events}) <= 33  # lanes are used again


def test_overlapping_spans_count_once_and_an_open_one_counts_up_to_now(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(trace.time, "perf_counter", lambda: now[0])
    spans = Spans()
    first, second = spans.span("reward"), spans.span("reward")
    first.__enter__()
    now[0] = 2.0
    threads = threading.Thread(target=second.__enter__)
    threads.start()
    threads.join()
    now[0] = 3.0
    first.__exit__(None, None, None)
    now[0] = 5.0
    assert spans.take_seconds() == {"reward": 5.0}  # 0-3 and 2-5 (still open): five seconds by the clock
    now[0] = 6.0
    second.__exit__(None, None, None)
    assert spans.take_seconds() == {"reward": 1.0}
    assert spans.take_seconds() == {}


def test_a_span_ends_when_its_body_raises():
    spans = Spans()
    with pytest.raises(KeyError), spans.span("train"):
        raise KeyError
    assert [e.name for e in spans.take_events()] == ["train"]


def durations(path):
    return [e for e in json.loads(path.read_text()) if e["ph"] == "X"]


def write_trace(path, *names, resume=False, close=True, **options):
    spans = Spans()
    file = TraceFile(path, title="test", resume=resume, **options)
    for name in names:
        with spans.span(name, note='"quoted"'):
            time.sleep(0.001)
    file.write(spans.take_events())
    if close:
        file.close()
    return file


def test_the_file_is_json_that_perfetto_reads(tmp_path):
    write_trace(tmp_path / "t.json", "train", "publish")
    events = json.loads((tmp_path / "t.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for event in durations(tmp_path / "t.json"):
        assert names[event["tid"]] == event["name"] and event["dur"] >= 1000 and event["args"] == {"note": '"quoted"'}


@pytest.mark.parametrize("tail", ["closed", "open", "torn"])
def test_a_resumed_run_continues_the_trace_on_the_same_clock(tmp_path, tail):
    path = tmp_path / "t.json"
    file = write_trace(path, "train", close=tail == "closed")
    if tail == "torn":
        file._file.write(b',\n{"name": "tr')
    file._file.close()
    write_trace(path, "train", "publish", resume=True)
    found = durations(path)
    assert [e["name"] for e in found] == ["train", "train", "publish"]
    assert found[0]["tid"] == found[1]["tid"]
    assert found[0]["ts"] + found[0]["dur"] <= found[1]["ts"] < found[0]["ts"] + 60e6


def test_the_trace_is_bounded(tmp_path):
    path = tmp_path / "t.json"
    file = write_trace(path, *["train"] * 5, close=False, max_bytes=400)
    assert file.full
    size = path.stat().st_size
    file.write([trace.Event("train", "train", 0.0, 1.0, {})])
    assert path.stat().st_size == size
    file.close()
    json.loads(path.read_text())
