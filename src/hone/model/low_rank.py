"""A linear layer of Hone's decoder with a low-rank adapter beside it: several in one, whole or divided over ranks.

Not here: which layers of a model have one, and what it is on disk (`lora.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from hone.config.run import LoraSection
from hone.model.collectives import summed, with_summed_gradient
from hone.model.decoder import parts_of
from hone.model.recompute import made_again

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class FusedLinear(nn.Module):
    """A linear layer that may be several side by side, some or all of which have an adapter.

    Args:
        base_layer: its output is the parts' outputs, one after another.
        sizes: outputs of each part.
        adapted: whether each part has an adapter; at least one has.
    """

    def __init__(self, base_layer: nn.Linear, sizes: Sequence[int], adapted: Sequence[bool], settings: LoraSection):
        super().__init__()
        self.base_layer = base_layer
        self.settings, self.sizes, self.adapted = settings, tuple(sizes), tuple(adapted)
        self.scale = settings.alpha / settings.rank
        self.is_on = True
        self.tensor_group: ProcessGroup | None = None
        """The ranks that have the other outputs or inputs, where `parallel.py` has divided the layer."""
        ends = list(accumulate(sizes))
        self.spans = [(end - size, end) for end, size, wanted in zip(ends, sizes, adapted, strict=True) if wanted]
        weight = base_layer.weight
        self.a = nn.Parameter(weight.new_empty(len(self.spans) * settings.rank, weight.shape[1]))
        self.b = nn.ParameterList(weight.new_empty(end - start, settings.rank) for start, end in self.spans)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def factors(self, part: int) -> tuple[Tensor, Tensor]:
        """A and B of one of the parts that have an adapter."""
        a, b = self.a.detach(), self.b[part].detach()
        return a if len(self.b) == 1 else a.split(b.shape[1])[part], b

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_on:
            return self.base_layer(x)
        if self.tensor_group is not None:
            return self._divided(x, self.tensor_group)
        return _FusedLowRank.apply(x, self.weight, self.bias, self.scale, self.spans, self.a, *self.b)

    def _divided(self, x: Tensor, group: ProcessGroup) -> Tensor:
        """This rank's outputs, or all of them as the sum over ranks that each have some inputs.

        The factor that is whole on every rank is used by each for its part of the work, so its gradient is a sum.
        """
        weight, a, *b = map(local_part, (self.weight, self.a, *self.b))
        bias = None if self.bias is None else local_part(self.bias)
        if isinstance(x, DTensor):  # whole: `parallel.py` has the gradients of all parts added up before over the ranks
            x = x.to_local(grad_placements=[Partial()])
            return _FusedLowRank.apply(x, weight, bias, self.scale, self.spans, with_summed_gradient(a, group), *b)
        b = [with_summed_gradient(factor, group) for factor in b]
        total = summed(_FusedLowRank.apply(x, weight, None, self.scale, self.spans, a, *b), group)
        return total if bias is None else total + bias

    def split(self) -> list[nn.Module]:
        """Layers that are its parts, each with its own adapter if it has one."""
        parts: list[nn.Module] = []
        factors = iter([self.factors(number) for number in range(len(self.b))])
        for plain, size, adapted in zip(parts_of(self.base_layer, self.sizes), self.sizes, self.adapted, strict=True):
            if not adapted:
                parts.append(plain)
                continue
            part = FusedLinear(plain, [size], [True], self.settings)
            a, b = next(factors)
            part.a, part.b = nn.Parameter(a.clone()), nn.ParameterList([b.clone()])
            parts.append(part)
        return parts

    def divide(self, mesh: DeviceMesh, *, by: Literal["outputs", "inputs"]) -> None:
        """Divide the adapter over ranks that have divided its base layer; only one part is divided by outputs."""

        def divided(factor: Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(distribute_tensor(factor.detach(), mesh, [Shard(dim)], src_data_rank=None))

        if by == "outputs":
            self.b = nn.ParameterList(divided(factor, 0) for factor in self.b)
            self.spans = [(0, self.sizes[0] // mesh.size())]
        else:
            self.a = divided(self.a, 1)
        self.tensor_group = mesh.get_group()


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a divided tensor; of another, all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _FusedLowRank(torch.autograd.Function):
    """x W^T + bias + for each part scale * (x A^T) B^T into its span of the outputs.

    Its own backward, because the weight has no gradient, and so that the parts' outputs are added in place: autograd
    would make and keep a tensor of the whole output for each of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        spans: list[tuple[int, int]],
        a: Tensor,
        *b: Tensor,
    ) -> Tensor:
        with made_again():
            low = F.linear(x, a).mul_(scale)
            out = F.linear(x, weight, bias)
            for (start, end), part, up in zip(spans, low.chunk(len(b), -1), b, strict=True):
                out[:, start:end].addmm_(part, up.T)
        ctx.save_for_backward(x, weight, low, a, *b)
        ctx.scale, ctx.spans = scale, spans
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, low, a, *b = ctx.saved_tensors
        grad = grads[0]
        parts = [grad[:, start:end] for start, end in ctx.spans]
        grad_b = [part.T @ inner for part, inner in zip(parts, low.chunk(len(b), -1), strict=True)]
        grad_low = torch.cat([part @ up for part, up in zip(parts, b, strict=True)], -1).mul_(ctx.scale)
        grad_x = torch.addmm(grad @ weight, grad_low, a) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None, None, grad_low.T @ x, *grad_b
