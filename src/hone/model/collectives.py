"""Differentiable collectives between ranks that compute one model together.

All ranks of a group call these alike and in the same order, also for tensors without a row. A loss is computed whole on
every rank of a group, from the same numbers: what arrives on the way back is equal on all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def with_summed_gradient(x: Tensor, group: ProcessGroup) -> Tensor:
    """x, the same on all ranks, for each to use for its part of the work: the gradient is the sum of the ranks'."""
    return _SummedGradient.apply(x, group)


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the ranks' x, on each of them; the gradient of a rank's x is that of the sum."""
    return _Summed.apply(x, group)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def gathered(x: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """(size, ...) the ranks' parts one after another, on every rank; the gradient of a rank's part is its own.

    Args:
        x: this rank's part of `size` rows, as `share` cuts them.
    """
    return _Gathered.apply(x, size, group)


def share(size: int, group: ProcessGroup) -> slice:
    """This rank's part of `size` rows: equal parts, the last ones shorter or empty."""
    part = -(-size // dist.get_world_size(group))
    start = min(part * dist.get_rank(group), size)
    return slice(start, min(start + part, size))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: ProcessGroup) -> Tensor:
        ctx.rows = share(size, group)
        ranks = dist.get_world_size(group)
        padded = x.new_zeros(-(-size // ranks), *x.shape[1:])
        padded[: len(x)] = x
        out = x.new_empty(len(padded) * ranks, *x.shape[1:])
        dist.all_gather(list(out.chunk(ranks)), padded, group=group)
        return out[:size]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0][ctx.rows], None, None


class Exchanged(torch.autograd.Function):
    """(sum of `receive`, ...) rows that the ranks send to this one, in their order.

    Args:
        x: (sum of `send`, ...) rows for rank 0, then for rank 1, ...
        send, receive: how many rows go to each rank, and come from it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchange(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange(x: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out
