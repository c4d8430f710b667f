"""`hone status RUN_DIR`, from what lies in the folder: of a run that goes on, that ended, that was killed."""

import json

import pytest
from tiny import write_run

from hone.cli.main import main
from hone.observe.events import EventLog
from hone.run.folder import RunFolder
from hone.run.status import read_status


@pytest.fixture
def folder(tmp_path):
    """A run that goes on, with two engines of which one was lost, at step 12 of 20."""
    with RunFolder.open(tmp_path / "run", run_file=tmp_path / "run.yaml", run_yaml="", config={"seed": 0}) as folder:
        log = EventLog(folder.events, resume_bytes=None, warn=pytest.fail)
        log.write("stage", stage="rl", steps=20)
        log.write("trainer_up", ranks=2)
        for name in ("engine-0", "engine-1"):
            log.write("replica_up", replica=name)
            log.write("replica_state", replica=name, state="ready")
        log.write("started", step=10, permits=8, max_staleness=1)
        for name in ("engine-0", "engine-1"):
            log.write("published", version=10, replica=name, fingerprint="ab")
        log.write("published", version=10)
        for prompt in (40, 41, 42):
            log.write("group_started", prompts=[prompt])
        log.write("group_finished", prompts=[40], versions=(10, 10))
        log.write("replica_state", replica="engine-0", state="busy")
        log.write("replica_state", replica="reward_model-0", state="offloaded")
        log.write("replica_down", replica="engine-1", why="engine-1 died.\nA long trace")
        log.write("replica_state", replica="engine-1", state="restarting")
        log.write("requeued", prompt=41, stream="train", replica="engine-1", why="engine-1 died.")
        log.write("replica_restarting", replica="engine-1", attempt=1)
        log.write("training", step=11)
        log.close()
        lines = [{"stage": "rl", "step": n, "time_s": 2.5 * n, "rollout/reward_mean": 0.1 * n} for n in range(8, 13)]
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
        yield folder


def test_a_run_that_continues(folder):
    status = read_status(RunFolder.read(folder.path), now_s=2e9)
    assert status.running and (status.stage, status.step, status.steps) == ("rl", 12, 20)
    assert status.step_s == 2.5 and status.eta_s == 8 * 2.5
    assert status.phase == "training" and status.phase_s > 0 and status.version == 10
    assert (status.ranks, status.in_flight) == (2, 2)
    assert (status.replicas["engine-0"].state, status.replicas["engine-0"].version) == ("busy", 10)
    assert (status.replicas["engine-1"].state, status.replicas["engine-1"].version) == ("restarting", None)
    assert status.last["rollout/reward_mean"] == pytest.approx(1.2)
    assert [event["kind"] for event in status.recent][-3:] == ["replica_down", "requeued", "replica_restarting"]


def test_people_see_what_matters(folder, capsys):
    assert main(["status", str(folder.path)]) == 0
    shown = capsys.readouterr().out
    for words in (
        f"{folder.path}: running",
        "rl step 12 of 20, 2.5 s a step, 0:20 left",
        "version 10 is live, 2 groups in flight",
        "reward 1.2",
        "trainer: 2 ranks",
        "engine-0: busy, version 10\n",
        "engine-1: restarting; engine-1 died.\n",
        "reward_model-0: offloaded\n",
    ):
        assert words in shown
    assert "group_started" not in shown


def test_a_killed_run_says_so(folder, capsys):
    folder.close()
    assert main(["status", str(folder.path)]) == 0
    assert "not running; it was killed or not started" in capsys.readouterr().out


def test_an_empty_run_has_a_status_too(tmp_path):
    with RunFolder.open(tmp_path / "run", run_file=tmp_path / "run.yaml", run_yaml="", config={}) as folder:
        status = read_status(folder)
    assert (status.running, status.stage, status.last, status.replicas) == (True, None, None, {})


def test_a_finished_run_with_its_audit(tmp_path, capsys):
    assert main(["train", str(write_run(tmp_path, steps=3))]) == 0
    run = str(tmp_path / "run")
    capsys.readouterr()
    assert main(["status", run, "--audit"]) == 0
    shown = capsys.readouterr().out
    assert f"{run}: not running; finished" in shown and "rl step 3 of 3" in shown
    assert "audit: 3 updates survive, 0 were undone, started 1 time, 0 groups in flight" in shown
    assert main(["status", run, "--audit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["running"] is False and found["audit"]["updates"] == 3 and found["audit"]["violations"] == []


def test_a_violation_is_an_exit_code(folder, capsys):
    assert main(["status", str(folder.path), "--audit"]) == 0
    with folder.events.open("a") as events:
        events.write('{"at":1,"kind":"trained","step":12,"prompts":[42],"oldest":3}\n')
    assert main(["status", str(folder.path), "--audit"]) == 1
    shown = capsys.readouterr().out
    assert "steps: update 12 follows update 10" in shown and "stale: 1 violations" in shown


def test_only_a_run_can_be_audited(capsys):
    assert main(["status", "--audit"]) == 2
    assert "needs a run's folder" in capsys.readouterr().err
