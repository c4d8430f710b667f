"""`hone train` with a service: whatever is killed, the trained rewards are those of the run without a fault, and
nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from service_run import write_run
from watching import listens, toy, wait_for

import hone.assemble.stage_runs
from hone.cli.main import main
from hone.services.state import read_state

TIMINGS = ("time", "memory/", "rollout/tokens_per_s", "rollout/samples_per_s")
HERE = Path(__file__).parent


def lines_of(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def metrics_of(folder):
    """What was computed: without what depends on the clock, the machine, or how requests travelled."""
    return [
        {name: value for name, value in line.items() if not name.startswith(TIMINGS) and "_http_" not in name}
        for line in lines_of(folder)
    ]


def weights_of(folder):
    return (folder / "run" / "hf" / "model.safetensors").read_bytes()


def log_of(folder):
    return (folder / "run" / "logs" / "training.log").read_text()


def meanwhile(work):
    """Do something while this thread trains."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def kill_service_in_the_middle(folder, seen, calls=40):
    """Wait until the service scores a sample of the third step (16 a step), and kill it."""

    def work():
        wait_for(lambda: (folder / "calls").exists() and (folder / "calls").stat().st_size >= calls, within_s=60)
        state = read_state(folder / "run").services[0]
        seen["pid"] = state.pid
        os.kill(state.pid, signal.SIGKILL)

    return meanwhile(work)


@pytest.fixture(scope="module")
def faultless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faultless")
    assert main(["train", str(write_run(folder, service="reward: rewards.yaml"))]) == 0
    return folder


@pytest.mark.slow("runs beside services")
def test_a_service_killed_in_mid_batch_changes_nothing(faultless, tmp_path):
    run_file, seen = write_run(tmp_path, service="reward: rewards.yaml"), {}
    killing = kill_service_in_the_middle(tmp_path, seen)
    assert main(["train", str(run_file)]) == 0
    killing.join()
    after = read_state(tmp_path / "run").services[0]
    assert after.restarts == 1 and after.pid not in (None, seen["pid"]), "the fault really happened"
    assert sum(line["reward/sums_http_failed"] for line in lines_of(tmp_path)) > 0, "in the middle of a batch"
    assert "was ended by signal 9, Killed; started again" in log_of(tmp_path)
    assert "rewards: 0 of 96 samples could not be scored; services: reward_server 1 restart" in log_of(tmp_path)
    assert weights_of(tmp_path) == weights_of(faultless)
    assert metrics_of(tmp_path) == metrics_of(faultless)
    assert len({line["rollout/reward_mean"] for line in metrics_of(faultless)}) > 3, "there was something to compare"


@pytest.mark.slow("runs beside services")
def test_the_logs_lie_beside_each_other(faultless):
    logs = faultless / "run" / "logs"
    said = (logs / "reward_server.log").read_text()
    assert "POST /v1/rewards 200" in said and "no token" not in said
    assert not (faultless / "run" / "services.token").exists()
    assert "service reward_server: ready after" in (logs / "training.log").read_text()
    assert "rl 6/6" in (logs / "training.log").read_text()
    assert not psutil.pid_exists(read_state(faultless / "run").services[0].pid)


@pytest.mark.slow("many launchers with services, each an interpreter of its own")
def test_beyond_its_restarts_the_run_ends_with_a_checkpoint_and_resumes_from_it(faultless, tmp_path, capsys):
    run_file, seen = write_run(tmp_path, service="reward: rewards.yaml, restarts: 0"), {}
    killing = kill_service_in_the_middle(tmp_path, seen)
    assert main(["train", str(run_file)]) == 3
    killing.join()
    said = capsys.readouterr().err
    assert "service reward_server was ended by signal 9, Killed, and was started again 0 times" in said
    assert "POST /v1/rewards 200" in said, "the last lines of its log"
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert newest.name in ("step-000002", "step-000003") and (newest / "manifest.json").is_file()
    assert main(["train", str(run_file), "--resume"]) == 0
    assert weights_of(tmp_path) == weights_of(faultless)
    assert metrics_of(tmp_path) == metrics_of(faultless)


