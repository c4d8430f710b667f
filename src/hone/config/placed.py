"""Derived quantities of a placement, for `hone explain`; the others are in `derived.py`."""

from __future__ import annotations

from collections.abc import Callable

from hone.config.derived import Derived
from hone.config.run import RunConfig
from hone.config.schema import generic
from hone.config.topology import Topology, topology_of
from hone.config.transport import likely_transport

Value = int | bool | str | None


def _of(compute: Callable[[Topology], Value]) -> Callable[[RunConfig], Value]:
    """A quantity of the topology; None where there is no cluster, or its size is only known when it is looked at."""

    def value(config: RunConfig) -> Value:
        cluster = config.cluster
        is_known = cluster.backend == "ray" and bool(cluster.pools or cluster.devices_per_node)
        return compute(topology_of(config)) if is_known else None

    return value


def _transport(config: RunConfig) -> Value:
    return likely_transport(config, topology_of(config)) if config.cluster.backend == "ray" else None


_POOLS = ("cluster.nodes", "cluster.devices_per_node", "cluster.pools.*.devices", "cluster.pools.*.roles")
_TENSOR, _SEQUENCE = "cluster.trainer.tensor_parallel", "cluster.trainer.sequence_parallel"

PLACED: tuple[Derived, ...] = (
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
        _transport,
    ),
)


def placed_from(path: str) -> list[Derived]:
    """What derives from a key."""
    return [derived for derived in PLACED if generic(path) in derived.keys]
