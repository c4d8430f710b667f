"""Attention over a shared-prompt layout: each sample sees its prompt and its own prefix, or the last tokens of them.

Explicit matrix products and a softmax per padded block, in an autograd function of its own that keeps q, k, v, the
output and each query's softmax normaliser, and makes the probabilities again in the backward pass. On CPUs that is
several times faster than the fused kernels at the sizes that matter here. On GPUs in 16 bits flash attention takes over
(varlen_attention.py); in float32, which it does not know, these are plain batched matrix products.

Everything moves between the flat list of tokens and the padded blocks one *row* at a time, a row being the D numbers of
one head of one token: gathering rows in (block, head, token) order puts them where the matrix products want them, with
no further transposition, and grouped queries share a key without a copy of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hone.model.layout import Layout
from hone.model.recompute import kept
from hone.model.tiling import AttentionBlock
from hone.model.varlen_attention import FLASH, varlen_attention
from hone.sizes import FLASH_WIDTH


class _Flash:
    is_anywhere = False


@contextmanager
def flash_anywhere() -> Iterator[None]:
    """Inside, attention in 16 bits is flash attention's on every device: for traces, whose tensors have no numbers."""
    before, _Flash.is_anywhere = _Flash.is_anywhere, True
    try:
        yield
    finally:
        _Flash.is_anywhere = before


class Attention(Protocol):
    """An attention strategy over the tokens of a layout, which knows two kinds more than `decoder.Attend`.

    Args:
        window: tokens that each one sees, itself included; None: all before it.
        sink_H: (Hq,) a score of each head that takes its part of the softmax and has no value.
    """

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None, sink_H: Tensor | None = None
    ) -> Tensor: ...


def shared_prompt_attention(layout: Layout) -> Attention:
    """The attention strategy for one microbatch; differentiable in q, k, v and sinks.

    Scores exist for one block at a time, at most `BLOCK_SCORES` per head.
    """
    workspace, by_flash = _Workspace(layout), varlen_attention(layout, FLASH)

    def attend(
        layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None, sink_H: Tensor | None = None
    ) -> Tensor:
        if window is not None and window >= layout.longest:
            window = None
        is_half = q.dtype in (torch.bfloat16, torch.float16)
        if (q.is_cuda or _Flash.is_anywhere) and is_half and q.shape[-1] <= FLASH_WIDTH:
            return by_flash(layer, q, k, v, window, sink_H)
        return _SharedPromptAttention.apply(q, k, v, sink_H, workspace, window)

    return attend


@dataclass(frozen=True)
class _BlockRows:
    """Which rows one block gathers, and its mask."""

    block: AttentionBlock
    queries: Tensor
    keys: Tensor
    values: Tensor
    outputs: Tensor
    """Like `queries`, in a tensor that holds nothing else, such as the gradient of the output."""
    sums: Tensor
    """Where gradients of keys and values are summed."""
    bias: Tensor
    """(B, 1, Q, K), 0 or -inf, in the dtype of the scores."""


