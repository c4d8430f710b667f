"""Ranks learn a reward model as one process does; a pair is never cut."""

from dataclasses import astuple

import numpy as np
import pytest
import torch
from pair_cases import Case, Found, learnt

from hone.data.pack import Shape, computed_tokens, divide_over_ranks


def assert_same(found: list[Found], expected: Found) -> None:
    for one in found:
        assert one.metrics == found[0].metrics and one.measured == found[0].measured, "ranks tell different things"
        for ours, theirs in zip(one.metrics, expected.metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)
        assert astuple(one.measured) == pytest.approx(astuple(expected.measured), rel=1e-9)
        for ours, theirs in zip((*one.gradients, one.master), (*expected.gradients, expected.master), strict=True):
            assert set(ours) == set(theirs)
            for name in ours:
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.slow("two ranks, close to test_sharded_pair")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(updates=3), id="shards"),
        pytest.param(Case(tokens_per_microbatch=8), id="several microbatches"),
        pytest.param(Case(num_pairs=1), id="a rank with nothing to do"),
        pytest.param(Case(implementation="transformers"), id="transformers"),
        pytest.param(Case(mesh={"tensor_parallel": 2}), id="tensor parallel"),
        pytest.param(Case(mesh={"sequence_parallel": 2}), id="sequence parallel"),
        pytest.param(Case(offload=("parameters",)), id="offload"),
    ],
)
def test_two_ranks_are_one_process(pair, case):
    expected = learnt(case, alone=True)
    assert any(gradient.abs().max() > 1e-3 for gradient in expected.gradients[0].values())
    assert_same(pair(learnt, case), expected)


def test_groups_that_must_stay_whole_are_not_cut_where_others_would_be():
    lengths = np.array([50, 50, 3, 3])
    shape = Shape(np.array([0, 0, 1, 1]), lengths, lengths.cumsum() - lengths, np.array([1, 1]))
    samples = np.arange(4)
    cut, whole = (divide_over_ranks(shape, samples, 2, 200, whole_groups=whole) for whole in (False, True))
    assert sorted(part.tolist() for rank in whole for part in rank) == [[0, 1], [2, 3]]
    heaviest = [max(computed_tokens(shape, np.concatenate(rank)) for rank in plan) for plan in (cut, whole)]
    assert heaviest[0] < heaviest[1], "balance is what it costs"
