"""Where each weight of a model is when its parameters are divided: a weight may be some rows of a fused parameter.

A model is made on device `meta`, divided over the ranks, and only then given memory, for each rank's share, and filled
from its `contents`, weight after weight (`fill`). Where the contents can only be had by making the whole model, as of
Transformers' classes, rank 0 makes it and sends each weight to all.

Not here: dividing them (`fsdp.py`), or what the parts are written to and read from (`tensor_files.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hone.errors import HoneError
from hone.model.base import CausalModel
from hone.model.fingerprint import Fingerprint
from hone.model.heads import ScalarModel
from hone.model.hf import TransformersModel
from hone.model.low_rank import local_part
from hone.model.weights import Contents, checked
from hone.train.mesh import TENSOR, Mesh
from hone.train.tensor_files import Share


@dataclass(frozen=True)
class WeightPart:
    """Where a matrix or vector is: which part of which parameter."""

    parameter: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: Tensor) -> Tensor:
        """It, as a view of the whole parameter."""
        return whole.as_strided(self.size, self.stride, self.offset)


class WeightMap:
    """Where everything of a model is; to be asked while each rank still has whole parameters, or parts of layers."""

    def __init__(self, model: CausalModel | ScalarModel) -> None:
        self._owners = {_storage(p): (name, local_part(p)) for name, p in model.named_parameters()}
        own = dict(model.named_weights() if isinstance(model, ScalarModel) else model.own_weights())
        self.weights = {name: self.of(weight) for name, weight in own.items() if _storage(weight) in self._owners}
        """Of each base weight, by its Hugging Face name."""
        self.buffers = {name: weight for name, weight in own.items() if _storage(weight) not in self._owners}
        """What Transformers' classes call weights and no rank divides, such as the bias of a router."""

    def of(self, view: Tensor) -> WeightPart:
        """The place of a view of a parameter."""
        name, parameter = self._owners[_storage(view)]
        offset = int(local_part(view).storage_offset() - parameter.storage_offset())
        return WeightPart(name, view.shape, view.stride(), offset)


@torch.no_grad()
def share_of(place: WeightPart, parameter: DTensor, mesh: Mesh, local: Tensor) -> Share:
    """What this rank has of a matrix or vector.

    Args:
        place: all of a parameter, or some of its rows.
        parameter: whose division is taken.
        local: this rank's part of it, or of something divided as it is.
    """
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    is_first = is_first_of_copies(parameter, mesh)
    if place.size == parameter.shape:
        return Share(local.detach(), offset, is_written=is_first and local.numel() > 0)
    first = place.offset // math.prod(parameter.shape[1:])
    if place.size[1:] != parameter.shape[1:]:  # some rows of one of its matrices, such as half an expert
        is_here = offset[0] <= first < offset[0] + shape[0]
        local = local[first - offset[0]] if is_here else local.new_empty(0, *parameter.shape[2:])
        first = place.offset % math.prod(parameter.shape[1:]) // math.prod(parameter.shape[2:])
        are_rows = place.size[1:] == parameter.shape[2:] and first + place.size[0] <= parameter.shape[1]
        assert are_rows, f"{place.parameter} is divided into something else than rows"
        shape, offset = shape[1:], offset[1:]
    begin, end = max(offset[0], first), min(offset[0] + shape[0], first + place.size[0])
    rows = local.detach()[begin - offset[0] : max(begin, end) - offset[0]]
    return Share(rows, (begin - first, *offset[1:]), is_written=is_first and rows.numel() > 0)


def shares_of(
    model: CausalModel | ScalarModel, places: Mapping[str, WeightPart], mesh: Mesh
) -> Iterator[tuple[str, Share]]:
    """What this rank has of a sharded model's weights."""
    parameters = dict(sharded_parameters(model))
    for name, place in places.items():
        parameter = parameters[place.parameter]
        yield name, share_of(place, parameter, mesh, parameter.to_local())


def sharded_parameters(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """Names and shares of a sharded model that has put away what it gathered."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is gathered"
        yield name, parameter


def is_first_of_copies(parameter: DTensor, mesh: Mesh) -> bool:
    """Whether no rank before this one has the same part of a parameter."""
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    copies = [at for placement, at in zip(parameter.placements, coordinate, strict=True) if placement.is_replicate()]
    if mesh.tensor is not None and TENSOR not in (parameter.device_mesh.mesh_dim_names or ()):
        copies.append(mesh.tensor.get_local_rank())  # whole in each of the ranks that divide layers
    return not any(copies)


def _storage(tensor: Tensor) -> int:
    """The same for all views of the same memory."""
    return local_part(tensor).untyped_storage()._cdata


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

    def given(tensor: Tensor) -> Tensor:
        device = "cpu" if on_host and isinstance(tensor, DTensor) else mesh.device
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    model._apply(given)
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
            shares[name].take({name: weight}, name)
        base.see(name, weight)
    base.finish()
    model.contents = body.contents = None


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
        whole = Fingerprint()
        for part in sums:
            whole.merge(part)
        self._adapter.base = whole.hexdigest()
