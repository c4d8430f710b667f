"""The ragged plan of the GPU's attention equals the CPU's, with its kernels replaced by plain products."""

from itertools import pairwise

import pytest
import torch
from test_attention import LARGE, LONG, SMALL, layout_of, random_qkv
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hone.model.attention import shared_prompt_attention
from hone.model.layout import Layout
from hone.model.varlen_attention import FLASH, RaggedCall, RaggedKernels, RaggedPlan, _operators, varlen_attention


def segments(ragged: RaggedCall):
    assert ragged.query_ends.dtype == ragged.key_ends.dtype == torch.int32
    queries, keys = (list(pairwise(ends.tolist())) for ends in (ragged.query_ends, ragged.key_ends))
    assert max(b - a for a, b in queries) == ragged.longest_query
    assert max(b - a for a, b in keys) == ragged.longest_key
    return [(slice(*q), slice(*k)) for q, k in zip(queries, keys, strict=True)]


def scores_of(q, k, ragged):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    if ragged.is_causal:  # flash attention's queries are the last tokens of the keys' sequence
        back = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        assert len(k) == len(q) or ragged.window, "kernels may differ in what causal means otherwise"
        scores = scores.masked_fill((back < 0) | (back >= (ragged.window or len(k))), -torch.inf)
    return scores


def plain_forward(q, k, v, ragged):
    out, normaliser = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan, dtype=q.dtype)
    for queries, keys in segments(ragged):
        scores = scores_of(q[queries], k[keys], ragged)
        normaliser[:, queries] = scores.logsumexp(-1)
        values = v[keys].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        out[queries] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values)
    return out, normaliser


def plain_backward(grad_out, q, k, v, out, normaliser, ragged):
    """Flash attention's own formulas (arXiv:2307.08691, algorithm 2)."""
    grads, share = [torch.zeros_like(x) for x in (q, k, v)], q.shape[1] // k.shape[1]
    for queries, keys in segments(ragged):
        scores = scores_of(q[queries], k[keys], ragged)
        powers = (scores - normaliser[:, queries, None]).exp()
        wide_k, wide_v = (x[keys].repeat_interleave(share, dim=1) for x in (k, v))
        grad_powers = torch.einsum("ihd,jhd->hij", grad_out[queries], wide_v)
        dots = (grad_out[queries] * out[queries]).sum(-1).T[:, :, None]
        grad_scores = powers * (grad_powers - dots) * q.shape[-1] ** -0.5
        grads[0][queries] += torch.einsum("hij,jhd->ihd", grad_scores, wide_k)
        of_k = torch.einsum("hij,ihd->jhd", grad_scores, q[queries])
        of_v = torch.einsum("hij,ihd->jhd", powers, grad_out[queries])
        for total, part in ((grads[1], of_k), (grads[2], of_v)):
            total[keys] += part.unflatten(1, (-1, share)).sum(2)
    return tuple(grads)


PLAIN = RaggedKernels(plain_forward, plain_backward)
ONE = layout_of([9], [1, 0], group=1)  # no response has an input


