"""Checks of what a recipe sets: engines that cannot start, lengths that overflow, placements that never start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from hone.plan.audit.context import Context
from hone.plan.audit.findings import Finding
from hone.plan.engine import EnginePlan
from hone.plan.ledger import gib

Check = Callable[[Context], Iterator[Finding]]
FRACS = (0.45, 0.5, 0.6, 0.7, 0.8, 0.9)


def engine_has_room(context: Context) -> Iterator[Finding]:
    """Weights, workspace and one longest sequence fit into an engine's share of a device."""
    for name, engine in context.engines.items():
        problem = engine.problem()
        path = f"engines.{name}.memory_frac"
        if problem is None:
            continue
        values = {
            "requested_gib": engine.requested_bytes / 2**30,
            "weights_gib": engine.weights_bytes / 2**30,
            "smallest_frac": engine.smallest_frac,
        }
        more = ", ".join(f"{frac:g} {_holds(engine, frac):.0f}" for frac in FRACS if _holds(engine, frac) >= 1)
        halved = _other(engine, tensor_parallel=2 * engine.settings.tensor_parallel)
        ways = f" Sequences of {engine.settings.longest:,} tokens by share: {more}." if more else ""
        if halved.problem() is None:
            ways += f" With tensor_parallel = {halved.settings.tensor_parallel} this share works."
        values |= {f"sequences_at_{frac:g}": _holds(engine, frac) for frac in FRACS}
        values["works_with_tensor_parallel_doubled"] = float(halved.problem() is None)
        yield Finding("engine_has_room", "impossible", path, problem + ways, values)


def _other(engine: EnginePlan, **settings: float) -> EnginePlan:
    return replace(engine, settings=replace(engine.settings, **settings))


def _holds(engine: EnginePlan, frac: float) -> float:
    return max(0.0, _other(engine, memory_frac=frac).longest_sequences)


def lengths_fit(context: Context) -> Iterator[Finding]:
    """What an engine is sent and writes fits into the length that it accepts."""
    for name, engine in context.read.recipe.engines.items():
        needed = engine.prompt_tokens + engine.template_tokens + engine.response_tokens
        if engine.max_model_tokens is not None and needed > engine.max_model_tokens:
            yield Finding(
                "lengths_fit",
                "contradictory",
                f"engines.{name}.max_model_tokens",
                f"{engine.template_tokens} + {engine.prompt_tokens} + {engine.response_tokens} = {needed} tokens, but "
                f"max_model_tokens = {engine.max_model_tokens}: {needed - engine.max_model_tokens} too many",
                {"needed": needed, "allowed": engine.max_model_tokens},
            )


def workspace_is_worth_it(context: Context) -> Iterator[Finding]:
    """With chunked prefill a step need not hold whole prompts; a large one takes the cache's memory."""
    for name, recipe in context.read.recipe.engines.items():
        engine = context.engines[name]
        small = _other(engine, max_batched_tokens=8192)
        lost = engine.workspace_bytes - small.workspace_bytes
        if recipe.chunked_prefill and recipe.max_batched_tokens > max(recipe.prompt_tokens, 8192):
            sequences = lost / (engine.kv_bytes_per_token * engine.settings.longest)
            yield Finding(
                "workspace_is_worth_it",
                "wasteful",
                f"engines.{name}.max_batched_tokens",
                f"{recipe.max_batched_tokens:,} tokens a step are not needed for prompts of {recipe.prompt_tokens:,}: "
                f"chunked prefill cuts them. The workspace for it takes {gib(lost)} more than 8,192 would, on every "
                f"device: cache for {sequences:.1f} sequences",
                {"lost_gib": lost / 2**30, "sequences": sequences},
            )


def shares_add_up(context: Context) -> Iterator[Finding]:
    """Engines that do not sleep share a device with each other and with what trains."""
    awake = {name: engine for name, engine in context.read.recipe.engines.items() if not engine.sleeps}
    asked = sum(engine.memory_frac for engine in awake.values())
    if len(awake) > 1 and asked > 1:
        yield Finding(
            "shares_add_up",
            "impossible",
            "engines",
            f"{' + '.join(f'{engine.memory_frac:g}' for engine in awake.values())} = {asked:g} of a device: each "
            "engine takes its share of the whole memory, whatever the others take",
            {"asked": asked},
        )


def samples_divide(context: Context) -> Iterator[Finding]:
    """A group is computed in passes of `device_batch`, prompts are divided among devices."""
    training = context.read.recipe.training
    if training is None:
        return
    rest = training.group_size % training.device_batch
    if rest:
        kept = training.group_size - rest
        yield Finding(
            "samples_divide",
            "contradictory",
            "training.device_batch",
            f"{training.group_size} samples in passes of {training.device_batch} leave {rest} over: only {kept} are "
            "generated, silently",
            {"kept": kept, "asked": training.group_size},
        )
    if training.prompts_per_step % training.devices:
        yield Finding(
            "samples_divide",
            "impossible",
            "training.prompts_per_step",
            f"{training.prompts_per_step} prompts do not divide among {training.devices} devices",
        )


def placement_can_start(context: Context) -> Iterator[Finding]:
    """Every group of roles asks for devices of its own; a scheduler waits indefinitely for those that do not exist."""
    placement = context.read.recipe.placement
    if placement is None:
        return
    sizes = {role: placement.default if size is None else size for role, size in placement.roles.items()}
    unsized = [role for role, size in placement.roles.items() if size is None]
    grouped = Counter(role for group in placement.colocated for role in group)
    asked = [max(sizes[role] for role in group) for group in placement.colocated]
    asked += [size for role, size in sizes.items() if not grouped[role]]
    twice = sorted(role for role, count in grouped.items() if count > 1)
    if sum(asked) <= placement.devices:
        return
    words = [f"{' + '.join(str(size) for size in asked)} = {sum(asked)} devices asked for, {placement.devices} there"]
    if twice:
        words.append(f"{' and '.join(twice)} are in two groups, and each group asks for devices of its own")
    if unsized and not twice:
        words.append(f"{' and '.join(unsized)} are not sized and get {placement.default} each")
    words.append("the run waits for them indefinitely")
    yield Finding(
        "placement_can_start",
        "impossible",
        "placement.colocated" if twice else "placement.roles",
        "; ".join(words),
        {"asked": sum(asked), "devices": placement.devices},
    )


CHECKS: tuple[Check, ...] = (
    engine_has_room,
    lengths_fit,
    workspace_is_worth_it,
    shares_add_up,
    samples_divide,
    placement_can_start,
)
