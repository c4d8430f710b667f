"""Whole runs whose weights go by broadcast: they learn what those do that go through Ray's object store."""

import os
import signal

import pytest
from ray_runs import Life, write_run
from test_ray_runs import APART, ASYNC, COLOCATED, assert_same_learning, metrics_of

from hone.cli.main import main
from hone.observe.events import read_events
from hone.run.audit import audit

pytestmark = [pytest.mark.timeout(600)]

GROUP = ["cluster.transport=group"]


def events_of(folder, *kinds):
    return [event for event in read_events(folder / "run" / "events.jsonl") if event["kind"] in kinds]


@pytest.mark.slow("starts Ray, and whole runs in it")
def test_a_run_by_broadcast_learns_what_one_through_the_object_store_does(tmp_path):
    told = {}
    for folder, transport in [("store", []), ("group", GROUP)]:
        life = Life(write_run(tmp_path / folder), *APART, *transport)
        assert life.end() == 0, life.text()
        told[folder] = life.text()
    assert "new weights go through Ray's object store" in told["store"]
    assert "new weights go through a broadcast (gloo)" in told["group"]
    assert_same_learning(tmp_path / "group" / "run", tmp_path / "store" / "run")
    for folder in told:
        assert 1 <= metrics_of(tmp_path / folder / "run")[-1]["engine/published_over_least"] < 1.05


@pytest.mark.slow("starts Ray, and whole runs in it")
def test_a_killed_engine_joins_the_group_again_and_the_other_is_never_without_weights(tmp_path):
    life = Life(write_run(tmp_path), *ASYNC, *GROUP, "run.steps=100000")
    life.until(lambda: len(events_of(tmp_path, "trained")) >= 2)
    os.kill(life.started("ray::EngineActor")[-1].pid, signal.SIGKILL)

    def both_have_versions_again():
        down = events_of(tmp_path, "replica_down")
        lost, since = (down[0]["replica"], down[0]["at"]) if down else ("", 0.0)
        new = [
            event for event in events_of(tmp_path, "published") if event.get("replica") == lost and event["at"] > since
        ]
        return len(new) >= 3

    life.until(both_have_versions_again)
    assert life.end(signal.SIGINT) == 130, life.text()
    (down,) = events_of(tmp_path, "replica_down")
    assert "died" in down["why"] or "ActorDied" in down["why"], (
        "the fault really happened, and no bystander fell with it"
    )
    assert audit(read_events(tmp_path / "run" / "events.jsonl")).violations == ()
    assert life.nothing_is_left()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([*APART, "cluster.transport=ipc"], "= ipc is for a trainer and engines on the same GPUs"),
        ([*COLOCATED, "cluster.transport=ipc"], "= ipc shares a GPU's memory, and run.device = cpu"),
        ([*COLOCATED, *GROUP, "run.device=cuda"], "= group cannot broadcast from a GPU to itself"),
    ],
    ids=["ipc apart", "ipc without GPUs", "NCCL on one GPU"],
)
def test_a_transport_that_cannot_be_is_refused(tmp_path, capsys, settings, says):
    assert main(["check", str(write_run(tmp_path)), *settings]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        (APART, "Ray's object store"),
        ([*APART, "run.device=cuda"], "a broadcast (NCCL)"),
        ([*COLOCATED, "run.device=cuda"], "the memory of their GPU (CUDA IPC)"),
        ([*COLOCATED, "run.device=auto"], "the memory of their GPU (CUDA IPC); without GPUs Ray's object store"),
        ([*APART, *GROUP], "a broadcast (gloo)"),
    ],
)
def test_explain_shows_what_weights_go_through(tmp_path, capsys, settings, way):
    assert main(["explain", str(write_run(tmp_path)), "cluster.transport", *settings]) == 0
    assert way in capsys.readouterr().out
