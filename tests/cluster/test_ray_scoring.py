"""Whole runs whose judge and reward model have devices of the cluster: they are scored as runs whose judge is a service
and whose reward model is in their process, whoever is killed, and nothing is left behind."""

import json
import os
import signal

import psutil
import pytest
from ray_runs import Life
from scored_runs import write_scored_run

from hone.cli.main import main
from hone.services.state import read_state

pytestmark = [pytest.mark.slow("starts Ray, and whole runs in it"), pytest.mark.timeout(600)]

APART = [
    "cluster.backend=ray",
    "cluster.pools={train: {devices: 1, roles: [policy, rollout, reference]}, "
    "scores: {devices: 1, roles: [reward_model]}, judge: {devices: 2, roles: [judge]}}",
]
TOGETHER = [
    "cluster.backend=ray",
    "cluster.pools={all: {devices: 1, roles: [policy, rollout, reference, reward_model, judge]}}",
]


def scores_of(run):
    """What every step was scored with, by component."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "rollout/reward_mean", "reward/judge_mean", "reward/reward_model_mean", "eval/reward_mean")
    return [{name: line[name] for name in names if name in line} for line in lines]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    return write_scored_run(tmp_path_factory.mktemp("scored"))


@pytest.fixture(scope="module")
def beside(run_file):
    """Scores of the run in one process, its judge a service."""
    here = run_file.parent
    assert main(["train", str(run_file), f"run.dir={here / 'beside'}"]) == 0
    scores = scores_of(here / "beside")
    assert len({line.get("reward/judge_mean") for line in scores}) > 2, "there is something to compare"
    return scores


def assert_same_scores(run, expected):
    for line, other in zip(scores_of(run), expected, strict=True):
        assert line == pytest.approx(other, rel=1e-5)


def test_those_that_share_the_trainers_devices_sleep_while_it_works(run_file, beside):
    life = Life(run_file, *TOGETHER, "run.dir=together")
    assert life.end() == 0, life.text()
    assert_same_scores(run_file.parent / "together", beside)
    log = (run_file.parent / "together" / "logs" / "judge-0.log").read_text()
    told = [line.split("POST ")[1].split()[0] for line in log.splitlines() if "POST /" in line]
    order = [path for path in told if path in ("/sleep", "/wake_up")]
    # What went well is told once and then summed up; the first of each are in order.
    assert order[:2] == ["/sleep", "/wake_up"] and told.index("/wake_up") < told.index("/v1/chat/completions")
    assert "services: judge-0 0 restarts" in life.text()


def test_on_devices_of_their_own_they_come_back_when_killed_and_nothing_is_scored_otherwise(run_file, beside):
    life = Life(run_file, *APART, "run.dir=apart")
    run = run_file.parent / "apart"
    life.until(lambda: (run / "metrics.jsonl").exists() and scores_of(run))
    killed, other = (one.pid for one in read_state(run).services)
    (copy,) = life.started("ray::ScorerActor")
    os.kill(killed, signal.SIGKILL)
    copy.kill()
    assert life.end() == 0, life.text()
    restarts = [one.restarts for one in read_state(run).services]
    assert not psutil.pid_exists(killed) and restarts == [1, 0], "the faults really happened"
    assert "reward_model-0 died" in life.text()
    assert "0 of 232 samples could not be scored; services: judge-0 1 restart, judge-1 0 restarts" in life.text()
    logs = [(run / "logs" / f"judge-{number}.log").read_text() for number in (0, 1)]
    assert all("POST /v1/chat/completions 200" in log for log in logs), "both replicas were asked"
    assert_same_scores(run, beside)
    assert life.nothing_is_left() and not psutil.pid_exists(other)


def test_scoring_continues_when_the_trainer_dies(run_file, beside):
    run = run_file.parent / "dying"
    life = Life(run_file, *TOGETHER, f"run.dir={run}", "checkpoint.every=1")
    life.until(lambda: (run / "metrics.jsonl").exists() and len(scores_of(run)) > 1)
    judges = [one.pid for one in read_state(run).services]
    (copy,) = life.started("ray::ScorerActor")
    life.started("ray::TrainerRank")[-1].kill()
    scorers = [*map(psutil.Process, judges), copy]
    life.until(lambda: life.text().count("; ready after") == 2)
    assert all(one.is_running() for one in scorers)
    assert life.end() == 0, life.text()
    assert [one.pid for one in read_state(run).services] == judges, "they are those of before"
    assert_same_scores(run, beside)
    assert life.nothing_is_left()


def test_a_killed_run_leaves_no_judge(run_file):
    life = Life(run_file, *APART, "run.dir=gone", "run.steps=100000")
    run = run_file.parent / "gone"
    life.until(lambda: (run / "services.json").exists() and read_state(run).services[0].state == "ready")
    judge = psutil.Process(read_state(run).services[0].pid)
    life.end(signal.SIGKILL)
    assert not psutil.wait_procs([judge], timeout=20)[1]
