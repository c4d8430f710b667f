"""What must hold of a placement: every role has one place, the devices exist, and sizes divide.

Ray waits for ever for devices that no cluster has; here that is a problem like any other, with the nearest placement
that would do. Rules that need a model's shape look at `model.init` or a local config.json; a shape known by its name
alone is `hone plan`'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path

from hone.config.breach import Breach
from hone.config.derived import samples_per_update
from hone.config.files import architecture_of
from hone.config.run import RunConfig
from hone.config.topology import (
    DEFAULT_POOL,
    ROLES,
    Replica,
    Topology,
    devices_asked_for,
    judge_services,
    judge_tensor_parallel,
    needed_roles,
    optional_roles,
    replicas_of,
    service_devices,
    topology_of,
)

_WHY = {
    "policy": "it is what is trained",
    "rollout": "stage rl samples",
    "reference": "a KL coefficient is above 0",
    "critic": "algorithm.credit = gae",
    "reward_model": "a reward `reward_model` scores on a device",
}
MOST_POOLS_TO_ORDER = 6
"""More pools than this are not tried in other orders."""


def cluster_keys_have_a_backend(config: RunConfig) -> Iterator[Breach]:
    given = sorted(config.cluster.model_fields_set)
    if given and "backend" not in given:
        keys = ("cluster.backend", *(f"cluster.{name}" for name in given))
        yield Breach(
            keys,
            f"is required with cluster.{given[0]}, which nothing reads in one process. Set it to ray; or to local, "
            "which says on purpose that the section waits",
        )


def cluster_says_which_devices(config: RunConfig) -> Iterator[Breach]:
    cluster = config.cluster
    if cluster.backend != "ray":
        return
    if config.run.devices is not None:
        yield Breach(
            ("run.devices", "cluster.backend"),
            f"= {list(config.run.devices)} is for one process. With cluster.backend = ray set it to null: "
            "CUDA_VISIBLE_DEVICES says which GPUs a machine has, cluster.pools how many are used",
        )
    if cluster.nodes > 1 and cluster.address is None:
        yield Breach(
            ("cluster.address", "cluster.nodes"),
            f"is required with cluster.nodes = {cluster.nodes}: a Ray that is started here has this machine alone. "
            "Start Ray on all of them, and set it to auto, or to host:port of the first",
        )
    if cluster.nodes > 1 and cluster.devices_per_node is None:
        yield Breach(
            ("cluster.devices_per_node", "cluster.nodes"),
            f"is required with cluster.nodes = {cluster.nodes}: only this machine can be looked at",
        )
    if cluster.address is not None and not re.fullmatch(r"auto|[^\s/:]+:\d+", cluster.address):
        yield Breach(("cluster.address",), f"must be auto, or host:port (got {cluster.address!r})")


def pools_are_named_plainly(config: RunConfig) -> Iterator[Breach]:
    for name in config.cluster.pools:
        if not re.fullmatch(r"[A-Za-z][\w-]{0,39}", name):
            yield Breach(
                (f"cluster.pools.{name}", "cluster.pools"),
                f"must be named with at most 40 letters, digits, _ and -, a letter first (got {name!r})",
            )


def roles_have_one_place(config: RunConfig) -> Iterator[Breach]:
    places: dict[str, str] = {}
    for name, pool in config.cluster.pools.items():
        for role in dict.fromkeys(pool.roles):
            if pool.roles.count(role) > 1:
                yield Breach((f"cluster.pools.{name}.roles",), f"must name {role} once (got {', '.join(pool.roles)})")
            if role in places:
                other = places[role]
                yield Breach(
                    (f"cluster.pools.{name}.roles", f"cluster.pools.{other}.roles"),
                    f"{role} is also in {other}, and every pool has devices of its own: together they would ask for "
                    f"{pool.devices + config.cluster.pools[other].devices}. Leave it in one of them, where it takes "
                    "turns with the others",
                )
            places.setdefault(role, name)


def needed_roles_have_a_place(config: RunConfig) -> Iterator[Breach]:
    pools = config.cluster.pools
    placed = {role for pool in pools.values() for role in pool.roles}
    missing = [role for role in ROLES if role in needed_roles(config) - placed] if pools else []
    for role in missing:
        home = next((name for name, pool in pools.items() if "policy" in pool.roles), next(iter(pools)))
        yield Breach(
            (f"cluster.pools.{home}.roles", "cluster.pools", "stages", "algorithm", "reward.components"),
            f"{role} is in no pool, and the run needs it ({_WHY[role]}). Nearest: {role} in the roles of {home}, or a "
            "pool of its own",
        )


def pools_have_work(config: RunConfig) -> Iterator[Breach]:
    wanted = needed_roles(config) | optional_roles(config)
    for name, pool in config.cluster.pools.items():
        if "judge" in pool.roles and "judge" not in wanted:
            continue  # judges_are_services says why
        if not wanted.intersection(pool.roles):
            yield Breach(
                (f"cluster.pools.{name}.roles", f"cluster.pools.{name}"),
                f"{', '.join(pool.roles)}: nobody here has anything to do in this run, and {pool.devices} devices "
                "would wait. Take the pool out, or give it another role",
            )


def devices_exist(config: RunConfig) -> Iterator[Breach]:
    cluster, per_node = config.cluster, config.cluster.devices_per_node
    if cluster.backend != "ray" or per_node is None:
        return
    there, asked = cluster.nodes * per_node, devices_asked_for(config)
    for name, service in config.services.items():
        beyond = [number for number in service.devices if number >= per_node]
        if beyond:
            keys = (f"services.{name}.devices", "cluster.devices_per_node")
            yield Breach(keys, f"must be below cluster.devices_per_node = {per_node} each (got {beyond[0]})")
    if not cluster.pools and len(service_devices(config)) >= there:
        keys = ("services", "cluster.devices_per_node")
        yield Breach(keys, f"have all {there} devices, and none is left for the run. Add machines, or free one")
    if asked > there:
        sizes = " + ".join(str(pool.devices) for pool in cluster.pools.values())
        services = len(service_devices(config))
        sizes += f" + {services} of services" if services else ""
        yield Breach(
            ("cluster.pools", "cluster.nodes", "cluster.devices_per_node"),
            f"ask for {sizes} = {asked} devices; there are nodes x devices_per_node = {cluster.nodes} x {per_node} = "
            f"{there}. Nearest: {_nearest_that_exists(config, asked - there)}",
        )


def _nearest_that_exists(config: RunConfig, lacking: int) -> str:
    """More machines; or the fewest pools whose roles could as well take turns elsewhere."""
    cluster, per_node = config.cluster, config.cluster.devices_per_node or 1
    ways = [f"cluster.nodes = {-(-devices_asked_for(config) // per_node)}"]
    movable = {name: pool for name, pool in cluster.pools.items() if not {"policy", "rollout"} & set(pool.roles)}
    moved: list[str] = []
    for name in sorted(movable, key=lambda name: movable[name].devices):
        if sum(movable[one].devices for one in moved) < lacking:
            moved.append(name)
    if moved and sum(movable[name].devices for name in moved) >= lacking:
        roles = " and ".join(role for name in moved for role in movable[name].roles)
        home = next(name for name, pool in cluster.pools.items() if name not in moved)
        ways.append(f"{roles} taking turns in another pool, such as {home}, instead of {' and '.join(moved)}")
    else:
        largest = max(cluster.pools, key=lambda name: cluster.pools[name].devices)
        left = cluster.pools[largest].devices - lacking
        ways += [f"cluster.pools.{largest}.devices = {left}"] if left > 0 else []
    return "; or ".join(ways)


def training_divides(config: RunConfig) -> Iterator[Breach]:
    topology, settings = _known(config), config.cluster.trainer
    if topology is None:
        return
    groups = {"policy": topology.trainer, "critic": topology.critic, "reference": topology.reference}
    for role, group in groups.items():
        if group is None or (role != "policy" and group.pool == topology.trainer.pool):
            continue
        size, tensor, where = group.world_size, settings.tensor_parallel, _devices_key(topology, group.pool)
        if line := _not_dividing(tensor, size, f"the {size} devices of {role}"):
            yield Breach(("cluster.trainer.tensor_parallel", where), line)
            continue
        ranks = size // tensor
        what = f"the {size} devices of {role}" + (f" / tensor_parallel = {ranks}" if tensor > 1 else "")
        for name, value in (("shard", settings.shard or 1), ("sequence_parallel", settings.sequence_parallel)):
            if line := _not_dividing(value, ranks, what):
                yield Breach((f"cluster.trainer.{name}", where), line)


def engines_divide(config: RunConfig) -> Iterator[Breach]:
    topology, cluster = _known(config), config.cluster
    if topology is None:
        return
    rollout, judge = topology.pool_of("rollout"), topology.pool_of("judge")
    for key, pool, each in (
        ("cluster.engines.tensor_parallel", rollout, cluster.engines.tensor_parallel),
        (judge_key(config), judge, judge_tensor_parallel(config)),
    ):
        size = len(pool.devices) if pool else each
        if pool and (line := _not_dividing(each, size, f"the {size} devices of pool {pool.name}")):
            keys = (key, _devices_key(topology, pool.name))
            yield Breach(keys, f"{line}; {size % each} would idle")


def heads_divide(config: RunConfig, folder: Path) -> Iterator[Breach]:
    """Tensor parallelism divides attention by heads, and Ulysses exchanges sequences for heads. An engine may have a
    key-value head on several devices; a trainer has each once."""
    shape, cluster = architecture_of(config, folder), config.cluster
    heads, kv_heads = shape.get("num_attention_heads"), shape.get("num_key_value_heads")
    if cluster.backend != "ray" or not isinstance(heads, int):
        return
    of_model = ("model.path", "model.init.num_attention_heads")
    kv_heads = kv_heads if isinstance(kv_heads, int) else heads
    engines, key = cluster.engines.tensor_parallel, "cluster.engines.tensor_parallel"
    if line := _not_dividing(engines, heads, f"the model's {heads} query heads"):
        yield Breach((key, *of_model), line)
    elif kv_heads % engines and engines % kv_heads:
        nearest = _nearest(engines, lambda n: heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0), heads)
        yield Breach(
            (key, *of_model),
            f"must divide the model's {kv_heads} key-value heads or be a multiple of them (got {engines}). Nearest: "
            f"{nearest}",
        )
    tensor, sequence = cluster.trainer.tensor_parallel, cluster.trainer.sequence_parallel
    if line := _not_dividing(tensor, kv_heads, f"the model's {kv_heads} key-value heads"):
        yield Breach(("cluster.trainer.tensor_parallel", *of_model), line)
    else:
        left = kv_heads // tensor
        if line := _not_dividing(sequence, left, f"the model's key-value heads / tensor_parallel = {left}"):
            yield Breach(("cluster.trainer.sequence_parallel", "cluster.trainer.tensor_parallel", *of_model), line)


def trainers_can_do_it(config: RunConfig) -> Iterator[Breach]:
    """What `model/parallel.py` refuses, as far as a run file tells."""
    settings, of_layers = config.cluster.trainer, "cluster.trainer.tensor_parallel"
    if config.cluster.backend != "ray":
        return
    if settings.tensor_parallel > 1 and config.lora.rank:
        yield Breach(
            (of_layers, "lora.rank"),
            f"= {settings.tensor_parallel} divides layers, and those with an adapter cannot be divided yet. Set it to "
            "1: shard divides the weights beneath",
        )
    if settings.tensor_parallel > 1 and settings.compile:
        yield Breach(
            ("cluster.trainer.compile", of_layers),
            f"is for whole layers, and {of_layers} = {settings.tensor_parallel} divides them. Leave one of them out",
        )
    if settings.sequence_parallel > 1 and config.model.implementation == "transformers":
        yield Breach(
            ("cluster.trainer.sequence_parallel", "model.implementation"),
            f"= {settings.sequence_parallel} needs Hone's own decoder, and model.implementation = transformers asks "
            "for another. Set it to 1, or take auto",
        )


def replicas_stay_within_a_machine(config: RunConfig) -> Iterator[Breach]:
    """What divides layers exchanges something in each of them, which only a machine's own links are fit for."""
    topology = _known(config)
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


