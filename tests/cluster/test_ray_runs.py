"""Whole runs with `cluster.backend: ray`: they learn what one process learns, go on, and leave nothing behind."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
from ray_runs import Life, write_run
from raylets import free_port, rays_folder, until_open
from safetensors.numpy import load_file

from hone import assemble
from hone.cli.main import main
from hone.config.load import load_config
from hone.observe.events import read_events
from hone.run.audit import audit_file

pytestmark = [pytest.mark.timeout(600)]

RAY = ["cluster.backend=ray"]
COLOCATED = [*RAY, "cluster.pools={all: {devices: 2, roles: [policy, rollout, reference]}}"]
APART = [
    *RAY,
    "cluster.pools={trainer: {devices: 2, roles: [policy, reference]}, engines: {devices: 2, roles: [rollout]}}",
]
ONE_AND_ONE = [*RAY, "cluster.pools={one: {devices: 1, roles: [policy, rollout, reference]}}"]
ASYNC = [*APART, "rollout.max_staleness=1"]


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def last_step(folder):
    """Of the metrics; 0 before there are any."""
    file = folder / "run" / "metrics.jsonl"
    return max((line["step"] for line in metrics_of(file.parent)), default=0) if file.exists() else 0


def weights_of(run):
    return load_file(run / "hf" / "model.safetensors")


def has_trained(folder, run="run"):
    return any(event["kind"] == "trained" for event in read_events(folder / run / "events.jsonl"))


def assert_same_learning(run, other):
    """The same samples and the same updates, up to the rounding of sums."""
    mine, theirs = metrics_of(run), metrics_of(other)
    assert [line["step"] for line in mine] == [line["step"] for line in theirs]
    for line, expected in zip(mine, theirs, strict=True):
        for name in ("rollout/reward_mean", "rollout/response_tokens_mean", "eval/reward_mean"):
            assert line.get(name) == expected.get(name), name
        for name in ("train/loss", "train/grad_norm", "train/kl_ref", "train/entropy"):
            assert line.get(name, 0.0) == pytest.approx(expected.get(name, 0.0), rel=1e-3, abs=1e-5), name
    ours, expected = weights_of(run), weights_of(other)
    assert ours.keys() == expected.keys()
    for name, weight in ours.items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow("starts Ray, and whole runs in it")
def test_two_ranks_and_two_engines_learn_what_one_process_learns(tmp_path, monkeypatch):
    run_file = write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    assemble.train(load_config(run_file, ["run.dir=local", "observe.console=quiet"]))
    assemble.train(load_config(run_file, ["run.dir=ray", "observe.console=quiet", *COLOCATED]))
    assert_same_learning(tmp_path / "ray", tmp_path / "local")
    assert all(line["train/grad_norm"] > 0.01 for line in metrics_of(tmp_path / "ray") if "train/grad_norm" in line)
    found = audit_file(tmp_path / "ray" / "events.jsonl")
    assert found.violations == ()


@pytest.mark.slow("starts Ray, and whole runs in it")
def test_ranks_and_engines_apart_learn_what_one_process_learns(tmp_path, monkeypatch):
    run_file = write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    assemble.train(load_config(run_file, ["run.dir=local", "observe.console=quiet"]))
    assert Life(run_file, *APART).end() == 0
    assert_same_learning(tmp_path / "run", tmp_path / "local")


@pytest.mark.slow("starts Ray, and whole runs in it")
def test_generating_and_training_overlap_within_the_bound(tmp_path):
    run_file = write_run(tmp_path)
    life = Life(run_file, *ASYNC, "run.steps=12")
    assert life.end() == 0, life.text()
    lines = [line for line in metrics_of(tmp_path / "run") if "rollout/staleness_max" in line]
    assert max(line["rollout/staleness_max"] for line in lines) == 1, "what was sampled ahead is one update late"
    assert lines[-1]["rollout/reward_mean"] > lines[0]["rollout/reward_mean"]
    assert all("train/mismatch_kl" in line for line in lines)
    assert audit_file(tmp_path / "run" / "events.jsonl").violations == ()


@pytest.mark.slow("starts Ray, and whole runs in it")
def test_a_stopped_run_leaves_nothing_and_continues(tmp_path):
    run_file = write_run(tmp_path)

    def stopped(number, *arguments):
        life = Life(run_file, *COLOCATED, "run.steps=100000", *arguments)
        step = last_step(tmp_path)
        life.until(lambda: last_step(tmp_path) > step)
        assert life.end(number) == 130, life.text()
        assert life.nothing_is_left()
        assert "aborted" not in life.text().lower()
        return life.text()

    stopped(signal.SIGINT)
    assert "resuming from" in stopped(signal.SIGTERM, "--resume")
    steps = last_step(tmp_path) + 2
    resumed = Life(run_file, *COLOCATED, f"run.steps={steps}", "--resume")
    assert resumed.end() == 0, resumed.text()
    assert "resuming from" in resumed.text()
    assert last_step(tmp_path) == steps


@pytest.mark.slow("starts Ray, and whole runs in it")
def test_a_rank_that_dies_is_named_and_ends_the_run(tmp_path):
    run_file = write_run(tmp_path)
    life = Life(run_file, *COLOCATED, "run.steps=100000", "cluster.restarts=0")
    life.until(lambda: has_trained(tmp_path))
    os.kill(life.started("ray::TrainerRank")[-1].pid, signal.SIGKILL)
    assert life.end() == 1
    assert "trainer rank" in life.text() and "died" in life.text()
    assert life.nothing_is_left()


def test_a_run_that_cannot_be_placed_says_so_before_anything_starts(tmp_path, capsys):
    run_file = write_run(tmp_path)
    assert main(["train", str(run_file), *RAY, "cluster.pools={all: {devices: 2, roles: [policy]}}"]) == 2
    assert "rollout" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow("starts Ray, and whole runs in it")
def test_a_run_joins_a_cluster_of_two_machines_and_leaves_it_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # importing Ray sets it
    monkeypatch.setenv("RAY_worker_niceness", "0")  # as docs/cluster.md recommends
    from ray.cluster_utils import Cluster

    run_file = write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    assemble.train(load_config(run_file, ["run.dir=local", "observe.console=quiet"]))
    monkeypatch.setattr("ray._private.node.Node._register_shutdown_hooks", lambda *_: None)  # they replace SIGTERM's
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        there = ["cluster.nodes=2", "cluster.devices_per_node=1", f"cluster.address={cluster.address}"]
        life = Life(run_file, *COLOCATED, *there)
        assert life.end() == 0, life.text()
        assert_same_learning(tmp_path / "run", tmp_path / "local")
        again = Life(run_file, *COLOCATED, *there, "run.dir=again", "run.steps=100000")
        again.until(lambda: has_trained(tmp_path, "again"))
        workers = [process for node in cluster.list_all_nodes() for process in running(node)]
        assert len(workers) == 4
        assert again.end(signal.SIGKILL) == -signal.SIGKILL
        assert not psutil.wait_procs(workers, timeout=30)[1], "Ray ends the actors of a driver that is gone"
        last = Life(run_file, *COLOCATED, *there, "run.dir=last")
        assert last.end() == 0, f"the devices are free again: {last.text()}"
    finally:
        cluster.shutdown()


@pytest.mark.slow("starts Ray, and whole runs in it")
def test_a_ray_that_wants_the_machines_token_is_joined(tmp_path, monkeypatch):
    """`ray start` asks for the token that an earlier run with a Ray of its own has left in the home directory."""
    run_file, port = write_run(tmp_path), free_port()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_worker_niceness", "0")  # as docs/cluster.md recommends
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("a" * 64)
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", "--num-cpus=1"]
    with rays_folder() as short, open(tmp_path / "head.log", "w") as log:
        monkeypatch.setenv("RAY_TMPDIR", str(short))
        head = subprocess.Popen([*ray, "--include-dashboard=false", "--block"], stdout=log, stderr=log)
        try:
            until_open(port, head, tmp_path / "head.log")
            life = Life(run_file, *ONE_AND_ONE, "cluster.devices_per_node=1", f"cluster.address=127.0.0.1:{port}")
            assert life.end() == 0, life.text()
            monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
            refused = Life(run_file, *ONE_AND_ONE, f"cluster.address=127.0.0.1:{port}", "run.dir=refused")
            assert refused.end() == 1 and "~/.ray/auth_token" in refused.text(), "it really asks for one"
        finally:
            head.kill()
            head.wait()


def running(node):
    """A node's processes that are ranks or engines."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    names = ("ray::TrainerRank", "ray::EngineActor")
    return [child for child in raylet.children(recursive=True) if " ".join(child.cmdline()).startswith(names)]
