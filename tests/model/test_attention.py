"""Shared-prompt attention equals plain causal attention over each sample's own sequence, forward and backward."""

import pytest
import torch
from torch import Tensor

from hone.model.attention import shared_prompt_attention
from hone.model.layout import Layout


def random_qkv(layout: Layout, heads: int, kv_heads: int, dtype=torch.float64, size: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = len(layout.token_ids_X), size
    return [
        torch.randn((shape[0], h, size), generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def plain_attention(layout: Layout, q: Tensor, k: Tensor, v: Tensor, window: int = 9999, sink_H=None) -> Tensor:
    """Row by row: softmax(q k / sqrt(D)) v over each distinct sample's real tokens, the results put back in X."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out = torch.zeros_like(q)
    rows = layout.rows()
    for index_L, real_L in zip(rows.index_RL, rows.real_RL, strict=True):
        at = index_L[real_L]
        scores = torch.einsum("ihd,jhd->hij", q[at], k[at]) * q.shape[-1] ** -0.5
        back = torch.arange(len(at))[:, None] - torch.arange(len(at))
        scores = scores.masked_fill((back < 0) | (back >= window), -torch.inf)
        if sink_H is not None:
            scores = torch.cat((scores, sink_H[:, None, None].expand(-1, len(at), 1)), dim=-1)
        weights = scores.softmax(-1)[..., : len(at)]
        out = out.index_put((at,), torch.einsum("hij,jhd->ihd", weights, v[at]))
    return out


def layout_of(prompt_sizes, response_sizes, group: int) -> Layout:
    prompts = [list(range(n)) for n in prompt_sizes]
    responses = [[100 + j] * n for n in response_sizes for j in range(group)]
    prompt_S = [s * len(prompts) // len(responses) for s in range(len(responses))]
    return Layout.build(prompts, prompt_S, responses)


SMALL = layout_of([2, 3], [3, 0, 2, 1], group=2)  # each group one square
LARGE = layout_of([70, 3, 5], [9, 2, 30, 4, 1, 3], group=3)  # squares, shared prompts and padding together
LONG = layout_of([600], [300, 280], group=1)  # cut into several tiles


@pytest.mark.parametrize("layout", [SMALL, LARGE, LONG], ids=["small", "large", "long"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
def test_equals_attention_over_each_sequence(layout, heads, kv_heads):
    q, k, v = random_qkv(layout, heads, kv_heads)
    out, plain = shared_prompt_attention(layout)(0, q, k, v), plain_attention(layout, q, k, v)
    torch.testing.assert_close(out, plain, atol=1e-12, rtol=0)
    # A position that only earlier samples of the row loop overwrite has the same value in each of them.
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), direction), torch.autograd.grad(plain, (q, k, v), direction), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)


@pytest.mark.parametrize(
    ("layout", "window", "has_sinks"),
    [(SMALL, 1, False), (LARGE, 4, True), (LARGE, None, True), (LONG, 270, True)],
    ids=["one token", "squares and tiles", "sinks", "tiles"],
)
def test_windows_and_sinks(layout, window, has_sinks):
    q, k, v = random_qkv(layout, 4, 2)
    sink_H = torch.tensor([-9.0, 0.1, 2.0, 40.0], dtype=q.dtype, requires_grad=True) if has_sinks else None
    inputs = [x for x in (q, k, v, sink_H) if x is not None]
    out = shared_prompt_attention(layout)(0, q, k, v, window, sink_H)
    plain = plain_attention(layout, q, k, v, window or 9999, sink_H)
    torch.testing.assert_close(out, plain, atol=1e-12, rtol=0)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    ours, theirs = (torch.autograd.grad(one, inputs, direction) for one in (out, plain))
    torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)


@pytest.mark.parametrize("layout", [SMALL, layout_of([66], [3, 2], group=2)], ids=["squares", "shared"])
def test_gradcheck(layout):
    q, k, v = random_qkv(layout, 2, 1, size=2)
    assert torch.autograd.gradcheck(lambda *x: shared_prompt_attention(layout)(0, *x), (q, k, v), fast_mode=True)


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_views_of_one_tensor_are_as_good_as_three(layout):
    q, k, v = random_qkv(layout, 4, 2)
    fused = torch.cat((q, k, v), dim=1).detach()
    views = fused.split((4, 2, 2), dim=1)
    attend = shared_prompt_attention(layout)
    assert torch.equal(attend(0, *views), attend(1, q, k, v))


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_bfloat16_is_close(layout):
    exact = random_qkv(layout, 4, 2)
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    out, want = shared_prompt_attention(layout)(0, *rounded), shared_prompt_attention(layout)(0, *exact)
    torch.testing.assert_close(out.double(), want, atol=0.06, rtol=0)
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), rounded), torch.autograd.grad(want.sum(), exact), strict=True
    ):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), theirs, atol=0.1, rtol=0.05)


def test_scores_are_not_rounded_before_the_softmax():
    """Large ones, which bfloat16 would round by some hundredths: the error would be twice as large as it is."""
    q, k, v = (x.detach().mul(factor).bfloat16() for x, factor in zip(random_qkv(LARGE, 4, 2), (6, 1, 1), strict=True))
    exact = shared_prompt_attention(LARGE)(0, q.double(), k.double(), v.double())[: LARGE.num_tokens]
    found = shared_prompt_attention(LARGE)(0, q, k, v)[: LARGE.num_tokens].double()
    assert (found - exact).norm() / exact.norm() < 4e-3


def test_huge_scores_stay_finite():
    q, k, v = (x.detach().float() * 1e3 for x in random_qkv(LARGE, 2, 1))
    assert shared_prompt_attention(LARGE)(0, q, k, v).isfinite().all()
