"""The chunks of a ring see of each other what the layout lets tokens see, each pair once."""

from types import SimpleNamespace

import pytest
import torch
from test_attention import LARGE, LONG, SMALL, layout_of
from torch._subclasses.fake_tensor import FakeTensorMode

from hone.model import ring
from hone.model.ring import RingPlan, ring_order
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
    whole = _with_filler(layout, 2 * ranks)
    chunks = ring_order(len(whole.token_ids_X), ranks).reshape(ranks, -1)
    met = torch.zeros(chunks.size, chunks.size, dtype=torch.long)
    for rank in range(ranks):
        plan = RingPlan(whole, ranks, rank)
        for distance in (0, *plan.distances):
            queries, keys = (torch.from_numpy(chunks[place]) for place in (rank, (rank - distance) % ranks))
            for call in plan.before(distance) if distance else plan.own:
                met[queries[:, None], keys[None]] += pairs_of(call, len(queries))
    assert torch.equal(met[:size, :size], expected)
    assert not met[size:, :size].any()  # filler meets filler alone
    assert (met.sum(1) > 0).all()  # and each token something, so that it has a normaliser


def test_a_chunk_is_sent_only_where_a_group_reaches():
    short = _with_filler(layout_of([5] * 15, [2, 3] * 15, group=1), 8)
    assert RingPlan(short, 4, 0).distances == [1, 3], "the pieces before the early one and before the late one"
    assert RingPlan(_with_filler(LONG, 8), 4, 0).distances == [1, 2, 3]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_has_as_much_to_do_in_one_long_sequence(ranks):
    layout = _with_filler(layout_of([3], [1400], group=1), 2 * ranks)
    chunk, pairs = len(layout.token_ids_X) // ranks, []
    for rank in range(ranks):
        plan = RingPlan(layout, ranks, rank)
        calls = [*plan.own, *(call for distance in plan.distances for call in plan.before(distance))]
        pairs.append(sum(int(pairs_of(call, chunk).sum()) for call in calls))
    assert max(pairs) < 1.02 * sum(pairs) / ranks


def test_flash_attention_takes_what_a_ring_gives_it(monkeypatch):
    """Operators of GPUs, without their kernels: shapes and dtypes, forward and backward."""
    layout = _with_filler(layout_of([40, 300], [30, 800], group=2), 8)
    monkeypatch.setattr(ring, "_Shift", lambda x, by, group: SimpleNamespace(arrived=lambda: x))
    plan, each = RingPlan(layout, 4, 3), len(layout.token_ids_X) // 4
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(each, 4, 64, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(each, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        out = ring._RingAttention.apply(q, k, v, plan, FLASH, None)
        grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert plan.distances == [1, 2, 3] and all(plan.before(distance) for distance in (1, 2, 3))
    for x, grad in zip((out, q, k, v), (q, *grads), strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, torch.bfloat16)
