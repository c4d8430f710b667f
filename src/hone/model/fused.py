"""The decoder's elementwise steps, each with a backward pass of its own.

Autograd would make the same gradients, from more operations on memory and with more kept for them: at a hidden size of
128 those operations, not the matrix products, are most of a training step. Each function is checked against autograd in
float64. All work on any device and in any floating dtype; sums over a row accumulate in float32 or better. Where fused
kernels are on (`kernels.py`), one compiled kernel or two do each forward and each backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model.kernels import fused_kernel, uses_fused_kernels


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467)."""
    if _is_plain(x):
        return _scaled(x, _inverse_rms(x, eps)) * weight
    return _FusedRMSNorm.apply(x, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for (X, 2 f) rows that hold gate and up side by side -> (X, f) (arXiv:2002.05202)."""
    return _gated(gate_up) if _is_plain(gate_up) else _SwiGLU.apply(gate_up)


def split_and_rotate(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    heads: int,
    kv_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts fused projections into q, k and v, norms q and k per head, and applies rotary positions to them.

    Args:
        qkv: (X, Hq + 2 Hkv, D), the heads of q, k and v in that order.
        rotation: `rotation(cos, sin)` of each token's angles (RoPE, arXiv:2104.09864).
        norms: (D,) weights of RMS norms of q and k, as in Qwen3; None where the model has none.
    Returns:
        (X, Hq, D), (X, Hkv, D), (X, Hkv, D); v shares qkv's memory.
    """
    if _is_plain(qkv):
        qk = qkv[:, : heads + kv_heads]
        if norms is not None:
            qk = _scaled(qk, _inverse_rms(qk, eps)).mul_(_weight_of_heads(*norms, heads, kv_heads))
        rotated = _rotate(qk, *rotation, 1.0)
        return rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :]
    q_weight, k_weight = norms or (None, None)
    return _SplitAndRotate.apply(qkv, *rotation, heads, kv_heads, q_weight, k_weight, eps)


