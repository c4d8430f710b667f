"""Runs on Ray that replay routing: they learn what one process learns, while records stay out of the controller."""

import os
import signal

import pytest
from ray_runs import Life, write_run
from test_ray_faults import events_of, trained
from test_ray_runs import APART, assert_same_learning

from hone import assemble
from hone.cluster.trainer import RemoteTrainer
from hone.config.load import load_config
from hone.experts import StoredExperts
from hone.observe.events import read_events
from hone.run.audit import audit

pytestmark = [pytest.mark.slow("starts Ray, and whole runs in it"), pytest.mark.timeout(600)]

MIXTURE = [
    "model.init={model_type: qwen3_moe, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 8, intermediate_size: 64, moe_intermediate_size: 16, num_experts: 8, "
    "num_experts_per_tok: 2, max_position_embeddings: 32, tie_word_embeddings: true}",
    "algorithm.replay_routing=true",
]
SMALL = "RAY_max_direct_call_object_size"
"""Bytes below which Ray keeps results out of its object store."""


def test_two_ranks_learn_what_one_process_learns_while_records_stay_out_of_the_controller(tmp_path, monkeypatch):
    run_file, seen = write_run(tmp_path), []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SMALL, "100")
    update = RemoteTrainer.update
    monkeypatch.setattr(
        RemoteTrainer, "update", lambda self, batch, how: (seen.append(batch), update(self, batch, how))[1]
    )
    assemble.train(load_config(run_file, ["run.dir=local", "observe.console=quiet", *MIXTURE]))
    assert not seen
    assemble.train(load_config(run_file, ["run.dir=ray", "observe.console=quiet", *MIXTURE, *APART]))
    assert_same_learning(tmp_path / "ray", tmp_path / "local")
    assert len(seen) == 3
    for batch in seen:
        assert all(isinstance(experts, StoredExperts) for experts in (batch.routing_T, *batch.prompt_routing))
        assert len(batch.routing_T) == len(batch.token_ids_T)


def test_a_killed_engine_costs_nothing_but_time(tmp_path, monkeypatch):
    steps, run_file = "run.steps=30", write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SMALL, "100")
    assemble.train(load_config(run_file, ["run.dir=local", "observe.console=quiet", steps, *MIXTURE]))
    life = Life(run_file, *APART, *MIXTURE, steps)
    life.until(lambda: trained(tmp_path) >= 5)
    os.kill(life.started("ray::EngineActor")[-1].pid, signal.SIGKILL)
    assert life.end() == 0, life.text()
    (down,) = events_of(tmp_path, "replica_down")
    assert "died" in down["why"], "the fault really happened"
    assert not events_of(tmp_path, "trainer_down") and "is lost" not in life.text()
    found = audit(read_events(tmp_path / "run" / "events.jsonl"))
    assert found.violations == () and found.updates == 30
    assert_same_learning(tmp_path / "run", tmp_path / "local")
    assert life.nothing_is_left()
