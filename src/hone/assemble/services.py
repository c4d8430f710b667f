"""The services of a run file, made ready to start beside a run."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from hone.config.derived import unused_services
from hone.config.load import Loaded
from hone.config.run import RunConfig
from hone.config.topology import Topology
from hone.errors import PlacementError
from hone.services.gpus import VARIABLE, Split, split_devices, topology_here, visible_devices
from hone.services.supervisor import Services


def claim_devices(config: RunConfig) -> Split:
    """Divide the GPUs, and let this process see its own alone. Comes before anything asks torch for them."""
    if not config.services and config.run.devices is None:
        return Split(None)
    split = split_devices(config, visible_devices())
    if split.training is not None:
        os.environ[VARIABLE] = split.training
    return split


def placed(config: RunConfig) -> Topology:
    """Who works on which devices of this machine and its like. Comes before `claim_devices` hides some of them.

    Raises:
        PlacementError: what the run file asks for is impossible here.
    """
    if config.cluster.backend == "ray" and find_spec("ray") is None:
        raise PlacementError("cluster.backend = ray: Ray is not installed. Get it with hone-rl's extra `ray`.")
    looks = config.cluster.backend == "ray" and config.run.device != "cpu"
    return topology_here(config, visible_devices() if looks else ())


def unused_notes(config: RunConfig) -> list[str]:
    """Notes about services that no reward uses."""
    return [f"services.{name}: no reward names it in its args (service: {name})" for name in unused_services(config)]


def services_apart(loaded: Loaded, split: Split, folder: Path) -> Services:
    """The run file's services for a verb other than `train`: what they say goes to stderr."""

    def say(message: str) -> None:
        print(message, file=sys.stderr)

    def relay(name: str, line: str) -> None:
        say(f"[{name}] {line}")

    stop = asyncio.Event()
    return Services.from_config(loaded, split, folder=folder, logs=folder, say=say, relay=relay, stop=stop)
