"""A driver on a machine without an accelerator, of a Ray cluster whose other machines have GPUs."""

import json

import pytest
import torch

from hone.assemble import services, stages
from hone.config.load import load_config
from hone.errors import DataError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")

MACHINES = [{"CPU": 4.0}, {"CPU": 16.0, "GPU": 8.0, "accelerator_type:H100": 1.0}]


class Reached(Exception):
    """What comes after the devices."""


@pytest.fixture
def loaded(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    keys = {
        "run": {"steps": 1, "device": "cuda"},
        "model": {"path": "Qwen/Qwen3-0.6B"},
        "data": {"train": "rows.jsonl", "answer_column": "answer"},
        "reward": {"components": [{"use": "exact"}]},
        "cluster": {"backend": "ray", "address": "head:6379", "devices_per_node": 8},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(keys))
    return load_config(tmp_path / "run.yaml")


def test_it_starts_a_run_on_the_cluster_s_gpus(monkeypatch, loaded):
    """It computes on its own cores, and the run is placed on the cluster's devices."""
    placed = []

    def place(config, found):
        placed.append(found)
        return real_place(config, found)

    def load_tokenizer(*_):
        raise Reached

    real_place = stages.topology_on
    monkeypatch.setattr(services, "machines_of", lambda cluster: MACHINES)
    monkeypatch.setattr(stages, "topology_on", place)
    monkeypatch.setattr(stages, "load_tokenizer", load_tokenizer)
    with pytest.raises(Reached):
        stages.train(loaded)
    assert [(found.device_type, found.per_node) for found in placed] == [("cuda", 8)]


def test_a_run_in_one_process_needs_its_own(loaded):
    with pytest.raises(DataError, match=r"run.device: cuda"):
        stages.set_up_arithmetic(loaded.config.run)
