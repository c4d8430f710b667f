"""Assignment of this machine's GPUs to training, services and pools, as values of CUDA_VISIBLE_DEVICES.

Device numbers in a run file count within this process's CUDA_VISIBLE_DEVICES: with 2,3 device 0 is the machine's third
GPU. On a machine without GPUs everything runs on the CPU, with a note that says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from shutil import which

from hone.config.automatic import AutoChoice, settled
from hone.config.load import Loaded
from hone.config.rules.files import architecture_of
from hone.config.rules.placement import CLUSTER_RULES
from hone.config.run import RunConfig
from hone.config.topology import Topology, devices_asked_for, topology_of
from hone.devices import FoundDevices, devices_here, machine_kind
from hone.errors import PlacementError, ServiceError


@dataclass(frozen=True, slots=True)
class Split:
    """The GPUs of training and of each service, as values of CUDA_VISIBLE_DEVICES."""

    training: str | None
    """None leaves the variable as it is."""
    services: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Differences from what the run file asks for, for people."""


def split_devices(config: RunConfig, visible: Sequence[str]) -> Split:
    """Divide the `visible` GPUs as the run file says; the rules of the configuration saw that nothing overlaps.

    Raises:
        ServiceError: a number that the machine does not have, though it has GPUs.
    """
    services = {name: service.devices for name, service in config.services.items()}
    wanted = {f"services.{name}.devices": devices for name, devices in services.items()}
    wanted["run.devices"] = config.run.devices or ()
    if not visible:
        notes = tuple(
            f"{key} = {list(devices)}: there is no GPU here, so it runs without"
            for key, devices in wanted.items()
            if devices
        )
        return Split(None, dict.fromkeys(services, ""), notes)
    for key, devices in wanted.items():
        missing = [number for number in devices if number >= len(visible)]
        if missing:
            raise ServiceError(
                f"{key} = {list(devices)}: there are {len(visible)} GPUs here, numbers 0 to {len(visible) - 1}. "
                f"Choose among those, or widen {machine_kind().variable}."
            )
    taken = {number for devices in services.values() for number in devices}
    training = config.run.devices
    if training is None and taken:
        training = tuple(number for number in range(len(visible)) if number not in taken)
    return Split(
        None if training is None else _named(training, visible),
        {name: _named(devices, visible) for name, devices in services.items()},
    )


def assumed_devices(config: RunConfig) -> FoundDevices:
    """Devices of the run's machines without asking Ray: this machine's; elsewhere what the run file says."""
    here, said = devices_here(config.run.device), config.cluster.devices_per_node
    return here if config.cluster.address is None or said is None else replace(here, per_node=said)


def settled_on(loaded: Loaded, found: FoundDevices) -> tuple[Loaded, tuple[AutoChoice, ...]]:
    """A run file as it runs on these devices with what is installed here, and what every `auto` in it stands for."""
    installed = {name for name in ("ray", "vllm", "triton") if find_spec(name) is not None}
    if os.environ.get("CC") or any(map(which, ("cc", "gcc", "clang"))):  # a C compiler that Triton finds
        installed.add("cc")
    shape = architecture_of(loaded.config, loaded.run_file.parent)
    found_to_be = settled(loaded.config, found, installed=frozenset(installed), shape=shape)
    return replace(loaded, config=found_to_be.config), found_to_be.choices


def topology_on(config: RunConfig, found: FoundDevices) -> Topology:
    """The topology of a run file on machines whose devices are the default of `devices_per_node`.

    Without accelerators a machine has as many devices as cores, or as many as the pools ask for.

    Args:
        found: devices of each machine, including those of services.
    Raises:
        PlacementError: every rule that the run file breaks on this machine.
    """
    cluster = config.cluster
    if cluster.backend != "ray":
        return topology_of(config)
    asked = -(-devices_asked_for(config) // cluster.nodes) if cluster.pools else 0
    has_cores = found.device_type == "cpu"
    each = max(asked, found.per_node) if has_cores else found.per_node
    wanted = cluster.devices_per_node or each
    if not has_cores and wanted > each:
        larger = "; or join Ray on larger machines with cluster.address" if cluster.address is None else ""
        machine = "this machine has" if cluster.address is None else "the cluster's machines have"
        raise PlacementError(
            f"cluster.devices_per_node = {wanted}, and {machine} {each} {found.resource}s. Nearest: {each}{larger}."
        )
    settled = config.model_copy(update={"cluster": cluster.model_copy(update={"devices_per_node": wanted})})
    broken = [f"{breach.keys[0]} {breach.message}" for rule in CLUSTER_RULES for breach in rule(settled)]
    if broken:
        raise PlacementError("; ".join(broken))
    return topology_of(settled)


def _named(devices: Sequence[int], visible: Sequence[str]) -> str:
    return ",".join(visible[number] for number in devices)
