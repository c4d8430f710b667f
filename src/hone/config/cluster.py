"""The `cluster` section: on which devices a run trains, samples and scores, and how its models are divided over them.

The rest of a run file says what is computed, and is the same on a laptop and on a cluster.
"""

from __future__ import annotations

from typing import Any, Literal

from hone.config.section import Section, key

Role = Literal["policy", "rollout", "reference", "critic", "reward_model", "judge"]


class PoolSection(Section):
    devices: int = key(..., unit="devices", ge=1)
    """GPUs of the pool; on a machine without, processes that share its cores."""
    roles: tuple[Role, ...] = key(..., min_length=1)
    """Who works on them; several take turns."""


class ShardingSection(Section):
    shard: int | None = key(None, unit="devices", ge=1)
    """Devices that weights, gradients and moments are sharded over (FSDP2), besides `tensor_parallel`; null: all;
    fewer: copies of the shards."""
    tensor_parallel: int = key(1, unit="devices", ge=1)
    """Devices that each layer is divided over."""
    sequence_parallel: int = key(1, unit="devices", ge=1)
    """Devices that each long sequence is divided over (Ulysses)."""
    offload: tuple[Literal["parameters", "optimizer", "reference"], ...] = key(())
    """What waits on the host while it is not used."""
    compile: bool = key(False)
    """Compile each layer."""


class EnginesSection(Section):
    use: Literal["embedded", "vllm"] = key("embedded")
    """Hone's own engine, or vLLM (an extra)."""
    tensor_parallel: int = key(1, unit="devices", ge=1)
    """Devices that one replica's weights are divided over; replicas = devices of the pool // tensor_parallel."""
    memory_frac: float = key(0.5, unit="fraction of a device's memory", gt=0, le=1)
    """What vLLM takes for weights, cache and workspace, of the whole memory of each of its devices."""
    args: dict[str, Any] = key({})
    """vLLM's other knobs: see docs/vllm.md."""


class ClusterSection(Section):
    backend: Literal["local", "ray"] = key("local")
    """local: one process on one device. ray: processes of their own for trainer ranks and engines."""
    address: str | None = key(None)
    """Ray cluster to join, `host:port`, or `auto` for the one that this machine belongs to; null: start one here."""
    nodes: int = key(1, unit="machines", ge=1)
    """Machines of the cluster."""
    devices_per_node: int | None = key(None, unit="devices", ge=1)
    """GPUs of each machine; null: as many as are found, on a machine without GPUs as many as it has cores."""
    pools: dict[str, PoolSection] = key({})
    """Devices by name and who works there; none: one pool of all devices, where trainer and engines take turns."""
    trainer: ShardingSection = key(ShardingSection())
    engines: EnginesSection = key(EnginesSection())
    """The policy's engines, where `rollout` is; a judge's are in its service's `engine`."""
    start_timeout_s: float = key(300.0, unit="seconds", gt=0)
    """Longest wait for devices and for all processes to be ready."""
    call_timeout_s: float = key(1800.0, unit="seconds", gt=0)
    """A rank or an engine without an answer for so long is stuck, and named."""
    heartbeat_timeout_s: float = key(60.0, unit="seconds", gt=0)
    """A process that answers no heartbeat for so long, because it is stopped or deadlocked, is killed and started
    again, long before `call_timeout_s`; heartbeats are answered during any computation."""
    restarts: int = key(3, unit="restarts per hour", ge=0)
    """Engines, reward models and trainers that die are started again so often; then the run ends."""
    transport: Literal["auto", "ray", "group", "ipc"] = key("auto")
    """How new weights reach the engines: Ray's object store; a broadcast (NCCL on GPUs, gloo on CPUs); the memory of a
    GPU that both are on; auto: the fastest where they are."""
    bucket_mib: float = key(256.0, unit="MiB", gt=0)
    """Weights are published in pieces of this size."""
    canary_every: int = key(10, unit="policy updates", ge=0)
    """Compare trainer's and engines' logprobs after every so many publishes; 0: never."""
