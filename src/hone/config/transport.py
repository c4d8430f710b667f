"""Choice of the weight transport: what `cluster.transport = auto` stands for."""

from __future__ import annotations

from typing import Literal

from hone.config.run import RunConfig
from hone.config.topology import Topology

Transport = Literal["ray", "group", "ipc"]


def transport_of(config: RunConfig, topology: Topology, *, on_gpu: bool) -> Transport:
    """What the run uses: the fastest way where trainer and engines are, unless the run file says another.

    On CPUs a broadcast is slower than the object store, which engines of one machine read in place: docs/publishing.md.
    """
    asked = config.cluster.transport
    if asked != "auto":
        return asked
    if not on_gpu:
        return "ray"
    return "ipc" if topology.colocated else "group"


def in_words(transport: Transport, *, on_gpu: bool) -> str:
    """A transport, for people."""
    broadcast = "a broadcast (NCCL)" if on_gpu else "a broadcast (gloo)"
    return {"ray": "Ray's object store", "group": broadcast, "ipc": "the memory of their GPU (CUDA IPC)"}[transport]


def likely_transport(config: RunConfig, topology: Topology) -> str | None:
    """For people, before anybody looked whether there are GPUs; None where there are no engines."""
    if not topology.engines:
        return None
    kinds = {"cpu": [False], "cuda": [True], "auto": [True, False]}[config.run.device]
    ways = [in_words(transport_of(config, topology, on_gpu=on_gpu), on_gpu=on_gpu) for on_gpu in kinds]
    return ways[0] if len(set(ways)) == 1 else f"{ways[0]}; without GPUs {ways[1]}"
