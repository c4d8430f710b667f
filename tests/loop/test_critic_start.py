"""What a critic starts from: the policy, another model, a reward model with its head; and what `hone check` says."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import metrics_of, write_run

from hone.cli.main import main

ROW = ["algorithm.credit=gae", "algorithm.kl_loss_coef=0"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    """The hf/ folder of a run of two updates."""
    folder = tmp_path_factory.mktemp("policy")
    assert main(["train", str(write_run(folder, steps=2)), *ROW]) == 0
    return folder / "run" / "hf"


def first_values(folder, *arguments) -> float:
    """Mean value before the first update of a run that starts its critic as told."""
    assert main(["train", str(write_run(folder, steps=1)), *ROW, *arguments]) == 0
    return next(line["critic/value_mean"] for line in metrics_of(folder) if "critic/value_mean" in line)


def test_a_new_head_knows_nothing(policy, tmp_path):
    assert first_values(tmp_path / "own") == 0
    assert first_values(tmp_path / "other", f"critic.path={policy}") == 0


def test_a_reward_model_brings_its_head(policy, tmp_path):
    folder = tmp_path / "rm"
    folder.mkdir()
    config = json.loads((policy / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(policy / "model.safetensors")
    weights.pop("lm_head.weight", None)
    weights["score.weight"] = torch.ones(1, config["hidden_size"])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert first_values(tmp_path / "run", f"critic.path={folder}") != 0


def check(folder, capsys, *arguments):
    code = main(["check", str(write_run(folder)), *ROW, *arguments])
    return code, " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "critic, model type qwen3"),
        ({"vocab_size": 99}, "has a vocabulary of 99 tokens, the policy's has"),
        ({"max_position_embeddings": 8}, "reads 8 tokens (max_position_embeddings), the longest sample has 12"),
    ],
    ids=["right", "vocabulary", "context"],
)
def test_check_looks_at_the_critic_before_anything_starts(policy, tmp_path, capsys, change, said):
    folder = tmp_path / "critic"
    folder.mkdir()
    config = json.loads((policy / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((policy / "model.safetensors").read_bytes())
    code, out = check(tmp_path, capsys, f"critic.path={folder}")
    assert code == (2 if change else 0), out
    assert said in out
