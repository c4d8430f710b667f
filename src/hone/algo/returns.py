"""Discounted returns and generalised advantage estimation over ragged, masked tokens.

Only tokens sampled by the policy are time steps. Environment tokens (mask 0) are skipped: neither discounted nor given
credit. All functions take flat ragged tensors, compute in float64, and
loop over powers of two instead of tokens. Not here: baselines among siblings (`advantage.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algo.segments import segment_sum


def discounted_sums(value_K: Tensor, segment_K: Tensor, factor: float) -> Tensor:
    """y_k = value_k + factor * y_(k+1) within each segment of adjacent elements; (K,).

    In log2(longest segment) passes: after the pass with reach r, an element holds the discounted sum of the 2r
    elements from itself on.
    """
    total_K, reach = value_K.clone(), 1
    longest = int(segment_K.bincount().max()) if len(segment_K) else 0
    while reach < longest:
        same = segment_K[reach:] == segment_K[:-reach]
        total_K[:-reach] += torch.where(same, factor**reach * total_K[reach:], 0.0)  # the right side is made first
        reach *= 2
    return total_K


def token_rewards(
    earned_S: Tensor,
    penalty_T: Tensor | None,
    sample_T: Tensor,
    mask_T: Tensor,
    *,
    turn_reward_T: Tensor | None = None,
) -> Tensor:
    """(T,) float64 reward of each token: its penalty, if there is any, and at a sample's last own token what it earned.

    `turn_reward_T` is the part of that which an environment gave for single turns, each at its turn's last token: it
    stays there, and the last token has the rest. Without penalties the rewards of a sample's tokens add up to what it
    earned, with or without turns.
    """
    own = mask_T.nonzero()[:, 0]
    sample_K = sample_T[own]
    is_last = torch.ones_like(sample_K, dtype=torch.bool)
    is_last[:-1] = sample_K[1:] != sample_K[:-1]
    reward_T = torch.zeros_like(mask_T, dtype=torch.float64) if penalty_T is None else penalty_T.double() * mask_T
    left_S = earned_S.double()
    if turn_reward_T is not None:
        given_T = turn_reward_T.double() * mask_T
        reward_T, left_S = reward_T + given_T, left_S - segment_sum(given_T, sample_T, len(earned_S))
    return reward_T.index_add(0, own[is_last], left_S[sample_K[is_last]])


def discounted_returns(reward_T: Tensor, sample_T: Tensor, mask_T: Tensor, *, gamma: float) -> Tensor:
    """(T,) float64 sum of gamma^k r_(t+k) over the sample's own tokens from t on; 0 where mask is 0."""
    own = mask_T.nonzero()[:, 0]
    sums_K = discounted_sums(reward_T.double()[own], sample_T[own], gamma)
    return torch.zeros_like(reward_T, dtype=torch.float64).index_put((own,), sums_K)


def gae(reward_T: Tensor, value_T: Tensor, sample_T: Tensor, mask_T: Tensor, *, gamma: float, lam: float) -> Tensor:
    """A_t = delta_t + gamma lam A_(t+1) with delta_t = r_t + gamma V_(t+1) - V_t (GAE, arXiv:1506.02438).

    Args:
        reward_T: see `token_rewards`.
        value_T: the critic's, of the state before each token; read only where mask is 1.
    Returns:
        (T,) float64 in reward units; 0 where mask is 0. After a sample's last own token V and A are 0. Returns for
        the critic are A + V.
    """
    own = mask_T.nonzero()[:, 0]
    sample_K, value_K = sample_T[own], value_T.double()[own]
    next_K = torch.zeros_like(value_K)
    next_K[:-1] = torch.where(sample_K[1:] == sample_K[:-1], value_K[1:], 0.0)
    delta_K = reward_T.double()[own] + gamma * next_K - value_K
    advantage_K = discounted_sums(delta_K, sample_K, gamma * lam)
    return torch.zeros_like(reward_T, dtype=torch.float64).index_put((own,), advantage_K)
