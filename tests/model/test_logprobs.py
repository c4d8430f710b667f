"""Chunked logprobs against log_softmax over full logits, in values and gradients."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hone.model import logprobs
from hone.model.logprobs import LogitMap, token_logprobs


def inputs(tokens: int = 13, hidden: int = 6, vocab: int = 17, dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(tokens, hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(),
        torch.randn(vocab, hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(),
        torch.randint(vocab, (tokens,), generator=generator),
    )


def naive(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = (hidden @ weight.T / temperature).log_softmax(-1)
    return logprobs.gather(1, target[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def test_numbers_by_hand():
    """Logits (ln 3, 0) give probabilities 3/4 and 1/4; at temperature 1/2 they give 9/10 and 1/10."""
    hidden, weight = torch.tensor([[1.0], [1.0]]), torch.tensor([[math.log(3)], [0.0]])
    target = torch.tensor([0, 1])
    logprob, entropy = token_logprobs(hidden, weight, target, temperature=1.0, chunk_tokens=8)
    assert logprob.exp().tolist() == pytest.approx([0.75, 0.25])
    assert entropy.tolist() == pytest.approx([0.5623351] * 2)
    logprob, _ = token_logprobs(hidden, weight, target, temperature=0.5, chunk_tokens=8)
    assert logprob.exp().tolist() == pytest.approx([0.9, 0.1])


@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_equals_full_logits_in_float64(chunk_tokens, temperature, entropy_grad):
    hidden, weight, target = inputs()
    ours = token_logprobs(
        hidden, weight, target, temperature=temperature, chunk_tokens=chunk_tokens, entropy_grad=entropy_grad
    )
    full = naive(hidden, weight, target, temperature)
    torch.testing.assert_close(ours, full, rtol=1e-12, atol=1e-12)
    direction = torch.linspace(-1, 2, len(target), dtype=torch.float64)

    def loss(logprob: Tensor, entropy: Tensor) -> Tensor:
        return (direction * logprob).sum() + entropy_grad * (direction.flip(0) * entropy).sum()

    grads = torch.autograd.grad(loss(*ours), (hidden, weight))
    torch.testing.assert_close(grads, torch.autograd.grad(loss(*full), (hidden, weight)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("chunk_tokens", [5, 100])
def test_gradcheck(chunk_tokens):
    hidden, weight, target = inputs()

    def function(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, weight, target, temperature=0.8, chunk_tokens=chunk_tokens, entropy_grad=True)

    assert torch.autograd.gradcheck(function, (hidden, weight))


@pytest.mark.parametrize("logit_map", [LogitMap(0.5), LogitMap(cap=1.5), LogitMap(2.0, 3.0)], ids=str)
@pytest.mark.parametrize("chunk_tokens", [5, 100])
def test_gradcheck_of_mapped_logits(logit_map, chunk_tokens):
    hidden, weight, target = inputs()

    def function(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden,
            weight,
            target,
            temperature=0.8,
            chunk_tokens=chunk_tokens,
            entropy_grad=True,
            logit_map=logit_map,
        )

    assert torch.autograd.gradcheck(function, (hidden, weight))


@pytest.mark.parametrize("vocab", [17, 20_000])
def test_bfloat16_inputs_lose_nothing_in_the_logits(vocab):
    hidden, weight, target = inputs(tokens=40, hidden=64, vocab=vocab, dtype=torch.bfloat16)
    ours = token_logprobs(hidden, weight, target, temperature=1.0, chunk_tokens=16)
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    full = naive(*exact, target, 1.0)
    assert ours[0].dtype == ours[1].dtype == torch.float32
    torch.testing.assert_close(ours[0].double(), full[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1].double(), full[1], rtol=1e-4, atol=1e-4)
    for mine, true in zip(
        torch.autograd.grad(ours[0].sum(), (hidden, weight)), torch.autograd.grad(full[0].sum(), exact), strict=True
    ):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - true).norm() < 0.005 * true.norm()


def test_weight_gradient_does_not_drift_with_the_number_of_chunks():
    """1,000 chunks that each add a little: bfloat16 sums would stop growing."""
    hidden = torch.ones(1000, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(1000, dtype=torch.int64)
    logprob, _ = token_logprobs(hidden, weight, target, temperature=1.0, chunk_tokens=1)
    logprob.sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [[500.0], [-500.0]]


def test_frozen_inputs_get_no_gradient():
    hidden, weight, target = inputs()
    logprob, entropy = token_logprobs(hidden, weight.detach(), target, temperature=1.0, chunk_tokens=4)
    assert logprob.requires_grad and not entropy.requires_grad
    logprob.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_no_tokens():
    hidden, weight, target = inputs(tokens=0)
    logprob, entropy = token_logprobs(hidden, weight, target, temperature=1.0, chunk_tokens=4)
    assert logprob.shape == entropy.shape == (0,)
    logprob.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


class Added(TorchDispatchMode):
    """Records what is called, and adds nothing: this torch may know no GPU."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return func(*args)
        self.calls.append((func, args, kwargs))
        return kwargs["out"]


def test_on_cuda_a_product_is_added_in_float32_at_once():
    """Whatever the vocabulary; of fake tensors, without numbers."""
    with FakeTensorMode():
        total = torch.empty(20_000, 8, device="cuda")
        left, right = (torch.empty(*size, device="cuda", dtype=torch.bfloat16) for size in ((20_000, 5), (5, 8)))
        with Added() as added:
            logprobs._add_product(total, left, right)
    ((operator, args, named),) = added.calls
    assert operator is torch.ops.aten.addmm.dtype_out and named["out"] is total
    assert args == (total, left, right, torch.float32)
