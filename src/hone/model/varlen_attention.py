"""Attention over a shared-prompt layout by kernels for ragged sequences (`torch.nn.attention.varlen`): what GPUs use.

A layer that sees everything before it makes two calls. In the first every prompt and every response attends to itself,
causally. In the second all responses of a prompt, which stand together, attend to it as one sequence, so the kernel
reads a prompt's keys once for all its samples. Their normalisers (the log-sum-exp of the scores) say how the two
results of a response mix. The backward pass gives both kernels the mixed output and normaliser, from which each makes
its exact part of the gradient; that of a prompt's keys is summed over all samples inside the kernel, in float32.

A layer with a sliding window makes one call, in which each response has the end of its prompt in front of its own keys.
A sink changes output and normaliser afterwards.

No masks, and index tensors of two numbers a token at most: memory grows linearly with the tokens. The kernels take
float16 and bfloat16 and keep scores in float32. Not here: CPUs and float32 (attention.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.model.layout import Layout
from hone.model.recompute import kept
from hone.ragged import Ints, ends_of, ranges


@dataclass(frozen=True)
class RaggedCall:
    """Which sequence of queries meets which of keys; both stand one after another."""

    query_ends: Tensor
    """(n + 1,) int32, from 0."""
    key_ends: Tensor
    longest_query: int
    longest_key: int
    is_causal: bool
    """Queries are the last tokens of the keys' sequence, and see those before them."""
    window: int | None = None
    """At most this number of them, themselves included; None: all."""


def ragged_call(
    layout: Layout, query_ends: Ints, key_ends: Ints, *, is_causal: bool, window: int | None = None
) -> RaggedCall:
    """A call over a layout's tokens; ends are (n + 1,), from 0."""
    longest_query, longest_key = (int(np.diff(ends).max()) for ends in (query_ends, key_ends))
    queries, keys = (on_device_of(layout, ends.astype(np.int32)) for ends in (query_ends, key_ends))
    return RaggedCall(queries, keys, longest_query, longest_key, is_causal, window)


def on_device_of(layout: Layout, array: np.ndarray) -> Tensor:
    """An array on the device of the layout's tokens."""
    return torch.from_numpy(array).to(layout.token_ids_X.device, non_blocking=True)


Forward = Callable[[Tensor, Tensor, Tensor, RaggedCall], tuple[Tensor, Tensor]]
"""From (Xq, H, D) queries and (Xk, Hkv, D) keys and values to the output and its (H, Xq) float32 normaliser."""
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, RaggedCall], tuple[Tensor, Tensor, Tensor]]
"""From the output's gradient, queries, keys, values, output and normaliser to the gradients of q, k and v."""


@dataclass(frozen=True)
class RaggedKernels:
    """Attention over ragged sequences.

    The backward pass may be given the output and normaliser of a softmax over more keys than these; it then makes
    these keys' part of that softmax's gradient.
    """

    forward: Forward
    backward: Backward


def varlen_attention(layout: Layout, kernels: RaggedKernels) -> Callable[..., Tensor]:
    """The attention strategy (`attention.Attention`) for one microbatch; differentiable in q, k, v and sinks."""
    plan = RaggedPlan(layout)

    def attend(
        layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None, sink_H: Tensor | None = None
    ) -> Tensor:
        return _VarlenAttention.apply(q, k, v, sink_H, plan, kernels, window)

    return attend


