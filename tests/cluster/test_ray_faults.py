"""Runs on Ray whose processes are killed: they end as if nothing had happened, and the checker finds nothing to say."""

import os
import signal
import time

import psutil
import pytest
from ray_runs import Life, write_run
from test_ray_runs import APART, ASYNC, COLOCATED, assert_same_learning, metrics_of

from hone import assemble
from hone.config.load import load_config
from hone.observe.events import read_events
from hone.run.audit import audit

pytestmark = [pytest.mark.slow("starts Ray, and whole runs in it"), pytest.mark.timeout(600)]

STEPS = 40


def events_of(folder, *kinds):
    return [event for event in read_events(folder / "run" / "events.jsonl") if event["kind"] in kinds]


def trained(folder):
    """The last update that was made; 0 before there is one."""
    return max((event["step"] for event in events_of(folder, "trained")), default=0)


@pytest.fixture(scope="module")
def faultless(tmp_path_factory):
    """The same run in one process."""
    folder = tmp_path_factory.mktemp("faultless")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assemble.train(load_config(write_run(folder), [f"run.steps={STEPS}", "observe.console=quiet"]))
    return folder / "run"


def kill(processes):
    os.kill(processes[-1].pid, signal.SIGKILL)


def kill_in_an_update(life, folder):
    """Kill a rank of the trainer while no engine is in the middle of new weights."""
    rank = life.started("ray::TrainerRank")[-1]

    def is_training():
        return events_of(folder, "training", "trained", "published")[-1]["kind"] == "training"

    while True:
        life.until(is_training)
        rank.suspend()
        time.sleep(0.5)  # what was under way is told by then
        if is_training():
            rank.kill()
            return
        rank.resume()


@pytest.mark.parametrize("layout", [APART, COLOCATED], ids=["apart", "in turn"])
def test_a_killed_rank_and_a_killed_engine_cost_nothing_but_time(tmp_path, faultless, layout):
    run_file = write_run(tmp_path)
    life = Life(run_file, *layout, f"run.steps={STEPS}")
    life.until(lambda: trained(tmp_path) >= 5)
    kill_in_an_update(life, tmp_path)
    life.until(lambda: "engines: 2, 2 of them as they were" in life.text())
    again = trained(tmp_path)
    life.until(lambda: trained(tmp_path) >= again + 2)
    kill(life.started("ray::EngineActor"))
    assert life.end() == 0, life.text()
    (down,) = events_of(tmp_path, "trainer_down")
    assert "trainer rank" in down["why"], "the fault really happened"
    assert [event["step"] for event in events_of(tmp_path, "started")][1] >= 4, "it continued from a checkpoint"
    (down,) = events_of(tmp_path, "replica_down")
    assert "died" in down["why"], "the fault really happened"
    found = audit(read_events(tmp_path / "run" / "events.jsonl"))
    assert found.violations == () and found.updates == STEPS
    assert_same_learning(tmp_path / "run", faultless)
    assert life.nothing_is_left()


def test_stopped_processes_are_noticed_by_their_heartbeat_and_started_again(tmp_path):
    """An engine, which samples again while training continues, and then a rank."""
    run_file = write_run(tmp_path)
    life = Life(run_file, *ASYNC, "run.steps=100000", "cluster.heartbeat_timeout_s=20")

    def suspend(who, kind):
        life.started(f"ray::{who}")[-1].suspend()
        (down,) = life.until(lambda: events_of(tmp_path, kind))
        assert "answered no heartbeat (cluster.heartbeat_timeout_s = 20)" in down["why"], "the fault really happened"
        return down

    def after(down, kind, **having):
        events = [event for event in events_of(tmp_path, kind) if event["at"] > down["at"]]
        return [event for event in events if event.items() >= having.items()]

    figures = {f"memory/{name}_process_rss_gib" for name in ("rank-0", "rank-1", "engine-0", "engine-1")}

    def all_are_measured():
        lines = metrics_of(tmp_path / "run")
        return figures <= lines[-1].keys() and lines[-1]["engine/replicas_up"] == 2

    life.until(lambda: trained(tmp_path) >= 3)
    down = suspend("EngineActor", "replica_down")
    assert life.until(lambda: after(down, "sampled", replica=down["replica"]))
    assert life.until(all_are_measured), "the one that was started again among them"
    kinds = [event["kind"] for event in events_of(tmp_path, "replica_down", "replica_restarting", "replica_up")]
    assert kinds[-3:] == ["replica_down", "replica_restarting", "replica_up"]
    last = [line for line in metrics_of(tmp_path / "run") if "time/step_s" in line][-1]
    assert last["engine/published_mib"] > 0

    down = suspend("TrainerRank", "trainer_down")
    life.until(lambda: after(down, "trainer_up"))
    then = trained(tmp_path)
    life.until(lambda: trained(tmp_path) >= then + 3)
    assert life.end(signal.SIGINT) == 130, life.text()
    assert audit(read_events(tmp_path / "run" / "events.jsonl")).violations == ()
    assert life.nothing_is_left()


