"""Names and shapes that a model's repository has for the weights of a Transformers class.

Transformers fuses some weights when it loads a directory: the experts of a layer become one parameter, which computes
faster. Repositories, vLLM and other readers have them one by one. The library can convert them back, by copies
(`revert_weight_conversion`, which `save_pretrained` uses). Here it converts weights on device `meta`, once, which
shows where in the parameters each weight of the repository is; from then on they are views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class NamedPart:
    """A weight of the repository: some consecutive numbers of a parameter, or all of them."""

    name: str
    size: torch.Size
    first: int
    """Its first number, counted from the parameter's first."""

    def of(self, parameter: Tensor) -> Tensor:
        """It, as a view of the parameter."""
        if self.size == parameter.shape:
            return parameter
        return parameter.reshape(-1)[self.first : self.first + self.size.numel()].view(self.size)


def repository_parts(hf: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, list[NamedPart]]:
    """What each weight of a module is in the repository, in the order of its numbers.

    A weight of which the repository has no consecutive numbers (transposed, interleaved, or part of a larger one there)
    keeps the module's name.

    Args:
        state: the module's weights under its own names, on any device; they are not read.
    """
    from transformers.core_model_loading import revert_weight_conversion  # brings modelling code and SciPy: 0.7 s

    stand_ins = {name: torch.empty(weight.shape, dtype=weight.dtype, device="meta") for name, weight in state.items()}
    owners = {_storage(tensor): name for name, tensor in stand_ins.items()}
    found: dict[str, list[NamedPart]] = {name: [] for name in state}
    with _WithoutCopies():
        named: Mapping[str, Any] = revert_weight_conversion(hf, dict(stand_ins))
    for name, tensor in named.items():
        owner = owners.get(_storage(tensor))
        if owner is not None and tensor.is_contiguous():
            found[owner].append(NamedPart(name, tensor.shape, int(tensor.storage_offset())))
    for name, parts in found.items():
        parts.sort(key=lambda part: part.first)
        if sum(part.size.numel() for part in parts) != state[name].numel():
            found[name] = [NamedPart(name, state[name].shape, 0)]
    return found


class _WithoutCopies(TorchFunctionMode):
    """Inside, `contiguous` leaves a view as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
