"""Ring attention (arXiv:2310.01889) over a shared-prompt layout: each rank of a ring has a chunk of the tokens.

A chunk is two pieces of the layout: of 2 R pieces rank r has piece r and piece 2 R - 1 - r (arXiv:2407.21783, section
3.3.2). A token sees those before it, so each rank has an early piece, which sees little, and a late one, which sees
much: in a long sequence all have as much to do.

Keys and values go round, and every rank attends to those before its own as they come. What it has so far is mixed with
what is new by their normalisers (the log-sum-exp of the scores). The backward pass sends keys and values round once
more; each rank makes their exact part of the gradient from the whole softmax's normaliser, and sends it back to the
rank that has the keys. What comes next is on its way while a rank computes. A chunk to which no rank
attends is not sent.

A group of samples is one stretch of the layout: its prompt, then its responses. So two pieces share one group at the
most, and of it one response: what one piece sees of another is two dense rectangles.

The kernels are flash attention's in 16 bits on GPUs; elsewhere plain products, a tile of queries at a time. Not here:
how tokens are exchanged for heads besides (sequence.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hone.model.layout import Layout
from hone.model.recompute import kept
from hone.model.varlen_attention import FLASH, RaggedCall, RaggedKernels, on_device_of, ragged_call
from hone.ragged import Ints, ends_of, ranges
from hone.sizes import QUERY_ROWS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ChunkPlaces = slice | Tensor
"""Places in a chunk."""


@dataclass(frozen=True)
class RingCall:
    """One call of a kernel: some queries of this rank's chunk with some keys of a chunk."""

    ragged: RaggedCall
    queries: ChunkPlaces
    keys: ChunkPlaces


def ring_attention(layout: Layout, group: ProcessGroup) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """The attention strategy (`decoder.Attend`) for this rank's chunk; differentiable in q, k and v.

    Args:
        layout: of all tokens, whose number the ranks divide.
        group: the ring.
    """
    plan = RingPlan(layout, dist.get_world_size(group), dist.get_rank(group))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernels = FLASH if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) else PLAIN
        return _RingAttention.apply(q, k, v, plan, kernels, group)

    return attend


def ring_order(size: int, ranks: int) -> Ints:
    """(size,) places in a layout: those of rank 0's chunk, then of rank 1's, ... `size` is a multiple of 2 `ranks`."""
    pieces = np.arange(size).reshape(2 * ranks, -1)
    return np.concatenate([np.concatenate((pieces[rank], pieces[-1 - rank])) for rank in range(ranks)])


