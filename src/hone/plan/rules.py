"""What does not divide or contradicts itself in a placement, each with the nearest values that would do.

Rules between keys of the run file alone are `config/rules.py`'s; here are those that need a model's shape, a number of
devices, or an engine's limits. A misfit is impossible, not unwise: it makes a plan's verdict `does not fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hone.plan.cluster import Pool
from hone.plan.engine import Engine
from hone.plan.inputs import Inputs, key_in
from hone.plan.pools import LEARNERS, SAMPLERS, places_of

Rule = Callable[[Inputs], Iterator[str]]


def misfits(inputs: Inputs, pools: Sequence[Pool]) -> list[str]:
    """Every rule that is broken, as lines that name key, value and way out."""
    found = [line for rule in EVERYWHERE for line in rule(inputs)]
    if inputs.placement.mode != "local":
        found += [line for rule in ON_MANY for line in rule(inputs)]
        found += [problem for problem in (engine.problem() for engine in _engines(pools)) if problem]
    return found


def nearest_legal(value: int, is_legal: Callable[[int], bool], *, low: int = 1, high: int | None = None) -> list[int]:
    """The nearest legal value below and above, those that exist."""
    top = high if high is not None else max(2 * value, value + 64)
    below = next((n for n in range(min(value, top), low - 1, -1) if is_legal(n)), None)
    above = next((n for n in range(max(value, low), top + 1) if is_legal(n)), None)
    return sorted({n for n in (below, above) if n is not None})


def does_not_divide(key: str, value: int, whole: int, what: str) -> str | None:
    """A line for a value that leaves a rest of `whole`; None if it leaves none."""
    if whole % value == 0:
        return None
    legal = nearest_legal(value, lambda n: whole % n == 0, high=whole)
    return f"{key} = {value} does not divide {what} ({whole}). Nearest: {_listed(legal)}."


def _listed(values: Sequence[int]) -> str:
    return " or ".join(str(value) for value in values) if values else "none"


def _engines(pools: Sequence[Pool]) -> list[Engine]:
    return [engine for pool in pools for engine in (pool.engine, pool.judge) if isinstance(engine, Engine)]


# ---- rules


def sequence_fits_the_model(inputs: Inputs) -> Iterator[str]:
    longest, limit = inputs.workload.lengths.longest, inputs.architecture.max_positions
    if limit and longest > limit:
        lengths = inputs.workload.lengths
        yield (
            f"data.max_prompt_tokens + rollout.max_response_tokens = {lengths.max_prompt} + {lengths.max_response} = "
            f"{longest}, but the model has {limit} positions. Take {longest - limit} off."
        )


def heads_divide(inputs: Inputs) -> Iterator[str]:
    arch, placement = inputs.architecture, inputs.placement
    tensor, context = placement.tensor_parallel, placement.context_parallel
    for key, value in (
        ("placement.tensor_parallel", tensor),
        ("placement.engine.tensor_parallel", placement.engine.tensor_parallel),
    ):
        line = does_not_divide(key_in(inputs, key), value, arch.heads, "the query heads")
        if line:
            yield line
    if inputs.topology is not None and arch.kv_heads % (tensor * context):
        legal = nearest_legal(tensor * context, lambda n: arch.kv_heads % n == 0, high=arch.kv_heads)
        yield (
            f"{key_in(inputs, 'placement.tensor_parallel')} = {tensor} x sequence_parallel = {context} does not divide "
            f"the key-value heads ({arch.kv_heads}), which a trainer has once. Nearest product: {_listed(legal)}."
        )
    elif context > 1 and arch.heads % (tensor * context):
        legal = nearest_legal(context, lambda n: arch.heads % (tensor * n) == 0, high=arch.heads)
        key = key_in(inputs, "placement.context_parallel")
        yield (
            f"{key} = {context} times tensor_parallel = {tensor} does not divide the query heads "
            f"({arch.heads}). Nearest: {_listed(legal)}."
        )


def pools_divide(inputs: Inputs) -> Iterator[str]:
    """Of the run file's `cluster` section, whose other rules are `config/cluster_rules.py`'s."""
    topology, placement = inputs.topology, inputs.placement
    if topology is None:
        return
    if topology.num_devices > inputs.hardware.devices:
        yield (
            f"the pools of the run file have {topology.num_devices} devices, and {inputs.hardware.title} "
            f"{'is' if inputs.hardware.devices == 1 else 'are'} planned for. Leave --hardware without a number, or "
            "make the pools smaller."
        )
    ways = placement.tensor_parallel * placement.context_parallel
    each = key_in(inputs, "placement.engine.tensor_parallel")
    for place in places_of(inputs):
        if place.roles & LEARNERS:
            yield from _multiple(f"devices of {place.name}", place.devices, ways, "tensor_parallel x sequence_parallel")
        if place.roles & SAMPLERS:
            yield from _multiple(f"devices of {place.name}", place.devices, placement.engine.tensor_parallel, each)


def devices_divide(inputs: Inputs) -> Iterator[str]:
    if inputs.topology is not None:
        return
    placement, devices = inputs.placement, inputs.hardware.devices
    scorer = placement.judge
    judges = scorer.devices if scorer else 0
    engine_each, ways = placement.engine.tensor_parallel, placement.tensor_parallel * placement.context_parallel
    if scorer and judges % scorer.tensor_parallel:
        legal = nearest_legal(judges, lambda n: n % scorer.tensor_parallel == 0)
        yield (
            f"placement.judge.devices = {judges} is no multiple of placement.judge.tensor_parallel = "
            f"{scorer.tensor_parallel}: {judges % scorer.tensor_parallel} would idle. Nearest: {_listed(legal)}."
        )
    rest = devices - judges
    if placement.mode == "separate":
        critics = placement.critic_devices if inputs.critic else 0
        engines = placement.engine_devices or engine_each
        trainers = rest - engines - critics
        if trainers < ways:
            yield (
                f"{devices} devices are too few: {engines} sample, {critics} hold the critic, {judges} the judge, and "
                f"training needs {ways}. Have at least {judges + engines + critics + ways}."
            )
            return
        yield from _multiple("placement.engine_devices", engines, engine_each, "placement.engine.tensor_parallel")
        yield from _multiple("devices that train", trainers, ways, "tensor_parallel x context_parallel")
    else:
        yield from _multiple("devices", rest, engine_each, "placement.engine.tensor_parallel")
        yield from _multiple("devices", rest, ways, "tensor_parallel x context_parallel")


def _multiple(name: str, count: int, of: int, what: str) -> Iterator[str]:
    if count % of:
        legal = nearest_legal(of, lambda n: count % n == 0, high=count)
        yield f"{name} = {count} is no multiple of {what} = {of}. Nearest {what}: {_listed(legal)}."


def shard_divides(inputs: Inputs) -> Iterator[str]:
    if inputs.topology is not None:
        return
    shard, devices = inputs.placement.shard, inputs.hardware.devices
    line = does_not_divide("placement.shard", shard, devices, "the devices") if shard else None
    if line:
        yield line


def ranks_have_work(inputs: Inputs) -> Iterator[str]:
    placement, workload = inputs.placement, inputs.workload
    ranks = inputs.hardware.devices // (placement.tensor_parallel * placement.context_parallel)
    if inputs.topology is None and placement.mode == "colocated" and workload.samples_per_optimizer_step < ranks:
        yield (
            f"an optimizer step has {workload.samples_per_optimizer_step} samples for {ranks} ranks: "
            f"{ranks - workload.samples_per_optimizer_step} would compute nothing. Raise placement.tensor_parallel or "
            "context_parallel, or take fewer devices."
        )


def engine_step_holds_its_samples(inputs: Inputs) -> Iterator[str]:
    engine = inputs.placement.engine
    if inputs.topology is not None and inputs.config.cluster.engines.use != "vllm":
        return
    samples = engine.max_samples or inputs.config.rollout.max_concurrent_samples
    key = key_in(inputs, "placement.engine.max_batched_tokens")
    if engine.max_batched_tokens < samples:
        yield (
            f"{key} = {engine.max_batched_tokens} is less than the {samples} sequences "
            f"that each add one token to a step. Set it to at least {samples}."
        )


def sleeping_engines_do_not_run_ahead(inputs: Inputs) -> Iterator[str]:
    staleness = inputs.workload.max_staleness
    if inputs.placement.mode == "colocated" and staleness:
        yield (
            f"rollout.max_staleness = {staleness}, but colocated engines sleep while the trainer works. Set it to 0, "
            "or placement.mode to separate."
        )


EVERYWHERE: tuple[Rule, ...] = (sequence_fits_the_model,)
ON_MANY: tuple[Rule, ...] = (
    heads_divide,
    pools_divide,
    devices_divide,
    shard_divides,
    ranks_have_work,
    engine_step_holds_its_samples,
    sleeping_engines_do_not_run_ahead,
)
