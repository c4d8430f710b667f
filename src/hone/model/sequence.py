"""Sequence parallelism (Ulysses, arXiv:2309.14509): the tokens of a microbatch are divided over ranks.

Each rank computes an equal part of the layout's flat list of tokens, whatever sequences they belong to: what stands
between two attentions knows no neighbours. Around attention the ranks exchange: each is sent all tokens for its share
of the heads, attends to the whole layout with those, and sends the results back. Behind the last layer, hidden states
are dealt out anew, so that every rank has an equal part of the response tokens to make logits for, wherever they stand.

Where ranks are more than key-value heads, the heads are exchanged among some ranks that follow each other, as many as
divide them, and the chunks of tokens that these have go round in a ring (ring.py).

Activations per rank fall with the number of ranks; the layout's masks do not. Weights are whole on every rank, and
each rank's gradients are of its tokens alone: they must be summed, as FSDP2 does over all ranks that it works on. Not
here: who the ranks are (`train/mesh.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hone.experts import UNRECORDED
from hone.model.attention import shared_prompt_attention
from hone.model.collectives import Exchanged, gathered, share
from hone.model.layout import Layout, filled
from hone.model.ring import ring_attention, ring_order
from hone.ragged import Ints

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

RING, HEADS = "ring", "heads"
"""Dimensions of `SequenceGroup.rings`."""


@dataclass(frozen=True)
class SequencePart:
    """What one rank computes of a layout."""

    token_ids_X: Tensor
    position_X: Tensor
    attend: Callable[..., Tensor]
    """From q, k and v of these tokens to what they attend to, as `attention.Attention`."""
    needed_W: Tensor
    """Like `Layout.needed_W`, of these tokens."""
    dealt: Callable[[Tensor], Tensor]
    """From the hidden states of `needed_W` to those that predict this rank's share of `Layout.target_U`."""
    routing_X: Tensor | None
    """Like `Layout.routing_X`, of these tokens."""


