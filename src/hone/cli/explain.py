"""`hone explain`: meaning, value and origin of a key, and what is derived from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from hone.cli.arguments import AsJson, RunFile, examples
from hone.config import schema
from hone.config.derived import (
    correction,
    longest_tokens,
    needs_critic,
    needs_reference,
    optimizer_steps_per_update,
    optimizer_steps_total,
    samples_per_update,
    source_weights,
    trains_adapter,
)
from hone.config.load import Loaded, load_config
from hone.config.messages import unknown_key
from hone.config.render import inline, resolved_yaml, value_at
from hone.config.run import RunConfig
from hone.config.topology import Topology, known_topology, likely_transport, topology_of
from hone.config.yaml_tree import Problem, Where
from hone.errors import ConfigError
from hone.services.gpus import assumed_devices, settled_on

EXAMPLES = examples(
    "hone explain run.yaml",
    "hone explain run.yaml rollout.group_size",
    "hone explain run.yaml train train.prompts_per_step=64",
    "hone explain run.yaml rollout.group_size --json",
)


def explain(
    run_file: RunFile,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key] section.key=value", help="A key or section to explain, and overrides."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a key: its value, its origin, what derives from it. Without a key: the whole resolved file."""
    keys = [word for word in words or () if "=" not in word]
    if len(keys) > 1:
        raise typer.BadParameter(f"one key at a time (got {', '.join(keys)})")
    loaded = load_config(run_file, [word for word in words or () if "=" in word])
    path = keys[0] if keys else ""
    if not path or schema.is_section(path) or (schema.is_section_list(path) and path not in schema.all_keys()):
        if as_json:
            values = value_at(loaded.config, path) if path else loaded.config.model_dump(mode="json")
            own = [leaf for leaf in loaded.origins if not path or leaf.startswith(f"{path}.")]
            origins = {leaf: str(loaded.where(leaf)) for leaf in own}
            typer.echo(json.dumps({"run_file": str(loaded.run_file), "values": values, "origins": origins}, indent=2))
        elif path:
            section = path if schema.is_section(path) else path.rpartition(".")[0]
            typer.echo(resolved_yaml(loaded.config, loaded.where, section=section, title=section), nl=False)
        else:
            typer.echo(loaded.as_yaml(), nl=False)
        return
    explanation = explain_key(loaded, path)
    typer.echo(json.dumps(explanation, indent=2) if as_json else as_text(explanation))


def explain_key(loaded: Loaded, path: str) -> dict[str, Any]:
    """Explanation of one key, as plain data.

    Raises:
        ConfigError: there is no such key.
    """
    key = schema.find_key(path)
    try:
        value = value_at(loaded.config, path)
    except KeyError:
        said = unknown_key(path) if key is None else "the run file has no such entry"
        raise ConfigError([str(Problem(Where(str(loaded.run_file)), path, said))]) from None
    assert key is not None, "what has a value has a key"
    is_whole_key = key.path == schema.generic(path)
    default: Any = None
    layers: list[dict[str, Any]] = []  # of the key or a part of it, weakest first; `wins` marks the effective ones
    if is_whole_key and not key.required:
        default = json.loads(json.dumps(key.default, default=list))
        layers.append({"where": "default", "path": path, "value": default, "wins": loaded.where(path) is None})
    last = {setting.path: setting for setting in loaded.history(path)}
    for setting in loaded.history(path):
        wins = setting is last[setting.path] and loaded.where(setting.path) == setting.where
        layers.append({"where": str(setting.where), "path": setting.path, "value": setting.value, "wins": wins})
    return {
        "key": path,
        "value": value,
        "unit": key.unit if is_whole_key else "",
        "meaning": key.meaning,
        "rule": key.rule if is_whole_key else "an entry of a free mapping",
        "default": default,
        "required": key.required,
        "layers": layers,
        "derives": _derives(loaded, path),
    }


