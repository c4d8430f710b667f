"""Credit by hand: baselines, spread, and the groups that have nothing to say."""

import math

import pytest
import torch

from hone.algo.advantage import group_mean, group_norm
from hone.algo.segments import segment_sum

NAN = math.nan


def credit(function, *groups):
    """Apply a credit function to groups of rewards written as lists; gives lists back."""
    reward_S = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    group_S = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    return function(reward_S, group_S, len(groups)).tolist()


def test_group_mean_centers_each_group():
    assert credit(group_mean, [0.0, 1.0], [2.0, 4.0, 9.0]) == [-0.5, 0.5, -3.0, -1.0, 4.0]


def test_group_norm_divides_by_the_unbiased_std():
    # mean 0.25, squared deviations 3 x 0.0625 + 0.5625 = 0.75, / 3 = 0.25, std 0.5
    advantages = credit(group_norm, [0.0, 0.0, 0.0, 1.0])
    assert advantages == pytest.approx([-0.25 / 0.500001] * 3 + [0.75 / 0.500001], rel=1e-12)


@pytest.mark.parametrize("function", [group_mean, group_norm])
def test_a_group_of_one_gets_zero_and_not_its_reward(function):
    assert credit(function, [7.0], [0.0, 2.0])[0] == 0


@pytest.mark.parametrize("function", [group_mean, group_norm])
def test_equal_rewards_get_exactly_zero_where_their_mean_rounds(function):
    rewards, one_group = torch.full((8,), 0.1), torch.zeros(8, dtype=torch.int64)
    mean = segment_sum(rewards, one_group, 1) / 8
    assert mean != rewards[0], "witness: the mean of these differs from them"
    assert function(rewards, one_group, 1).tolist() == [0] * 8


@pytest.mark.parametrize("function", [group_mean, group_norm])
def test_an_unscored_sample_gets_zero_and_enters_no_baseline(function):
    with_hole = credit(function, [1.0, NAN, 3.0, 5.0])
    without = credit(function, [1.0, 3.0, 5.0])
    assert with_hole == [without[0], 0, without[1], without[2]]


@pytest.mark.parametrize("function", [group_mean, group_norm])
def test_a_group_with_one_scored_member_or_none_gets_zero(function):
    assert credit(function, [NAN, 4.0, NAN], [NAN, NAN]) == [0] * 5


@pytest.mark.parametrize("function", [group_mean, group_norm])
def test_credit_does_not_depend_on_the_order_of_samples(function):
    generator = torch.Generator().manual_seed(0)
    reward_S = torch.rand(40, generator=generator, dtype=torch.float64)
    group_S = torch.arange(40) // 5
    order = torch.randperm(40, generator=generator)
    plain = function(reward_S, group_S, 8)
    torch.testing.assert_close(function(reward_S[order], group_S[order], 8), plain[order], rtol=1e-12, atol=1e-12)