class RingPlan:
    """What one rank computes with each chunk of keys.

    Args:
        layout: of all tokens, as many as `ring_order` takes.
        ranks, rank: of the ring.
    """

    def __init__(self, layout: Layout, ranks: int, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self._layout = layout
        self._piece = len(layout.token_ids_X) // (2 * ranks)
        prompt_start_R, prompt_length_R, own_start_R, length_R = layout.spans_R.T
        size = len(layout.token_ids_X)
        inner = np.concatenate((prompt_start_R, own_start_R[length_R > 1], [layout.num_tokens, size]))
        self._ends = np.unique(np.concatenate(([0], inner)))
        self._start_N, first = np.unique(prompt_start_R, return_index=True)
        self._prompt_end_N = self._start_N + prompt_length_R[first]
        self._end_N = np.append(self._start_N[1:], layout.num_tokens)

    @cached_property
    def distances(self) -> list[int]:
        """Of the ranks, counted backwards round the ring, whose chunks any rank attends to; the same on all ranks."""
        return [
            d for d in range(1, self.ranks) if any(self._rectangles(r, (r - d) % self.ranks) for r in range(self.ranks))
        ]

    @cached_property
    def own(self) -> list[RingCall]:
        """This rank's chunk with itself: in each piece each stretch of a sequence, and responses with what is there of
        prompts; and the later piece with the earlier one."""
        ends, queries, keys = [np.zeros(1, np.int64)], list[tuple[Ints, Ints]](), list[tuple[Ints, Ints]]()
        for place, piece in enumerate(self._pieces(self.rank)):
            low, high = self._bounds(piece)
            shift = place * self._piece - low
            ends.append(np.unique(self._ends.clip(low, high))[1:] + shift)
            start_N, prompt_end_N, end_N = (
                x.clip(low, high) + shift for x in (self._start_N, self._prompt_end_N, self._end_N)
            )
            have_both = (prompt_end_N > start_N) & (end_N > prompt_end_N)
            queries.append((prompt_end_N[have_both], end_N[have_both]))
            keys.append((start_N[have_both], prompt_end_N[have_both]))
        each, everything = np.concatenate(ends), slice(0, 2 * self._piece)
        calls = [RingCall(ragged_call(self._layout, each, each, is_causal=True), everything, everything)]
        spans = [[np.concatenate(parts) for parts in zip(*of_pieces, strict=True)] for of_pieces in (queries, keys)]
        if len(spans[0][0]):
            starts, lengths = zip(*((start, end - start) for start, end in spans), strict=True)
            ragged = ragged_call(self._layout, *map(ends_of, lengths), is_causal=False)
            places = (on_device_of(self._layout, one) for one in map(ranges, starts, lengths))
            calls.append(RingCall(ragged, *places))
        return calls + self._calls(self.rank)

    def before(self, distance: int) -> list[RingCall]:
        """This rank's chunk with that of the rank `distance` places before it."""
        return self._calls((self.rank - distance) % self.ranks)

    def _calls(self, other: int) -> list[RingCall]:
        return [
            RingCall(
                ragged_call(self._layout, np.array([0, q_end - q]), np.array([0, k_end - k]), is_causal=False),
                slice(q, q_end),
                slice(k, k_end),
            )
            for q, q_end, k, k_end in self._rectangles(self.rank, other)
        ]

    def _rectangles(self, rank: int, other: int) -> list[tuple[int, int, int, int]]:
        """Queries of a rank's chunk and keys of another's, or of its own, from and to, each within its chunk: for each
        piece and an earlier one, of the prompt and of the response that both have."""
        return [
            (
                q + place * self._piece,
                qe + place * self._piece,
                k + key_place * self._piece,
                ke + key_place * self._piece,
            )
            for place, piece in enumerate(self._pieces(rank))
            for key_place, earlier in enumerate(self._pieces(other))
            if earlier < piece
            for q, qe, k, ke in self._between(piece, earlier)
        ]

    def _between(self, piece: int, earlier: int) -> list[tuple[int, int, int, int]]:
        """Queries and keys, from and to, each within its piece."""
        (low, high), (key_low, key_high) = self._bounds(piece), self._bounds(earlier)
        number = int(np.searchsorted(self._start_N, low, side="right")) - 1
        start, prompt_end, end = (int(x[number]) for x in (self._start_N, self._prompt_end_N, self._end_N))
        found = []
        if start < key_high and end > low:
            found.append((low, min(end, high), max(start, key_low), min(prompt_end, key_high)))
            sequence = int(np.searchsorted(self._ends, low, side="right")) - 1
            own, own_end = int(self._ends[sequence]), int(self._ends[sequence + 1])
            if own >= prompt_end:
                found.append((low, min(own_end, high), max(own, key_low), key_high))
        return [(q - low, qe - low, k - key_low, ke - key_low) for q, qe, k, ke in found if qe > q and ke > k]

    def _pieces(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.ranks - 1 - rank

    def _bounds(self, piece: int) -> tuple[int, int]:
        return piece * self._piece, (piece + 1) * self._piece


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, kernels: RaggedKernels, group: ProcessGroup
    ) -> Tensor:
        out, normaliser = kept(partial(_attended, q, k, v, plan, kernels, group))
        ctx.save_for_backward(q, k, v, out, normaliser)
        ctx.plan, ctx.kernels, ctx.group = plan, kernels, group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, normaliser = ctx.saved_tensors
        plan, kernels, group, grad_out = ctx.plan, ctx.kernels, ctx.group, grads[0].contiguous()
        exact = torch.promote_types(q.dtype, torch.float32)
        grad_q, grad_kv = torch.zeros(q.shape, dtype=exact, device=q.device), None
        going_back: _Shift | None = None
        for distance, kv, calls in _round(k, v, plan, group):
            part = torch.zeros(kv.shape, dtype=exact, device=q.device)
            for call in calls:
                rows, keys = call.queries, call.keys
                given = grad_out[rows], q[rows], kv[0][keys], kv[1][keys], out[rows], _columns(normaliser, rows)
                of_q, of_k, of_v = kernels.backward(*given, call.ragged)
                _add(grad_q, rows, of_q)
                _add(part[0], keys, of_k)
                _add(part[1], keys, of_v)
            if grad_kv is None:
                grad_kv = part  # of its own keys
                continue
            if going_back is not None:
                grad_kv.add_(going_back.arrived())
            going_back = _Shift(part, -distance, group)
        assert grad_kv is not None
        if going_back is not None:
            grad_kv.add_(going_back.arrived())
        return grad_q.to(q.dtype), *grad_kv.to(q.dtype).unbind(), None, None, None


def _attended(
    q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, kernels: RaggedKernels, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """What this rank's queries attend to, and their normalisers."""
    out = normaliser = None
    for _, kv, calls in _round(k, v, plan, group):
        for call in calls:
            rows = call.queries
            found, its_normaliser = kernels.forward(q[rows], kv[0][call.keys], kv[1][call.keys], call.ragged)
            if out is None or normaliser is None:  # each query with itself at least
                out, normaliser = found.to(its_normaliser.dtype), its_normaliser
                continue
            ours = _columns(normaliser, rows)
            both = torch.logaddexp(ours, its_normaliser)
            share = (its_normaliser - both).exp_().T.unsqueeze(-1)
            out[rows] = torch.lerp(out[rows], found.to(out.dtype), share)
            normaliser[:, rows] = both
    assert out is not None and normaliser is not None
    return out.to(q.dtype), normaliser


def _round(k: Tensor, v: Tensor, plan: RingPlan, group: ProcessGroup) -> Iterator[tuple[int, Tensor, list[RingCall]]]:
    """Keys and values of this chunk and of those that any rank looks at, with what to compute of them. The next ones
    are on their way meanwhile."""
    own, distances = torch.stack((k, v)), plan.distances
    coming = [_Shift(own, distance, group) for distance in distances[:1]]
    yield 0, own, plan.own
    for number, distance in enumerate(distances, 1):
        kv = coming.pop().arrived()
        coming += [_Shift(own, following, group) for following in distances[number : number + 1]]
        yield distance, kv, plan.before(distance)


class _Shift:
    """What the rank `by` places before this one in the ring has, on its way."""

    def __init__(self, x: Tensor, by: int, group: ProcessGroup) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        send, receive = [0] * ranks, [0] * ranks
        send[(rank + by) % ranks] = receive[(rank - by) % ranks] = len(x)
        self._sent, self._out = x.contiguous(), torch.empty_like(x)
        self._work = dist.all_to_all_single(self._out, self._sent, receive, send, group=group, async_op=True)

    def arrived(self) -> Tensor:
        """It, once it is there."""
        if self._work is not None:
            self._work.wait()
        return self._out


def _columns(x: Tensor, part: ChunkPlaces) -> Tensor:
    return x[:, part].contiguous()


def _add(total: Tensor, part: ChunkPlaces, x: Tensor) -> None:
    """Each place comes once, so the order of the sums is fixed."""
    if isinstance(part, slice):
        total[part] += x
    else:
        total.index_add_(0, part, x.to(total.dtype))


# ---- plain kernels


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, ragged: RaggedCall) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(q.dtype, torch.float32)
    out, normaliser = torch.empty_like(q), torch.empty(q.shape[1], len(q), dtype=exact, device=q.device)
    for rows, keys, hidden in _tiles(ragged):
        scores = _scores(q[rows], k[keys], hidden)
        normaliser[:, rows] = (own := scores.logsumexp(-1)).view(q.shape[1], -1)
        powers = scores.sub_(own.unsqueeze(-1)).exp_()
        out[rows] = _by_tokens(powers @ v[keys].to(exact).transpose(0, 1), q.shape[1]).to(q.dtype)
    return out, normaliser


def _plain_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, normaliser: Tensor, ragged: RaggedCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Flash attention's formulas (arXiv:2307.08691, algorithm 2)."""
    exact, scale = normaliser.dtype, q.shape[-1] ** -0.5
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=exact, device=q.device) for x in (q, k, v))
    for rows, keys, hidden in _tiles(ragged):
        queries, gradients = (_by_heads(x[rows].to(exact), k.shape[1]) for x in (q, grad_out))
        of_keys, values = (x[keys].to(exact).transpose(0, 1) for x in (k, v))
        tops = normaliser[:, rows].reshape(k.shape[1], -1, 1)
        powers = _scores(q[rows], k[keys], hidden).sub_(tops).exp_()
        dots = (gradients * _by_heads(out[rows].to(exact), k.shape[1])).sum(-1, keepdim=True)
        grad_scores = (gradients @ values.mT).sub_(dots).mul_(powers).mul_(scale)
        grad_q[rows] += _by_tokens(grad_scores @ of_keys, q.shape[1])
        grad_k[keys] += (grad_scores.mT @ queries).transpose(0, 1)
        grad_v[keys] += (powers.mT @ gradients).transpose(0, 1)
    return grad_q, grad_k, grad_v


