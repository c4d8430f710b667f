"""Logprobs and entropies of given tokens from hidden states, without ever holding the logits of all tokens.

A vocabulary of 150,000 makes one token's logits 600 kB. Here they exist for `chunk_tokens` tokens at a time: the
backward pass makes each chunk's logits again (one more matrix product of three) rather than keep them. Arithmetic on
logits is float32 also when hidden states and weights are bfloat16, and the weight's gradient is summed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LN_2 = math.log(2.0)

UPCAST_ROWS = 8192
"""Rows of a bfloat16 output weight, or of its gradient, that are converted to float32 together."""


def token_logprobs(
    hidden_UH: Tensor,
    weight_VH: Tensor,
    target_U: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at each target, and that distribution's entropy, in nats.

    Args:
        hidden_UH: (U, h) final hidden states. weight_VH: (V, h) output weight. target_U: (U,) int64.
        temperature: divides the logits, > 0.
        chunk_tokens: tokens whose logits exist at one time: memory, never the result.
        entropy_grad: whether the entropy is differentiable too, not only the logprob.
    Returns:
        (U,) logprobs and (U,) entropies, float32 (float64 for float64 inputs), both functions of the whole vocabulary.
    """
    logprob_U, entropy_U = _TokenLogprobs.apply(
        hidden_UH, weight_VH, target_U, 1.0 / temperature, chunk_tokens, entropy_grad
    )
    return logprob_U, entropy_U


class _TokenLogprobs(torch.autograd.Function):
    """Works in units of ln 2, for exp2 is the faster exponential on CPUs, and in place, for memory is the point."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, scale: float, chunk_tokens: int, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprob_U, entropy_U, log_sum_U = (hidden.new_empty(len(target), dtype=dtype) for _ in range(3))
        keeps = len(target) <= chunk_tokens and any(ctx.needs_input_grad)
        kept: tuple[Tensor, ...] = ()
        for rows in _chunks(len(target), chunk_tokens):
            logits_CV = _logits(hidden[rows], weight, scale)
            top_C1 = logits_CV.amax(-1, keepdim=True)
            powers_CV = logits_CV.sub_(top_C1).exp2()
            sum_C1 = powers_CV.sum(-1, keepdim=True)
            log_sum_C1 = sum_C1.log2()
            torch.sub(logits_CV.gather(1, target[rows, None]), log_sum_C1, out=logprob_U[rows, None])
            mean_C = torch.linalg.vecdot(powers_CV, logits_CV).div_(sum_C1[:, 0])
            torch.sub(log_sum_C1[:, 0], mean_C, out=entropy_U[rows])
            torch.add(log_sum_C1, top_C1, out=log_sum_U[rows, None])
            if keeps:  # the backward pass would make this one chunk again: keeping it costs no more memory
                kept = (logits_CV.sub_(log_sum_C1),)
            del logits_CV, powers_CV  # before the next chunk, not after it
        logprob_U.mul_(LN_2)
        entropy_U.mul_(LN_2)
        ctx.save_for_backward(hidden, weight, target, log_sum_U, entropy_U, *kept)
        ctx.scale, ctx.chunk_tokens, ctx.entropy_grad = scale, chunk_tokens, entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_U)
        return logprob_U, entropy_U

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, target, log_sum_U, entropy_U, *kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = weight.new_zeros(weight.shape, dtype=log_sum_U.dtype) if wants_weight else None
        for rows in _chunks(len(target), ctx.chunk_tokens):
            logprobs_CV = kept[0] if kept else _logits(hidden[rows], weight, ctx.scale).sub_(log_sum_U[rows, None])
            of_entropy = (grads[1][rows], entropy_U[rows]) if ctx.entropy_grad else None
            grad_logits = _grad_logits(logprobs_CV, target[rows], grads[0][rows], of_entropy, ctx.scale)
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, hidden[rows])
            del logprobs_CV, grad_logits
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _logits(hidden_CH: Tensor, weight_VH: Tensor, scale: float) -> Tensor:
    """(C, V) logits at the temperature, in units of ln 2."""
    return _product_float32(hidden_CH, weight_VH).mul_(scale / LN_2)


def _product_float32(hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
    """hidden @ weight.T, never rounded to less than float32: a bfloat16 logit of 20 would be wrong by up to 0.06."""
    if hidden_CH.dtype not in (torch.bfloat16, torch.float16):
        return hidden_CH @ weight_VH.T
    if hidden_CH.is_cuda:
        return torch.mm(hidden_CH, weight_VH.T, out_dtype=torch.float32)
    hidden = hidden_CH.float()
    if len(weight_VH) <= UPCAST_ROWS:
        return hidden @ weight_VH.float().T
    logits = hidden.new_empty(len(hidden), len(weight_VH))
    for rows in _chunks(len(weight_VH), UPCAST_ROWS):
        torch.mm(hidden, weight_VH[rows].float().T, out=logits[:, rows])
    return logits


def _grad_logits(
    logprobs_CV: Tensor, target_C: Tensor, grad_C: Tensor, of_entropy: tuple[Tensor, Tensor] | None, scale: float
) -> Tensor:
    """d loss / d logits: g (1[target] - p) from the logprob, and -g' p (log p + H) from the entropy H.

    Leaves `logprobs_CV` (in units of ln 2) as it is: it may have been kept, and backward may run again.
    """
    grad_CV = logprobs_CV.exp2()
    if of_entropy is None:
        grad_CV.mul_((grad_C * -scale)[:, None])
    else:
        of_entropy_C, entropy_C = of_entropy
        slope_CV = torch.mul(logprobs_CV, (of_entropy_C * LN_2)[:, None])
        grad_CV.mul_(slope_CV.add_((grad_C + of_entropy_C * entropy_C)[:, None])).mul_(-scale)
    return grad_CV.scatter_add_(1, target_C[:, None], (grad_C * scale)[:, None])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in total's dtype over chunks, whatever the dtype of one product."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    for rows in _chunks(len(total), UPCAST_ROWS):
        total[rows].add_(left[rows] @ right)