class SequenceGroup:
    """The ranks that divide every microbatch's tokens with this one.

    Args:
        group: None: no other rank does.
        rings: (ring, heads) of the same ranks, where they are more than the heads: those of `heads` exchange tokens for
            heads among them, and the chunks that they have then go round in `ring`. None: all exchange.
    """

    def __init__(self, group: ProcessGroup | None = None, rings: DeviceMesh | None = None) -> None:
        self.group, self.rings = group, rings

    def part_of(self, layout: Layout) -> SequencePart:
        """What this rank computes; all ranks have the same layout."""
        if self.group is None:
            return SequencePart(
                layout.token_ids_X,
                layout.position_X,
                shared_prompt_attention(layout),
                layout.needed_W,
                lambda hidden_W: hidden_W.index_select(0, layout.needed_U),
                layout.routing_X,
            )
        ranks = dist.get_world_size(self.group)
        layout = _with_filler(layout, ranks if self.rings is None else 2 * ranks)
        size = len(layout.token_ids_X)
        # Places in the layout of the first rank's tokens, then of the second's, ...
        order_X = np.arange(size) if self.rings is None else ring_order(size, self.rings[RING].size())
        own_x, place_X, each = (
            order_X.reshape(ranks, -1)[dist.get_rank(self.group)],
            np.argsort(order_X),
            size // ranks,
        )
        place_U, device = place_X[layout.predict_on_host()], layout.token_ids_X.device
        needed_W, dealt = _dealing(place_U // each, place_U % each, device, self.group)
        own = torch.from_numpy(own_x).to(device, non_blocking=True)
        if self.rings is None:
            attend = _exchanging(shared_prompt_attention(layout), self.group)
        else:
            attend, heads = ring_attention(layout, self.rings[RING].get_group()), self.rings[HEADS]
            if heads.size() > 1:
                attend = _exchanging(attend, heads.get_group())
        return SequencePart(
            layout.token_ids_X[own],
            layout.position_X[own],
            attend,
            needed_W,
            dealt,
            None if layout.routing_X is None else layout.routing_X[own],
        )

    def share(self, value_U: Tensor) -> Tensor:
        """This rank's part of the values of all response tokens."""
        return value_U if self.group is None else value_U[share(len(value_U), self.group)]

    def whole(self, value_U: Tensor, size: int) -> Tensor:
        """The values of all `size` response tokens, on every rank, from their parts."""
        return value_U if self.group is None else gathered(value_U, size, self.group)


UNDIVIDED = SequenceGroup()


def _with_filler(layout: Layout, multiple: int) -> Layout:
    """The same layout with more filler, so that its tokens are a multiple of something."""
    more, routing_X = -len(layout.token_ids_X) % multiple, layout.routing_X
    if routing_X is not None:
        routing_X = F.pad(routing_X, (0, 0, 0, 0, 0, more), value=UNRECORDED)
    return replace(
        layout,
        token_ids_X=F.pad(layout.token_ids_X, (0, more)),
        position_X=F.pad(layout.position_X, (0, more)),
        routing_X=routing_X,
    )


def _dealing(
    owner_U: Ints, place_U: Ints, device: torch.device, group: ProcessGroup
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """`SequencePart.needed_W` and `.dealt`: which rank has which hidden state, and which is to make logits of it.

    Args:
        owner_U, place_U: the rank that computes what predicts each response token, and where among its own.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    reader_U = np.arange(len(owner_U)) // max(-(-len(owner_U) // ranks), 1)
    sent = owner_U == rank  # for reader after reader, as these follow each other in U
    needed_W, row = np.unique(place_U[sent], return_inverse=True)
    read = owner_U[reader_U == rank]
    place = np.argsort(np.argsort(read, kind="stable"))  # where in what comes, owner after owner, each one is
    send = np.bincount(reader_U[sent], minlength=ranks).tolist()
    receive = np.bincount(read, minlength=ranks).tolist()
    on_device = [torch.from_numpy(array).to(device, non_blocking=True) for array in (filled(needed_W), row, place)]

    def dealt(hidden_W: Tensor) -> Tensor:
        rows = hidden_W.index_select(0, on_device[1])
        return Exchanged.apply(rows, send, receive, group).index_select(0, on_device[2])

    return on_device[0], dealt


def _exchanging(attend: Callable[..., Tensor], group: ProcessGroup) -> Callable[..., Tensor]:
    """An attention for all tokens, as one for those of this rank."""

    def exchanging(
        layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None, sink_H: Tensor | None = None
    ) -> Tensor:
        named: dict[str, Any] = {} if window is None else {"window": window}
        if sink_H is not None:
            named["sink_H"] = sink_H[share(len(sink_H), group)]
        return _ToTokens.apply(attend(layer, *_ToHeads.apply(q, k, v, group), **named), group)

    return exchanging


class _ToHeads(torch.autograd.Function):
    """(x, H, D) of this rank's tokens and all heads, several of them -> (X, H / ranks, D) of all tokens each."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        *parts, ctx.group = given
        ctx.widths = [x.shape[1] // dist.get_world_size(ctx.group) for x in parts]
        return _to_heads(parts, ctx.group).split(ctx.widths, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *_to_tokens(torch.cat(grads, dim=1), ctx.widths, ctx.group), None


class _ToTokens(torch.autograd.Function):
    """The other way round, of one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_tokens(x, [x.shape[1]], group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _to_heads(grads, ctx.group), None


def _to_heads(parts: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """(x, H_i, D) -> (X, sum of H_i / ranks, D), in one exchange."""
    ranks = dist.get_world_size(group)
    ends = np.cumsum([0, *(part.shape[1] // ranks for part in parts)]).tolist()
    out = parts[0].new_empty(ranks, len(parts[0]), ends[-1], parts[0].shape[2])
    for part, (start, end) in zip(parts, pairwise(ends), strict=True):
        out[:, :, start:end] = part.unflatten(1, (ranks, -1)).transpose(0, 1)
    return _exchange_blocks(out, group).flatten(0, 1)


def _to_tokens(x: Tensor, widths: Sequence[int], group: ProcessGroup) -> list[Tensor]:
    """(X, sum of widths, D) -> (x, widths * ranks, D), in one exchange."""
    ranks = dist.get_world_size(group)
    blocks = _exchange_blocks(x.unflatten(0, (ranks, -1)).contiguous(), group)
    return [block.transpose(0, 1).flatten(1, 2) for block in blocks.split(list(widths), dim=2)]


def _exchange_blocks(blocks: Tensor, group: ProcessGroup) -> Tensor:
    """blocks[i] goes to rank i; what comes from rank i is block i."""
    out = torch.empty_like(blocks)
    dist.all_to_all_single(out, blocks, group=group)
    return out
