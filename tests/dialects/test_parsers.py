"""An independent oracle: an imported command has the algorithm that the tool's own parser gives it.

`parsers.json` has random sets of keys with what the real parsers make of them, defaults included (record_parsers.py).
What these values mean is written here a second time, without the tables of `hone import`.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hone.config import schema
from hone.dialects.reading import read_foreign
from hone.dialects.translate import Imported, translate

RECORDED = json.loads((Path(__file__).parent / "parsers.json").read_text("utf-8"))
START = {
    "verl": "python3 -m verl.trainer.main_ppo",
    "openrlhf": "python3 -m openrlhf.cli.train_ppo_ray",
    "trl": "trl grpo",
}
CREDITS = {
    "grpo": "group_norm",
    "rloo": "leave_one_out",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce": "reinforce_pp",
    "dr_grpo": "group_mean",
    "reinforce_baseline": "group_mean_whitened",
}
AGGREGATES = {"token-mean": "token_mean", "seq-mean-token-mean": "sample_mean"}


def of_verl(v: dict[str, Any]) -> dict[str, Any]:
    actor = {key.rpartition("actor.")[2]: value for key, value in v.items() if ".actor." in key}
    credit = CREDITS.get(v["algorithm.adv_estimator"], v["algorithm.adv_estimator"])
    if credit == "group_norm" and not v["algorithm.norm_adv_by_std_in_grpo"]:
        credit = "group_mean"
    group, batch = v["actor_rollout_ref.rollout.n"], v["data.train_batch_size"]
    steps = min(actor["ppo_mini_batch_size"], batch) * group
    found = {
        "algorithm.credit": credit,
        "algorithm.gamma": v["algorithm.gamma"] if credit in ("gae", "reinforce_pp") else 1.0,
        "algorithm.clip_low": actor["clip_ratio_low"],
        "algorithm.clip_high": actor["clip_ratio_high"],
        "algorithm.dual_clip": actor["clip_ratio_c"],
        "algorithm.aggregate": AGGREGATES[actor["loss_agg_mode"]],
        "algorithm.entropy_coef": actor["entropy_coeff"],
        "algorithm.kl_loss_coef": actor["kl_loss_coef"] if actor["use_kl_loss"] else 0.0,
        "train.prompts_per_step": batch,
        "train.samples_per_optimizer_step": None if steps == batch * group else steps,
        "train.passes_per_batch": actor["ppo_epochs"],
        "train.optimizer.lr": actor["optim.lr"],
        "train.optimizer.weight_decay": actor["optim.weight_decay"],
        "train.optimizer.grad_clip": actor["grad_clip"],
        "rollout.group_size": group,
        "rollout.temperature": v["actor_rollout_ref.rollout.temperature"],
        "data.max_prompt_tokens": v["data.max_prompt_length"],
        "rollout.max_response_tokens": v["data.max_response_length"],
    }
    if actor["use_kl_loss"]:
        found["algorithm.kl_estimator"] = {"low_var_kl": "k3", "mse": "k2"}[actor["kl_loss_type"]]
    if credit == "gae":
        found |= {"algorithm.gae_lambda": v["algorithm.lam"], "critic.value_clip": v["critic.cliprange_value"]}
        found |= {"critic.optimizer.lr": v["critic.optim.lr"]}
    return found


def of_openrlhf(v: dict[str, Any]) -> dict[str, Any]:
    credit = CREDITS.get(v["algo.advantage.estimator"], v["algo.advantage.estimator"])
    group, batch, step = v["rollout.n_samples_per_prompt"], v["rollout.batch_size"], v["train.batch_size"]
    schedule = v["actor.lr_scheduler"]
    found = {
        "algorithm.credit": credit,
        "algorithm.gamma": v["algo.advantage.gamma"],
        "algorithm.clip_low": v["actor.eps_clip_low_high"][0],
        "algorithm.clip_high": v["actor.eps_clip_low_high"][1],
        "algorithm.dual_clip": v["actor.dual_clip"],
        "algorithm.aggregate": AGGREGATES[v["actor.loss_agg_mode"] or "token-mean"],
        "algorithm.entropy_coef": v["actor.entropy_coef"] or 0.0,
        "algorithm.kl_reward_coef": v["algo.kl.init_coef"],
        "algorithm.reward_clip": v["reward.clip_range"],
        "train.prompts_per_step": batch,
        "train.samples_per_optimizer_step": None if step >= batch * group else step,
        "train.passes_per_batch": v["train.max_epochs"],
        "train.optimizer.lr": v["actor.adam.lr"],
        "train.optimizer.betas": v["actor.adam.betas"],
        "train.optimizer.weight_decay": v["actor.adam.weight_decay"],
        "train.optimizer.grad_clip": v["actor.max_norm"],
        "train.optimizer.warmup_frac": v["actor.lr_warmup_ratio"],
        "train.optimizer.schedule": "cosine" if "cosine" in schedule else schedule,
        "rollout.group_size": group,
        "seed": v["train.seed"],
    }
    if v["algo.kl.init_coef"]:
        found |= {"algorithm.kl_estimator": v["algo.kl.estimator"], "algorithm.kl_target": v["algo.kl.target"]}
    if credit == "gae":
        found |= {"algorithm.gae_lambda": v["algo.advantage.lambd"], "critic.value_clip": v["critic.value_clip"]}
        found |= {"critic.optimizer.lr": v["critic.adam.lr"]}
    if v["rollout.max_new_tokens"] is not None:
        new = v["rollout.max_new_tokens"]
        found |= {"rollout.max_response_tokens": new, "data.max_prompt_tokens": v["data.max_len"] - new}
    return found


def of_trl(v: dict[str, Any]) -> dict[str, Any]:
    together = v["per_device_train_batch_size"] * v["gradient_accumulation_steps"]
    aggregates = {"grpo": "sample_mean", "dr_grpo": "fixed_length", "dapo": "token_mean", "cispo": "token_mean"}
    found = {
        "algorithm.credit": "group_norm" if v["scale_rewards"] == "group" else "group_mean",
        "algorithm.clip": "cispo" if v["loss_type"] == "cispo" else "ppo",
        "algorithm.aggregate": aggregates[v["loss_type"]],
        "algorithm.ratio": v["importance_sampling_level"],
        "algorithm.clip_low": v["epsilon"],
        "algorithm.clip_high": v["epsilon"] if v["epsilon_high"] is None else v["epsilon_high"],
        "algorithm.dual_clip": v["delta"],
        "algorithm.kl_loss_coef": v["beta"],
        "algorithm.mask_truncated": v["mask_truncated_completions"],
        "train.prompts_per_step": together // v["num_generations"],
        "train.passes_per_batch": v["num_iterations"],
        "train.optimizer.lr": v["learning_rate"],
        "train.optimizer.schedule": v["lr_scheduler_type"],
        "train.optimizer.betas": [0.9, v["adam_beta2"]],
        "train.optimizer.weight_decay": v["weight_decay"],
        "train.optimizer.grad_clip": v["max_grad_norm"],
        "train.optimizer.warmup_steps": int(v["warmup_steps"]),
        "rollout.group_size": v["num_generations"],
        "rollout.max_response_tokens": v["max_completion_length"],
        "rollout.temperature": v["temperature"],
        "checkpoint.every": -(-v["save_steps"] // v["num_iterations"]),
        "seed": v["seed"],
    }
    if v["max_steps"] > 0:
        found["run.steps"] = -(-v["max_steps"] // v["num_iterations"])
    else:
        found["run.epochs"] = v["num_train_epochs"]
    return found


ORACLES = {"verl": of_verl, "openrlhf": of_openrlhf, "trl": of_trl}


def value(imported: Imported, key: str) -> Any:
    """What the run has: imported, or Hone's default."""
    settings = imported.settings()
    return settings[key][0] if key in settings else schema.all_keys()[key].default


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda one: f"{one['tool']}-{RECORDED.index(one)}")
def test_the_algorithm_is_the_parsers(recorded):
    command = shlex.join([*shlex.split(START[recorded["tool"]]), *recorded["words"]])
    imported = translate(read_foreign(command, "run.sh"), recorded["version"])
    expected = ORACLES[recorded["tool"]](recorded["values"])
    refused = {key for line in imported.lines if line.verdict.kind == "refused" for key in line.about}
    if recorded["tool"] == "verl" and recorded["values"]["actor_rollout_ref.rollout.n"] == 1:
        expected.pop("algorithm.credit")  # a group of one has no baseline, which verl lets happen
        refused -= {"algorithm.credit"}
    assert not refused
    assert {key: value(imported, key) for key in expected} == {key: pytest.approx(v) for key, v in expected.items()}


def test_every_tool_is_recorded():
    assert {one["tool"] for one in RECORDED} == set(ORACLES) and len(RECORDED) >= 30
    assert all(len(one["words"]) > 5 for one in RECORDED)
