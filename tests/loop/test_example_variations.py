"""examples/variations run as they are written, but for their size, and each does what it is there to show."""

from pathlib import Path

import pytest
from tiny import metrics_of

from hone.cli.main import main

VARIATIONS = Path(__file__).parents[2] / "examples" / "variations"
SMALL = [
    "run.steps=3",
    "run.threads=1",
    "train.prompts_per_step=8",
    "rollout.group_size=4",
    "reward.min_valid_per_group=2",
    "sft.epochs=0.2",
    "data.eval_rows=0:20",
    "observe.console=quiet",
    "observe.tensorboard=false",
]


def steps_of(folder, name, *more):
    assert main(["train", str(VARIATIONS / name), f"run.dir={folder}/run", *SMALL, *more]) == 0
    return [line for line in metrics_of(folder) if "rollout/reward_mean" in line]


def test_every_variation_is_run_here():
    assert {path.name for path in VARIATIONS.glob("*.yaml")} == {
        "kl-control.yaml",
        "optimizer-steps.yaml",
        "shaping.yaml",
        "off-policy.yaml",
        "evaluation.yaml",
    }


@pytest.mark.slow("a whole run of an example")
def test_kl_control_steers_its_coefficient(tmp_path):
    steps = steps_of(tmp_path, "kl-control.yaml", "algorithm.reference_refresh_every=2")
    coefficients = [step["train/kl_coef"] for step in steps]
    assert coefficients[0] == pytest.approx(0.01, rel=0.01) and len(set(coefficients)) == 3


@pytest.mark.slow("a whole run of an example")
def test_several_optimizer_steps_move_the_ratio(tmp_path):
    steps = steps_of(tmp_path, "optimizer-steps.yaml", "train.samples_per_optimizer_step=8")
    assert [step["train/optimizer_steps"] for step in steps] == [8, 8, 8]
    assert steps[0]["train/ratio_max"] > 1


@pytest.mark.slow("samples many groups that it drops")
def test_shaping_replaces_groups_that_say_nothing(tmp_path):
    steps = steps_of(tmp_path, "shaping.yaml", "algorithm.max_dropped_per_kept=1000", "run.steps=1")
    assert steps[0]["rollout/groups_dropped"] > 0
    assert steps[0]["rollout/zero_std_group_frac"] == 0


@pytest.mark.slow("a whole run of an example")
def test_off_policy_trains_on_older_samples(tmp_path):
    steps = steps_of(tmp_path, "off-policy.yaml", "run.steps=6")
    assert max(step["rollout/staleness_max"] for step in steps) == 1


@pytest.mark.slow("a whole run of an example")
def test_evaluation_keeps_the_best(tmp_path):
    best = "eval/pass@1"
    steps_of(tmp_path, "evaluation.yaml", "eval.every=1", "eval.samples=4")
    evaluations = [line for line in metrics_of(tmp_path) if best in line]
    assert len(evaluations) == 4 and all(line["eval/pass@4"] >= line["eval/pass@1"] for line in evaluations)
    assert (tmp_path / "run" / "hf-best" / "model.safetensors").is_file()
