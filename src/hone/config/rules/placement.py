"""Placement rules: every role has one place, the devices exist, and what is asked for can be done.

Ray waits forever for devices that no cluster has; here that is a problem like any other, with the nearest placement
that works. What must divide is in `division.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hone.config.derived import samples_ahead_on_ray
from hone.config.engine import MAX_SHARED_FRAC, POLICY_GPU_FRAC, SERVICE_GPU_FRAC
from hone.config.rules import Breach
from hone.config.rules.division import DIVISION_RULES
from hone.config.run import RunConfig
from hone.config.topology import (
    ROLES,
    TRAINED,
    devices_asked_for,
    judge_services,
    judges_pool,
    needed_roles,
    optional_roles,
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


def cluster_keys_have_a_backend(config: RunConfig) -> Iterator[Breach]:
    cluster = config.cluster
    defaults = {name: field.default for name, field in type(cluster).model_fields.items()}
    given = sorted(name for name, value in cluster if value != defaults[name] and name != "env")
    if given and cluster.backend == "auto":
        keys = ("cluster.backend", *(f"cluster.{name}" for name in given))
        yield Breach(
            keys,
            f"is required with cluster.{given[0]}, which nothing reads in one process. Set it to ray; or to local, "
            "which ignores the section on purpose",
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


def pools_have_names_and_roles_of_their_own(config: RunConfig) -> Iterator[Breach]:
    places: dict[str, str] = {}
    for name, pool in config.cluster.pools.items():
        if not re.fullmatch(r"[A-Za-z][\w-]{0,39}", name):
            yield Breach(
                (f"cluster.pools.{name}", "cluster.pools"),
                f"must be named with at most 40 letters, digits, _ and -, a letter first (got {name!r})",
            )
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
                f"{', '.join(pool.roles)}: none of its roles is used by this run; its {pool.devices} devices would "
                "idle. Remove the pool, or give it another role",
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
    elif cluster.pools:
        largest = max(cluster.pools, key=lambda name: cluster.pools[name].devices)
        left = cluster.pools[largest].devices - lacking
        ways += [f"cluster.pools.{largest}.devices = {left}"] if left > 0 else []
    return "; or ".join(ways)


def trainers_can_do_it(config: RunConfig) -> Iterator[Breach]:
    """What `model/parallel.py` refuses, as far as a run file shows."""
    settings, of_layers = config.cluster.trainer, "cluster.trainer.tensor_parallel"
    if config.cluster.backend != "ray":
        return
    if settings.tensor_parallel > 1 and settings.compile:
        yield Breach(
            ("cluster.trainer.compile", of_layers),
            f"is for whole layers, and {of_layers} = {settings.tensor_parallel} divides them. Leave one of them out",
        )


def sleeping_engines_do_not_run_ahead(config: RunConfig) -> Iterator[Breach]:
    staleness = config.rollout.max_staleness
    if not samples_ahead_on_ray(config):
        return
    topology = topology_of(config)
    if shared := [role for role in TRAINED if topology.shares_devices(role, "rollout")]:
        yield Breach(
            ("rollout.max_staleness", "cluster.pools"),
            f"= {staleness} lets sampling run ahead, but {', '.join(shared)} and rollout share their devices and take "
            "turns. Nearest: 0; or a pool of its own for rollout",
        )


def weights_can_go_that_way(config: RunConfig) -> Iterator[Breach]:
    """What `cluster.transport` asks for, as far as a run file shows; whether there are GPUs is seen at the start."""
    cluster, device = config.cluster, config.run.device
    if cluster.backend != "ray" or "rl" not in config.stages or cluster.transport in ("auto", "ray"):
        return
    colocated = topology_of(config).colocated
    if cluster.transport == "ipc" and not colocated:
        yield Breach(
            ("cluster.transport", "cluster.pools"),
            "= ipc is for a trainer and engines on the same GPUs, and policy and rollout are in pools of their own. "
            "Nearest: group, a broadcast between GPUs; or one pool for both",
        )
    elif cluster.transport == "ipc" and device == "cpu":
        yield Breach(
            ("cluster.transport", "run.device"),
            "= ipc shares a GPU's memory, and run.device = cpu. Nearest: auto, which takes Ray's object store",
        )
    elif cluster.transport == "group" and colocated and device != "cpu":
        yield Breach(
            ("cluster.transport", "cluster.pools", "run.device"),
            "= group cannot broadcast from a GPU to itself (NCCL), and policy and rollout share their devices. "
            "Nearest: ipc or auto; or a pool of its own for rollout; or run.device = cpu",
        )


# ---- judges and reward models


def judges_are_services(config: RunConfig) -> Iterator[Breach]:
    """The judge's model is a service's: on its own devices without a cluster, in a pool with one."""
    pool, services = judges_pool(config), judge_services(config)
    if pool is None:
        return
    roles = f"cluster.pools.{pool}.roles"
    if len(services) != 1:
        got = f"got {', '.join(services)}" if services else "got none"
        yield Breach(
            (roles, "services", "reward.components"),
            f"judge is one service with `policy`, a model that a reward `judge` names ({got}). "
            + ("Leave the role out and give them `devices`" if services else "Add one, or leave the role out"),
        )
    for name in services:
        service, key = config.services[name], f"services.{name}"
        if service.devices:
            yield Breach(
                (f"{key}.devices", roles),
                "contradicts the pool with judge in its roles, where this service runs. Set it to []",
            )
        if service.port:
            yield Breach(
                (f"{key}.port", roles),
                f"= {service.port} is of a service beside the run; in pool {pool} every replica takes a free port. Set "
                f"it to 0, or take judge out of the roles of {pool}",
            )


def judges_engines_fit_their_pool(config: RunConfig) -> Iterator[Breach]:
    """What `services.NAME.engine` asks for can be had on the pool's devices, beside the policy's engines there."""
    pool = judges_pool(config)
    for name in judge_services(config) if pool else []:
        if (engine := config.services[name].engine) is None:
            continue
        key, size = f"services.{name}.engine", engine.tensor_parallel_size
        if engine.use == "hone" and size > 1:
            yield Breach(
                (f"{key}.tensor_parallel_size", f"{key}.use", f"cluster.pools.{pool}.devices"),
                f"= {size}, and use = hone is an engine on one device. Set it to 1, or use vLLM",
            )
        policys, share = config.cluster.engines, engine.gpu_memory_utilization or SERVICE_GPU_FRAC
        beside = policys.gpu_memory_utilization or POLICY_GPU_FRAC
        shares = policys.kind.memory == "share" and "rollout" in config.cluster.pools[str(pool)].roles
        if shares and (total := share + beside) > MAX_SHARED_FRAC + 1e-9:
            yield Breach(
                (f"{key}.gpu_memory_utilization", "cluster.engines.gpu_memory_utilization"),
                f"{share:g} + the policy's engines' {beside:g} = {total:g} > {MAX_SHARED_FRAC:g} of each device of "
                f"{pool}: the judge scores while the policy's engines sample. "
                f"Nearest: {MAX_SHARED_FRAC / 2:g} each; or a pool of its own for judge",
            )


def sleeping_scorers_are_not_asked(config: RunConfig) -> Iterator[Breach]:
    """Roles that share the trainer's devices are offloaded while it works, and score nothing then."""
    staleness = config.rollout.max_staleness
    if not samples_ahead_on_ray(config):
        return
    topology = topology_of(config)
    for role in ("judge", "reward_model"):
        if topology.sleeps(role):
            yield Breach(
                ("rollout.max_staleness", "cluster.pools"),
                f"= {staleness} lets samples be scored while the policy is trained, but {role} shares its devices and "
                f"sleeps then. Nearest: 0; or a pool of its own for {role}",
            )


CLUSTER_RULES = (
    cluster_keys_have_a_backend,
    cluster_says_which_devices,
    pools_have_names_and_roles_of_their_own,
    needed_roles_have_a_place,
    pools_have_work,
    devices_exist,
    trainers_can_do_it,
    sleeping_engines_do_not_run_ahead,
    weights_can_go_that_way,
    *DIVISION_RULES,
    judges_are_services,
    judges_engines_fit_their_pool,
    sleeping_scorers_are_not_asked,
)
