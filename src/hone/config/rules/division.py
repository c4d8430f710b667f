"""Divisibility rules: devices among ranks and replicas, heads and samples among devices, samples among steps.

Rules that need a model's shape look at `model.init` or a local config.json; a shape known by its name alone is
`hone plan`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from typing import Any

from hone.config.derived import samples_per_update
from hone.config.rules import Breach
from hone.config.run import RunConfig
from hone.config.topology import (
    DEFAULT_POOL,
    PlacedReplica,
    Topology,
    judge_services,
    judge_tensor_parallel,
    known_topology,
    replicas_of,
    topology_of,
)
from hone.sizes import OWN_FAMILIES

MOST_POOLS_TO_ORDER = 6
"""More pools than this are not tried in other orders."""


def training_divides(config: RunConfig) -> Iterator[Breach]:
    topology, settings = known_topology(config), config.cluster.trainer
    if topology is None:
        return
    for role, group in topology.groups.items():
        if group is None or (role != "policy" and group.pool == topology.trainer.pool):
            continue
        size, tensor, where = group.world_size, settings.tensor_parallel, _devices_key(group.pool)
        if line := _not_dividing(tensor, size, f"the {size} devices of {role}"):
            yield Breach(("cluster.trainer.tensor_parallel", where), line)
            continue
        ranks = size // tensor
        what = f"the {size} devices of {role}" + (f" / tensor_parallel = {ranks}" if tensor > 1 else "")
        for name, value in (("shard", settings.shard or 1), ("sequence_parallel", settings.sequence_parallel)):
            if line := _not_dividing(value, ranks, what):
                yield Breach((f"cluster.trainer.{name}", where), line)


def engines_divide(config: RunConfig) -> Iterator[Breach]:
    topology, cluster = known_topology(config), config.cluster
    if topology is None:
        return
    rollout, judge = topology.pool_of("rollout"), topology.pool_of("judge")
    for key, pool, each in (
        ("cluster.engines.tensor_parallel_size", rollout, cluster.engines.tensor_parallel_size),
        (judge_key(config), judge, judge_tensor_parallel(config)),
    ):
        size = len(pool.devices) if pool else each
        if pool and (line := _not_dividing(each, size, f"the {size} devices of pool {pool.name}")):
            keys = (key, _devices_key(pool.name))
            yield Breach(keys, f"{line}; {size % each} would idle")


def heads_divide(config: RunConfig, shape: Mapping[str, Any]) -> Iterator[Breach]:
    """Tensor parallelism divides attention by heads, and Ulysses exchanges sequences for heads; where ranks are more,
    Hone's own decoder has a ring. An engine may have a key-value head on several devices; a trainer has each once."""
    cluster = config.cluster
    heads, kv_heads = shape.get("num_attention_heads"), shape.get("num_key_value_heads")
    if cluster.backend != "ray" or not isinstance(heads, int):
        return
    of_model = ("model.path", "model.init.num_attention_heads")
    kv_heads = kv_heads if isinstance(kv_heads, int) else heads
    engines, key = cluster.engines.tensor_parallel_size, "cluster.engines.tensor_parallel_size"
    if line := _not_dividing(engines, heads, f"the model's {heads} query heads"):
        yield Breach((key, *of_model), line)
    elif kv_heads % engines and engines % kv_heads:
        nearest = _nearest(engines, lambda n: heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0), heads)
        yield Breach(
            (key, *of_model),
            f"must divide the model's {kv_heads} key-value heads or be a multiple of them (got {engines}). Nearest: "
            f"{nearest}",
        )
    has_ring = shape.get("model_type") in OWN_FAMILIES and config.model.implementation != "transformers"
    sequence = 1 if has_ring else cluster.trainer.sequence_parallel
    yield from trained_layers_divide(shape, cluster.trainer.tensor_parallel, sequence)


def trained_layers_divide(shape: Mapping[str, Any], tensor: int, sequence: int) -> Iterator[Breach]:
    """As far as the keys of a model's config.json show; also what `model.parallel` refuses."""
    heads, width = shape.get("num_attention_heads"), shape.get("intermediate_size")
    kv_heads = shape.get("num_key_value_heads") or heads
    key, of_model = "cluster.trainer.tensor_parallel", ("model.path", "model.init.num_attention_heads")
    if not isinstance(kv_heads, int):
        return
    left = kv_heads // tensor
    if line := _not_dividing(tensor, kv_heads, f"the model's {kv_heads} key-value heads"):
        yield Breach((key, *of_model), line)
    elif line := _not_dividing(sequence, left, f"the model's key-value heads / tensor_parallel = {left}"):
        yield Breach(("cluster.trainer.sequence_parallel", key, *of_model), line)
    if isinstance(width, int) and (line := _not_dividing(tensor, width, f"the model's feed-forward width {width}")):
        yield Breach((key, "model.path", "model.init.intermediate_size"), line)


