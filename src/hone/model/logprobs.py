"""Logprobs and entropies of given tokens from hidden states, without ever holding the logits of all tokens.

A vocabulary of 150,000 makes one token's logits 600 kB. Here they exist for `chunk_tokens` tokens at a time: the
backward pass makes each chunk's logits again (one more matrix product of three) rather than keep them. Arithmetic on
logits is float32 also when hidden states and weights are bfloat16, and the weight's gradient is summed in float32.

Architectures that scale their logits or cap them softly do so elementwise (`LogitMap`), in the same chunks.

Where the vocabulary is divided over ranks (`parallel.py`), each makes the logits of its own rows, and what a softmax
needs of all of them is reduced: per chunk the largest logit and three sums of each token, and on the way back, once,
the gradient of the hidden states.

Where fused kernels are on (`kernels.py`), a chunk of products is passed over three times: for the largest, for
the sums, and on the way back once to be read and its gradient written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hone.model.kernels import fused_kernel, uses_fused_kernels

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedConfig

LN_2 = math.log(2.0)

UPCAST_ROWS = 8192
"""Rows of a bfloat16 output weight, or of its gradient, that are converted to float32 together."""


@dataclass(frozen=True)
class LogitMap:
    """What an architecture does to each number of hidden @ weight.T to make it a logit."""

    scale: float = 1.0
    """Multiplies it first (Cohere, Granite, Falcon-H1)."""
    cap: float | None = None
    """Then bounds it softly: cap * tanh(x / cap) (Gemma 2)."""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> LogitMap:
        """Of a config.json, as Transformers' class of its model_type reads it."""
        keys = config.to_dict()
        scaling = keys.get("logits_scaling") or 1.0
        scale = scaling if config.model_type == "hyperclovax" else 1.0 / scaling
        scale *= (keys.get("logit_scale") or 1.0) * (keys.get("lm_head_multiplier") or 1.0)
        return cls(scale, keys.get("final_logit_softcapping") or keys.get("logits_soft_cap"))

    def __call__(self, products: Tensor) -> Tensor:
        """Logits from products, in place."""
        if self.scale != 1.0:
            products.mul_(self.scale)
        return products if self.cap is None else products.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: Tensor) -> Tensor:
        """d logit / d product where there is a cap, from logits, in place."""
        assert self.cap is not None
        return logits.div_(self.cap).square_().neg_().add_(1.0).mul_(self.scale)


PLAIN = LogitMap()