class _Workspace:
    """What all layers of one microbatch share: row indices, made by the first one, and memory for scores."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._plans: dict[tuple[int | None, ...], tuple[list[_BlockRows], Tensor]] = {}
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def plan(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> tuple[list[_BlockRows], Tensor]:
        """The blocks' rows, and for each (token, head) its place among the concatenated outputs of all blocks."""
        heads, kv_heads = q.shape[1], k.shape[1]
        key = heads, kv_heads, _spacing(q), _spacing(k), _spacing(v), window
        if key not in self._plans and window is not None:
            (all_blocks, output_rows), position_X, blocks = self.plan(q, k, v, None), self.layout.position_X, []
            for rows in all_blocks:  # where a query does not see further back than its window
                queries, keys = position_X[rows.block.query_BQ], position_X[rows.block.key_BK]
                too_far = (queries[:, :, None] - keys[:, None] >= window)[:, None]
                blocks.append(replace(rows, bias=rows.bias.masked_fill(too_far, -torch.inf)))
            self._plans[key] = blocks, output_rows
        if key not in self._plans:
            blocks = [
                _BlockRows(
                    block,
                    queries=_rows(block.query_BQ, heads, _spacing(q)),
                    keys=_rows(block.key_BK, kv_heads, _spacing(k)),
                    values=_rows(block.key_BK, kv_heads, _spacing(v)),
                    outputs=_rows(block.query_BQ, heads, heads),
                    sums=_rows(block.key_BK, kv_heads, kv_heads),
                    bias=block.bias_BQK[:, None].to(score_dtype(q)),
                )
                for block in self.layout.blocks
            ]
            first, column, width = self.layout.query_slot_3X[:, :, None]
            head = torch.arange(heads, device=q.device)
            self._plans[key] = blocks, (first * heads + width * head + column).flatten()
        return self._plans[key]

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory, the same for every block and layer: it stays in the cache and needs no allocation."""
        size = math.prod(shape)
        memory = self._memory.get((name, dtype))
        if memory is None or memory.numel() < size:
            memory = torch.empty(size, dtype=dtype, device=self.layout.token_ids_X.device)
            self._memory[name, dtype] = memory
        return memory[:size].view(shape)


class _SharedPromptAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink_H: Tensor | None, workspace: _Workspace, window: int | None
    ) -> Tensor:
        q, k, v = _with_rows(q), _with_rows(k), _with_rows(v)
        out, *normalisers = kept(partial(_attended, q, k, v, sink_H, workspace, window))
        ctx.save_for_backward(q, k, v, sink_H, out, *normalisers)
        ctx.workspace, ctx.window = workspace, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, sink_H, out, *normalisers = ctx.saved_tensors
        workspace, grad_out, size = ctx.workspace, grads[0].contiguous(), q.shape[-1]
        blocks, output_rows = workspace.plan(q, k, v, ctx.window)
        grad_k, grad_v = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        grad_sink = None if sink_H is None else torch.zeros(q.shape[1], dtype=score_dtype(q), device=q.device)
        dots = torch.linalg.vecdot(grad_out, out).flatten()
        parts = []
        for i, rows in enumerate(blocks):
            top, inverse = normalisers[2 * i : 2 * i + 2]
            if rows.block.padded:  # a padded query repeats a real one, whose gradient must not count twice
                real_BQ = rows.block.real_BQ
                inverse = (inverse.view(len(real_BQ), -1, real_BQ.shape[1]) * real_BQ[:, None]).view(inverse.shape)
            queries, keys = _queries(q, rows.queries, k, rows), _keys(k, rows.keys, rows)
            # powers * inverse are the probabilities; the factor goes to the D numbers of a row instead of its K scores.
            powers = _scores(queries, keys, rows, workspace).sub_(top).exp2_()
            grad_rows = _queries(grad_out, rows.outputs, k, rows).mul_(inverse)
            low_powers = _cast(powers, q, "low", workspace)
            _add_rows(grad_v, rows.sums, torch.bmm(low_powers.mT, grad_rows))
            grad_powers = workspace.empty("grad", powers.shape, q.dtype)
            torch.bmm(grad_rows, _keys(v, rows.values, rows).mT, out=grad_powers)
            dot_rows = dots.index_select(0, rows.outputs).view(inverse.shape).mul_(inverse)
            if sink_H is not None and grad_sink is not None:
                of_sink = _sinks(sink_H, rows, top).sub_(top).exp2_().mul_(dot_rows)
                grad_sink -= of_sink.view(len(rows.bias), q.shape[1], -1).sum((0, 2))
            grad_scores = powers.mul_(_cast(grad_powers, powers, "high", workspace).sub_(dot_rows))
            grad_scores = _cast(grad_scores, q, "low", workspace)
            parts.append(_product(grad_scores, keys, size**-0.5).view(-1, size))
            _add_rows(grad_k, rows.sums, _product(grad_scores.mT, queries, size**-0.5))
        padded = parts[0] if len(parts) == 1 else torch.cat(parts)
        grad_q = _without_filler(padded.index_select(0, output_rows).view(q.shape), workspace)
        if sink_H is not None and grad_sink is not None:
            grad_sink = grad_sink.to(sink_H.dtype)
        return grad_q, grad_k, grad_v, grad_sink, None, None


def _attended(
    q: Tensor, k: Tensor, v: Tensor, sink_H: Tensor | None, workspace: _Workspace, window: int | None
) -> tuple[Tensor, ...]:
    """What every query attends to, and per block the two numbers that normalise its scores."""
    blocks, output_rows = workspace.plan(q, k, v, window)
    parts, normalisers = [], []
    for rows in blocks:
        scores = _scores(_queries(q, rows.queries, k, rows), _keys(k, rows.keys, rows), rows, workspace)
        top = scores.amax(-1, keepdim=True)
        sinks = None if sink_H is None else _sinks(sink_H, rows, top)
        if sinks is not None:
            top = torch.maximum(top, sinks)
        powers = scores.sub_(top).exp2_()
        total = powers.sum(-1, keepdim=True)
        if sinks is not None:
            total += sinks.sub_(top).exp2_()
        inverse = total.reciprocal_()
        out = torch.bmm(_cast(powers, q, "low", workspace), _keys(v, rows.values, rows))
        parts.append(out.mul_(inverse).view(-1, q.shape[-1]))
        normalisers += (top, inverse)
    padded = parts[0] if len(parts) == 1 else torch.cat(parts)
    out = _without_filler(padded.index_select(0, output_rows).view(q.shape), workspace)
    return out, *normalisers


def score_dtype(x: Tensor) -> torch.dtype:
    """Softmax is float32 for everything below it."""
    return torch.promote_types(x.dtype, torch.float32)


def _scores(queries: Tensor, keys: Tensor, rows: _BlockRows, workspace: _Workspace) -> Tensor:
    """(B * Hkv, Hq / Hkv * Q, K) scaled scores in units of ln 2, -inf where hidden: exp2 is faster than exp on CPUs.

    They are float32 at least from the product on: bfloat16 would round a score of 20 by up to 0.06.
    """
    shape = len(queries), queries.shape[1], keys.shape[1]
    scale = queries.shape[-1] ** -0.5 * math.log2(math.e)
    exact_queries, exact_keys = (
        _cast(x, rows.bias, name, workspace) for x, name in ((queries, "queries"), (keys, "keys"))
    )
    scores = _product(exact_queries, exact_keys.mT, scale, workspace.empty("scores", shape, rows.bias.dtype))
    scores.view(len(rows.bias), -1, *rows.bias.shape[2:]).add_(rows.bias)
    return scores


def _sinks(sink_H: Tensor, rows: _BlockRows, top: Tensor) -> Tensor:
    """The sinks' scores, as `_scores` has those of keys: (B * Hkv, Hq / Hkv * Q, 1)."""
    width = rows.block.query_BQ.shape[1]
    scores = sink_H.detach().to(top.dtype)[None, :, None] * math.log2(math.e)
    return scores.expand(len(rows.bias), -1, width).reshape(top.shape)


