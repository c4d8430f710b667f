"""Derived quantities of a run file, each a named function of it, for `hone explain` and other callers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.config.run import DataSection, RewardComponent, RunConfig
from hone.config.source import OF_A_SOURCE, SourceSection


def run_name(config: RunConfig, run_file: Path) -> str:
    """`run.name`, else the run file's own name, or its folder's for `run.yaml`."""
    if config.run.name is not None:
        return config.run.name
    path = run_file.absolute()
    return path.parent.name if path.stem == "run" else path.stem


def run_dir(config: RunConfig, run_file: Path) -> Path:
    """`run.dir` with `{name}` filled in, relative to the current directory."""
    return Path(config.run.dir.replace("{name}", run_name(config, run_file))).expanduser()


def overridden(keys: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json with those of `model.override`; nested ones are merged."""
    found = dict(keys)
    for name, value in override.items():
        both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
        found[name] = overridden(found[name], value) if both else value
    return found


def samples_per_update(config: RunConfig) -> int:
    """P x G, samples that one policy update trains on."""
    return config.train.prompts_per_step * config.rollout.group_size


def optimizer_steps_per_update(config: RunConfig) -> int:
    """Optimizer steps of one policy update, over all its passes."""
    total = samples_per_update(config)
    return config.train.passes_per_batch * (total // (config.train.samples_per_optimizer_step or total))


def optimizer_steps_total(config: RunConfig) -> int:
    """Optimizer steps of the policy in the whole RL stage: the length of the learning rate's schedule."""
    waiting = config.critic.warmup_updates if needs_critic(config) else 0
    return max(config.run.steps - waiting, 0) * optimizer_steps_per_update(config)


def critic_steps_total(config: RunConfig) -> int:
    """Optimizer steps of the critic in the whole RL stage: it learns in the policy's warm-up too."""
    return config.run.steps * optimizer_steps_per_update(config)


def samples_total(config: RunConfig) -> int:
    """Samples that the RL stage trains on."""
    return config.run.steps * samples_per_update(config)


def groups_in_flight(config: RunConfig) -> int:
    """Permits: groups between the start of their generation and the publishing of what was learned from them."""
    return (config.rollout.max_staleness + 1) * config.train.prompts_per_step


def samples_ahead_on_ray(config: RunConfig) -> bool:
    """Whether processes sample for the next updates while others train."""
    return config.cluster.backend == "ray" and config.rollout.max_staleness > 0 and "rl" in config.stages


def section_of(data: DataSection, source: SourceSection) -> DataSection:
    """`data` as it is for the rows of one source: a key that the source sets replaces the one in `data`.

    `template` and `chat` are alternatives, so that a source that sets one of them has neither from `data`; what only a
    chat template uses is left out with it.
    """
    own = {name: value for name in OF_A_SOURCE if (value := getattr(source, name)) is not None}
    if "template" in own:
        own = {"chat": False, **own}
    elif own.get("chat"):
        own["template"] = None
    if data.chat and own.get("chat") is False:
        own = {"system": None, "last_turn": "prompt", "image_columns": (), **own}
    return data.model_copy(update=own)


def has_answers(config: RunConfig) -> bool:
    """Whether the rows of every source bring gold answers."""
    sections = [section_of(config.data, source) for source in (*config.data.train, *(config.data.eval or ()))]
    return all(one.answer_column is not None or one.last_turn == "answer" for one in sections)


def source_weights(data: DataSection) -> tuple[float, ...] | None:
    """Weights of the sources in `data.train`; None: every row counts the same."""
    weights = [source.weight for source in data.train]
    return None if None in weights else tuple(weight for weight in weights if weight is not None)


def source_shares(config: RunConfig) -> str | None:
    """Each source's share of the prompts, where the run file gives weights."""
    weights = source_weights(config.data)
    if not weights or not sum(weights):
        return None
    sources = zip(config.data.train, weights, strict=True)
    return ", ".join(f"{source.name or source.path} {weight / sum(weights):.1%}" for source, weight in sources)


def longest_tokens(config: RunConfig) -> int:
    """Most tokens of one prompt and its response."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def kv_cache_tokens(config: RunConfig) -> int:
    """Most tokens that an engine's KV cache holds, each prompt counted for every sample."""
    longest = config.rollout.max_concurrent_samples * longest_tokens(config)
    return min(config.rollout.kv_cache_tokens or longest, longest)


def response_tokens_per_update(config: RunConfig) -> int:
    """Most response tokens of one policy update."""
    return samples_per_update(config) * config.rollout.max_response_tokens


def longest_without_penalty_tokens(config: RunConfig) -> int | None:
    """Length of the longest response that the overlong penalty spares; None when it is off."""
    limit, buffer = config.rollout.max_response_tokens, config.algorithm.overlong_buffer_frac
    return limit - math.ceil(round(limit * buffer, 6)) if buffer else None


def ratio_range(config: RunConfig) -> str | None:
    """Where the policy ratio is kept; None when it is not bounded."""
    algorithm = config.algorithm
    is_bounded = algorithm.clip in ("ppo", "clip_cov")
    return f"{1 - algorithm.clip_low:g} to {1 + algorithm.clip_high:g}" if is_bounded else None


def needs_reference(config: RunConfig) -> bool:
    """Whether a frozen copy of the policy is kept for the KL term."""
    return "rl" in config.stages and max(config.algorithm.kl_loss_coef, config.algorithm.kl_reward_coef) > 0


def needs_critic(config: RunConfig) -> bool:
    """Whether a critic is trained beside the policy."""
    return "rl" in config.stages and config.algorithm.credit == "gae"


def trains_adapter(config: RunConfig, stage: str) -> bool:
    """Whether a stage trains a low-rank adapter instead of the weights."""
    return config.lora.rank > 0 and stage in config.lora.stages and stage in config.stages


def starts_from_adapter(config: RunConfig, stage: str) -> bool:
    """Whether a stage begins with the adapter in `lora.start`: the first one that trains an adapter does."""
    first = next((name for name in config.stages if trains_adapter(config, name)), None)
    return config.lora.start is not None and stage == first


def adapter_stages(config: RunConfig) -> str | None:
    """The stages that train an adapter; None when none does."""
    return ", ".join(stage for stage in config.stages if trains_adapter(config, stage)) or None


def service_uses(config: RunConfig) -> list[tuple[str, str]]:
    """Where rewards name a service: (key, NAME)."""
    return [
        (f"reward.components.{number}.{key}", name)
        for number, component in enumerate(config.reward.components)
        for key, name in services_of(component)
    ]


def services_of(component: RewardComponent) -> list[tuple[str, str]]:
    """Where a built-in reward names a service in its args, as `service: NAME` at any depth: (key, NAME)."""
    return [] if ":" in component.use else list(_named_services(component.args, "args"))


def _named_services(args: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    for name, value in args.items():
        if name == "service" and isinstance(value, str):
            yield f"{path}.{name}", value
        elif isinstance(value, Mapping):
            yield from _named_services(value, f"{path}.{name}")


def unused_services(config: RunConfig) -> list[str]:
    """Services that no reward names, by their name or, in whatever is written in args, by their port."""
    named = {name for _, name in service_uses(config)}
    written = json.dumps([c.args for c in config.reward.components] + [config.rollout.environment.args])
    return [
        name
        for name, service in config.services.items()
        if name not in named and not (service.port and f":{service.port}" in written)
    ]


def correction(config: RunConfig) -> str:
    """The off-policy correction that `auto` stands for, or the one that was chosen."""
    algorithm = config.algorithm
    if algorithm.correction != "auto":
        return algorithm.correction
    is_shared = config.cluster.backend != "ray" and config.rollout.max_staleness == 0
    return "tis" if not is_shared and algorithm.old_logprobs == "trainer" else "none"


@dataclass(frozen=True, slots=True)
class Derived:
    """A quantity for people: its name, unit and formula in keys, and the function that computes it."""

    name: str
    unit: str
    formula: str
    keys: tuple[str, ...]
    compute: Callable[[RunConfig], int | bool | str | None]


_P, _G, _PASSES = "train.prompts_per_step", "rollout.group_size", "train.passes_per_batch"
_M, _STEPS, _R = "train.samples_per_optimizer_step", "run.steps", "rollout.max_response_tokens"
_PROMPT, _CONCURRENT = "data.max_prompt_tokens", "rollout.max_concurrent_samples"

DERIVED: tuple[Derived, ...] = (
    Derived("samples per update", "samples", "prompts_per_step x group_size", (_P, _G), samples_per_update),
    Derived(
        "optimizer steps per update",
        "optimizer steps",
        "passes_per_batch x prompts_per_step x group_size / samples_per_optimizer_step",
        (_P, _G, _PASSES, _M),
        optimizer_steps_per_update,
    ),
    Derived(
        "optimizer steps in all",
        "optimizer steps",
        "(steps, less critic.warmup_updates with a critic) x optimizer steps per update",
        (_STEPS, _P, _G, _PASSES, _M, "critic.warmup_updates", "algorithm.credit"),
        optimizer_steps_total,
    ),
    Derived("samples in all", "samples", "steps x prompts_per_step x group_size", (_STEPS, _P, _G), samples_total),
    Derived(
        "groups in flight",
        "groups",
        "(max_staleness + 1) x prompts_per_step",
        ("rollout.max_staleness", _P),
        groups_in_flight,
    ),
    Derived("shares of the prompts", "", "weight / the sum of all", ("data.train",), source_shares),
    Derived("longest sample", "tokens", "max_prompt_tokens + max_response_tokens", (_PROMPT, _R), longest_tokens),
    Derived(
        "KV cache",
        "tokens at most",
        "max_concurrent_samples x longest sample, within kv_cache_tokens",
        (_CONCURRENT, "rollout.kv_cache_tokens", _PROMPT, _R),
        kv_cache_tokens,
    ),
    Derived(
        "response tokens per update",
        "tokens at most",
        "prompts_per_step x group_size x max_response_tokens",
        (_P, _G, _R),
        response_tokens_per_update,
    ),
    Derived(
        "longest response without length penalty",
        "tokens",
        "max_response_tokens x (1 - overlong_buffer_frac)",
        (_R, "algorithm.overlong_buffer_frac"),
        longest_without_penalty_tokens,
    ),
    Derived(
        "policy ratio kept in",
        "",
        "1 - clip_low to 1 + clip_high",
        ("algorithm.clip", "algorithm.clip_low", "algorithm.clip_high"),
        ratio_range,
    ),
    Derived(
        "frozen reference",
        "",
        "kl_loss_coef > 0 or kl_reward_coef > 0, in stage rl",
        ("algorithm.kl_loss_coef", "algorithm.kl_reward_coef", "stages"),
        needs_reference,
    ),
    Derived(
        "stages with an adapter",
        "",
        "rank > 0, lora.stages in stages",
        ("lora.rank", "lora.stages", "stages"),
        adapter_stages,
    ),
    Derived("critic", "", "credit = gae in stage rl", ("algorithm.credit", "stages"), needs_critic),
    Derived(
        "off-policy correction",
        "",
        "correction, and where it is auto: tis if the engine has weights of its own and old_logprobs = trainer",
        ("algorithm.correction", "rollout.max_staleness", "cluster.backend", "algorithm.old_logprobs"),
        correction,
    ),
)
"""A few lines each, so that `hone explain` can say what a key changes."""


def derived_from(path: str) -> list[Derived]:
    """What derives from a key."""
    return [derived for derived in DERIVED if path in derived.keys]