def replicas_stay_within_a_machine(config: RunConfig) -> Iterator[Breach]:
    """Ranks that divide layers communicate in every layer, which needs the links within one machine."""
    topology = known_topology(config)
    if topology is None or config.cluster.devices_per_node is None:
        return
    per_node = topology.devices_per_node
    for key, replicas in _replicas(config, topology).items():
        each = len(replicas[0].devices) if replicas else 1
        across = next((replica for replica in replicas if len(set(replica.nodes)) > 1), None)
        if each > per_node:
            keys = (key, "cluster.devices_per_node")
            nearest = _nearest(per_node, lambda n, each=each: each % n == 0, per_node)
            yield Breach(keys, f"= {each} is more than a machine has ({per_node}). Nearest: {nearest}")
        elif across is not None:
            keys = (key, f"cluster.pools.{across.pool}.devices", "cluster.pools")
            yield Breach(
                keys,
                f"= {each} puts devices {across.devices[0]} to {across.devices[-1]}, of pool {across.pool}, together, "
                f"and they are on machines {across.nodes[0]} and {across.nodes[-1]}, of {per_node} devices each. "
                f"{_cure_across(config)}",
            )


def _replicas(config: RunConfig, topology: Topology) -> dict[str, tuple[PlacedReplica, ...]]:
    """Key -> devices that divide layers among them as it says."""
    tensor = config.cluster.trainer.tensor_parallel
    learners = [pool for pool in topology.pools if {"policy", "critic", "reference"} & set(pool.roles)]
    return {
        "cluster.trainer.tensor_parallel": tuple(
            one for pool in learners for one in replicas_of(pool, "ranks", tensor)
        ),
        "cluster.engines.tensor_parallel_size": topology.engines,
        judge_key(config): topology.judges,
    }


def _cure_across(config: RunConfig) -> str:
    """Pools take devices in order: another order is the nearest placement that works, if one does."""
    pools = config.cluster.pools
    for order in permutations(pools) if len(pools) <= MOST_POOLS_TO_ORDER else ():
        cluster = config.cluster.model_copy(update={"pools": {name: pools[name] for name in order}})
        other = config.model_copy(update={"cluster": cluster})
        groups = _replicas(other, topology_of(other)).values()
        if all(len(set(replica.nodes)) == 1 for replicas in groups for replica in replicas):
            return f"Nearest: the pools in the order {', '.join(order)}"
    return "Let sizes of pools be multiples of what divides a machine"


def ranks_have_samples(config: RunConfig) -> Iterator[Breach]:
    topology = known_topology(config)
    if topology is None:
        return
    learners = [group for group in (topology.trainer, topology.critic) if group is not None]
    sizes = {
        "rl": (
            "train.samples_per_optimizer_step",
            config.train.samples_per_optimizer_step or samples_per_update(config),
        ),
        "sft": ("sft.rows_per_step", config.sft.rows_per_step),
        "reward_model": ("rm.pairs_per_step", config.rm.pairs_per_step),
    }
    for stage, (key, samples) in sizes.items():
        group = max(learners if stage == "rl" else [topology.trainer], key=lambda group: group.data_parallel)
        ranks = group.data_parallel
        if stage in config.stages and samples < ranks:
            keys = (key, "train.prompts_per_step", _devices_key(group.pool))
            yield Breach(
                keys,
                f"must be at least the {ranks} data-parallel ranks (got {samples}): {ranks - samples} would compute "
                f"nothing. Nearest: {ranks}; or more cluster.trainer.tensor_parallel or sequence_parallel, or fewer "
                "devices",
            )


def optimizer_steps_divide_the_update(config: RunConfig) -> Iterator[Breach]:
    wanted, total = config.train.samples_per_optimizer_step, samples_per_update(config)
    what = f"prompts_per_step x group_size = {config.train.prompts_per_step} x {config.rollout.group_size} = {total}"
    if "rl" in config.stages and wanted is not None and (line := _not_dividing(wanted, total, what)):
        yield Breach(("train.samples_per_optimizer_step", "train.prompts_per_step", "rollout.group_size"), line)


def judge_key(config: RunConfig) -> str:
    """The key that says how many devices a judge is divided over."""
    return next((f"services.{name}.engine.tensor_parallel_size" for name in judge_services(config)), "services")


def _devices_key(pool: str) -> str:
    return "cluster.devices_per_node" if pool == DEFAULT_POOL else f"cluster.pools.{pool}.devices"


def _not_dividing(value: int, whole: int, what: str) -> str | None:
    """The message for a value that does not divide `whole`; None if it does."""
    if whole % value == 0:
        return None
    return f"must divide {what} (got {value}). Nearest: {_nearest(value, lambda n: whole % n == 0, whole)}"


def _nearest(value: int, is_legal: Callable[[int], bool], most: int) -> str:
    """The nearest legal values from 1 to `most`, one below and one above."""
    below = next((n for n in range(min(value, most), 0, -1) if is_legal(n)), None)
    above = next((n for n in range(max(value, 1), most + 1) if is_legal(n)), None)
    return " or ".join(str(n) for n in sorted({n for n in (below, above) if n is not None})) or "none"


DIVISION_RULES = (training_divides, engines_divide, replicas_stay_within_a_machine, ranks_have_samples)
