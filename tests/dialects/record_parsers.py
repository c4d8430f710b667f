"""Recorder of `parsers.json`: what the real parsers of verl, OpenRLHF and TRL make of random sets of keys.

Run where the three are installed (`pip install --no-deps openrlhf verl`, `pip install hydra-core trl`), as
`python tests/dialects/record_parsers.py`. OpenRLHF's parser is the body of its script, run without its last call;
verl's configuration is composed by Hydra from its package; TRL's by Transformers' HfArgumentParser. test_parsers.py
reads what is recorded.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import random
import sys
from enum import Enum
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "parsers.json"
SETS = 12
"""Of each tool."""

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL = {
    "algorithm.adv_estimator": ["grpo", "gae", "rloo", "reinforce_plus_plus"],
    "algorithm.gamma": [1.0, 0.99],
    "algorithm.lam": [0.95, 0.9],
    "algorithm.norm_adv_by_std_in_grpo": [True, False],
    "data.train_batch_size": [64, 256],
    "data.max_prompt_length": [256, 1024],
    "data.max_response_length": [128, 2048],
    f"{A}.ppo_mini_batch_size": [16, 64],
    f"{A}.clip_ratio": [0.1, 0.3],
    f"{A}.clip_ratio_low": [0.15],
    f"{A}.clip_ratio_high": [0.28],
    f"{A}.clip_ratio_c": [3.0, 10.0],
    f"{A}.loss_agg_mode": ["token-mean", "seq-mean-token-mean"],
    f"{A}.entropy_coeff": [0.0, 0.001],
    f"{A}.use_kl_loss": [True, False],
    f"{A}.kl_loss_coef": [0.001, 0.02],
    f"{A}.kl_loss_type": ["low_var_kl", "mse"],
    f"{A}.ppo_epochs": [1, 2],
    f"{A}.optim.lr": ["1e-6", "5e-7"],
    f"{A}.optim.weight_decay": [0.0, 0.1],
    f"{A}.grad_clip": [0.5, 1.0],
    f"{R}.n": [4, 8],
    f"{R}.temperature": [0.7, 1.0],
    "critic.cliprange_value": [0.2, 0.5],
    "critic.optim.lr": ["1e-5"],
}
OPENRLHF = {
    "algo.advantage.estimator": ["gae", "reinforce", "rloo", "group_norm", "dr_grpo", "reinforce_baseline"],
    "algo.advantage.gamma": [1.0, 0.99],
    "algo.advantage.lambd": [1.0, 0.95],
    "algo.kl.init_coef": [0.0, 0.01, "1e-3"],
    "algo.kl.estimator": ["k1", "k2", "k3"],
    "algo.kl.target": [0.1],
    "algo.kl.horizon": [5000],
    "actor.eps_clip": [0.1, 0.3],
    "actor.eps_clip_low_high": ["0.2 0.28"],
    "actor.dual_clip": [3.0],
    "actor.loss_agg_mode": ["token-mean", "seq-mean-token-mean"],
    "actor.entropy_coef": [0.001],
    "actor.adam.lr": ["5e-7", "1e-6"],
    "actor.adam.betas": ["0.9 0.99"],
    "actor.adam.weight_decay": [0.01],
    "actor.max_norm": [0.5],
    "actor.lr_warmup_ratio": [0.0, 0.1],
    "actor.lr_scheduler": ["constant", "cosine_with_min_lr", "linear"],
    "critic.value_clip": [0.2],
    "critic.adam.lr": ["9e-6"],
    "reward.clip_range": ["-5 5"],
    "rollout.batch_size": [64, 128],
    "rollout.n_samples_per_prompt": [4, 8],
    "rollout.max_new_tokens": [256],
    "data.max_len": [1024],
    "train.batch_size": [64, 128],
    "train.max_epochs": [1, 2],
    "train.seed": [7],
}
TRL = {
    "beta": [0.0, 0.04],
    "epsilon": [0.1, 0.2],
    "epsilon_high": [0.28],
    "delta": [4.0],
    "loss_type": ["grpo", "dr_grpo", "dapo", "cispo"],
    "scale_rewards": ["group", "none"],
    "importance_sampling_level": ["token", "sequence"],
    "num_generations": [4, 8],
    "per_device_train_batch_size": [8, 16],
    "gradient_accumulation_steps": [1, 4],
    "num_iterations": [1, 2],
    "max_completion_length": [128],
    "temperature": [0.7],
    "learning_rate": ["3e-6"],
    "lr_scheduler_type": ["cosine", "constant"],
    "warmup_steps": [10],
    "adam_beta2": [0.95],
    "weight_decay": [0.1],
    "max_grad_norm": [0.3],
    "num_train_epochs": [2],
    "max_steps": [100],
    "save_steps": [50],
    "seed": [3],
    "mask_truncated_completions": [True, False],
}


def drawn(choices: dict[str, list[Any]], seed: int) -> dict[str, Any]:
    """About half of the keys, each with one of its values."""
    chance = random.Random(seed)
    return {key: chance.choice(values) for key, values in choices.items() if chance.random() < 0.5}


def plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(name): plain(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _flat(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, child in tree.items():
        where = f"{path}{name}"
        found |= _flat(child, f"{where}.") if isinstance(child, dict) and child else {where: child}
    return found


# ---- the real parsers


def of_verl(words: list[str]) -> dict[str, Any]:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer", overrides=words)
    return _flat(plain(OmegaConf.to_container(config, resolve=True)))


def of_openrlhf(words: list[str]) -> dict[str, Any]:
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None and spec.submodule_search_locations
    script = Path(spec.submodule_search_locations[0]) / "cli" / "train_ppo_ray.py"
    body = next(node for node in ast.parse(script.read_text("utf-8")).body if isinstance(node, ast.If)).body
    kept = [node for node in body if ast.unparse(node) != "train(args)"]
    names: dict[str, Any] = {"argparse": argparse, "datetime": __import__("datetime").datetime}
    sys.argv = ["train_ppo_ray", *words]
    exec(compile(ast.Module(kept, []), str(script), "exec"), names)
    return _flat(_as_tree(names["args"]))


def _as_tree(space: Any) -> Any:
    if hasattr(space, "__dict__") and not isinstance(space, type):
        return {name: _as_tree(child) for name, child in vars(space).items()}
    return plain(space)


def of_trl(words: list[str]) -> dict[str, Any]:
    from transformers import HfArgumentParser
    from trl import GRPOConfig

    (config,) = HfArgumentParser((GRPOConfig,)).parse_args_into_dataclasses(words)  # type: ignore[arg-type]
    return {name: plain(value) for name, value in vars(config).items() if not name.startswith("_")}


# ---- recording


def words_of(tool: str, keys: dict[str, Any]) -> list[str]:
    if tool == "verl":
        return [f"{key}={value}" for key, value in keys.items()]
    words: list[str] = []
    for key, value in keys.items():
        words += [f"--{key}", *str(value).split()]
    return words


def main() -> None:
    fixed = {
        "verl": {},
        "openrlhf": {"reward.remote_url": "reward.py", "actor.model_name_or_path": "a/b", "data.prompt_dataset": "c"},
        "trl": {"output_dir": "out", "bf16": False, "report_to": "none"},
    }
    parsers = {"verl": (of_verl, VERL), "openrlhf": (of_openrlhf, OPENRLHF), "trl": (of_trl, TRL)}
    lines = []
    for tool, (parse, choices) in parsers.items():
        version = importlib.metadata.version(tool)
        seed, recorded = 0, 0
        while recorded < SETS:
            words = words_of(tool, fixed[tool] | drawn(choices, seed))
            seed += 1
            try:
                values = parse(words)
            except (AssertionError, ValueError, TypeError):
                continue  # keys that the tool refuses together
            kept = {key: values.get(key) for key in choices}
            lines.append(json.dumps({"tool": tool, "version": version, "words": words, "values": kept}))
            recorded += 1
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")


if __name__ == "__main__":
    main()