def _tiles(ragged: RaggedCall) -> Iterator[tuple[slice, slice, int | None]]:
    """At most `QUERY_ROWS` queries, the keys that any of them sees, and how many the first one sees; None: all."""
    query_ends, key_ends = ragged.query_ends.tolist(), ragged.key_ends.tolist()
    for number, key_start in enumerate(key_ends[:-1]):
        first, last = query_ends[number], query_ends[number + 1]
        for start in range(first, last, QUERY_ROWS):
            end = min(start + QUERY_ROWS, last)
            if ragged.is_causal:
                yield slice(start, end), slice(key_start, key_start + end - first), start - first + 1
            else:
                yield slice(start, end), slice(key_start, key_ends[number + 1]), None


def _scores(q: Tensor, k: Tensor, seen: int | None) -> Tensor:
    """(Hkv, Hq / Hkv * Q, K) scaled scores, -inf where hidden."""
    exact = torch.promote_types(q.dtype, torch.float32)
    queries = _by_heads(q.to(exact), k.shape[1])
    scores = queries @ k.to(exact).permute(1, 2, 0) * q.shape[-1] ** -0.5
    if seen is not None:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(seen)
        scores.view(len(scores), -1, *hidden.shape).masked_fill_(hidden, -torch.inf)
    return scores


def _by_heads(x: Tensor, kv_heads: int) -> Tensor:
    """(Q, Hq, D) -> (Hkv, Hq / Hkv * Q, D)."""
    return x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _by_tokens(x: Tensor, heads: int) -> Tensor:
    """(Hkv, Hq / Hkv * Q, D) -> (Q, Hq, D)."""
    return x.unflatten(1, (heads // len(x), -1)).flatten(0, 1).transpose(0, 1)


PLAIN = RaggedKernels(_plain_forward, _plain_backward)
"""Batched products and a softmax in float32 at least: for CPUs, and for float32 and float64 anywhere."""