def _product(left: Tensor, right: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """scale * left @ right, batched, without another pass for the scale."""
    if out is None:
        out = left.new_empty(len(left), left.shape[1], right.shape[2])
    return out.baddbmm_(left, right, beta=0, alpha=scale)


def _cast(x: Tensor, like: Tensor, name: str, workspace: _Workspace) -> Tensor:
    """x itself where the dtype is right, else a conversion in shared memory."""
    return x if x.dtype == like.dtype else workspace.empty(name, x.shape, like.dtype).copy_(x)


def _without_filler(x: Tensor, workspace: _Workspace) -> Tensor:
    """x, with 0 where filler tokens hold what belongs to the first one."""
    x[workspace.layout.num_tokens :] = 0
    return x


def _queries(x: Tensor, index: Tensor, k: Tensor, rows: _BlockRows) -> Tensor:
    """(B * Hkv, Hq / Hkv * Q, D): the queries that share a key head stand together."""
    return _gather(x, index).view(len(rows.bias) * k.shape[1], -1, x.shape[-1])


def _keys(x: Tensor, index: Tensor, rows: _BlockRows) -> Tensor:
    """(B * Hkv, K, D)."""
    return _gather(x, index).view(-1, rows.bias.shape[-1], x.shape[-1])


def _add_rows(total: Tensor, index: Tensor, x: Tensor) -> None:
    total.view(-1, total.shape[-1]).index_add_(0, index, x.view(-1, total.shape[-1]))


def _rows(index: Tensor, heads: int, spacing: int) -> Tensor:
    """(B * heads * n,) rows of (B, n) tokens when tokens stand `spacing` rows apart."""
    head = torch.arange(heads, device=index.device)[None, :, None]
    return (index[:, None] * spacing + head).flatten()


def _with_rows(x: Tensor) -> Tensor:
    """x itself if it, or a larger tensor that it is a view of, is a list of rows; else a copy that is."""
    size = x.shape[-1]
    is_list = x.stride()[1:] == (size, 1) and x.stride(0) % size == 0
    return x if is_list else x.contiguous()


def _spacing(x: Tensor) -> int:
    return x.stride(0) // x.shape[-1]


def _gather(x: Tensor, index: Tensor) -> Tensor:
    tokens, heads, size = x.shape
    rows = x.as_strided(((tokens - 1) * _spacing(x) + heads, size), (size, 1))
    return rows.index_select(0, index)