@pytest.mark.parametrize("layout", [SMALL, LARGE, LONG, ONE], ids=["small", "large", "long", "prompt alone"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
def test_equals_the_blocks_forward_and_backward(layout, heads, kv_heads):
    q, k, v = random_qkv(layout, heads, kv_heads)
    found, expected = varlen_attention(layout, PLAIN)(0, q, k, v), shared_prompt_attention(layout)(0, q, k, v)
    n = layout.num_tokens
    torch.testing.assert_close(found[:n], expected[:n], atol=1e-13, rtol=0)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    direction[n:] = 0  # nothing reads filler
    ours_all, theirs_all = (torch.autograd.grad(out, (q, k, v), direction) for out in (found, expected))
    for ours, theirs in zip(ours_all, theirs_all, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("layout", "window", "has_sinks"),
    [(SMALL, 1, False), (LARGE, 4, True), (LARGE, None, True), (LONG, 270, True)],
    ids=["one token", "squares and tiles", "sinks", "tiles"],
)
def test_windows_and_sinks_are_those_of_the_blocks(layout, window, has_sinks):
    q, k, v = random_qkv(layout, 4, 2)
    sink_H = torch.tensor([-9.0, 0.1, 2.0, 40.0], dtype=q.dtype, requires_grad=True) if has_sinks else None
    inputs, n = [x for x in (q, k, v, sink_H) if x is not None], layout.num_tokens
    found, expected = (
        attend(0, q, k, v, window, sink_H)
        for attend in (varlen_attention(layout, PLAIN), shared_prompt_attention(layout))
    )
    torch.testing.assert_close(found[:n], expected[:n], atol=1e-13, rtol=0)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    direction[n:] = 0  # nothing reads filler
    ours, theirs = (torch.autograd.grad(out, inputs, direction) for out in (found, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_flash_attention_takes_windows_and_sinks():
    """Operators of GPUs, without their kernels: shapes and dtypes, forward and backward."""
    layout = layout_of([40, 300], [30, 800], group=2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(len(layout.token_ids_X), 4, 64, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(len(layout.token_ids_X), 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        inputs = (q, k, v, torch.empty(4, dtype=torch.bfloat16, requires_grad=True))
        with Operators() as forward:
            out = varlen_attention(layout, FLASH)(0, q, k, v, 128, inputs[-1])
        grads = torch.autograd.grad(out, inputs, torch.empty_like(out))
    assert len([name for name in forward.names if "varlen" in name]) == 1
    assert [(x.shape, x.dtype) for x in (q, *inputs)] == [(x.shape, x.dtype) for x in (out, *grads)]


class Operators(TorchDispatchMode):
    """Names of operators that launch a kernel or more."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


VIEWS = ("permute", "unsqueeze", "detach", "view", "alias", "empty", "add.")
NO_KERNELS = ("prim.", *(f"aten.{name}" for name in VIEWS))
"""Views, memory, and the sum of the two gradients that this test's one tensor for keys and values gets."""


def test_a_layer_is_a_handful_of_operators_however_long_and_many_the_sequences_are():
    counts = []
    for layout in (layout_of([40, 300], [30, 800], group=8), layout_of([4000], [900], group=1)):
        with FakeTensorMode(allow_non_fake_inputs=True):
            q = torch.empty(len(layout.token_ids_X), 4, 64, dtype=torch.bfloat16, requires_grad=True)
            k = torch.empty(len(layout.token_ids_X), 2, 64, dtype=torch.bfloat16, requires_grad=True)
            attend = varlen_attention(layout, FLASH)
            attend(0, q, k, k)  # the first layer puts the plan on the device
            with Operators() as forward:
                out = attend(1, q, k, k)
            with Operators() as backward:
                torch.autograd.grad(out, (q, k), torch.empty_like(out))
        assert [name for name in forward.names if "varlen" in name] == ["torch_attn._varlen_attn.default"] * 2
        assert len([name for name in backward.names if "varlen" in name]) == 2
        counts.append([sum(not name.startswith(NO_KERNELS) for name in mode.names) for mode in (forward, backward)])
    expected = [16, 11] if _operators().groups_queries else [24, 27]  # before torch 2.13 heads are repeated
    assert counts == [expected] * 2, "they do not depend on the layout"


def test_a_layout_of_32k_tokens_makes_no_tiles():
    layout = Layout.build([list(range(100))], [0], [[1] * 32_000])
    plan = RaggedPlan(layout)
    ragged, responses, prompts = plan.shared
    sizes = [x.nbytes for x in (responses, prompts, plan.own.query_ends, ragged.query_ends, ragged.key_ends)]
    assert sum(sizes) < 260_000, "8 bytes a token: where it stands"
    assert "blocks_and_slots" not in vars(layout.tiling)
