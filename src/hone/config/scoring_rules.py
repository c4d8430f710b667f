"""Rules of judges and reward models on devices of a cluster, besides placement.

Without a pool a judge is a service beside the run; with one, what the run file says of that service must not say
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.breach import Breach
from hone.config.derived import samples_ahead_on_ray
from hone.config.engine import MAX_SHARED_FRAC, POLICY_GPU_FRAC, SERVICE_GPU_FRAC
from hone.config.run import RunConfig
from hone.config.topology import judge_services, judges_pool, topology_of


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
        shares = policys.kind.takes_share and "rollout" in config.cluster.pools[str(pool)].roles
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


SCORING_RULES = (judges_are_services, judges_engines_fit_their_pool, sleeping_scorers_are_not_asked)