class RaggedPlan:
    """The calls of every layer, made from a layout's spans when the first layer asks for them."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._windowed: dict[int, tuple[RaggedCall, Tensor]] = {}

    def windowed(self, window: int) -> tuple[RaggedCall, Tensor]:
        """Everything in one call for layers that look back so far, and the places in X of the keys: those of a response
        follow the end of its prompt that its first token sees."""
        if window not in self._windowed:
            layout = self._layout
            prompt_start_R, prompt_length_R, own_start_R, length_R = layout.spans_R.T
            start_N = np.unique(prompt_start_R)
            has_inputs = length_R > 1
            seen_R = np.minimum(prompt_length_R, window - 1)[has_inputs]
            filler = [] if layout.num_tokens == len(layout.token_ids_X) else [layout.num_tokens]
            starts = np.concatenate((start_N, own_start_R[has_inputs], filler)).astype(np.int64)
            order = np.argsort(starts)
            own_ends = np.append(starts[order], len(layout.token_ids_X))
            seen = np.concatenate((np.zeros_like(start_N), seen_R, np.zeros_like(filler))).astype(np.int64)[order]
            seen_end = np.concatenate((start_N, (prompt_start_R + prompt_length_R)[has_inputs], filler)).astype(
                np.int64
            )[order]
            pairs = np.stack((seen, np.diff(own_ends)), axis=1)
            places = ranges(np.stack((seen_end - seen, own_ends[:-1]), axis=1).ravel(), pairs.ravel())
            ragged = ragged_call(layout, own_ends, ends_of(pairs.sum(1)), is_causal=True, window=window)
            self._windowed[window] = ragged, on_device_of(layout, places)
        return self._windowed[window]

    @cached_property
    def own(self) -> RaggedCall:
        """Every prompt and response with itself. Filler is one more sequence, which nothing reads."""
        layout = self._layout
        prompt_start_R, _, own_start_R, length_R = layout.spans_R.T
        size = len(layout.token_ids_X)
        ends = np.unique(np.concatenate((prompt_start_R, own_start_R[length_R > 1], [layout.num_tokens, size])))
        return ragged_call(layout, ends, ends, is_causal=True)

    @cached_property
    def shared(self) -> tuple[RaggedCall, Tensor, Tensor] | None:
        """The responses of each prompt with it, and the places in X of the responses' tokens and of the prompts'; None
        where no response has an input."""
        prompt_start_R, prompt_length_R, _, length_R = self._layout.spans_R.T
        start_N, first, prompt_R = np.unique(prompt_start_R, return_index=True, return_inverse=True)
        inputs_N = np.bincount(prompt_R, weights=np.maximum(length_R - 1, 0)).astype(np.int64)
        start_N, length_N, inputs_N = (x[inputs_N > 0] for x in (start_N, prompt_length_R[first], inputs_N))
        if not len(start_N):
            return None
        ragged = ragged_call(self._layout, ends_of(inputs_N), ends_of(length_N), is_causal=False)
        places = (ranges(start_N + length_N, inputs_N), ranges(start_N, length_N))
        responses, prompts = (on_device_of(self._layout, one) for one in places)
        return ragged, responses, prompts


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_H: Tensor | None,
        plan: RaggedPlan,
        kernels: RaggedKernels,
        window: int | None,
    ) -> Tensor:
        out, normaliser = kept(partial(_attended, q, k, v, sink_H, plan, kernels, window))
        ctx.save_for_backward(q, k, v, sink_H, out, normaliser)
        ctx.plan, ctx.kernels, ctx.window = plan, kernels, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, sink_H, out, normaliser = ctx.saved_tensors
        plan, kernels, grad_out, grad_sink = ctx.plan, ctx.kernels, grads[0].contiguous(), None
        saved = grad_out, q, k, v, out, normaliser
        if ctx.window is None:
            grad_q, grad_k, grad_v = _gradients(*saved, plan, kernels)
        else:
            grad_q, grad_k, grad_v = _windowed_gradients(*saved, plan, kernels, ctx.window)
        if sink_H is not None:
            dots = torch.linalg.vecdot(grad_out.to(normaliser.dtype), out.to(normaliser.dtype)).T
            share = (sink_H.to(normaliser.dtype)[:, None] - normaliser).exp_()
            grad_sink = share.mul_(dots).sum(1).neg_().to(sink_H.dtype)
        return grad_q, grad_k, grad_v, grad_sink, None, None, None


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_H: Tensor | None,
    plan: RaggedPlan,
    kernels: RaggedKernels,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """What every query attends to, and its normaliser."""
    if window is None:
        out, normaliser = _of_both(q, k, v, plan, kernels)
    else:
        ragged, keys = plan.windowed(window)
        out, normaliser = kernels.forward(q, k.index_select(0, keys), v.index_select(0, keys), ragged)
    if sink_H is None:
        return out, normaliser
    whole = torch.logaddexp(normaliser, sink_H.detach().to(normaliser.dtype)[:, None])
    share = (normaliser - whole).exp_().T.unsqueeze(-1)
    return (out * share).to(out.dtype), whole


def _of_both(q: Tensor, k: Tensor, v: Tensor, plan: RaggedPlan, kernels: RaggedKernels) -> tuple[Tensor, Tensor]:
    """Like `_attended`, of all keys before each query."""
    out, normaliser = kernels.forward(q, k, v, plan.own)
    if plan.shared is None:
        return out, normaliser
    ragged, responses, prompts = plan.shared
    k, v = (x.index_select(0, prompts) for x in (k, v))
    of_prompt, its_normaliser = kernels.forward(q.index_select(0, responses), k, v, ragged)
    of_own, own_normaliser = out.index_select(0, responses), normaliser.index_select(1, responses)
    both = torch.logaddexp(own_normaliser, its_normaliser)
    share = (its_normaliser - both).exp_().T.unsqueeze(-1)
    mixed = torch.lerp(of_own.to(share.dtype), of_prompt.to(share.dtype), share).to(out.dtype)
    return out.index_copy_(0, responses, mixed), normaliser.index_copy_(1, responses, both)


def _gradients(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    normaliser: Tensor,
    plan: RaggedPlan,
    kernels: RaggedKernels,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = kernels.backward(grad_out, q, k, v, out, normaliser, plan.own)
    if plan.shared is not None:
        ragged, responses, prompts = plan.shared
        parts = kernels.backward(
            grad_out.index_select(0, responses),
            q.index_select(0, responses),
            k.index_select(0, prompts),
            v.index_select(0, prompts),
            out.index_select(0, responses),
            normaliser.index_select(1, responses),
            ragged,
        )
        grad_q.index_add_(0, responses, parts[0])  # each row once, so the order of the sums is fixed
        grad_k.index_add_(0, prompts, parts[1])
        grad_v.index_add_(0, prompts, parts[2])
    return grad_q, grad_k, grad_v


def _windowed_gradients(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    normaliser: Tensor,
    plan: RaggedPlan,
    kernels: RaggedKernels,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of a prompt's keys is summed over the responses that see them, in the normaliser's dtype."""
    ragged, keys = plan.windowed(window)
    grad_q, *parts = kernels.backward(
        grad_out, q, k.index_select(0, keys), v.index_select(0, keys), out, normaliser, ragged
    )
    grad_k, grad_v = (
        torch.zeros(x.shape, dtype=normaliser.dtype, device=x.device)
        .index_add_(0, keys, part.to(normaliser.dtype))
        .to(x.dtype)
        for x, part in zip((k, v), parts, strict=True)
    )
    return grad_q, grad_k, grad_v


