"""examples/ppo runs as it is written, but for its size."""

from pathlib import Path

import pytest
from tiny import metrics_of

from hone.cli.main import main

RUN_FILE = Path(__file__).parents[2] / "examples" / "ppo" / "run.yaml"
SMALL = [
    "run.steps=3",
    "run.threads=1",
    "critic.warmup_updates=1",
    "train.prompts_per_step=4",
    "train.samples_per_optimizer_step=16",
    "sft.epochs=0.05",
    "data.eval_rows=0:20",
    "observe.console=quiet",
    "observe.tensorboard=false",
]


@pytest.mark.slow("trains an example")
def test_the_example_trains_its_critic_then_its_policy(tmp_path):
    assert main(["train", str(RUN_FILE), f"run.dir={tmp_path}/run", *SMALL]) == 0
    steps = [line for line in metrics_of(tmp_path) if "rollout/reward_mean" in line]
    assert ["train/loss" in line for line in steps] == [False, True, True]
    assert steps[0]["critic/lr"] == steps[-1]["critic/lr"] == pytest.approx(1e-3)
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
