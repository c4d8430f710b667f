"""Runs of models with layers of linear attention, convolution or state space, interrupted and resumed."""

import json

import pytest
from model_zoo import architecture
from tiny import metrics_of, weights_of, write_run

from hone.cli.main import main

FAMILIES = ["lfm2", "qwen3_5_text", "qwen3_next", "mamba2", "falcon_h1", "nemotron_h"]
CLASS_KEYS = ("vocab_size", "time_step_limit")
"""The vocabulary is the tokenizer's; the other's default is the class's, with an infinity, which is no JSON."""


@pytest.mark.slow("three runs of each")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, family):
    keys = architecture(family)
    words = [f"model.init={json.dumps({name: keys[name] for name in keys if name not in CLASS_KEYS})}"]
    words.append("checkpoint.every=2")
    whole, torn = (tmp_path / name for name in ("whole", "torn"))
    for folder in (whole, torn):
        folder.mkdir()
        assert main(["train", str(write_run(folder, steps=4)), *words]) == 0
    newest = torn / "run" / "checkpoints" / "step-000004" / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    assert main(["train", "--resume", str(torn / "run")]) == 0
    assert weights_of(torn) == weights_of(whole)
    assert metrics_of(torn) == metrics_of(whole)
    assert next(line for line in metrics_of(whole) if "gate/logprob_gap" in line)["gate/logprob_gap"] < 1e-4
