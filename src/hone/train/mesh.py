"""Device mesh of the training ranks, and which of them work on the same samples.

Ranks are counted with what talks most innermost: replicas of the shards, shards, tensor. Ranks that follow each other
in the first two divide sequences between them. Not here: what is sharded over a mesh (`fsdp.py`,
`model/parallel.py`), or where in a cluster the processes run (`config.topology`, `cluster/`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout
from torch.distributed.fsdp import FSDPModule

from hone.devices import kind_of
from hone.model.sequence import HEADS, RING
from hone.train.agreement import DIVIDED, Collectives

REPLICATE, SHARD, TENSOR, DATA, SEQUENCE = "replicate", "shard", "tensor", "data", "sequence"
"""Names of the dimensions of a mesh."""


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the processes that train one model, and the groups in which they talk."""

    device: torch.device
    """Of this rank."""
    sharding: DeviceMesh
    """(shard,), or (replicate, shard) where there are several copies of the shards: what FSDP2 works on."""
    tensor: DeviceMesh | None
    """(tensor,): the ranks that divide each layer; None where none does."""
    samples: DeviceMesh
    """(data, sequence) of the ranks with this one's place in `tensor`: samples are divided over data, tokens over
    sequence."""
    _rings: dict[int, DeviceMesh] = field(default_factory=dict)
    collectives: Collectives = field(default_factory=Collectives)
    """Those of this rank's passes."""

    @property
    def data_parallel(self) -> int:
        """How many shares the samples of a batch are divided into."""
        return self.samples[DATA].size()

    @property
    def sequence(self) -> DeviceMesh | None:
        """(sequence,): the ranks that divide each sequence of this rank's share; None where none does."""
        return self.samples[SEQUENCE] if self.samples[SEQUENCE].size() > 1 else None

    def rings(self, heads: int) -> DeviceMesh:
        """(ring, heads): the ranks of `sequence`, `heads` that follow each other in each place of the ring; see
        `model.sequence`. Every rank of the process group calls it alike."""
        if heads not in self._rings:
            sequence = self.samples[SEQUENCE].size()
            shape = self.data_parallel, sequence // heads, heads, self.tensor.size() if self.tensor else 1
            mesh = _divided(self.device, shape, (DATA, RING, HEADS, TENSOR))
            self._rings[heads] = mesh[RING, HEADS]
        return self._rings[heads]


def make_mesh(
    device: torch.device, *, shard: int | None = None, tensor_parallel: int = 1, sequence_parallel: int = 1
) -> Mesh:
    """Divides the ranks of the process group, which is there; every rank calls it alike.

    Args:
        device: of this rank.
        shard: ranks that weights, gradients and moments are divided over, besides `tensor_parallel`; None: all.
        tensor_parallel, sequence_parallel: ranks that divide each layer, and each sequence.
    Raises:
        ValueError: sizes that do not divide the ranks.
    """
    world_size = dist.get_world_size()
    sharded = world_size // tensor_parallel
    shard = sharded if shard is None else shard
    if world_size % tensor_parallel or sharded % shard or sharded % sequence_parallel:
        raise ValueError(
            f"{world_size} ranks cannot be divided into tensor_parallel = {tensor_parallel}, shard = {shard} and "
            f"sequence_parallel = {sequence_parallel}: shard and sequence_parallel must each divide world size / "
            "tensor_parallel."
        )
    sizes = {REPLICATE: sharded // shard, SHARD: shard, TENSOR: tensor_parallel}
    named = {name: size for name, size in sizes.items() if size > 1 or name == SHARD}
    states = _divided(device, tuple(named.values()), tuple(named))
    shape = (sharded // sequence_parallel, sequence_parallel, tensor_parallel)
    samples = _divided(device, shape, (DATA, SEQUENCE, TENSOR))
    collectives = Collectives()
    if tensor_parallel > 1 or sequence_parallel > 1:
        collectives.never = DIVIDED
    elif not hasattr(FSDPModule, "reset_iter_state"):
        collectives.never = f"PyTorch {torch.__version__} cannot give up a pass that has begun; 2.13 can"
    return Mesh(
        device=device,
        sharding=states[REPLICATE, SHARD] if REPLICATE in named else states[SHARD],
        tensor=states[TENSOR] if TENSOR in named else None,
        samples=samples[DATA, SEQUENCE],
        collectives=collectives,
    )


def _divided(device: torch.device, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """`init_device_mesh`, whose groups wait as long as the process group does; on NCCL it would be ten minutes."""
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    if device.type in ("cpu", "cuda"):  # gloo and NCCL, of which torch can set it
        for group in mesh.get_all_groups():
            _set_pg_timeout(_get_default_group()._get_backend(device).options._timeout, group)
    return mesh


@contextmanager
def process_group(
    device: torch.device, *, rank: int, world_size: int, address: str, timeout_s: float
) -> Iterator[None]:
    """Inside, this process is one of those that train together; gloo joins CPUs, NCCL joins GPUs, HCCL joins NPUs.

    Args:
        address: where they meet: `tcp://host:port` of a `TCPStore` that is open, or `file:///path` of a file that does
            not exist yet.
        timeout_s: longest wait for the others, at the start and in every collective.
    Raises:
        torch.distributed.DistError: not all came in time.
    """
    kind, timeout = kind_of(device), timedelta(seconds=timeout_s)
    if kind is not None:
        torch.accelerator.set_device_index(device.index or 0)
    if address.startswith("file:"):
        meeting: dict[str, Any] = {"init_method": address}
    else:
        # As an init_method, rank 0 would open the port, which must have been free until then.
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        meeting = {"store": TCPStore(host, int(port), is_master=False, timeout=timeout)}
    dist.init_process_group(
        "gloo" if kind is None else kind.backend,
        **meeting,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=None if kind is None else device,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
