"""The placement of a run on machines like this one: `config.topology`, once it is known how many devices they have."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hone.config.cluster_rules import CLUSTER_RULES
from hone.config.run import RunConfig
from hone.config.topology import Topology, devices_asked_for, topology_of
from hone.errors import PlacementError


def topology_here(config: RunConfig, gpus: Sequence[str]) -> Topology:
    """Who works on which devices, where `cluster.devices_per_node` may have been left to what this machine has.

    A machine without GPUs has as many devices as it has cores, or as many processes as the pools ask for.

    Args:
        gpus: of this machine (`devices.visible_devices`), those of services among them.
    Raises:
        PlacementError: what is impossible here, all of it.
    """
    cluster = config.cluster
    if cluster.backend == "local":
        return topology_of(config)
    asked = -(-devices_asked_for(config) // cluster.nodes) if cluster.pools else 0
    found = len(gpus) or max(asked, len(os.sched_getaffinity(0)))
    wanted = cluster.devices_per_node or found
    if gpus and cluster.address is None and wanted > found:
        raise PlacementError(
            f"cluster.devices_per_node = {wanted}, and this machine has {found} GPUs. Nearest: {found}; or join Ray on "
            "larger machines with cluster.address."
        )
    settled = config.model_copy(update={"cluster": cluster.model_copy(update={"devices_per_node": wanted})})
    broken = [f"{breach.keys[0]} {breach.message}" for rule in CLUSTER_RULES for breach in rule(settled)]
    if broken:
        raise PlacementError("; ".join(broken))
    return topology_of(settled)
