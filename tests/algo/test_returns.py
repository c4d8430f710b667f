"""Returns and generalised advantages by hand, against a plain loop, and blind to what the policy did not write."""

import pytest
import torch
from torch import Tensor

from hone.algo.advantage import discounted_returns, discounted_sums, gae, token_rewards


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ragged(seed: int = 0, lengths=(3, 0, 1, 17, 64, 5)):
    """Rewards, values, samples and a mask with holes; one sample is empty, one has no token of its own."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    sample_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask_T = (torch.rand(total, generator=generator) < 0.7).double()
    mask_T[sample_T == 5] = 0
    reward_T, value_T = torch.randn(2, total, generator=generator, dtype=torch.float64)
    return reward_T, value_T, sample_T, mask_T


def plain_gae(reward_T, value_T, sample_T, mask_T, gamma, lam):
    """Backwards, one token after the other; where mask is 0 the carried V and A pass through."""
    advantage_T, sample = torch.zeros_like(reward_T), None
    next_value = next_advantage = 0.0
    for t in reversed(range(len(reward_T))):
        if sample_T[t] != sample:
            sample, next_value, next_advantage = sample_T[t], 0.0, 0.0
        if mask_T[t] > 0:
            delta = reward_T[t] + gamma * next_value - value_T[t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = value_T[t]
            advantage_T[t] = next_advantage
    return advantage_T


def test_discounted_sums_by_hand():
    """1 + 2/2 + 4/4 and so on; a new segment starts from nothing."""
    sums = discounted_sums(float64(1, 2, 4, 8, 16), torch.tensor([0, 0, 0, 1, 1]), 0.5)
    assert sums.tolist() == [3, 4, 4, 16, 16]


def test_gae_by_hand():
    """lambda 0.95, gamma 1: deltas 0.6 - 0.5, 0.7 - 0.6, 1 - 0.7; A_1 = 0.1 + 0.95 x 0.3, A_0 = 0.1 + 0.95 A_1."""
    arguments = float64(0, 0, 1), float64(0.5, 0.6, 0.7), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    assert gae(*arguments, gamma=1.0, lam=0.95).tolist() == pytest.approx([0.46575, 0.385, 0.3])
    # gamma 0.5: deltas 0.3 - 0.5, 0.35 - 0.6, 0.3; factor 0.475
    assert gae(*arguments, gamma=0.5, lam=0.95).tolist() == pytest.approx([-0.2510625, -0.1075, 0.3])


def test_two_hundred_tool_tokens_are_no_steps():
    """V is 0.5 wherever the policy is, the reward 0.5: advantage exactly 0. Counted as steps, tools make it -0.5."""
    reward_T = torch.zeros(202, dtype=torch.float64)
    reward_T[-1] = 0.5
    value_T, mask_T = torch.zeros(202, dtype=torch.float64), torch.zeros(202)
    value_T[[0, -1]], mask_T[[0, -1]] = 0.5, 1.0
    sample_T = torch.zeros(202, dtype=torch.int64)
    assert gae(reward_T, value_T, sample_T, mask_T, gamma=1.0, lam=0.95).tolist() == [0] * 202
    counted = gae(reward_T, value_T, sample_T, torch.ones(202), gamma=1.0, lam=0.95)
    assert float(counted[0]) == pytest.approx(-0.5, abs=1e-4), "witness: they do not vanish by themselves"


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (1.0, 0.0)])
def test_gae_equals_the_plain_loop(gamma, lam):
    case = ragged()
    expected = plain_gae(*case, gamma, lam)
    assert expected.abs().max() > 1
    torch.testing.assert_close(gae(*case, gamma=gamma, lam=lam), expected, rtol=1e-12, atol=1e-12)


def test_at_lambda_one_a_return_is_the_discounted_reward_whatever_the_critic_says():
    reward_T, value_T, sample_T, mask_T = ragged()
    returns_T = discounted_returns(reward_T, sample_T, mask_T, gamma=0.9)
    by_critic_T = gae(reward_T, value_T, sample_T, mask_T, gamma=0.9, lam=1.0) + value_T * mask_T
    torch.testing.assert_close(by_critic_T, returns_T, rtol=1e-12, atol=1e-12)


def test_values_and_rewards_where_the_policy_wrote_nothing_are_never_read():
    reward_T, value_T, sample_T, mask_T = ragged()
    nan_T = torch.where(mask_T > 0, 0.0, torch.nan)
    plain = gae(reward_T, value_T, sample_T, mask_T, gamma=0.9, lam=0.9)
    assert torch.equal(gae(reward_T + nan_T, value_T + nan_T, sample_T, mask_T, gamma=0.9, lam=0.9), plain)


def test_the_order_of_samples_and_what_stands_between_them_do_not_matter():
    """The last sample alone gets what it gets among the others."""
    reward_T, value_T, sample_T, mask_T = ragged()
    among = gae(reward_T, value_T, sample_T, mask_T, gamma=0.9, lam=0.9)[sample_T == 4]
    one = sample_T == 4
    alone = gae(reward_T[one], value_T[one], sample_T[one] * 0, mask_T[one], gamma=0.9, lam=0.9)
    torch.testing.assert_close(alone, among, rtol=1e-12, atol=1e-12)


def test_what_a_sample_earned_is_at_its_last_own_token():
    sample_T, mask_T = torch.tensor([0, 0, 0, 1, 2, 2]), float64(1, 1, 0, 0, 0, 1)
    reward_T = token_rewards(float64(5, 6, 7), None, sample_T, mask_T)
    assert reward_T.tolist() == [0, 5, 0, 0, 0, 7]  # sample 1 has no token of its own
    penalised_T = token_rewards(float64(5, 6, 7), float64(-1, -2, -3, -4, -5, -6), sample_T, mask_T)
    assert penalised_T.tolist() == [-1, 3, 0, 0, 0, 1]


def test_nothing_is_worth_nothing():
    empty, none = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    assert gae(empty, empty, none, empty, gamma=1.0, lam=1.0).tolist() == []
    assert token_rewards(float64(1), None, none, empty).tolist() == []


def test_long_responses_cost_passes_in_the_logarithm_of_their_length(monkeypatch):
    passes = []
    where = torch.where
    monkeypatch.setattr(torch, "where", lambda *args: (passes.append(1), where(*args))[1])
    discounted_sums(torch.ones(5000), torch.zeros(5000, dtype=torch.int64), 1.0)
    assert len(passes) == 13


# ---- rewards of single turns --------------------------------------------------------------------------------------

TURNS = {"sample_T": torch.zeros(5, dtype=torch.int64), "mask_T": float64(1, 1, 0, 0, 1)}
"""Two tokens of the policy, two of a tool, one of the policy: turns end at tokens 1 and 4."""


def test_what_a_turn_was_given_is_at_its_last_token_and_the_rest_at_the_samples():
    """5 in all: 2 for the first turn, 1 for the second, 2 from other components."""
    given = float64(0, 2, 0, 0, 1)
    assert token_rewards(float64(5), None, **TURNS, turn_reward_T=given).tolist() == [0, 2, 0, 0, 3]
    penalty = float64(-0.5, -0.5, -9, -9, -0.5)
    rewards = token_rewards(float64(5), penalty, **TURNS, turn_reward_T=given)
    assert rewards.tolist() == [-0.5, 1.5, 0, 0, 2.5]


def test_gae_with_rewards_of_turns_by_hand():
    """V 1, 2, 3 on own tokens, lambda 0.5: deltas 2 - 1, 2 + 3 - 2, 3 - 3; A 1 + 3 / 2, 3, 0. Tool tokens: nothing."""
    reward_T = token_rewards(float64(5), None, **TURNS, turn_reward_T=float64(0, 2, 0, 0, 1))
    advantage_T = gae(reward_T, float64(1, 2, 77, 77, 3), **TURNS, gamma=1.0, lam=0.5)
    assert advantage_T.tolist() == [2.5, 3, 0, 0, 0]
    at_the_end = token_rewards(float64(5), None, **TURNS)
    assert gae(at_the_end, float64(1, 2, 77, 77, 3), **TURNS, gamma=1.0, lam=0.5).tolist() == [2, 2, 0, 0, 2]
    assert discounted_returns(reward_T, **TURNS, gamma=0.5).tolist() == [0 + 0.5 * 3.5, 2 + 0.5 * 3, 0, 0, 3]


def test_at_gamma_and_lambda_one_a_first_tokens_return_is_the_samples_reward():
    """Whatever was given where, penalties apart; what stands on a tool's token is not the policy's and moves on."""
    _, value_T, sample_T, mask_T = ragged()
    generator = torch.Generator().manual_seed(1)
    turn_reward_T = torch.randn(len(mask_T), generator=generator, dtype=torch.float64)
    earned_S = torch.randn(6, generator=generator, dtype=torch.float64)
    reward_T = token_rewards(earned_S, None, sample_T, mask_T, turn_reward_T=turn_reward_T)
    return_T = gae(reward_T, value_T, sample_T, mask_T, gamma=1.0, lam=1.0) + value_T * mask_T
    own = mask_T.nonzero()[:, 0]
    first = [int(own[sample_T[own] == s][0]) for s in range(6) if (sample_T[own] == s).any()]
    assert len(first) == 4, "witness: one sample is empty, one has no token of its own"
    torch.testing.assert_close(return_T[first], earned_S[sample_T[first]], rtol=1e-12, atol=1e-12)
    assert reward_T[mask_T == 0].tolist() == [0] * int((mask_T == 0).sum())
