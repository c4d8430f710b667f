"""Ring attention (arXiv:2310.01889) over a shared-prompt layout: each rank of a ring has a chunk of the tokens.

Keys and values go round, and every rank attends to those of the chunks before its own as they come. What it has so far
is mixed with what is new by their normalisers (the log-sum-exp of the scores). The backward pass sends keys and values
round once more; each rank makes their exact part of the gradient from the whole softmax's normaliser, and sends it back
to the rank that has the keys. Nothing goes further than the longest group of samples reaches.

Chunks follow each other in the layout, where a group of samples is one stretch: its prompt, then its responses. So two
chunks share one group at the most, and of it one response: what one chunk sees of another is two dense rectangles.

The kernels are flash attention's in 16 bits on GPUs; elsewhere plain products, a tile of queries at a time. Not here:
how tokens are exchanged for heads besides (sequence.py). Later chunks have more to attend to, and ranks wait for them.
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

from hone.model.collectives import exchanged
from hone.model.layout import QUERY_ROWS, Ints, Layout
from hone.model.recompute import kept
from hone.model.varlen_attention import FLASH, RaggedCall, RaggedKernels, on_device_of, ragged_call

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Part = slice | Tensor
"""Places in a chunk."""


@dataclass(frozen=True)
class RingCall:
    """One call of a kernel: some queries of this rank's chunk with some keys of a chunk."""

    ragged: RaggedCall
    queries: Part
    keys: Part


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


class RingPlan:
    """What one rank computes with each chunk of keys.

    Args:
        ranks, rank: of the ring.
    """

    def __init__(self, layout: Layout, ranks: int, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self._layout = layout
        self._each = len(layout.token_ids_X) // ranks
        prompt_start_R, prompt_length_R, own_start_R, length_R = layout.spans_R.T
        size = len(layout.token_ids_X)
        inner = np.concatenate((prompt_start_R, own_start_R[length_R > 1], [layout.num_tokens, size]))
        self._ends = np.unique(np.concatenate(([0], inner)))
        self._start_N, first = np.unique(prompt_start_R, return_index=True)
        self._prompt_end_N = self._start_N + prompt_length_R[first]
        self._end_N = np.append(self._start_N[1:], layout.num_tokens)

    @cached_property
    def reach(self) -> int:
        """How many chunks back any rank looks."""
        pairs = ((chunk, distance) for chunk in range(self.ranks) for distance in range(1, chunk + 1))
        return max((distance for chunk, distance in pairs if self._rectangles(chunk, distance)), default=0)

    @cached_property
    def own(self) -> list[RingCall]:
        """This rank's chunk with itself: each stretch of a sequence, and responses with what is here of prompts."""
        low, high = self._bounds(self.rank)
        ends = np.unique(self._ends.clip(low, high)) - low
        everything = slice(0, self._each)
        calls = [RingCall(ragged_call(self._layout, ends, ends, is_causal=True), everything, everything)]
        prompts = self._start_N.clip(low, high) - low, self._prompt_end_N.clip(low, high) - low
        responses = prompts[1], self._end_N.clip(low, high) - low
        have_both = (prompts[1] > prompts[0]) & (responses[1] > responses[0])
        if have_both.any():
            queries, keys = ([part[have_both] for part in ends] for ends in (responses, prompts))
            ragged = ragged_call(self._layout, _ends(queries), _ends(keys), is_causal=False)
            places = (on_device_of(self._layout, _ranges(part)) for part in (queries, keys))
            calls.append(RingCall(ragged, *places))
        return calls

    def before(self, distance: int) -> list[RingCall]:
        """This rank's chunk with the one so many before it."""
        return [
            RingCall(
                ragged_call(self._layout, np.array([0, q_end - q]), np.array([0, k_end - k]), is_causal=False),
                slice(q, q_end),
                slice(k, k_end),
            )
            for q, q_end, k, k_end in self._rectangles(self.rank, distance)
        ]

    def _rectangles(self, chunk: int, distance: int) -> list[tuple[int, int, int, int]]:
        """Queries and keys, from and to, each within its chunk: of the prompt, and of the response that both have."""
        if distance > chunk:
            return []
        (low, high), (key_low, key_high) = self._bounds(chunk), self._bounds(chunk - distance)
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

    def _bounds(self, chunk: int) -> tuple[int, int]:
        return chunk * self._each, (chunk + 1) * self._each


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
        for distance, kv, calls in _round(k, v, plan, group):
            part = torch.zeros(kv.shape, dtype=exact, device=q.device)
            for call in calls:
                rows, keys = call.queries, call.keys
                given = grad_out[rows], q[rows], kv[0][keys], kv[1][keys], out[rows], _columns(normaliser, rows)
                of_q, of_k, of_v = kernels.backward(*given, call.ragged)
                _add(grad_q, rows, of_q)
                _add(part[0], keys, of_k)
                _add(part[1], keys, of_v)
            back = part if distance == 0 else _shifted(part, -distance, group)
            grad_kv = back if grad_kv is None else grad_kv.add_(back)
        assert grad_kv is not None
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
    """The keys and values of this chunk and those before it, as far as any rank looks, with what to compute of them."""
    kv = torch.stack((k, v))
    yield 0, kv, plan.own
    for distance in range(1, plan.reach + 1):
        kv = _shifted(kv, 1, group)
        yield distance, kv, plan.before(distance)


def _shifted(x: Tensor, by: int, group: ProcessGroup) -> Tensor:
    """What the rank `by` places before this one in the ring has."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    send, receive = [0] * ranks, [0] * ranks
    send[(rank + by) % ranks] = receive[(rank - by) % ranks] = len(x)
    return exchanged(x, send, receive, group)


def _columns(x: Tensor, part: Part) -> Tensor:
    return x[:, part].contiguous()


def _add(total: Tensor, part: Part, x: Tensor) -> None:
    """Each place comes once, so the order of the sums is fixed."""
    if isinstance(part, slice):
        total[part] += x
    else:
        total.index_add_(0, part, x.to(total.dtype))


def _ends(spans: list[Ints]) -> Ints:
    return np.concatenate(([0], np.cumsum(spans[1] - spans[0])))


def _ranges(spans: list[Ints]) -> Ints:
    return np.concatenate([np.arange(start, end) for start, end in zip(*spans, strict=True)])


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
