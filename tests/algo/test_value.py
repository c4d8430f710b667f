"""The critic's loss by hand and against autograd; what it explains."""

import pytest
import torch

from hone.algo.loss import Values, explained_variance, value_loss


def values_of(value, old, target):
    value_T, old_T, return_T = (torch.as_tensor(x, dtype=torch.float64) for x in (value, old, target))
    sample_T = torch.zeros(len(value_T), dtype=torch.int64)
    return Values(
        value_T=value_T,
        old_value_T=old_T,
        return_T=return_T,
        loss_mask_T=torch.ones_like(old_T),
        sample_T=sample_T,
        num_samples=1,
    )


def test_value_loss_by_hand():
    """Return 1. Old 0, now 0.5, clip 0.2: max(0.5^2, 0.8^2) / 2 = 0.32, clipped. Moved away to -0.5: 1.5^2 / 2."""
    loss_T, clipped_T = value_loss(values_of([0.5, -0.5, 0.1], [0.0] * 3, [1.0] * 3), 0.2)
    assert loss_T.tolist() == pytest.approx([0.32, 1.125, 0.405])
    assert clipped_T.tolist() == [True, False, False]


def test_without_a_clip_it_is_half_the_squared_error():
    loss_T, clipped_T = value_loss(values_of([3.0, -1.0], [0.0, 0.0], [1.0, 1.0]), None)
    assert loss_T.tolist() == [2, 2]
    assert not clipped_T.any()


def test_a_clipped_value_has_no_gradient_and_the_others_that_of_the_error():
    value_T = torch.tensor([0.5, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    value_loss(values_of(value_T, [0.0] * 3, [1.0] * 3), 0.2)[0].sum().backward()
    assert value_T.grad is not None
    assert value_T.grad.tolist() == pytest.approx([0, -1.5, -0.9])


def test_explained_variance_by_hand():
    """Returns 0, 2, 4 (variance 8/3), errors 0, 1, -1 (variance 2/3): 1 - 1/4. The masked token would spoil it."""
    value_T, return_T = torch.tensor([0.0, 1.0, 5.0, 99.0]), torch.tensor([0.0, 2.0, 4.0, 0.0])
    mask_T = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert explained_variance(value_T, return_T, mask_T) == pytest.approx(0.75)
    assert explained_variance(return_T, return_T, mask_T) == 1
    assert explained_variance(torch.full((4,), 7.0), return_T, mask_T) == 0


def test_where_all_returns_are_equal_there_is_nothing_to_explain():
    assert explained_variance(torch.rand(3), torch.full((3,), 0.1), torch.ones(3)) is None
    assert explained_variance(torch.rand(3), torch.rand(3), torch.zeros(3)) is None
