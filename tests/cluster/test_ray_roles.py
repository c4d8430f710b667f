"""Runs with critic and reference in pools of their own: they learn what one process learns, and go on elsewhere."""

import os
import shutil
import signal

import pytest
from ray_runs import Life, write_run
from test_ray_runs import RAY, assert_same_learning, metrics_of

from hone import assemble
from hone.config.load import load_config
from hone.observe.events import read_events
from hone.run.audit import audit_file

pytestmark = [pytest.mark.slow("starts Ray, and whole runs in it"), pytest.mark.timeout(600)]

PPO = [
    "algorithm.correction=none",  # else ratios of rounding errors would be learnt from too
    "algorithm.credit=gae",
    "algorithm.reference_refresh_every=2",
    "critic.warmup_updates=1",
    "critic.optimizer.lr=1e-3",
    "train.samples_per_optimizer_step=32",
    "run.steps=4",
    "observe.console=quiet",
]
EACH = [
    *RAY,
    "cluster.pools={train: {devices: 2, roles: [policy]}, values: {devices: 1, roles: [critic]}, "
    "frozen: {devices: 2, roles: [reference]}, sample: {devices: 1, roles: [rollout]}}",
]
ONE_GANG_BESIDE = [
    *RAY,
    "cluster.pools={train: {devices: 1, roles: [policy, rollout]}, others: {devices: 1, roles: [critic, reference]}}",
]

CRITIC_APART = [
    *RAY,
    "cluster.pools={train: {devices: 1, roles: [policy, reference]}, values: {devices: 1, roles: [critic]}, "
    "sample: {devices: 1, roles: [rollout]}}",
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run in one process; its folder has a checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("alone")
    return assemble.train(load_config(write_run(folder), [*PPO, f"run.dir={folder / 'run'}"]))


def run_file_in(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return write_run(folder)


def from_step_2(run, folder):
    """A copy of a run's folder as it was after step 2."""
    copy = shutil.copytree(run, folder / "run")
    shutil.rmtree(copy / "checkpoints" / "step-000004")
    return copy


def test_each_in_a_pool_of_its_own(tmp_path, monkeypatch, alone):
    run_file = run_file_in(tmp_path, monkeypatch)
    run = assemble.train(load_config(run_file, [*PPO, *EACH, "run.dir=each"]))
    assert_same_learning(run, alone)
    for name in ("critic/loss", "critic/value_mean", "critic/grad_norm", "critic/lr"):
        mine, theirs = ([line[name] for line in metrics_of(one) if name in line] for one in (run, alone))
        assert len(mine) == 4 and mine == pytest.approx(theirs, rel=1e-3, abs=1e-6), name
    processes = {name for line in metrics_of(run) for name in line if name.endswith("_process_rss_gib")}
    assert {f"memory/{name}_process_rss_gib" for name in ("rank-1", "critic-0", "reference-1")} <= processes
    names = {path.name for path in (run / "checkpoints" / "step-000002").glob("*.safetensors")}
    assert {"critic.safetensors", "tensors-00000-of-00002.safetensors", "reference-00001-of-00002.safetensors"} <= names
    assert audit_file(run / "events.jsonl").violations == ()
    back = from_step_2(run, tmp_path)
    assemble.train(load_config(run_file, PPO), resume=True)
    assert_same_learning(back, alone)


def test_a_run_of_one_process_continues_with_roles_apart(tmp_path, monkeypatch, alone):
    run_file = run_file_in(tmp_path, monkeypatch)
    run = from_step_2(alone, tmp_path)
    assemble.train(load_config(run_file, [*PPO, *ONE_GANG_BESIDE]), resume=True)
    assert_same_learning(run, alone)


def test_a_critic_that_dies_is_named_and_started_again(tmp_path, monkeypatch):
    run_file = run_file_in(tmp_path, monkeypatch)
    alone = assemble.train(load_config(run_file, [*PPO, "run.steps=20", "run.dir=alone"])).absolute()
    life = Life(run_file, *PPO, *CRITIC_APART, "run.steps=20")

    def events(kind):
        return [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == kind]

    life.until(lambda: events("trained"))
    os.kill(events("trainer_up")[0]["pids"]["critic rank 0"], signal.SIGKILL)
    assert life.end() == 0, life.text()
    (down,) = events("trainer_down")
    assert "critic rank 0 died" in down["why"]
    assert_same_learning(tmp_path / "run", alone)
    assert life.nothing_is_left()