def _derives(loaded: Loaded, path: str) -> list[dict[str, Any]]:
    loaded, choices = settled_on(loaded, assumed_devices(loaded.config))
    here = [
        {"name": "on this machine", "value": choice.value, "unit": "", "formula": choice.why}
        for choice in choices
        if choice.key == path
    ]
    known = (derived for derived in DERIVED if schema.generic(path) in derived.keys)
    found = ((derived, derived.compute(loaded.config)) for derived in known)
    return here + [
        {"name": derived.name, "value": value, "unit": derived.unit, "formula": derived.formula}
        for derived, value in found
        if value is not None
    ]


def as_text(explanation: dict[str, Any]) -> str:
    """Print an explanation."""
    default = "required" if explanation["required"] else f"default {inline(explanation['default'])}"
    lines = [
        f"{explanation['key']} = {inline(explanation['value'])}{_unit(explanation['unit'])}",
        f"  {explanation['meaning']}",
        f"  {explanation['rule']}; {default}",
    ]
    rows = explanation["layers"]
    width = max((len(row["where"]) for row in rows), default=0)
    lines += ["", "Set by"] if rows else []
    for row in rows:
        name = "" if row["path"] == explanation["key"] else f"{row['path']} = "
        mark = ">" if row["wins"] else " "
        lines.append(f"{mark} {row['where']:<{width}}  {name}{inline(row['value'])}{'  wins' if row['wins'] else ''}")
    lines += ["", "Derives"] if explanation["derives"] else []
    for row in explanation["derives"]:
        value = row["value"] if isinstance(row["value"], str) else inline(row["value"])
        lines.append(f"  {row['name']} = {value}{_unit(row['unit'])}  ({row['formula']})")
    return "\n".join(lines)


def _unit(unit: str) -> str:
    return f" {unit}" if unit else ""


# ---- derived quantities


DerivedValue = int | bool | str | None


def _of(compute: Callable[[Topology], DerivedValue]) -> Callable[[RunConfig], DerivedValue]:
    """A quantity of the topology; None where there is no cluster, or its size is only known when it is looked at."""

    def value(config: RunConfig) -> DerivedValue:
        topology = known_topology(config)
        return None if topology is None else compute(topology)

    return value


def _source_shares(config: RunConfig) -> str | None:
    """Each source's share of the prompts, where the run file gives weights."""
    weights = source_weights(config.data)
    if not weights or not sum(weights):
        return None
    sources = zip(config.data.train, weights, strict=True)
    return ", ".join(f"{source.name or source.path} {weight / sum(weights):.1%}" for source, weight in sources)


def _kv_cache_tokens(config: RunConfig) -> int:
    """Most tokens that an engine's KV cache holds, each prompt counted for every sample."""
    longest = config.rollout.max_concurrent_samples * longest_tokens(config)
    return min(config.rollout.kv_cache_tokens or longest, longest)


def _longest_without_penalty_tokens(config: RunConfig) -> int | None:
    """Length of the longest response that the overlong penalty spares; None when it is off."""
    limit, buffer = config.rollout.max_response_tokens, config.algorithm.overlong_buffer_frac
    return limit - math.ceil(round(limit * buffer, 6)) if buffer else None


def _ratio_range(config: RunConfig) -> str | None:
    """Where the policy ratio is kept; None when it is not bounded."""
    algorithm = config.algorithm
    is_bounded = algorithm.clip in ("ppo", "clip_cov")
    return f"{1 - algorithm.clip_low:g} to {1 + algorithm.clip_high:g}" if is_bounded else None


@dataclass(frozen=True, slots=True)
class Derived:
    """A quantity for people: its name, unit and formula in keys, and the function that computes it."""

    name: str
    unit: str
    formula: str
    keys: tuple[str, ...]
    compute: Callable[[RunConfig], DerivedValue]


