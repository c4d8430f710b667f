"""Error messages for keys and values, with the nearest valid spelling or value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hone.config import schema
from hone.config.section import Section
from hone.errors import nearest

_SECRET_KEY = re.compile(
    r"(.*_)?(api_?keys?|passw(or)?d|passphrase|secrets?(_key)?|credentials?|bearer|private_key|"
    r"(access|auth|api|hf|hub|huggingface|wandb|openai|anthropic|github|bearer|refresh|session|user)_?(token|key)|token)",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(sk|pk|rk)-[\w-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bgh[opsur]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\bxox[abpr]-[\w-]{10,}|\bAIza[\w-]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY|\bBearer [\w.~+/-]{16,}|://[^/\s:@]+:[^/\s:@]+@"
)

OTHER_NAMES = {
    "train_batch_size": "train.prompts_per_step",
    "rollout_batch_size": "train.prompts_per_step",
    "global_batch_size": "train.prompts_per_step",
    "n": "rollout.group_size",
    "num_samples": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "n_samples_per_prompt": "rollout.group_size",
    "ppo_mini_batch_size": "train.samples_per_optimizer_step",
    "mini_batch_size": "train.samples_per_optimizer_step",
    "ppo_max_token_len_per_gpu": "train.tokens_per_microbatch",
    "micro_batch_size": "train.tokens_per_microbatch",
    "ppo_epochs": "train.passes_per_batch",
    "max_epochs": "train.passes_per_batch",
    "max_prompt_length": "data.max_prompt_tokens",
    "prompt_max_len": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "generate_max_len": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "max_tokens": "rollout.max_response_tokens",
    "clip_ratio": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "beta": "algorithm.kl_loss_coef",
    "kl_coef": "algorithm.kl_reward_coef",
    "init_kl_coef": "algorithm.kl_reward_coef",
    "adv_estimator": "algorithm.credit",
    "advantage_estimator": "algorithm.credit",
    "kl_penalty": "algorithm.kl_estimator",
    "staleness_threshold": "rollout.max_staleness",
    "learning_rate": "train.optimizer.lr",
    "max_grad_norm": "train.optimizer.grad_clip",
    "gradient_checkpointing": "train.activation_checkpointing",
    "output_dir": "run.dir",
    "model_name_or_path": "model.path",
}
"""What other tools call our keys (the glossary's table), for users of these tools."""


@cache
def foreign_names() -> Mapping[str, str]:
    """Other tools' keys, in full -> ours, or why there is none; by `hone.tools.foreign_names`."""
    return json.loads((Path(__file__).parent / "foreign_names.json").read_text("utf-8"))


def is_secret_key(path: str) -> bool:
    return _SECRET_KEY.fullmatch(path.rpartition(".")[2]) is not None


def is_secret_value(value: Any) -> bool:
    """Text that looks like a key or password by its form, alone or in a list."""
    if isinstance(value, list):
        return any(is_secret_value(item) for item in value)
    return isinstance(value, str) and _SECRET_VALUE.search(value) is not None


def show(value: Any, max_chars: int = 60) -> str:
    """A value as it would be written in the file, cut to a length; never a secret."""
    text = repr(value) if isinstance(value, float) else json.dumps(_without_secrets(value), ensure_ascii=False)
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: "[hidden]" if is_secret_key(name) else _without_secrets(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_without_secrets(item) for item in value]
    return "[hidden]" if is_secret_value(value) else value


def unknown_key(path: str) -> str:
    """What to say of a key that does not exist: a spelling, the right section, or what the section has."""
    if counterpart := foreign_names().get(path):
        return f"unknown key. {counterpart}"
    section, _, name = path.rpartition(".")
    here = list(_section(section).model_fields)
    if said := _section(section).elsewhere.get(name):
        return f"{said}. Leave it out here"
    if close := nearest(name, here):
        return f"unknown key. Did you mean {schema.join_path(section, close)}?"
    elsewhere = [key.path for key in schema.all_keys().values() if key.name == name]
    elsewhere += [known for known in schema.all_sections() if known and known.rpartition(".")[2] == name]
    if elsewhere:
        return f"unknown key here. Did you mean {' or '.join(elsewhere)}?"
    if other := OTHER_NAMES.get(name):
        return f"unknown key. Hone's word for it is {other}"
    by_name = {key.name: key.path for key in schema.all_keys().values()}
    if close := nearest(name, by_name, cutoff=80):
        return f"unknown key. Did you mean {by_name[close]}?"
    while section and not schema.is_section(section):
        section = section.rpartition(".")[0]
    has = f"{section} has" if section else "The top level has"
    return f"unknown key. {has}: {', '.join(_section(section).model_fields)}"


def wrong_value(path: str, got: Any) -> str:
    """What to say of a value that its key refuses: the rule, what was got, the nearest legal value."""
    if schema.is_section(path):
        return f"must be a section: keys and values, indented under it (got {show(got)})"
    if path in schema.section_maps():
        return f"must be sections by name, such as `judge:` with its keys indented under it (got {show(got)})"
    if schema.is_section_list(path) and path not in schema.all_keys():
        return f"must be a list of sections, each starting with `- ` (got {show(got)})"
    key = schema.find_key(path)
    if key is None:
        return unknown_key(path)
    is_number = isinstance(got, int | float) and not isinstance(got, bool)
    fits = is_number and (key.kind.startswith("a number") or isinstance(got, int)) and abs(got) < float("inf")
    # Only the bounds when the type is right: "at least 1" and not "a whole number, at least 1".
    return f"must be {key.bounds if key.bounds and fits else key.rule} (got {show(got)}){_cure(key, got)}"


def _cure(key: schema.Key, got: Any) -> str:
    if key.choices:
        close = nearest(str(got), key.choices, cutoff=50)
        return f". Did you mean {close}?" if close else ""
    if isinstance(got, bool):
        return ""
    if isinstance(got, str) and key.kind.startswith("true") and got.lower() in ("yes", "on", "no", "off"):
        return f". Write {'true' if got.lower() in ('yes', 'on') else 'false'}"
    if isinstance(got, int | float) and key.is_text:
        return ". Put it in quotes"
    if isinstance(got, str) and re.fullmatch(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?", got) and "number" in key.kind:
        return ". Write it without quotes"
    if isinstance(got, str) and "list" in key.kind:
        return f". Write [{show(got)}]"
    if isinstance(got, int | float) and got == got and abs(got) < float("inf"):
        if key.lowest is not None and got < key.lowest:
            return f". Nearest: {show(key.lowest)}"
        if key.highest is not None and got > key.highest:
            return f". Nearest: {show(key.highest)}"
        if isinstance(got, float) and key.kind.startswith("a whole number"):
            return f". Nearest: {round(got)}"
    return ""


def _section(path: str) -> type[Section]:
    return schema.all_sections().get(schema.generic(path), Section)
