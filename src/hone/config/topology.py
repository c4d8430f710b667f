"""Topology: ranks, replicas and machines that follow from the `cluster` section. Pure arithmetic.

The run's devices are counted from 0 over all machines, machine by machine; those that services have are not among them.
Pools take them in the order of the run file, replicas in the order of their pool. Nothing here looks at a machine, and
what does not divide is refused in `rules/placement.py`, not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import Any, Literal, get_args

from hone.config.cluster import ClusterSection, PoolSection, Role, ShardingSection
from hone.config.derived import needs_critic, needs_reference
from hone.config.run import RewardComponent, RunConfig

ROLES: tuple[Role, ...] = get_args(Role)
TRAINED: tuple[Role, ...] = ("policy", "critic", "reference")
"""Roles that ranks have, and no replicas."""
DEFAULT_POOL = "all"
"""Name of the one pool of a run file that names none. A judge is not in it: it stays a service beside the run."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices by name, and the roles that use them in turn."""

    name: str
    roles: tuple[Role, ...]
    """Roles that this run needs, in the order of `ROLES`."""
    devices: tuple[int, ...]
    nodes: tuple[int, ...]
    """The machine of each."""


@dataclass(frozen=True, slots=True)
class TrainerGroup:
    """Ranks that hold one model together; rank r is on `devices[r]`.

    replicate x shard x tensor_parallel = world_size, the last innermost; sequence parallel ranks are neighbours in the
    first two. With 8 ranks, shard 2 and tensor_parallel 2, ranks {0,1,2,3} and {4,5,6,7} each hold a copy of weights,
    gradients and moments, {0,1} divide each layer, and a batch is divided over data_parallel = 4.
    """

    pool: str
    devices: tuple[int, ...]
    nodes: tuple[int, ...]
    world_size: int
    shard: int
    replicate: int
    tensor_parallel: int
    sequence_parallel: int

    @property
    def data_parallel(self) -> int:
        """Parts that a batch's samples are divided into."""
        return max(self.world_size // (self.tensor_parallel * self.sequence_parallel), 1)


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """One engine, judge or reward model; its weights are divided over its devices."""

    name: str
    """`engine-0`, `judge-0`, `reward_model-0`."""
    pool: str
    devices: tuple[int, ...]
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """The whole placement of a run."""

    backend: str
    nodes: int
    devices_per_node: int
    """Devices of a machine; includes those of services, which are on the first machine."""
    pools: tuple[Pool, ...]
    trainer: TrainerGroup
    engines: tuple[PlacedReplica, ...]
    critic: TrainerGroup | None
    """On the trainer's ranks if its pool is the trainer's; None: the run has none. So with the next."""
    reference: TrainerGroup | None
    reward_models: tuple[PlacedReplica, ...]
    judges: tuple[PlacedReplica, ...]

    @property
    def colocated(self) -> bool:
        """Trainer and engines take turns on the same devices."""
        return self.shares_devices("policy", "rollout")

    @property
    def groups(self) -> Mapping[Role, TrainerGroup | None]:
        """The ranks of each trained role; None: the run has no such role."""
        return {"policy": self.trainer, "critic": self.critic, "reference": self.reference}

    @property
    def apart(self) -> dict[str, tuple[Role, ...]]:
        """Critic and reference where they are not on the policy's ranks: by pool, those that its ranks hold."""
        placed: dict[str, tuple[Role, ...]] = {
            pool.name: tuple(role for role in TRAINED if role in pool.roles) for pool in self.pools
        }
        return {name: roles for name, roles in placed.items() if roles and "policy" not in roles}

    @property
    def num_devices(self) -> int:
        """Devices of all pools."""
        return sum(len(pool.devices) for pool in self.pools)

    def pool_of(self, role: Role) -> Pool | None:
        """Pool of a role; None if the run does not need it, or it has none."""
        return next((pool for pool in self.pools if role in pool.roles), None)

    def shares_devices(self, one: Role, other: Role) -> bool:
        """Whether two roles take turns."""
        pool = self.pool_of(one)
        return pool is not None and pool is self.pool_of(other)

    def processes_on(self, device: int) -> int:
        """How many processes take turns on a device: of those that train, of an engine, of those that score."""
        gangs = {group.pool: group for group in (self.trainer, self.critic, self.reference) if group is not None}
        held = [*gangs.values(), *self.engines, *self.reward_models, *self.judges]
        return sum(device in one.devices for one in held)

    def sleeps(self, role: Role) -> bool:
        """Whether a role that samples or scores sleeps while the trainer works, because that is on its devices."""
        return any(self.shares_devices(role, learner) for learner in TRAINED)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {**asdict(self), "colocated": self.colocated}


def known_topology(config: RunConfig) -> Topology | None:
    """The placement of a run on Ray, where the run file alone says how many devices there are."""
    cluster = config.cluster
    is_known = cluster.backend == "ray" and bool(cluster.pools or cluster.devices_per_node)
    placed = {role for pool in cluster.pools.values() for role in pool.roles}
    is_whole = not cluster.pools or needed_roles(config) <= placed
    return topology_of(config) if is_known and is_whole else None


def topology_of(config: RunConfig, devices_per_node: int | None = None) -> Topology:
    """The placement of a run.

    Args:
        devices_per_node: what was found on this machine, for a run file that does not say; None: not looked at, as many
            as the pools need, without pools one.
    """
    if config.cluster.backend != "ray":
        cluster, machines = ClusterSection(), _Machines(1, 1)
    else:
        cluster = config.cluster
        each = cluster.devices_per_node or devices_per_node or -(-max(devices_asked_for(config), 1) // cluster.nodes)
        machines = _Machines(cluster.nodes, each, len(service_devices(config)))
    most: tuple[Role, ...] = tuple(role for role in ROLES if role != "judge")
    default = PoolSection(devices=max(machines.devices, 1), roles=most)
    wanted: dict[str, PoolSection] = cluster.pools or {DEFAULT_POOL: default}
    needed = needed_roles(config) | optional_roles(config)
    devices = count()  # what is asked for and not there is counted too
    pools: list[Pool] = []
    for name, section in wanted.items():
        roles: tuple[Role, ...] = tuple(role for role in ROLES if role in section.roles and role in needed)
        numbers = tuple(islice(devices, section.devices))
        pools.append(Pool(name, roles, numbers, tuple(machines.of(number) for number in numbers)))
    place = {role: pool for pool in reversed(pools) for role in pool.roles}
    settings = cluster.trainer
    trained = {
        role: _trainer(pool, settings.shard, settings.tensor_parallel, settings.sequence_parallel)
        for role, pool in place.items()
        if role in TRAINED
    }
    return Topology(
        backend="ray" if cluster.backend == "ray" else "local",
        nodes=machines.nodes,
        devices_per_node=machines.devices_each,
        pools=tuple(pools),
        trainer=trained.get("policy") or _trainer(pools[0], None, 1, 1),
        engines=replicas_of(place.get("rollout"), "engine", cluster.engines.tensor_parallel_size),
        critic=trained.get("critic"),
        reference=trained.get("reference"),
        reward_models=replicas_of(place.get("reward_model"), "reward_model", 1),
        judges=replicas_of(place.get("judge"), "judge", judge_tensor_parallel(config)),
    )


def is_sharded(settings: ShardingSection, world_size: int) -> bool:
    """Whether ranks hold shards (FSDP2); otherwise one rank holds flat buffers, as a run of one process does."""
    return world_size > 1 or bool(settings.offload) or settings.compile


def devices_asked_for(config: RunConfig) -> int:
    """Devices of all pools, and those of services, which are on the machine where the run was started."""
    return sum(pool.devices for pool in config.cluster.pools.values()) + len(service_devices(config))


def service_devices(config: RunConfig) -> frozenset[int]:
    """Devices of the first machine that services have."""
    return frozenset(number for service in config.services.values() for number in service.devices)


def needed_roles(config: RunConfig) -> frozenset[Role]:
    """Roles that the run cannot do without."""
    needed: set[Role] = {"policy"}
    if "rl" in config.stages:
        needed |= {"rollout"}
        needed |= {"reward_model"} if reward_models(config) else set()
    needed |= {"reference"} if needs_reference(config) else set()
    needed |= {"critic"} if needs_critic(config) else set()
    return frozenset(needed)


def optional_roles(config: RunConfig) -> frozenset[Role]:
    """Roles that may have a pool: a judge without one is a service beside the run."""
    return frozenset(["judge"] if "rl" in config.stages and judge_services(config) else [])


def reward_models(config: RunConfig) -> list[RewardComponent]:
    """Rewards `reward_model` that score on a device: those that are not put on a CPU."""
    return [
        component
        for component in config.reward.components
        if component.use == "reward_model" and component.args.get("device") != "cpu"
    ]


def judge_services(config: RunConfig) -> list[str]:
    """Services that are models which rewards ask for their opinion."""
    named = [component.args.get("service") for component in config.reward.components if component.use == "judge"]
    return [name for name, service in config.services.items() if service.policy is not None and name in named]


@dataclass(frozen=True, slots=True)
class _Machines:
    """Machines with equally many devices, of which services on the first one have some."""

    nodes: int
    devices_each: int
    taken: int = 0

    @property
    def devices(self) -> int:
        """The run's own."""
        return self.nodes * self.devices_each - self.taken

    def of(self, device: int) -> int:
        """The machine of a device of the run."""
        return (device + self.taken) // self.devices_each


def judges_pool(config: RunConfig) -> str | None:
    """The pool with the judge among its roles, of a run on a cluster."""
    pools = config.cluster.pools if config.cluster.backend == "ray" else {}
    return next((name for name, pool in pools.items() if "judge" in pool.roles), None)


def judge_tensor_parallel(config: RunConfig) -> int:
    """Devices of one replica of the judge."""
    engines = [config.services[name].engine for name in judge_services(config)]
    return next((engine.tensor_parallel_size for engine in engines if engine is not None), 1)


def _trainer(pool: Pool, shard: int | None, tensor: int, sequence: int) -> TrainerGroup:
    size = len(pool.devices)
    ranks = max(size // tensor, 1)
    sharded = min(shard or ranks, ranks)
    return TrainerGroup(
        pool=pool.name,
        devices=pool.devices,
        nodes=pool.nodes,
        world_size=size,
        shard=sharded,
        replicate=ranks // sharded,
        tensor_parallel=tensor,
        sequence_parallel=sequence,
    )


def replicas_of(pool: Pool | None, name: str, each: int) -> tuple[PlacedReplica, ...]:
    """A pool cut into replicas of `each` devices; a rest is left out, and without a pool there is none."""
    if pool is None:
        return ()
    starts = range(0, len(pool.devices) - each + 1, each)
    cuts = [slice(start, start + each) for start in starts]
    return tuple(
        PlacedReplica(f"{name}-{number}", pool.name, pool.devices[cut], pool.nodes[cut])
        for number, cut in enumerate(cuts)
    )


def topology_lines(topology: Topology) -> list[str]:
    """The placement as a small table for people: roles, their devices and machines, and how they are divided."""
    title = f"{topology.num_devices} of {topology.nodes} x {topology.devices_per_node} devices, {_turns(topology)}"
    rows = [("role", "pool", "devices", "machines", "")]
    for role in ROLES:
        if pool := topology.pool_of(role):
            rows.append((role, pool.name, _span(pool.devices), _span(pool.nodes), _division(topology, role)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    table = (
        "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
    )
    return [f"placement: {title}", *(f"    {line}".rstrip() for line in table)]


def _turns(topology: Topology) -> str:
    """Which roles share the engines' devices, in words."""
    if len(topology.pools) == 1:
        return "roles take turns"
    sharing = [role for role in TRAINED if topology.shares_devices(role, "rollout")]
    if not sharing:
        return "trainer and engines apart"
    return f"{'trainer' if 'policy' in sharing else ', '.join(sharing)} and engines take turns"


def _division(topology: Topology, role: Role) -> str:
    """How a role's devices are divided, in words."""
    if group := topology.groups.get(role):
        if role != "policy" and group.pool == topology.trainer.pool:
            return "on the policy's ranks"
        sizes = {
            "shard": group.shard,
            "tensor_parallel": group.tensor_parallel,
            "sequence_parallel": group.sequence_parallel,
            "copies": group.replicate,
        }
        divided = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        return f"{_many(group.world_size, 'rank')}{f': {divided}' if divided else ''}"
    replicas = {"rollout": topology.engines, "judge": topology.judges, "reward_model": topology.reward_models}[role]
    each = len(replicas[0].devices) if replicas else 0
    return f"{_many(len(replicas), 'replica')} on {_many(each, 'device')}{' each' if len(replicas) > 1 else ''}"


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _span(numbers: tuple[int, ...]) -> str:
    """`0-7`, or `3`."""
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first}-{last}"


def divided_tower(model_type: str, cluster: ClusterSection) -> str:
    """That the trainer's ranks cannot divide this model, which has a vision tower, as the section says; "" if they
    can."""
    for name in ("tensor_parallel", "sequence_parallel"):
        if cluster.backend == "ray" and (value := getattr(cluster.trainer, name)) > 1:
            return (
                f"{model_type} has a vision tower, whose weights ranks shard but do not divide otherwise (got "
                f"cluster.trainer.{name} = {value}). Set cluster.trainer.{name}=1, or take a text model."
            )
    return ""


TransportKind = Literal["ray", "group", "ipc"]


def transport_of(config: RunConfig, topology: Topology, *, on_gpu: bool) -> TransportKind:
    """What the run uses: the fastest way where trainer and engines are, unless the run file says another.

    On CPUs a broadcast is slower than the object store, which engines of one machine read in place: docs/publishing.md.
    """
    asked = config.cluster.transport
    if asked != "auto":
        return asked
    if not on_gpu:
        return "ray"
    return "ipc" if topology.colocated else "group"


def in_words(transport: TransportKind, *, on_gpu: bool) -> str:
    """A transport, for people."""
    broadcast = "a broadcast (NCCL)" if on_gpu else "a broadcast (gloo)"
    return {"ray": "Ray's object store", "group": broadcast, "ipc": "the memory of their GPU (CUDA IPC)"}[transport]


def likely_transport(config: RunConfig, topology: Topology) -> str | None:
    """For people, before it is known whether there are GPUs; None where there are no engines."""
    if not topology.engines:
        return None
    kinds = {"cpu": [False], "npu": [False], "cuda": [True], "auto": [True, False]}[config.run.device]
    ways = [in_words(transport_of(config, topology, on_gpu=on_gpu), on_gpu=on_gpu) for on_gpu in kinds]
    return ways[0] if len(set(ways)) == 1 else f"{ways[0]}; without GPUs {ways[1]}"
