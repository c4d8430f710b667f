"""A rank of Ray's that runs out of memory: all try again with less, or start again with less where they cannot, and the
run ends with the same weights."""

import os
from pathlib import Path

import pytest
from failing_ranks import ranks_of_which_one_fails
from ray_runs import write_run
from test_ray_runs import COLOCATED, assert_same_learning

from hone import assemble
from hone.config.load import load_config
from hone.memory.record import Record
from hone.observe.events import read_events

pytestmark = [pytest.mark.timeout(600)]


@pytest.mark.slow("starts Ray twice, and whole runs in it")
@pytest.mark.parametrize(("division", "starts"), [([], 1), (["cluster.trainer.tensor_parallel=2"], 2)])
def test_all_ranks_compute_with_less_when_one_runs_out_of_memory(tmp_path, monkeypatch, division, starts):
    options = ["observe.console=quiet", *COLOCATED, *division]
    run_file = write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # of Ray's processes
    assemble.train(load_config(run_file, ["run.dir=whole", *options]))
    monkeypatch.setattr("hone.assemble.ray_workers.rank", ranks_of_which_one_fails)
    assemble.train(load_config(run_file, ["run.dir=failed", *options]))
    assert not Record.read(tmp_path / "whole").changes
    (change,) = Record.read(tmp_path / "failed").changes
    assert change.phase == "update" and change.is_down
    events = [event["kind"] for event in read_events(tmp_path / "failed" / "events.jsonl")]
    assert events.count("trainer_up") == starts
    assert_same_learning(tmp_path / "failed", tmp_path / "whole")