def token_logprobs(
    hidden_UH: Tensor,
    weight_VH: Tensor,
    target_U: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy_grad: bool = False,
    logit_map: LogitMap = PLAIN,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at each target, and that distribution's entropy, in nats.

    Logits are `logit_map` of hidden @ weight.T.

    Args:
        hidden_UH: (U, h) final hidden states. weight_VH: (V, h) output weight, or a DTensor whose rows are divided
            over the ranks of one group, which then all call this with the same other arguments. target_U: (U,) int64.
        temperature: divides the logits, > 0.
        chunk_tokens: tokens whose logits exist at one time: memory, never the result.
        entropy_grad: whether the entropy is differentiable too, not only the logprob.
        logit_map: the model's; see `CausalModel.logit_map`.
    Returns:
        (U,) logprobs and (U,) entropies, float32 (float64 for float64 inputs), both functions of the whole vocabulary.
    """
    words, weight_VH = _Words.of(weight_VH)
    logprob_U, entropy_U = _TokenLogprobs.apply(
        hidden_UH, weight_VH, target_U, words, logit_map, 1.0 / temperature, chunk_tokens, entropy_grad
    )
    return logprob_U, entropy_U


@dataclass(frozen=True)
class _Words:
    """Which tokens' logits this rank makes, and how the ranks find out about those of all."""

    first: int
    group: ProcessGroup | None
    """None: all are made here."""

    @classmethod
    def of(cls, weight_VH: Tensor) -> tuple[_Words, Tensor]:
        """And the rows of the weight that are here."""
        if not isinstance(weight_VH, DTensor):
            return cls(0, None), weight_VH
        group = weight_VH.device_mesh.get_group()
        most = -(-len(weight_VH) // dist.get_world_size(group))
        return cls(most * dist.get_rank(group), group), weight_VH.to_local()

    def largest(self, top_C1: Tensor) -> Tensor:
        """The largest of the ranks' values."""
        if self.group is not None:
            dist.all_reduce(top_C1, dist.ReduceOp.MAX, group=self.group)
        return top_C1

    def total(self, *sums_C: Tensor) -> tuple[Tensor, ...]:
        """The sums over the ranks of several things."""
        if self.group is None:
            return sums_C
        packed = torch.stack(sums_C)
        dist.all_reduce(packed, group=self.group)
        return packed.unbind()

    def pick(self, value_CV: Tensor, target_C: Tensor) -> Tensor:
        """(C,) each token's value at its target; 0 where that is another rank's."""
        if self.group is None:
            return value_CV.gather(1, target_C[:, None])[:, 0]
        column_C, is_here_C = self._columns(value_CV, target_C)
        return value_CV.gather(1, column_C[:, None])[:, 0] * is_here_C

    def add(self, total_CV: Tensor, target_C: Tensor, value_C: Tensor) -> Tensor:
        """Adds to each token's entry at its target, where it is here."""
        if self.group is not None:
            target_C, is_here_C = self._columns(total_CV, target_C)
            value_C = value_C * is_here_C
        return total_CV.scatter_add_(1, target_C[:, None], value_C[:, None])

    def _columns(self, value_CV: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor]:
        column_C = target_C - self.first
        last = value_CV.shape[1] - 1
        return column_C.clamp(0, last), (column_C >= 0) & (column_C <= last)


class _TokenLogprobs(torch.autograd.Function):
    """Works in units of ln 2, for exp2 is the faster exponential on CPUs, and in place, for memory is the point."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        words: _Words,
        logit_map: LogitMap,
        scale: float,
        chunk_tokens: int,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprob_U, entropy_U, log_sum_U = (hidden.new_empty(len(target), dtype=dtype) for _ in range(3))
        keeps = len(target) <= chunk_tokens and any(ctx.needs_input_grad)
        kept: tuple[Tensor, ...] = ()
        fuses, factor = uses_fused_kernels(hidden.device), scale / LN_2
        softmax_sums = _fused_sums if fuses else _sums
        for rows in _chunks(len(target), chunk_tokens):
            products_CV = product_float32(hidden[rows], weight)
            top_C1, sum_C, dot_C, logit_C = softmax_sums(products_CV, target[rows], words, logit_map, factor)
            log_sum_C = sum_C.log2()
            torch.sub(logit_C, log_sum_C, out=logprob_U[rows])
            torch.sub(log_sum_C, dot_C.div_(sum_C), out=entropy_U[rows])
            torch.add(log_sum_C, top_C1[:, 0], out=log_sum_U[rows])
            if keeps:  # the backward pass would make this one chunk again: keeping it costs no more memory
                kept = (products_CV if fuses else products_CV.sub_(log_sum_C[:, None]),)
            del products_CV  # before the next chunk, not after it
        logprob_U.mul_(LN_2)
        entropy_U.mul_(LN_2)
        ctx.save_for_backward(hidden, weight, target, log_sum_U, entropy_U, *kept)
        ctx.words, ctx.logit_map, ctx.scale, ctx.fuses = words, logit_map, scale, fuses
        ctx.chunk_tokens, ctx.entropy_grad = chunk_tokens, entropy_grad
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
            products_CV = kept[0] if kept else product_float32(hidden[rows], weight)
            of_entropy = (grads[1][rows], entropy_U[rows]) if ctx.entropy_grad else ()
            of_chunk = (products_CV, log_sum_U[rows], target[rows], grads[0][rows], *of_entropy)
            del products_CV
            if ctx.fuses:
                grad_logits = _fused_grad_logits(
                    *of_chunk,
                    first=ctx.words.first,
                    logit_scale=ctx.logit_map.scale,
                    cap=ctx.logit_map.cap,
                    factor=ctx.scale / LN_2,
                    dtype=weight.dtype,
                )
            else:
                grad_logits = _grad_logits(
                    *of_chunk, words=ctx.words, logit_map=ctx.logit_map, scale=ctx.scale, is_kept=bool(kept)
                )
                grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, hidden[rows])
            del of_chunk, grad_logits
        if grad_hidden is not None:
            (grad_hidden,) = ctx.words.total(grad_hidden)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *(None,) * 6


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _sums(
    products_CV: Tensor, target_C: Tensor, words: _Words, logit_map: LogitMap, factor: float
) -> tuple[Tensor, ...]:
    """The largest logit (C, 1), and of the powers of 2 of the logits less that: (C,) sum, (C,) sum of power times
    logit, and (C,) the target's logit. The products become these logits, in place."""
    logits_CV = logit_map(products_CV).mul_(factor)
    top_C1 = words.largest(logits_CV.amax(-1, keepdim=True))
    powers_CV = logits_CV.sub_(top_C1).exp2()
    sums = powers_CV.sum(-1), torch.linalg.vecdot(powers_CV, logits_CV), words.pick(logits_CV, target_C)
    return top_C1, *words.total(*sums)


def _fused_sums(
    products_CV: Tensor, target_C: Tensor, words: _Words, logit_map: LogitMap, factor: float
) -> tuple[Tensor, ...]:
    """Like `_sums`; the products stay as they are. A logit grows with its product, so the largest is the largest's."""
    top_C1 = words.largest(logit_map(products_CV.amax(-1, keepdim=True)).mul_(factor))
    of_map = {"logit_scale": logit_map.scale, "cap": logit_map.cap, "factor": factor}
    return top_C1, *words.total(*_kernel_of_sums(products_CV, top_C1, target_C, first=words.first, **of_map))


@fused_kernel
def _kernel_of_sums(
    products_CV: Tensor,
    top_C1: Tensor,
    target_C: Tensor,
    *,
    first: int,
    logit_scale: float,
    cap: float | None,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    logits_CV = _mapped(products_CV, logit_scale, cap) * factor - top_C1
    powers_CV = logits_CV.exp2()
    target_logit_C = torch.where(_is_target(logits_CV, target_C, first), logits_CV, 0.0).sum(-1)
    return powers_CV.sum(-1), (powers_CV * logits_CV).sum(-1), target_logit_C


@fused_kernel
def _fused_grad_logits(
    products_CV: Tensor,
    log_sum_C: Tensor,
    target_C: Tensor,
    grad_C: Tensor,
    grad_entropy_C: Tensor | None = None,
    entropy_C: Tensor | None = None,
    *,
    first: int,
    logit_scale: float,
    cap: float | None,
    factor: float,
    dtype: torch.dtype,
) -> Tensor:
    """d loss / d products, in `dtype`; see `_grad_logits`."""
    mapped_CV = _mapped(products_CV, logit_scale, cap)
    logprobs_CV = mapped_CV * factor - log_sum_C[:, None]
    from_logprob_CV = torch.where(_is_target(logprobs_CV, target_C, first), grad_C[:, None], 0.0)
    slope_C1 = grad_C[:, None]
    if grad_entropy_C is not None and entropy_C is not None:
        slope_C1 = slope_C1 + grad_entropy_C[:, None] * (logprobs_CV * LN_2 + entropy_C[:, None])
    grad_CV = (from_logprob_CV - logprobs_CV.exp2() * slope_C1) * (factor * LN_2 * logit_scale)
    if cap is not None:
        grad_CV = grad_CV * (1.0 - (mapped_CV / cap).square())
    return grad_CV.to(dtype)


def _mapped(products: Tensor, scale: float, cap: float | None) -> Tensor:
    """`LogitMap`, not in place."""
    products = products * scale
    return products if cap is None else cap * torch.tanh(products / cap)


def _is_target(value_CV: Tensor, target_C: Tensor, first: int) -> Tensor:
    """(C, V) whether a column is the row's target; all False where that is another rank's."""
    column_V = torch.arange(value_CV.shape[1], device=value_CV.device, dtype=torch.int32)
    return column_V == (target_C - first)[:, None].to(torch.int32)


def product_float32(hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
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
    chunk_CV: Tensor,
    log_sum_C: Tensor,
    target_C: Tensor,
    grad_C: Tensor,
    grad_entropy_C: Tensor | None = None,
    entropy_C: Tensor | None = None,
    *,
    words: _Words,
    logit_map: LogitMap,
    scale: float,
    is_kept: bool,
) -> Tensor:
    """d loss / d products: g (1 - p) at the target and -g p elsewhere from the logprob, and -g' p (log p + H) from the
    entropy H, times the slope of the logits.

    Args:
        chunk_CV: products, which are used up; or where `is_kept` their logprobs in units of ln 2, which stay as they
            are, for backward may run again.
    """
    logprobs_CV = chunk_CV if is_kept else logit_map(chunk_CV).mul_(scale / LN_2).sub_(log_sum_C[:, None])
    grad_CV = logprobs_CV.exp2()
    if grad_entropy_C is None or entropy_C is None:
        grad_CV.mul_((grad_C * -scale)[:, None])
    else:
        slope_CV = torch.mul(logprobs_CV, (grad_entropy_C * LN_2)[:, None])
        grad_CV.mul_(slope_CV.add_((grad_C + grad_entropy_C * entropy_C)[:, None])).mul_(-scale)
        del slope_CV
    words.add(grad_CV, target_C, grad_C * scale)
    if logit_map.cap is not None:
        grad_CV.mul_(logit_map.slope((logprobs_CV + log_sum_C[:, None]).mul_(LN_2 / scale)))
    elif logit_map.scale != 1.0:
        grad_CV.mul_(logit_map.scale)
    return grad_CV


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in total's dtype over chunks. On a CPU one product is rounded to its factors'."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    if left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
        return
    for rows in _chunks(len(total), UPCAST_ROWS):
        total[rows].add_(left[rows] @ right)
