import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest
from observed import Settings, decode, make_group

from hone.errors import RunFolderError
from hone.observe.observer import Observer
from hone.observe.recorder import read_samples, recorded_steps
from hone.run.audit import audit_file
from hone.types import Position


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def computed(line):
    """What a resumed run must repeat: all but the clock and the memory."""
    return {name: value for name, value in line.items() if not name.startswith(("time", "memory/"))}


def steps_of_a_run(observer, first, last):
    for step in range(first, last + 1):
        with observer.span("generate"), observer.span("decode"):
            pass
        observer.record("rl", step, [make_group(step)], [[0.5, -0.5]])
        observer.log("rl", step, {"rollout/reward_mean": step / 7, "train/tokens": step})


def open_observer(folder, **options):
    settings = Settings(tensorboard=True, trace=True)
    return Observer(folder, settings, title="test", total_steps=9, decode=decode, **options)


def test_trackers_get_as_many_samples_as_asked_for(tmp_path):
    tables = []

    class Board:
        def write(self, *args): ...

        def write_samples(self, stage, step, rows, *_):
            tables.append((stage, step, rows))

        def close(self): ...

    for count in (0, 3):
        settings = Settings(tracker_samples=count)
        observer = Observer(tmp_path / str(count), settings, title="t", total_steps=9, decode=decode)
        observer._tensorboard = Board()
        groups = [make_group(0), make_group(1, texts=("4", "x" * 5000))]
        observer.record("rl", 1, groups, [[0.5, -0.5], [0.25, -0.25]])
        observer.record("rl", 1, groups, None)
        observer.close("done")
    ((stage, step, rows),) = tables
    assert (stage, step, [row[3] for row in rows]) == ("rl", 1, [0.5, -0.5, 0.25]), "of those that were trained on"
    assert rows[0] == ("2+2=", "4", 1.0, 0.5, "4", "stop")


def test_a_run_leaves_every_record(tmp_path):
    observer = open_observer(tmp_path)
    observer.say("hello\nworld")
    steps_of_a_run(observer, 1, 3)
    observer.close("completed 3 updates")
    first = lines(tmp_path)[0]
    assert computed(first) == {"stage": "rl", "step": 1, "rollout/reward_mean": 1 / 7, "train/tokens": 1}
    assert 0 <= first["time/decode_s"] <= first["time/generate_s"] < 1
    assert 0 < first["memory/rss_gib"] <= first["memory/peak_rss_gib"]
    assert recorded_steps(tmp_path) == {"rl": [1, 2, 3]}
    assert len(list((tmp_path / "tensorboard" / "rl").iterdir())) == 1
    names = [e["name"] for e in json.loads((tmp_path / "trace.json").read_text()) if e["ph"] == "X"]
    assert names == ["decode", "generate"] * 3
    log = (tmp_path / "logs" / "training.log").read_text().splitlines()
    assert [line[20:].partition("  ETA")[0] for line in log] == [
        "hello",
        "world",
        "rl 1/9  reward 0.143",
        "rl 3/9  reward 0.429",
        f"completed 3 updates. Report: {tmp_path / 'report.html'}",
    ]
    assert (tmp_path / "report.html").exists()


def test_a_resumed_run_has_the_metrics_and_samples_of_the_uninterrupted_one(tmp_path):
    whole = open_observer(tmp_path / "whole")
    steps_of_a_run(whole, 1, 9)
    whole.close("done")

    killed = open_observer(tmp_path / "cut")
    steps_of_a_run(killed, 1, 4)
    position = killed.position()
    assert recorded_steps(tmp_path / "cut") == {"rl": [1, 2, 3, 4]}  # at a checkpoint all samples are there
    steps_of_a_run(killed, 5, 7)
    killed.position()  # ... and here the process dies: nothing is closed

    resumed = open_observer(tmp_path / "cut", resume=position)
    steps_of_a_run(resumed, 5, 9)
    resumed.close("done")
    assert [*map(computed, lines(tmp_path / "cut"))] == [*map(computed, lines(tmp_path / "whole"))]
    for step in range(1, 10):
        assert read_samples(tmp_path / "cut", step) == read_samples(tmp_path / "whole", step)
    killed.close("the process that died")


def test_a_folder_that_lost_metrics_is_refused(tmp_path):
    open_observer(tmp_path).close("done")
    with pytest.raises(RunFolderError, match="metrics are missing"):
        open_observer(tmp_path, resume=Position(100))


def test_an_unregistered_metric_is_our_mistake_and_leaves_no_line(tmp_path):
    observer = open_observer(tmp_path)
    with pytest.raises(ValueError, match=r"'train/los' is not registered.*metrics\.py"):
        observer.log("rl", 1, {"train/los": 1.0})
    observer.close("done")
    assert lines(tmp_path) == []


def test_given_values_win_over_measured_ones(tmp_path):
    observer = open_observer(tmp_path)
    with observer.span("generate"):
        pass
    observer.log("rl", 1, {"time/generate_s": 5.0})
    observer.close("done")
    assert lines(tmp_path)[0]["time/generate_s"] == 5.0


