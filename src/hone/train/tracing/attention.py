"""Attention with the memory of a fused kernel, for traces of Transformers' classes: shapes only, no numbers.

It keeps q, k, v, its output and one normaliser per query, and has no mask and no copies of grouped keys; backward it
sums q's gradient in float32 (FlashAttention-2, arXiv:2307.08691). On a CPU Transformers would take another path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "hone_traced"
"""What Transformers calls it, as `attn_implementation`."""


class _Fused(torch.autograd.Function):
    """q (b, heads, s, d), k and v (b, kv heads, s, d) -> (b, s, heads, value width)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, length, _ = q.shape
        out = q.new_empty(batch, length, heads, v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(batch, heads, length, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, _, normaliser = ctx.saved_tensors
        summed = torch.empty(q.shape, dtype=torch.float32), torch.empty_like(normaliser)
        results = tuple(torch.empty_like(x) for x in (q, k, v))
        del summed
        return results


def register() -> None:
    """Let Transformers know it."""
    ALL_ATTENTION_FUNCTIONS.register(
        NAME, lambda _, query, key, value, *__, **___: (_Fused.apply(query, key, value), None)
    )
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_, **__: None)
