"""Schema of the `cluster` section: placement of roles on devices, and parallelism of the models.

The rest of a run file is the same on a laptop and on a cluster.
"""

from __future__ import annotations

from typing import Literal

from hone.config.engine import EngineSection
from hone.config.section import Section, key

Role = Literal["policy", "rollout", "reference", "critic", "reward_model", "judge"]


class PoolSection(Section):
    devices: int = key(..., unit="devices", ge=1)
    """GPUs of the pool; without GPUs, processes that share the cores."""
    roles: tuple[Role, ...] = key(..., min_length=1)
    """Roles placed on the pool; several take turns."""


class ShardingSection(Section):
    shard: int | None = key(None, unit="devices", ge=1)
    """Devices to shard weights, gradients and moments over (FSDP2), besides `tensor_parallel`; null: all; fewer: hybrid
    sharding, with replicas of the shards."""
    tensor_parallel: int = key(1, unit="devices", ge=1)
    """Tensor parallel size: devices per layer."""
    sequence_parallel: int = key(1, unit="devices", ge=1)
    """Sequence parallel size: devices per sequence (Ulysses; beyond the key-value heads ring attention with it)."""
    offload: tuple[Literal["parameters", "optimizer", "reference"], ...] = key(())
    """What to keep in host memory while it is not used."""
    compile: bool = key(False)
    """Compile each layer of a model that runs in Transformers' class; Hone's own decoder has `run.fused_kernels`."""


class ClusterSection(Section):
    backend: Literal["auto", "local", "ray"] = key("auto")
    """local: one process on one device. ray: a process per trainer rank and engine. auto: ray on machines with GPUs
    where vLLM is installed or there are several, on all of them; else local. Other keys of the section need one of the
    two."""
    address: str | None = key(None)
    """Ray cluster to join, `host:port`, or `auto` for this machine's; null: start one on this machine."""
    nodes: int = key(1, unit="machines", ge=1)
    """Machines of the cluster."""
    devices_per_node: int | None = key(None, unit="devices", ge=1)
    """GPUs per machine; null: all; without GPUs, the number of cores."""
    pools: dict[str, PoolSection] = key({})
    """Named groups of devices with their roles; none: one pool of all devices, where trainer and engines take turns."""
    env: dict[str, str] = key({})
    """Environment variables of ranks, engines, judges and reward models; in one process, of the run itself."""
    trainer: ShardingSection = key(ShardingSection())
    engines: EngineSection = key(EngineSection())
    """The policy's engines, where `rollout` is; a judge's are in its service's `engine`."""
    start_timeout_s: float = key(900.0, unit="seconds", gt=0)
    """Maximum time until devices are free and all processes are ready."""
    call_timeout_s: float = key(1800.0, unit="seconds", gt=0)
    """A rank or engine that does not respond to a call for this long counts as failed."""
    heartbeat_timeout_s: float = key(60.0, unit="seconds", gt=0)
    """A process without a heartbeat for this long (stopped or deadlocked) is killed and restarted; heartbeats continue
    during computation."""
    restarts: int = key(3, unit="restarts per hour", ge=0)
    """Maximum restarts per hour of each engine, reward model and trainer; after that the run fails."""
    transport: Literal["auto", "ray", "group", "ipc"] = key("auto")
    """How weights are published to the engines: Ray's object store, broadcast (NCCL on GPUs, gloo on CPUs), or CUDA IPC
    on a shared GPU; auto: the fastest for the placement."""
    bucket_mib: float = key(256.0, unit="MiB", gt=0)
    """Size of the buckets in which weights are published."""
    canary_every: int = key(10, unit="policy updates", ge=0)
    """Publishes between comparisons of trainer's and engines' logprobs; 0: never."""
