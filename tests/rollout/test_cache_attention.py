"""Attention over the engine's cache as a GPU computes it, on a CPU: the same numbers by other calls."""

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hone.rollout import cache
from hone.rollout.cache import Grouping, KeyValueStore, masked_attention, step_attention


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_repeated_heads_are_grouped_heads(kv_heads):
    q, k, v = (torch.randn(3, heads, length, 8) for heads, length in ((4, 5), (kv_heads, 9), (kv_heads, 9)))
    seen = torch.rand(3, 1, 5, 9) < 0.5
    seen[..., 0] = True
    grouped, repeated = (masked_attention(q, k, v, seen, repeats=repeats) for repeats in (False, True))
    torch.testing.assert_close(repeated, grouped)


class Calls(TorchDispatchMode):
    """Records operators on fake tensors of a GPU, and what they return."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.found.append((func, getattr(result, "dtype", None)))
        return result


def test_on_cuda_scores_are_not_rounded():
    aten = torch.ops.aten
    with FakeTensorMode():
        q, k = (torch.empty(2, length, 8, device="cuda", dtype=torch.bfloat16) for length in (3, 5))
        with Calls() as calls:
            cache._products(q, k.mT)
            cache._products(q.float(), k.mT.float())
    products = [call for call in calls.found if call[0].overloadpacket is aten.bmm]
    assert products == [(aten.bmm.dtype, torch.float32), (aten.bmm.default, torch.float32)]


def stepped(dtype):
    """One step of four branches at two prompts."""
    branches, kv_heads, head_dim, generator = 4, 2, 32, torch.Generator().manual_seed(0)
    store = KeyValueStore(1, kv_heads, head_dim, torch.zeros(1, dtype=dtype))
    store.free(2 * 40 + branches * 16)
    store.prompts.lay_out(2, 40, live=0)
    store.responses.lay_out(branches, 16, live=0)
    store.memory.copy_(torch.randn(store.memory.shape, generator=generator))
    slots, lengths = np.array([0, 0, 1, 1]), np.array([40, 40, 25, 25])
    grouping = Grouping.of(slots, lengths, 2, 2, kv_heads, torch.device("cpu"))
    attend = step_attention(
        store,
        (grouping.prompts, grouping.members),
        grouping.branch_of_seat,
        grouping.seat_of_branch,
        grouping.prompt_length_C,
        torch.tensor([3, 9, 14, 0]),
    )
    heads = (4 * kv_heads, kv_heads, kv_heads)
    return attend(0, *(torch.randn(branches, n, head_dim, generator=generator).to(dtype) for n in heads))


def test_scores_in_float32_leave_bfloat16_results_that_are_closer(monkeypatch):
    exact, rounded = stepped(torch.float64), stepped(torch.bfloat16)
    monkeypatch.setattr(cache, "_products", lambda queries, keys: torch.bmm(queries.float(), keys.float()))
    found = stepped(torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() < (rounded - exact).norm()
    torch.testing.assert_close(found.double(), exact, atol=0.03, rtol=0.03)
