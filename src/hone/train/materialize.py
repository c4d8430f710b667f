"""Materialisation of meta-device models from a checkpoint, shard by shard.

A model is made on device `meta`, divided over the ranks, and only then given memory, for each rank's share, and filled
from its `contents`, weight after weight. Where the contents can only be had by making the whole model, as of
Transformers' classes, rank 0 makes it and sends each weight to all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hone.errors import HoneError
from hone.model.base import CausalModel
from hone.model.fingerprint import Fingerprint
from hone.model.heads import ScalarModel
from hone.model.hf import TransformersModel
from hone.model.weights import Contents, checked
from hone.train.mesh import Mesh
from hone.train.tensor_files import box_of
from hone.train.weight_map import WeightPart, shares_of


@torch.no_grad()
def fill(model: CausalModel | ScalarModel, places: Mapping[str, WeightPart], mesh: Mesh, *, on_host: bool) -> None:
    """Give a sharded model memory and what is to be in it; nothing, where it has both. Every rank calls it.

    Args:
        places: of everything that is divided, by the names of `model.contents`.
        on_host: shares wait in host memory.
    Raises:
        DataError: what is read does not fit the model; see `model.weights.checked`.
    """
    if model.contents is None:
        return
    body = model.body if isinstance(model, ScalarModel) else model
    _give_memory(model, torch.device("cpu") if on_host else mesh.device, mesh.device)
    shares = dict(shares_of(model, places, mesh))
    buffers = body.buffers_by_name() if isinstance(body, TransformersModel) else {}
    shapes = {name: place.size for name, place in places.items()}
    shapes |= {name: buffer.shape for name, buffer in buffers.items()}
    contents = model.contents
    weights = _from_first(contents, mesh.device) if contents.is_made_whole else contents.read()
    base = _BaseFingerprint(body)
    for name, weight in checked(shapes, weights, ignored=body.aliases):
        if name in buffers:
            buffers[name].copy_(weight)
        else:
            share = shares[name]
            share.tensor.copy_(box_of({name: weight}, name, share.offset, share.tensor.shape))
        base.see(name, weight)
    base.finish()
    model.contents = body.contents = None


def _give_memory(model: nn.Module, of_shares: torch.device, of_buffers: torch.device) -> None:
    def given(tensor: Tensor) -> Tensor:
        device = of_shares if isinstance(tensor, DTensor) else of_buffers
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    model._apply(given)


def _from_first(contents: Contents, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """What rank 0 reads, on all ranks, one weight at a time; raises on all what it raises on that one."""
    whole: dict[str, Tensor] = {}
    header: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            whole = dict(contents.read())
            header = [[(name, weight.shape, weight.dtype) for name, weight in whole.items()]]
        except HoneError as error:  # the others wait
            header = [error]
    dist.broadcast_object_list(header, src=0, device=device)
    if isinstance(header[0], HoneError):
        raise header[0]
    for name, shape, dtype in header[0]:
        sent = whole.pop(name).to(device).contiguous() if whole else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(sent, src=0)
        yield name, sent


class _BaseFingerprint:
    """The fingerprint of a new adapter's base weights, which the ranks make together, each of some weights."""

    def __init__(self, model: CausalModel) -> None:
        self._adapter = model.adapter
        self._fingerprint = Fingerprint()
        self._names: set[str] = set()
        if self._adapter is not None:
            self._names = {name for name, _ in model.own_weights()}
            self._dtype = next(factor for _, factor in self._adapter.weights()).dtype
        self._seen = 0

    def see(self, name: str, weight: Tensor) -> None:
        """A weight has come."""
        if name not in self._names:
            return
        if self._seen % dist.get_world_size() == dist.get_rank():
            weight = weight.to(self._dtype) if weight.is_floating_point() else weight
            self._fingerprint.add(name, weight.shape, weight.dtype, weight.contiguous().view(-1).view(torch.uint8))
        self._seen += 1

    def finish(self) -> None:
        """All have come."""
        if self._adapter is None:
            return
        sums: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sums, self._fingerprint)
        self._adapter.base = _of_all(sums).hexdigest()


def _of_all(parts: Iterable[Fingerprint]) -> Fingerprint:
    whole = Fingerprint()
    for part in parts:
        whole.merge(part)
    return whole
