"""Credit by hand: baselines, spread, and the groups that have nothing to say."""

import math

import pytest
import torch

from hone.algo.advantage import (
    CREDIT,
    Outcomes,
    best_of_group,
    group_mean,
    group_norm,
    leave_one_out,
    whiten,
)
from hone.algo.segments import segment_sum

NAN = math.nan
PER_SAMPLE = [group_mean, group_norm, leave_one_out, best_of_group]


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


@pytest.mark.parametrize("function", PER_SAMPLE)
def test_a_group_of_one_gets_zero_and_not_its_reward(function):
    assert credit(function, [7.0], [0.0, 2.0])[0] == 0


@pytest.mark.parametrize("function", PER_SAMPLE)
def test_equal_rewards_get_exactly_zero_where_their_mean_rounds(function):
    rewards, one_group = torch.full((8,), 0.1), torch.zeros(8, dtype=torch.int64)
    mean = segment_sum(rewards, one_group, 1) / 8
    assert mean != rewards[0], "witness: the mean of these differs from them"
    assert function(rewards, one_group, 1).tolist() == [0] * 8


@pytest.mark.parametrize("function", PER_SAMPLE)
def test_an_unscored_sample_gets_zero_and_enters_no_baseline(function):
    with_hole = credit(function, [1.0, NAN, 3.0, 5.0])
    without = credit(function, [1.0, 3.0, 5.0])
    assert with_hole == [without[0], 0, without[1], without[2]]


@pytest.mark.parametrize("function", PER_SAMPLE)
def test_a_group_with_one_scored_member_or_none_gets_zero(function):
    assert credit(function, [NAN, 4.0, NAN], [NAN, NAN]) == [0] * 5


@pytest.mark.parametrize("function", PER_SAMPLE)
def test_credit_does_not_depend_on_the_order_of_samples(function):
    generator = torch.Generator().manual_seed(0)
    reward_S = torch.rand(40, generator=generator, dtype=torch.float64)
    group_S = torch.arange(40) // 5
    order = torch.randperm(40, generator=generator)
    plain = function(reward_S, group_S, 8)
    torch.testing.assert_close(function(reward_S[order], group_S[order], 8), plain[order], rtol=1e-12, atol=1e-12)


def test_leave_one_out_subtracts_the_mean_of_the_siblings():
    assert credit(leave_one_out, [1.0, 2.0, 6.0, NAN]) == [1 - 4, 2 - 3.5, 6 - 1.5, 0]


def test_only_the_best_of_a_group_gets_credit_and_by_its_margin():
    # mean 2, deviations -2, -1, 3; variance (4 + 1 + 9) / 2 = 7
    assert credit(best_of_group, [0.0, 1.0, 5.0], [3.0, 3.0, 0.0]) == pytest.approx(
        [0, 0, 4 / 7**0.5, 0, 0, 0], rel=1e-5
    )


def outcomes(rewards, lengths, group_S, mask=None):
    num_tokens = sum(lengths)
    return Outcomes(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(group_S),
        max(group_S) + 1,
        torch.tensor(lengths),
        torch.ones(num_tokens, dtype=torch.float64) if mask is None else torch.tensor(mask, dtype=torch.float64),
        value_T=torch.linspace(-1, 1, num_tokens, dtype=torch.float64),
        greedy_reward_N=torch.linspace(0, 1, max(group_S) + 1, dtype=torch.float64),
        scores_CS=torch.tensor([rewards, rewards], dtype=torch.float64),
        weight_C=(1.0, -0.5),
    )


def test_the_length_weighted_baseline_by_hand():
    """Rewards 1 and 4 at lengths 2 and 1: baseline (2 + 4) / 3 = 2."""
    advantages_T = CREDIT["length_weighted"].function(outcomes([1.0, 4.0], [2, 1], [0, 0]))
    assert advantages_T.tolist() == [-1, -1, 2]


def test_whitening_is_over_unmasked_tokens():
    advantages_T = whiten(torch.tensor([1.0, 100.0, 3.0]), torch.tensor([1.0, 0.0, 1.0]))
    assert advantages_T.tolist() == pytest.approx([-1 / 2**0.5, 0, 1 / 2**0.5], rel=1e-5)


def test_whitening_of_nothing_is_zero():
    assert whiten(torch.tensor([1.0, 2.0]), torch.zeros(2)).tolist() == [0, 0]


@pytest.mark.parametrize("name", CREDIT)
def test_every_credit_is_finite_where_samples_are_unscored_alone_or_equal(name):
    mask = [0, 1, 1, 1, 1, 1, 1, 0, 1]
    case = outcomes([NAN, 1.0, 2.0, 0.1, 0.1, 7.0, NAN, 3.0], [1, 1, 1, 1, 2, 1, 1, 1], [0, 0, 0, 1, 1, 2, 3, 3], mask)
    advantages_T = CREDIT[name].function(case)
    assert advantages_T.isfinite().all()
    assert advantages_T.shape == case.loss_mask_T.shape


JUDGED_AMONG_SIBLINGS = sorted(
    name for name, entry in CREDIT.items() if "siblings" in entry.needs and name != "group_mean_whitened"
)


@pytest.mark.parametrize("name", JUDGED_AMONG_SIBLINGS)
def test_every_group_credit_gives_zero_to_equal_rewards_and_single_samples(name):
    advantages_T = CREDIT[name].function(outcomes([0.1] * 7 + [5.0], [2] * 8, [0] * 7 + [1]))
    assert advantages_T.tolist() == [0] * 16