def test_a_service_that_crashes_at_the_start_ends_the_run_at_once(tmp_path, capsys):
    service = f"command: {json.dumps(toy('--crash-before-ready', '80'))}"
    run_file = write_run(tmp_path, service=service)
    assert main(["train", str(run_file)]) == 3
    said = capsys.readouterr().err.splitlines()
    assert said[-50:] == [f"  line {number}" for number in range(30, 80)]


def test_a_trainer_that_crashes_ends_its_services(tmp_path, monkeypatch, capsys):
    async def crash(run):
        raise ZeroDivisionError

    monkeypatch.setattr(hone.assemble.stage_runs, "train_policy", crash)
    service = f"command: {json.dumps(toy('--children'))}"
    assert main(["train", str(write_run(tmp_path, service=service, reward="{use: exact}"))]) == 1
    state = read_state(tmp_path / "run").services[0]
    assert state.state == "stopped" and not psutil.pid_exists(state.pid)
    assert not listens(int(state.url.rpartition(":")[2]))
    assert "services.reward_server: no reward names it" in log_of(tmp_path)


@pytest.mark.slow("runs beside services")
def test_an_evaluation_starts_the_services_too(faultless, capsys):
    evaluated = ["data.eval=sums.jsonl", "data.eval_rows=0:8"]
    log = faultless / "run" / "logs" / "reward_server.log"
    before = log.read_bytes()
    assert main(["eval", str(faultless / "tiny.yaml"), *evaluated, "--json"]) == 0
    said = capsys.readouterr()
    assert 0 < json.loads(said.out)["eval/reward_mean"] <= 1
    assert "service reward_server: ready after" in said.err
    assert log.read_bytes() == before, "the training run's own"


def ended(tmp_path, number, lives, *, service=None):
    """What became of launchers that got a signal at random moments."""
    command = f"command: {json.dumps(toy('--children'))}"
    run_file = write_run(tmp_path, service=service or command, reward="{use: exact}", steps=100_000, save_every=50)
    program = [sys.executable, str(HERE / "lives.py"), str(run_file), number, str(lives), "1"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120 + 10 * lives)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow("many launchers with services, each an interpreter of its own")
@pytest.mark.timeout(1200)
def test_killed_launchers_leave_nothing_behind(tmp_path):
    found = ended(tmp_path, "SIGKILL", 30)
    assert {life["exit"] for life in found} == {-signal.SIGKILL}, (tmp_path / "lives.log").read_text()[-2000:]
    assert [life["left"] for life in found] == [[]] * 30
    doing = [life["doing"] for life in found]
    assert doing.count("ready") > 5 and (None in doing or "starting" in doing), "moments of all kinds"


@pytest.mark.slow("many launchers with services, each an interpreter of its own")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_stopped_launchers_end_their_services_and_leave_a_checkpoint(tmp_path, number):
    found = ended(tmp_path, number, 10)
    assert [life["left"] for life in found] == [[]] * 10
    exits = [life["exit"] for life in found]
    assert exits.count(130) >= 5, exits
    unhandled = {"SIGTERM": -signal.SIGTERM, "SIGINT": 130}[number]
    assert all(e == 130 or (e == unhandled and life["doing"] is None) for e, life in zip(exits, found, strict=True))
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow("many launchers with services, each an interpreter of its own")
@pytest.mark.timeout(300)
def test_killed_launchers_of_a_real_reward_service_leave_nothing_behind(tmp_path):
    found = ended(tmp_path, "SIGKILL", 10, service="reward: rewards.yaml")
    assert [life["left"] for life in found] == [[]] * 10


@pytest.mark.slow("runs beside services")
def test_a_run_and_its_services_can_be_looked_at(faultless, capsys):
    assert main(["status", str(faultless / "run"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["running"] is False and shown["last"]["step"] == 6
    assert shown["services"][0]["name"] == "reward_server" and shown["services"][0]["state"] == "stopped"
    assert main(["status", str(faultless / "run")]) == 0
    told = capsys.readouterr().out
    assert "rl step 6 of 6, " in told and "reward_server: was stopped" in told
