"""The fused elementwise steps against the plain formulas, and their gradients against autograd in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model.fused import rms_norm, rotation, split_and_rotate, swiglu

X, HEADS, KV_HEADS, SIZE = 7, 4, 2, 6


def random(*shape: int, dtype=torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def plain_split_and_rotate(qkv: Tensor, cos: Tensor, sin: Tensor, norms) -> tuple[Tensor, ...]:
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    if norms is not None:
        q, k = plain_norm(q, norms[0]), plain_norm(k, norms[1])

    def turn(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos[:, None] - right * sin[:, None], right * cos[:, None] + left * sin[:, None]), -1)

    return turn(q), turn(k), v


def check(ours, plain, inputs: tuple[Tensor, ...], tolerance: float = 1e-12) -> None:
    """Same outputs, to the bit also without autograd, and along one random direction same gradients."""
    with torch.no_grad():
        without_autograd = ours(*inputs)
    mine, reference = ours(*inputs), plain(*inputs)
    torch.testing.assert_close(without_autograd, mine, atol=0, rtol=0)
    mine, reference = (x if isinstance(x, tuple) else (x,) for x in (mine, reference))
    torch.testing.assert_close(mine, reference, atol=tolerance, rtol=0)
    directions = tuple(random(*x.shape, dtype=x.dtype, seed=1).detach() for x in reference)
    torch.testing.assert_close(
        torch.autograd.grad(mine, inputs, directions),
        torch.autograd.grad(reference, inputs, directions),
        atol=20 * tolerance,
        rtol=0,
    )


def test_rms_norm_by_hand():
    """Rows of (3, 4) have a root mean square of sqrt(12.5)."""
    out = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    assert out.tolist() == [pytest.approx([3 / 12.5**0.5, 8 / 12.5**0.5])]


def test_rms_norm():
    check(lambda x, w: rms_norm(x, w, 1e-6), plain_norm, (random(X, 10), random(10, seed=2)))


def test_swiglu():
    def plain(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    check(swiglu, plain, (random(X, 20),))


@pytest.mark.parametrize("normed", [False, True])
def test_split_and_rotate(normed):
    cos, sin = random(X, SIZE // 2, seed=3).detach(), random(X, SIZE // 2, seed=4).detach()
    qkv, norms = random(X, HEADS + 2 * KV_HEADS, SIZE), (random(SIZE, seed=5), random(SIZE, seed=6))

    def ours(qkv: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
        return split_and_rotate(qkv, rotation(cos, sin), HEADS, KV_HEADS, norms or None, 1e-6)  # type: ignore[arg-type]

    def plain(qkv: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
        return plain_split_and_rotate(qkv, cos, sin, norms or None)

    check(ours, plain, (qkv, *norms) if normed else (qkv,))


def test_bfloat16_norm_sums_in_float32():
    """1,024 numbers near 1: a bfloat16 sum would stop at 256."""
    x = 1 + 0.01 * random(4, 1024).detach()
    out = rms_norm(x.bfloat16(), torch.ones(1024, dtype=torch.bfloat16), 1e-6)
    torch.testing.assert_close(out.double(), plain_norm(x, torch.ones(1024, dtype=torch.float64)), atol=0.008, rtol=0)


@pytest.mark.parametrize("normed", [False, True])
def test_bfloat16_gradients_are_close(normed):
    cos, sin = torch.linspace(0, 1, 3).expand(X, 3), torch.linspace(1, 0, 3).expand(X, 3)
    qkv, norms = random(X, HEADS + 2 * KV_HEADS, SIZE), (random(SIZE, seed=5), random(SIZE, seed=6))
    direction = random(X, HEADS, SIZE, seed=7).detach()

    def gradient(dtype: torch.dtype) -> Tensor:
        x = qkv.detach().to(dtype).requires_grad_()
        weights = tuple(n.detach().to(dtype) for n in norms) if normed else None
        q, _, v = split_and_rotate(x, rotation(cos.to(dtype), sin.to(dtype)), HEADS, KV_HEADS, weights, 1e-6)  # type: ignore[arg-type]
        (grad,) = torch.autograd.grad((q * direction.to(dtype)).sum() + v.square().sum(), x)
        return grad.double()

    torch.testing.assert_close(gradient(torch.bfloat16), gradient(torch.float64), atol=0.08, rtol=0.05)