def rotation(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(X, D / 2) cosines and sines to the two (X, 1, D) factors that every layer multiplies with."""
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def _is_plain(x: Tensor) -> bool:
    """Whether neither autograd nor a fused kernel need know: nothing is kept. A fused kernel does the same with
    gradients and without, so that a policy's logprobs before an update are those in it to the bit."""
    return not torch.is_grad_enabled() and (torch.compiler.is_compiling() or not uses_fused_kernels(x.device))


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, inverse, weighted = _normed(x, weight=weight, eps=eps)
        ctx.save_for_backward(normed, inverse, weight)
        return weighted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        normed, inverse, weight = ctx.saved_tensors
        is_trained = ctx.needs_input_grad[1]  # or frozen under an adapter
        grad_x, grad_weight = _norm_gradients(grads[0], normed, inverse, weight=weight, is_trained=is_trained)
        return grad_x, grad_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _gated(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _gated_gradient(*ctx.saved_tensors, grads[0])


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        kv_heads: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.heads, ctx.kv_heads = heads, kv_heads
        qk = qkv[:, : heads + kv_heads]
        if q_weight is None or k_weight is None:
            ctx.save_for_backward(cos, sin)
            rotated = _rotated(qk, cos, sin)
        else:
            weight_HD = _weight_of_heads(q_weight, k_weight, heads, kv_heads)
            rotated, inverse = _normed_and_rotated(qk, cos, sin, weight_HD=weight_HD, eps=eps)
            ctx.save_for_backward(cos, sin, qkv, inverse, weight_HD)  # qkv lives on in v anyway
        return rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin, *normed_qk = ctx.saved_tensors
        heads, kv_heads = ctx.heads, ctx.kv_heads
        if not normed_qk:
            return _rotated_gradient(*grads, cos, sin), *(None,) * 7
        qkv, inverse, weight_HD = normed_qk
        qk, is_trained = qkv[:, : heads + kv_heads], ctx.needs_input_grad[5]
        grad_qkv, grad_q_weight, grad_k_weight = _normed_and_rotated_gradients(
            *grads, cos, sin, qk, inverse, weight_HD=weight_HD, heads=heads, is_trained=is_trained
        )
        return grad_qkv, None, None, None, None, grad_q_weight, grad_k_weight, None


# ---- what may be one kernel


@fused_kernel
def _normed(x: Tensor, *, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normed rows, what they were multiplied with, and the rows times the weight."""
    inverse = _inverse_rms(x, eps)
    normed = _scaled(x, inverse)
    return normed, inverse, normed * weight


@fused_kernel
def _norm_gradients(
    grad: Tensor, normed: Tensor, inverse: Tensor, *, weight: Tensor, is_trained: bool
) -> tuple[Tensor, Tensor | None]:
    grad_weight = (grad * normed).sum(0) if is_trained else None
    return _norm_backward(grad * weight, normed, inverse), grad_weight


@fused_kernel
def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@fused_kernel
def _gated_gradient(gate_up: Tensor, grad: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if torch.compiler.is_compiling():
        return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)), dim=-1)
    grad_gate_up = torch.empty_like(gate_up)
    grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
    torch.mul(grad, F.silu(gate), out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
    return grad_gate_up


@fused_kernel
def _rotated(qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotate(qk, cos, sin, 1.0)


@fused_kernel
def _rotated_gradient(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((_rotate(torch.cat((grad_q, grad_k), dim=1), cos, sin, -1.0), grad_v), dim=1)


@fused_kernel
def _normed_and_rotated(
    qk: Tensor, cos: Tensor, sin: Tensor, *, weight_HD: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The rotated heads, and what they were multiplied with by the norm."""
    inverse = _inverse_rms(qk, eps)
    return _rotate(_scaled(qk, inverse).mul_(weight_HD), cos, sin, 1.0), inverse


@fused_kernel
def _normed_and_rotated_gradients(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    qk: Tensor,
    inverse: Tensor,
    *,
    weight_HD: Tensor,
    heads: int,
    is_trained: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of q, k and v side by side, and of the weights of the norms of q and k."""
    grad_qk = _rotate(torch.cat((grad_q, grad_k), dim=1), cos, sin, -1.0)
    normed = _scaled(qk, inverse)
    grad_q_weight = grad_k_weight = None
    if is_trained:
        grad_weight_HD = (grad_qk * normed).sum(0)
        grad_q_weight, grad_k_weight = grad_weight_HD[:heads].sum(0), grad_weight_HD[heads:].sum(0)
    grad_qk = _norm_backward(grad_qk.mul_(weight_HD), normed, inverse)
    return torch.cat((grad_qk, grad_v), dim=1), grad_q_weight, grad_k_weight


def _weight_of_heads(q_weight: Tensor, k_weight: Tensor, heads: int, kv_heads: int) -> Tensor:
    """(Hq + Hkv, D) of (D,) each."""
    return torch.cat((q_weight.expand(heads, -1), k_weight.expand(kv_heads, -1)))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    """(left, right) halves of each head to (left cos - right sin, right cos + left sin); direction -1 turns back."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin, value=direction)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """(..., 1) 1 / sqrt(mean(x^2) + eps), at least float32."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor in x's dtype, multiplied in the factor's."""
    if torch.compiler.is_compiling():
        return (x * factor).to(x.dtype)
    return torch.mul(x, factor, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))


def _norm_backward(grad_normed: Tensor, normed: Tensor, inverse: Tensor) -> Tensor:
    """Gradient of x where normed = x * inverse: what changes the row's own length drops out. Uses up `grad_normed`."""
    along = torch.linalg.vecdot(grad_normed, normed).unsqueeze(-1).div_(-normed.shape[-1])
    return _scaled(grad_normed.addcmul_(normed, along), inverse)
