"""examples/reward-model and examples/sft-chat run as they are written, only shorter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hone import assemble
from hone.cli.main import main
from hone.config.load import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = ["run.threads=1", "observe.console=quiet", "observe.tensorboard=false", "observe.trace=false"]


@pytest.fixture(autouse=True)
def no_threads_left_behind():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("example", ["reward-model", "sft-chat"])
def test_the_script_makes_exactly_these_files(example, tmp_path):
    subprocess.run([sys.executable, EXAMPLES / example / "make_data.py", tmp_path], check=True, capture_output=True)
    made = sorted(tmp_path.iterdir())
    assert [path.name for path in made] == sorted(path.name for path in (EXAMPLES / example).glob("*.jsonl"))
    assert all(path.read_bytes() == (EXAMPLES / example / path.name).read_bytes() for path in made)


def test_held_out_pairs_are_never_trained_on():
    pairs, held_out = (
        set((EXAMPLES / "reward-model" / f"{name}.jsonl").read_text().splitlines()) for name in ("pairs", "held_out")
    )
    assert pairs and held_out and not pairs & held_out


@pytest.mark.slow("a run of two stages")
def test_a_reward_model_is_trained_and_then_rewards_a_policy(tmp_path):
    examples = EXAMPLES / "reward-model"
    rm = [*QUICK, f"run.dir={tmp_path}/rm", "rm.epochs=2", "train.optimizer.warmup_steps=2", "eval.every=0"]
    assemble.train(load_config(examples / "run-rm.yaml", rm))
    config = json.loads((tmp_path / "rm" / "hf" / "config.json").read_text())
    assert config["hone_reward_std"] > 0
    reward = f"[{{use: reward_model, args: {{path: {tmp_path}/rm/hf, normalize: true}}, timeout_s: 60}}, "
    reward += "{use: exact, weight: 0}]"
    rl = [*QUICK, f"run.dir={tmp_path}/rl", f"reward.components={reward}", "run.steps=2", "sft.epochs=1"]
    rl += ["train.prompts_per_step=4", "data.eval_rows=0:8"]
    assemble.train(load_config(examples / "run-rl.yaml", rl))
    lines = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    (first, second) = (line for line in lines if "rollout/reward_mean" in line)
    assert first["reward/reward_model_fault_frac"] == 0.0
    assert first["rollout/reward_mean"] == pytest.approx(first["reward/reward_model_mean"], abs=1e-6)
    assert second["reward/reward_model_std"] > 0 and "reward/exact_mean" in second


@pytest.mark.slow("a run of an example")
def test_sft_on_conversations(tmp_path):
    settings = [*QUICK, f"run.dir={tmp_path}/chat", "sft.rows=0:256", "sft.epochs=1", "sft.optimizer.warmup_steps=1"]
    assemble.train(load_config(EXAMPLES / "sft-chat" / "run.yaml", settings))
    lines = [json.loads(line) for line in (tmp_path / "chat" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and lines[-1]["sft/loss"] < lines[0]["sft/loss"]
    template = json.loads((tmp_path / "chat" / "hf" / "tokenizer_config.json").read_text()).get("chat_template")
    saved = tmp_path / "chat" / "hf" / "chat_template.jinja"
    assert "generation" in (template or saved.read_text()), "the template travels with the model"
    assert main(["check", str(EXAMPLES / "sft-chat" / "run.yaml")]) == 0