def test_any_thread_may_use_it(tmp_path):
    observer = open_observer(tmp_path)

    def work(worker):
        for step in range(20):
            with observer.span(f"work_{worker}"):
                observer.say(f"{worker} {step}")
            observer.record("rl", step, [make_group(worker)], None)
            observer.log("rl", step, {"train/loss": 0.1})

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    observer.close("done")
    assert len(lines(tmp_path)) == 80
    assert all(len(read_samples(tmp_path, step)) == 8 for step in range(20))
    log = (tmp_path / "logs" / "training.log").read_text().splitlines()
    assert sum(bool(re.fullmatch(r"\S+ \S+ \d \d+", line)) for line in log) == 80


def test_a_metric_that_is_not_finite_is_said_once(tmp_path, capsys):
    observer = open_observer(tmp_path)
    for step in (1, 2):
        observer.log("rl", step, {"train/loss": float("nan")})
    observer.close("done")
    assert capsys.readouterr().err == "warning: train/loss is nan at rl step 1 (reported once)\n"


def test_a_full_disk_ends_in_messages(tmp_path):
    """No file may grow beyond 4,000 bytes: what a full disk does, one file after the other."""
    script = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from observed import Settings, make_group
from hone.errors import HoneError
from hone.observe.observer import Observer
observer = Observer(Path(sys.argv[1]), Settings(tensorboard=True, trace=True), title="t", total_steps=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
observer.record("rl", 1, [make_group(i, texts=[str(hash((i, j))) for j in range(40)], rewards=[0.0] * 40)
                          for i in range(20)], None)
step = 0
try:
    while True:
        step += 1
        with observer.span("train", note="x" * 200):
            pass
        observer.log("rl", step, {"train/loss": 0.0})
except HoneError as error:
    print(error)
observer.close("failed")
"""
    here = __file__.rpartition("/")[0]
    command = [sys.executable, "-c", script, str(tmp_path), here]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "metrics.jsonl: step" in done.stdout and "Free space there and resume" in done.stdout
    warnings = done.stderr.splitlines()
    for what in ("samples/ cannot be written", "trace.json cannot be written", "report.html cannot be written"):
        assert sum(what in line for line in warnings) == 1, (what, warnings)


def test_nothing_heavy_is_imported(tmp_path):
    script = """
import sys
from pathlib import Path
import hone.observe.observer
heavy = {"torch", "transformers", "tensorboard", "wandb", "tensorflow"} & set(sys.modules)
assert not heavy, heavy
sys.path.insert(0, sys.argv[2])
from observed import Settings
observer = hone.observe.observer.Observer(Path(sys.argv[1]), Settings(tensorboard=True), title="t", total_steps=1)
observer.log("rl", 1, {"train/loss": 0.0})
observer.close("done")
assert "torch" not in sys.modules
"""
    here = __file__.rpartition("/")[0]
    subprocess.run([sys.executable, "-c", script, str(tmp_path), here], check=True, timeout=60)


def test_a_torn_summary_and_a_cut_sample_file_do_no_harm(tmp_path):
    killed = open_observer(tmp_path)
    steps_of_a_run(killed, 1, 3)
    position = killed.position()
    killed.close("died")
    (tmp_path / "logs" / "summary.json").write_text('{"titl')
    resumed = open_observer(tmp_path, resume=position)
    cut = tmp_path / "samples" / "rl" / "step-000002.jsonl.gz"
    cut.write_bytes(cut.read_bytes()[:-9])  # while it runs
    resumed.close("done")
    assert "summary.json is torn" in (tmp_path / "logs" / "training.log").read_text()
    assert (tmp_path / "set-aside" / "summary.json").exists() and (tmp_path / "report.html").exists()


def test_a_disk_that_stalls_under_samples_ends_nothing(tmp_path):
    observer = open_observer(tmp_path, patience_s=0.1)
    (tmp_path / "samples" / "rl").mkdir(parents=True)
    stalled = tmp_path / "samples" / "rl" / "step-000001.jsonl.gz.tmp"
    os.mkfifo(stalled)  # to open a pipe that nobody reads waits for ever
    steps_of_a_run(observer, 1, 30)
    assert observer.position().metrics_bytes == (tmp_path / "metrics.jsonl").stat().st_size
    observer._background.patience_s = 20.0
    stalled.read_bytes()  # the disk is back
    while observer._background._is_stalled or not stalled.with_suffix("").exists():
        time.sleep(0.01)  # a run that ends while the disk stalls closes no files
    stalled.with_suffix("").unlink()
    observer.close("done")
    assert len(lines(tmp_path)) == 30, "metrics have every step"
    log = (tmp_path / "logs" / "training.log").read_text()
    assert "has taken nothing for 0.1 s" in log and re.search(r"take data again; \d\d writes were dropped", log)
    found = audit_file(tmp_path / "events.jsonl")
    assert found.violations == () and len(found.gaps) == 2
