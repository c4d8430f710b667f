"""Derived quantities of a run file, each a named function of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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


def longest_tokens(config: RunConfig) -> int:
    """Most tokens of one prompt and its response."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


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


def service_uses(config: RunConfig) -> list[tuple[str, str]]:
    """Where rewards name a service: (key, NAME)."""
    return [
        (f"reward.components.{number}.{key}", name)
        for number, component in enumerate(config.reward.components)
        for key, name in services_of(component)
    ]


def component_name(component: RewardComponent) -> str:
    """What metrics call a reward component: its `name`, else the last part of `use`."""
    return component.name or component.use.rpartition(":")[2]


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


PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers, in the words of config.json, that mix tokens by attention to all earlier ones or to the last few."""


RUNS_ON = "its layers have states, which run on over the boundaries of samples"
"""Why classes of state spaces compute padded rows, which their config.json need not say."""


def why_rows(keys: Mapping[str, Any]) -> str | None:
    """Why Transformers' class of a language model computes padded rows, as far as its config.json shows; None: nothing
    there is against one row with each prompt once."""
    others = set(keys.get("layer_types") or ()) - PACKED_LAYERS
    if others:
        return f"it has layers of the kind {', '.join(sorted(others))}"
    if keys.get("keep_window_size"):  # Doge
        return "each of its layers makes masks of its own"
    return "it caps the scores of attention" if keys.get("attn_logit_softcapping") else None