@pytest.mark.parametrize(
    ("who", "layout"),
    [("raylet/raylet", APART), ("RuntimeEnvAgent", APART), ("gcs_server", ASYNC)],
    ids=["raylet", "runtime-env agent", "gcs_server, asynchronous"],
)
def test_without_ray_itself_a_run_ends_with_a_message_and_resumes_from_its_checkpoint(tmp_path, who, layout):
    """A raylet ends with its agent, and the ranks with a raylet; without a GCS they can write a checkpoint first."""
    run_file = write_run(tmp_path)
    life = Life(run_file, *layout, "run.steps=100000")
    life.until(lambda: trained(tmp_path) >= 3)
    life.started(who)[-1].kill()
    assert life.end() == 3, life.text()
    assert life.text().splitlines()[-1].count("Ray is lost: ") == 1 and "Traceback" not in life.text()
    assert "--resume` continues from the newest checkpoint" in life.text()
    assert life.nothing_is_left()
    steps = max(int(folder.name[-6:]) for folder in (tmp_path / "run" / "checkpoints").iterdir()) + 2
    if who == "gcs_server":
        assert steps >= trained(tmp_path) + 1, "the checkpoint was written after Ray was lost"
    resumed = Life(run_file, *layout, f"run.steps={steps}", "--resume")
    assert resumed.end() == 0, resumed.text()
    assert audit(read_events(tmp_path / "run" / "events.jsonl")).violations == ()


def test_a_killed_controller_is_resumed_and_leaves_nothing(tmp_path, faultless):
    run_file = write_run(tmp_path)
    life = Life(run_file, *APART, f"run.steps={STEPS}")
    life.until(lambda: trained(tmp_path) >= 5)
    workers = [*life.started("ray::TrainerRank"), *life.started("ray::EngineActor")]
    assert len(workers) == 4
    assert life.end(signal.SIGKILL) == -signal.SIGKILL
    assert not psutil.wait_procs(workers, timeout=30)[1]
    assert life.nothing_is_left()
    resumed = Life(run_file, *APART, f"run.steps={STEPS}", "--resume")
    assert resumed.end() == 0, resumed.text()
    found = audit(read_events(tmp_path / "run" / "events.jsonl"))
    assert found.violations == () and found.updates == STEPS and found.counts["started"] == 2
    assert found.counts["stopped"] == 1, "the first life did not end in order"
    assert_same_learning(tmp_path / "run", faultless)


def test_three_faults_in_one_asynchronous_run(tmp_path):
    """An engine, then a rank, then the controller: what survives was trained on once, from current weights."""
    run_file = write_run(tmp_path)
    life = Life(run_file, *ASYNC, "run.steps=100000")
    life.until(lambda: trained(tmp_path) >= 3)
    kill(life.started("ray::EngineActor"))
    life.until(lambda: events_of(tmp_path, "replica_down"))
    kill(life.started("ray::TrainerRank"))
    life.until(lambda: len(events_of(tmp_path, "started")) == 2)
    again = trained(tmp_path)
    life.until(lambda: trained(tmp_path) >= again + 3)
    life.end(signal.SIGKILL)
    assert life.nothing_is_left()
    steps = metrics_of(tmp_path / "run")[-1]["step"] + 5
    resumed = Life(run_file, *ASYNC, f"run.steps={steps}", "--resume")
    assert resumed.end() == 0, resumed.text()
    found = audit(read_events(tmp_path / "run" / "events.jsonl"))
    assert found.violations == () and found.updates == steps
    assert found.counts["replica_down"] >= 1 and found.counts["trainer_down"] == 1 and found.counts["started"] == 3
