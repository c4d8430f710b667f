"""A run whose engine is vLLM in a process of Ray's, taking turns with the trainer: SFT, then RL. Real vLLM."""

import json

import pytest
from tiny import metrics_of, write_run

from hone.assemble import train
from hone.config.load import load_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

HEADS_OF_32 = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def run_on_vllm(folder, *overrides):
    """SFT and RL with vLLM on the trainer's device, to the end. Lines of metrics with a mismatch, and each version's
    fingerprint."""
    sizes = [f"model.init.{name}={value}" for name, value in HEADS_OF_32.items()]
    cluster = ["backend=ray", "devices_per_node=1", "engines.use=vllm", "engines.max_num_seqs=64"]
    words = [*sizes, "sft.epochs=6", *(f"cluster.{word}" for word in cluster), *overrides]
    train(load_config(write_run(folder, steps=4), words))
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    held = [event["fingerprint"] for event in events if event["kind"] == "published" and "fingerprint" in event]
    assert len(set(held)) == 5  # five versions, each with weights of its own
    assert (folder / "run" / "hf" / "model.safetensors").is_file()
    return [line for line in metrics_of(folder) if "train/mismatch_gap" in line]


def test_training_with_vllm_agrees_with_the_trainer_at_every_version(tmp_path):
    steps = run_on_vllm(tmp_path)
    assert len(steps) == 4
    assert all(line["train/mismatch_gap"] < 1e-4 for line in steps)  # the same logprobs, to float32
    assert all(line["train/mismatch_kl"] < 1e-6 for line in steps)


def test_an_adapter_alone_is_published_to_vllm_in_every_step(tmp_path):
    """The base is the model after SFT; what vLLM is sent is 4 of its 64 dimensions."""
    adapter = ["rank=4", "stages=[rl]", "publish=adapter"]
    steps = run_on_vllm(tmp_path, "cluster.engines.sleep_level=1", *(f"lora.{word}" for word in adapter))
    assert len(steps) == 4
    assert all(line["train/mismatch_gap"] < 1e-3 for line in steps)
    published = [line["engine/published_mib"] for line in metrics_of(tmp_path) if "engine/published_mib" in line]
    whole = (tmp_path / "run" / "hf" / "model.safetensors").stat().st_size / 2**20
    assert published and all(size < whole / 2 for size in published)