def _forward(q: Tensor, k: Tensor, v: Tensor, ragged: RaggedCall) -> tuple[Tensor, Tensor]:
    operators, more = _operators(), []
    if operators.groups_queries:
        more = [True]
    else:
        k, v = _repeated(q, k), _repeated(q, v)
    out, normaliser, _ = operators.forward(q, k, v, *_arguments(ragged), None, _window(ragged), *more)
    return out, normaliser


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, normaliser: Tensor, ragged: RaggedCall
) -> tuple[Tensor, Tensor, Tensor]:
    operators, kv_heads = _operators(), k.shape[1]
    if not operators.groups_queries:
        k, v = _repeated(q, k), _repeated(q, v)
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
    saved = grad_out, q, k, v, out, normaliser
    grad_q, *grads = operators.backward(*saved, *_arguments(ragged), no_dropout, None, _window(ragged))
    if k.shape[1] != kv_heads:
        grads = [x.unflatten(1, (kv_heads, -1)).sum(2, dtype=torch.float32).to(x.dtype) for x in grads]
    return grad_q, grads[0], grads[1]


def _arguments(ragged: RaggedCall) -> tuple[Any, ...]:
    is_causal = ragged.is_causal and ragged.window is None  # a window says it by itself
    return ragged.query_ends, ragged.key_ends, ragged.longest_query, ragged.longest_key, is_causal


def _window(ragged: RaggedCall) -> list[int]:
    """Keys to the left and to the right of a query's own; -1: all."""
    if ragged.window is not None:
        return [ragged.window - 1, 0]
    return [-1, 0] if ragged.is_causal else [-1, -1]


def _repeated(q: Tensor, x: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


@dataclass(frozen=True)
class _Operators:
    forward: Any
    backward: Any
    groups_queries: bool
    """Since torch 2.13; before, heads of keys and values are repeated."""


@cache
def _operators() -> _Operators:
    import torch.nn.attention.varlen  # registers them

    forward, backward = torch.ops.torch_attn._varlen_attn, torch.ops.torch_attn._varlen_attn_backward
    names = {argument.name for argument in forward.default._schema.arguments}
    return _Operators(forward, backward, "enable_gqa" in names)


FLASH = RaggedKernels(_forward, _backward)
"""Flash attention: the operators under `varlen_attn`, whose own backward pass knows no other softmax than its own."""
