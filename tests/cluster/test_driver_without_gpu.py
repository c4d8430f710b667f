"""A driver on a machine without an accelerator, of a Ray cluster whose other machines have GPUs."""

import json
from types import SimpleNamespace

import pytest
import torch

from hone.assemble import services, stages
from hone.assemble.models import starting_folder
from hone.config.load import load_config
from hone.config.run import RunConfig
from hone.data.chat import load_tokenizer
from hone.devices import FoundDevices
from hone.errors import DataError, PlacementError

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

    def tokenizer_of(_):
        raise Reached

    real_place = stages.topology_on
    monkeypatch.setattr(services, "machines_of", lambda cluster: MACHINES)
    monkeypatch.setattr(stages, "topology_on", place)
    monkeypatch.setattr(stages, "tokenizer_of", tokenizer_of)
    with pytest.raises(Reached):
        stages.train(loaded)
    assert [(found.device_type, found.per_node) for found in placed] == [("cuda", 8)]


def test_a_run_in_one_process_needs_its_own(loaded):
    with pytest.raises(DataError, match=r"run.device: cuda"):
        stages.set_up_arithmetic(loaded.config.run)


def test_random_weights_for_engines_are_made_on_its_cores(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = {"init": {"model_type": "qwen3", **sizes, "num_key_value_heads": 1, "head_dim": 16}, "characters": "ab"}
    config = RunConfig.model_validate({"model": model, "data": {"train": "d"}})
    source = SimpleNamespace(
        loaded=SimpleNamespace(config=config, run_file=tmp_path / "run.yaml"),
        folder=SimpleNamespace(path=tmp_path),
        tokenizer=load_tokenizer(config.model, tmp_path),
        device=torch.device("cuda"),
    )
    assert (starting_folder(source) / "model.safetensors").is_file()


def own_ray(device):
    sections = {"run": {"device": device}, "cluster": {"backend": "ray"}}
    return RunConfig.model_validate({"model": {"path": "a/b"}, "data": {"train": "d"}, **sections})


def test_a_ray_of_its_own_refuses_what_hone_does_not_know(monkeypatch):
    """And what is not there, or cannot be placed; it computes on the CPU where that is all there is, or wanted."""
    assert services.devices_found(own_ray("auto")).device_type == "cpu"
    with pytest.raises(DataError, match=r"run.device: cuda, but torch sees no GPU"):
        services.devices_found(own_ray("cuda"))
    for seen, error in (("xpu", DataError), ("cuda", PlacementError)):
        monkeypatch.setattr(
            "torch.accelerator.current_accelerator", lambda check_available=False, seen=seen: torch.device(seen)
        )
        with pytest.raises(error, match=rf"run.device.* auto.* `{seen}` here"):
            services.devices_found(own_ray("auto"))
        assert services.devices_found(own_ray("cpu")).device_type == "cpu"
    gpus = FoundDevices("cuda", "GPU", 2)
    monkeypatch.setattr(services, "devices_here", lambda wanted: gpus)
    assert services.devices_found(own_ray("auto")) is gpus
