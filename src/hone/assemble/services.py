"""The services of a run file, made ready to start beside a run."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import torch

from hone.cluster.ray import machines_of
from hone.config.load import Loaded
from hone.config.run import RunConfig
from hone.devices import (
    FoundDevices,
    device_of,
    devices_here,
    devices_of_machines,
    is_accelerator,
    machine_kind,
    visible_devices,
)
from hone.errors import PlacementError
from hone.services.gpus import Split, split_devices
from hone.services.supervisor import Services


def claim_devices(config: RunConfig) -> Split:
    """Assign the GPUs, and make only this process's own visible. Call before torch initialises them."""
    if not config.services and config.run.devices is None:
        return Split(None)
    split = split_devices(config, visible_devices())
    if split.training is not None:
        os.environ[machine_kind().variable] = split.training
    return split


def devices_found(config: RunConfig) -> FoundDevices:
    """Devices of this machine and its like, or of the Ray cluster that is joined; before `claim_devices` hides some.

    Raises:
        PlacementError: the cluster has not what is wanted.
        DataError: this machine, which is to be the cluster, has not, or it has what Hone does not know.
        ClusterError: there is no Ray at `cluster.address`.
    """
    cluster, wanted = config.cluster, config.run.device
    if cluster.backend != "ray" or wanted == "cpu":
        return devices_here(wanted)
    if cluster.address is not None:
        return devices_of_machines(machines_of(cluster), wanted, cluster.nodes)
    found = devices_here(wanted)
    if found.device_type == "cpu" and (seen := device_of(wanted, "run.device")).type != "cpu":
        raise PlacementError(
            f"run.device = {wanted}: torch sees devices of type `{seen.type}` here, and the driver lists none, so Ray "
            "cannot place a run on them. Check that the driver's tools are there (nvidia-smi), or use "
            "cluster.backend: local."
        )
    return found


def unseen_notes(config: RunConfig, device: torch.device) -> list[str]:
    """A note where `auto` computes on the CPU of a machine whose driver lists accelerators."""
    if is_accelerator(device) or config.run.device != "auto" or not (seen := visible_devices()):
        return []
    return [
        f"the driver lists {len(seen)} {machine_kind().resource}s, and torch {torch.__version__} sees none: this run "
        "computes on the CPU. Install torch for them, or set run.device=cpu."
    ]


def services_for_verb(loaded: Loaded, split: Split, folder: Path) -> Services:
    """The run file's services for a verb other than `train`: messages go to stderr."""

    def say(message: str) -> None:
        print(message, file=sys.stderr)

    stop = asyncio.Event()
    return Services.from_config(
        loaded, split, folder=folder, logs=folder, say=say, relay=lambda name, line: say(f"[{name}] {line}"), stop=stop
    )
