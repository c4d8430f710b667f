"""The chunks of a ring see of each other what the layout lets tokens see, each pair once."""

import pytest
import torch
from test_attention import LARGE, LONG, SMALL, layout_of
from torch._subclasses.fake_tensor import FakeTensorMode

from hone.model import ring
from hone.model.ring import RingPlan
from hone.model.sequence import _with_filler
from hone.model.varlen_attention import FLASH

MANY = layout_of([5, 1, 40, 2], [3, 1, 9, 20], group=4)


def pairs_of(call, size):
    """(size, size) how often each query of a chunk meets each key."""
    met = torch.zeros(size, size, dtype=torch.long)
    rows, columns = (torch.arange(size)[part] for part in (call.queries, call.keys))
    queries, keys = call.ragged.query_ends.tolist(), call.ragged.key_ends.tolist()
    for q, q_end, k, k_end in zip(queries, queries[1:], keys, keys[1:], strict=False):
        block = torch.ones(q_end - q, k_end - k, dtype=torch.long)
        met[rows[q:q_end, None], columns[None, k:k_end]] += block.tril() if call.ragged.is_causal else block
    return met


@pytest.mark.parametrize("layout", [SMALL, LARGE, LONG, MANY], ids=["small", "large", "long", "many"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_pair_that_may_meet_meets_once(layout, ranks):
    rows, size = layout.rows(), layout.num_tokens
    expected = torch.zeros(size, size, dtype=torch.long)
    for index_L, real_L in zip(rows.index_RL, rows.real_RL, strict=True):
        at = index_L[real_L]
        expected[at[:, None], at[None]] = torch.ones(len(at), len(at), dtype=torch.long).tril()
    whole = _with_filler(layout, ranks)
    each = len(whole.token_ids_X) // ranks
    met = torch.zeros(ranks * each, ranks * each, dtype=torch.long)
    for rank in range(ranks):
        plan = RingPlan(whole, ranks, rank)
        for distance in range(plan.reach + 1):
            for call in plan.before(distance) if distance else plan.own:
                low, key_low = rank * each, (rank - distance) * each
                met[low : low + each, key_low : key_low + each] += pairs_of(call, each)
    assert torch.equal(met[:size, :size], expected)
    assert not met[size:, :size].any()  # filler meets filler alone
    assert (met.sum(1) > 0).all()  # and each token something, so that it has a normaliser


def test_nothing_goes_further_than_the_longest_group():
    short = _with_filler(layout_of([5] * 15, [2, 3] * 15, group=1), 4)
    assert RingPlan(short, 4, 0).reach == 1 and RingPlan(_with_filler(LONG, 4), 4, 0).reach == 3


def test_flash_attention_takes_what_a_ring_gives_it(monkeypatch):
    """Operators of GPUs, without their kernels: shapes and dtypes, forward and backward."""
    layout = _with_filler(layout_of([40, 300], [30, 800], group=2), 4)
    monkeypatch.setattr(ring, "_shifted", lambda x, by, group: x)
    plan, each = RingPlan(layout, 4, 3), len(layout.token_ids_X) // 4
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(each, 4, 64, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(each, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        out = ring._RingAttention.apply(q, k, v, plan, FLASH, None)
        grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert plan.reach == 3 and any(plan.before(distance) for distance in (1, 2, 3))
    for x, grad in zip((out, q, k, v), (q, *grads), strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, torch.bfloat16)
