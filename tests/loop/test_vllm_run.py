"""A run whose engine is vLLM in a process of Ray's, taking turns with the trainer: SFT, then RL. Real vLLM."""

import json

import pytest
from tiny import metrics_of, write_run

from hone.assemble import train
from hone.config.load import load_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

HEADS_OF_32 = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def test_training_with_vllm_agrees_with_the_trainer_at_every_version(tmp_path):
    run_file = write_run(tmp_path, steps=4)
    sizes = [f"model.init.{name}={value}" for name, value in HEADS_OF_32.items()]
    train(
        load_config(
            run_file,
            [
                *sizes,
                "sft.epochs=6",
                "cluster.backend=ray",
                "cluster.devices_per_node=1",
                "cluster.engines.use=vllm",
                "cluster.engines.max_num_seqs=64",
            ],
        )
    )
    steps = [line for line in metrics_of(tmp_path) if "train/mismatch_gap" in line]
    assert len(steps) == 4
    assert all(line["train/mismatch_gap"] < 1e-4 for line in steps)  # the same logprobs, to float32
    assert all(line["train/mismatch_kl"] < 1e-6 for line in steps)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    held = [event["fingerprint"] for event in events if event["kind"] == "published" and "fingerprint" in event]
    assert len(set(held)) == 5  # five versions, each with weights of its own
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
