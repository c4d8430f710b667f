"""Where each weight of a model is when its parameters are divided: a weight may be some rows of a fused parameter.

Not here: dividing them (`fsdp.py`), or what the parts are written to and read from (`tensor_files.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hone.model.base import CausalModel
from hone.model.heads import ScalarModel
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
        self._owners = {_storage(p): (name, _local(p)) for name, p in model.named_parameters()}
        own = dict(model.named_weights() if isinstance(model, ScalarModel) else model.own_weights())
        self.weights = {name: self.of(weight) for name, weight in own.items() if _storage(weight) in self._owners}
        """Of each base weight, by its Hugging Face name."""
        self.buffers = {name: weight for name, weight in own.items() if _storage(weight) not in self._owners}
        """What Transformers' classes call weights and no rank divides, such as the bias of a router."""

    def of(self, view: Tensor) -> WeightPart:
        """The place of a view of a parameter."""
        name, parameter = self._owners[_storage(view)]
        offset = int(_local(view).storage_offset() - parameter.storage_offset())
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
        assert place.size[1:] == parameter.shape[2:], f"{place.parameter} is divided into something else than rows"
        is_here = offset[0] <= first < offset[0] + shape[0]
        row = place.offset % math.prod(parameter.shape[1:]) // math.prod(parameter.shape[2:])
        matrix = local.detach()[first - offset[0]] if is_here else local.new_empty(0, *parameter.shape[2:])
        rows = matrix[row : row + place.size[0]]
        return Share(rows, (0,) * rows.dim(), is_written=is_first and rows.numel() > 0)
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


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storage(tensor: Tensor) -> int:
    """The same for all views of the same memory."""
    return _local(tensor).untyped_storage()._cdata