def _replicas(config: RunConfig, topology: Topology) -> dict[str, tuple[Replica, ...]]:
    """Key -> devices that divide layers among them as it says."""
    tensor = config.cluster.trainer.tensor_parallel
    learners = [pool for pool in topology.pools if {"policy", "critic", "reference"} & set(pool.roles)]
    return {
        "cluster.trainer.tensor_parallel": tuple(
            one for pool in learners for one in replicas_of(pool, "ranks", tensor)
        ),
        "cluster.engines.tensor_parallel": topology.engines,
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
    topology = _known(config)
    if topology is None:
        return
    ranks = topology.trainer.data_parallel
    sizes = {
        "rl": (
            "train.samples_per_optimizer_step",
            config.train.samples_per_optimizer_step or samples_per_update(config),
        ),
        "sft": ("sft.rows_per_step", config.sft.rows_per_step),
        "reward_model": ("rm.pairs_per_step", config.rm.pairs_per_step),
    }
    for stage, (key, samples) in sizes.items():
        if stage in config.stages and samples < ranks:
            keys = (key, "train.prompts_per_step", _devices_key(topology, topology.trainer.pool))
            yield Breach(
                keys,
                f"must be at least the {ranks} data-parallel ranks (got {samples}): {ranks - samples} would compute "
                f"nothing. Nearest: {ranks}; or more cluster.trainer.tensor_parallel or sequence_parallel, or fewer "
                "devices",
            )


def sleeping_engines_do_not_run_ahead(config: RunConfig) -> Iterator[Breach]:
    staleness = config.rollout.max_staleness
    if config.cluster.backend == "ray" and staleness and "rl" in config.stages and topology_of(config).colocated:
        yield Breach(
            ("rollout.max_staleness", "cluster.pools"),
            f"= {staleness} lets sampling run ahead, but policy and rollout share their devices and take turns. "
            "Nearest: 0; or a pool of its own for rollout",
        )


def engines_can_do_it(config: RunConfig) -> Iterator[Breach]:
    cluster = config.cluster
    if cluster.backend != "ray":
        return
    if cluster.engines.use == "vllm" and config.rollout.compile:
        yield Breach(
            ("rollout.compile", "cluster.engines.use"),
            "= true compiles Hone's own engine; vLLM does so by itself. Set it to false",
        )
    engines = cluster.engines
    only = [key for key in ("memory_frac", "args") if key in engines.model_fields_set]
    only += ["tensor_parallel"] if engines.tensor_parallel > 1 else []
    for key in only if engines.use != "vllm" else ():
        yield Breach(
            (f"cluster.engines.{key}", "cluster.engines.use"),
            f"is only used by use = vllm (got use = {engines.use}, Hone's own engine, whole on each device). Leave it "
            "out, or set use to vllm",
        )


def judges_are_services(config: RunConfig) -> Iterator[Breach]:
    """The judge's model is a service's: on its own devices without a cluster, in a pool with one."""
    places = [f"cluster.pools.{name}.roles" for name, pool in config.cluster.pools.items() if "judge" in pool.roles]
    services = judge_services(config)
    if config.cluster.backend != "ray":
        return
    if places and len(services) != 1:
        got = f"got {', '.join(services)}" if services else "got none"
        yield Breach(
            (places[0], "services", "reward.components"),
            f"judge is one service with `policy`, a model that a reward `judge` names ({got}). "
            + ("Leave the role out and give them `devices`" if services else "Add one, or leave the role out"),
        )
    for name in services if places else []:
        if config.services[name].devices:
            yield Breach(
                (f"services.{name}.devices", places[0]),
                "contradicts the pool with judge in its roles, where this service runs. Set it to []",
            )


def judge_key(config: RunConfig) -> str:
    """Where it is said how many devices a judge is divided over."""
    return next((f"services.{name}.engine.tensor_model_parallel_size" for name in judge_services(config)), "services")


def _known(config: RunConfig) -> Topology | None:
    """The topology, where the run file alone says how many devices there are."""
    cluster = config.cluster
    is_known = cluster.backend == "ray" and bool(cluster.pools or cluster.devices_per_node)
    return topology_of(config) if is_known and not list(needed_roles_have_a_place(config)) else None


def _devices_key(topology: Topology, pool: str) -> str:
    return "cluster.devices_per_node" if pool == DEFAULT_POOL else f"cluster.pools.{pool}.devices"


def _not_dividing(value: int, whole: int, what: str) -> str | None:
    """What to say of a value that leaves a rest of `whole`; None if it leaves none."""
    if whole % value == 0:
        return None
    return f"must divide {what} (got {value}). Nearest: {_nearest(value, lambda n: whole % n == 0, whole)}"


def _nearest(value: int, is_legal: Callable[[int], bool], most: int) -> str:
    """The nearest legal values from 1 to `most`, one below and one above."""
    below = next((n for n in range(min(value, most), 0, -1) if is_legal(n)), None)
    above = next((n for n in range(max(value, 1), most + 1) if is_legal(n)), None)
    return " or ".join(str(n) for n in sorted({n for n in (below, above) if n is not None})) or "none"


CLUSTER_RULES = (
    cluster_keys_have_a_backend,
    cluster_says_which_devices,
    pools_are_named_plainly,
    roles_have_one_place,
    needed_roles_have_a_place,
    pools_have_work,
    devices_exist,
    training_divides,
    trainers_can_do_it,
    engines_divide,
    replicas_stay_within_a_machine,
    ranks_have_samples,
    sleeping_engines_do_not_run_ahead,
    engines_can_do_it,
    judges_are_services,
)