_P, _G, _PASSES = "train.prompts_per_step", "rollout.group_size", "train.passes_per_batch"
_M, _STEPS, _R = "train.samples_per_optimizer_step", "run.steps", "rollout.max_response_tokens"
_PROMPT, _CONCURRENT = "data.max_prompt_tokens", "rollout.max_concurrent_samples"
_POOLS = ("cluster.nodes", "cluster.devices_per_node", "cluster.pools.*.devices", "cluster.pools.*.roles")
_TENSOR, _SEQUENCE = "cluster.trainer.tensor_parallel", "cluster.trainer.sequence_parallel"

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
    Derived(
        "samples in all",
        "samples",
        "steps x prompts_per_step x group_size",
        (_STEPS, _P, _G),
        lambda c: c.run.steps * samples_per_update(c),
    ),
    Derived(
        "groups in flight",
        "groups",
        "(max_staleness + 1) x prompts_per_step",
        ("rollout.max_staleness", _P),
        lambda c: (c.rollout.max_staleness + 1) * c.train.prompts_per_step,
    ),
    Derived("shares of the prompts", "", "weight / the sum of all", ("data.train",), _source_shares),
    Derived("longest sample", "tokens", "max_prompt_tokens + max_response_tokens", (_PROMPT, _R), longest_tokens),
    Derived(
        "KV cache",
        "tokens at most",
        "max_concurrent_samples x longest sample, within kv_cache_tokens",
        (_CONCURRENT, "rollout.kv_cache_tokens", _PROMPT, _R),
        _kv_cache_tokens,
    ),
    Derived(
        "response tokens per update",
        "tokens at most",
        "prompts_per_step x group_size x max_response_tokens",
        (_P, _G, _R),
        lambda c: samples_per_update(c) * c.rollout.max_response_tokens,
    ),
    Derived(
        "longest response without length penalty",
        "tokens",
        "max_response_tokens x (1 - overlong_buffer_frac)",
        (_R, "algorithm.overlong_buffer_frac"),
        _longest_without_penalty_tokens,
    ),
    Derived(
        "policy ratio kept in",
        "",
        "1 - clip_low to 1 + clip_high",
        ("algorithm.clip", "algorithm.clip_low", "algorithm.clip_high"),
        _ratio_range,
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
        lambda config: ", ".join(stage for stage in config.stages if trains_adapter(config, stage)) or None,
    ),
    Derived("critic", "", "credit = gae in stage rl", ("algorithm.credit", "stages"), needs_critic),
    Derived(
        "off-policy correction",
        "",
        "correction, and where it is auto: tis if the engine has weights of its own and old_logprobs = trainer",
        ("algorithm.correction", "rollout.max_staleness", "cluster.backend", "algorithm.old_logprobs"),
        correction,
    ),
    Derived("devices of the run", "devices", "those of all pools", _POOLS, _of(lambda t: t.num_devices)),
    Derived("trainer", "ranks", "devices of the pool with policy", _POOLS, _of(lambda t: t.trainer.world_size)),
    Derived(
        "data-parallel ranks",
        "ranks",
        "trainer ranks / (tensor_parallel x sequence_parallel)",
        (*_POOLS, _TENSOR, _SEQUENCE),
        _of(lambda t: t.trainer.data_parallel),
    ),
    Derived(
        "copies of weights and states",
        "copies",
        "trainer ranks / (shard x tensor_parallel)",
        (*_POOLS, "cluster.trainer.shard", _TENSOR),
        _of(lambda t: t.trainer.replicate),
    ),
    Derived(
        "engines",
        "replicas",
        "devices of the pool with rollout / engines.tensor_parallel_size",
        (*_POOLS, "cluster.engines.tensor_parallel_size"),
        _of(lambda t: len(t.engines) or None),
    ),
    Derived(
        "judges",
        "replicas",
        "devices of the pool with judge / its engine's tensor_parallel_size",
        (*_POOLS, "services.*.engine.tensor_parallel_size"),
        _of(lambda t: len(t.judges) or None),
    ),
    Derived(
        "trainer and engines take turns",
        "",
        "rollout is in one pool with policy, critic or reference",
        ("cluster.pools.*.roles", "rollout.max_staleness"),
        _of(lambda t: t.sleeps("rollout")),
    ),
    Derived(
        "new weights go through",
        "",
        "the fastest way where trainer and engines are, or what cluster.transport says",
        ("cluster.transport", "cluster.pools.*.roles", "run.device"),
        lambda config: likely_transport(config, topology_of(config)) if config.cluster.backend == "ray" else None,
    ),
)
