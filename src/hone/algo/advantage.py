"""Advantage estimators: from rewards of samples to advantages of tokens. Pure functions that ignore unscored samples.

Conventions that hold for every function: NaN marks an unscored sample, which enters no baseline and gets advantage 0;
standard deviations are unbiased; a group with one scored member, or with all rewards equal, gets advantage 0, never
NaN and never the reward itself. What a sample earned over its baseline is a reward at its last token;
with a KL penalty in the reward, or a discount, an earlier token's advantage is the return from there on. Where no
baseline is taken from whole samples (`reinforce_pp`, `gae`), what an environment gave for a turn is a reward at the
turn's last token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hone.algo.registry import Entry
from hone.algo.segments import segment_index, segment_mean, segment_range, segment_sum

STD_FLOOR = 1e-6
"""Default of `algorithm.std_floor`, in reward units: keeps a nearly equal group from exploding, as published."""


@dataclass(frozen=True)
class Outcomes:
    """Inputs of the advantage estimators: S samples in groups, T response tokens."""

    reward_S: Tensor
    """(S,) float, shaped; NaN where unscored."""
    group_S: Tensor
    """(S,) int64: group (prompt) of each sample."""
    num_groups: int
    length_S: Tensor
    """(S,) int64: tokens of each sample."""
    loss_mask_T: Tensor
    """(T,) float, 1 where the policy sampled the token and its sample was scored."""
    penalty_T: Tensor | None = None
    """(T,) reward of each token alone, such as minus the KL to the reference; None."""
    turn_reward_T: Tensor | None = None
    """(T,) the part of `reward_S` that was given for single turns, at the turns' last tokens; None: there is none."""
    value_T: Tensor | None = None
    """(T,) the critic's value of the state before each token; only where the row needs `values`."""
    scores_CS: Tensor | None = None
    """(C, S) score of each reward component, NaN where it has none; only where the row needs `scores`."""
    weight_C: tuple[float, ...] = ()
    """Weights of these components in the reward."""
    greedy_reward_N: Tensor | None = None
    """(num_groups,) shaped reward of the greedy sample, NaN where unscored; only where the row needs it."""
    gamma: float = 1.0
    gae_lambda: float = 1.0
    std_floor: float = STD_FLOOR
    """Added to a standard deviation before it divides."""

    @cached_property
    def sample_T(self) -> Tensor:
        """(T,) int64: sample of each token. Made on demand: what judges whole samples alone has no use for it."""
        return segment_index(self.length_S)


def group_mean(reward_S: Tensor, group_S: Tensor, num_groups: int) -> Tensor:
    """Advantage of each sample over its siblings: R - mean(R) (Dr. GRPO, arXiv:2503.20783).

    Args:
        reward_S: (S,) float, NaN where unscored.
        group_S: (S,) int64 in [0, num_groups).
    Returns:
        (S,) in reward units.
    """
    scored_S = (~reward_S.isnan()).to(reward_S.dtype)
    known_S = reward_S.nan_to_num(0.0)
    mean_N = segment_mean(known_S, scored_S, group_S, num_groups)
    # The mean of equal floats may differ from them in the last bit: only the range shows that they are equal.
    speaks_S = (segment_range(reward_S, group_S, num_groups) > 0)[group_S]
    return (known_S - mean_N[group_S]) * scored_S * speaks_S


def group_norm(reward_S: Tensor, group_S: Tensor, num_groups: int, std_floor: float = STD_FLOOR) -> Tensor:
    """Advantage in standard deviations of the group: (R - mean) / (std + std_floor) (GRPO, arXiv:2402.03300).

    Weights groups with little spread more than `group_mean` does. Arguments as there; (S,), dimensionless.
    """
    deviation_S = group_mean(reward_S, group_S, num_groups)
    return deviation_S / (_std(deviation_S, reward_S, group_S, num_groups) + std_floor)[group_S]


def leave_one_out(reward_S: Tensor, group_S: Tensor, num_groups: int) -> Tensor:
    """R - mean of the siblings: an unbiased baseline (RLOO, arXiv:2402.14740). Arguments as `group_mean`; (S,)."""
    count_N = segment_sum((~reward_S.isnan()).to(reward_S.dtype), group_S, num_groups)
    return group_mean(reward_S, group_S, num_groups) * (count_N / (count_N - 1).clamp(min=1))[group_S]


def best_of_group(reward_S: Tensor, group_S: Tensor, num_groups: int, std_floor: float = STD_FLOOR) -> Tensor:
    """(best - second best) / std for the best sample, 0 for the rest: credit for pass@k (arXiv:2503.19595).

    Samples that share the best reward have no margin, and get 0. Arguments as `group_mean`; (S,), dimensionless.
    """
    order = torch.argsort(reward_S.nan_to_num(-torch.inf), stable=True)
    order = order[torch.argsort(group_S[order], stable=True)]  # by group, then by reward
    is_last = torch.ones_like(order, dtype=torch.bool)
    is_last[:-1] = group_S[order][1:] != group_S[order][:-1]
    best = order[is_last]
    second = order[(is_last.nonzero()[:, 0] - 1).clamp(min=0)]
    deviation_S = group_mean(reward_S, group_S, num_groups)
    spread_S = _std(deviation_S, reward_S, group_S, num_groups)[group_S]
    speaks = spread_S[best] > 0  # so there are two scored samples, and they are the last two of their group
    margin = torch.where(speaks, (reward_S[best] - reward_S[second]) / (spread_S[best] + std_floor), 0.0)
    return torch.zeros_like(reward_S).index_put((best,), margin)


def length_weighted(outcomes: Outcomes) -> Tensor:
    """R - sum(length R) / sum(length): the baseline of least variance for long responses (OPO, arXiv:2505.23585).

    Length counts loss tokens. (S,) in reward units.
    """
    o = outcomes
    length_S = segment_sum(o.loss_mask_T, o.sample_T, len(o.reward_S)) * ~o.reward_S.isnan()
    baseline_N = segment_mean(o.reward_S.nan_to_num(0.0), length_S, o.group_S, o.num_groups)
    speaks_S = (segment_range(o.reward_S, o.group_S, o.num_groups) > 0)[o.group_S]
    return (o.reward_S.nan_to_num(0.0) - baseline_N[o.group_S]) * speaks_S


def by_component(outcomes: Outcomes) -> Tensor:
    """Sum over components of weight x (score - group mean) / group std, normalised over the samples of the batch (GDPO,
    arXiv:2601.05242).

    In the sum of the scores a component with much spread hides the others; here each counts as its weight says. A
    component that does not apply to a group, or is equal in it, adds 0. (S,), dimensionless.
    """
    o = outcomes
    assert o.scores_CS is not None, "the row needs the scores of reward components but the batch has none"
    scored_S = ~o.reward_S.isnan()
    total_S = torch.zeros_like(o.reward_S)
    for score_S, weight in zip(o.scores_CS.to(o.reward_S.dtype), o.weight_C, strict=True):
        known_S = torch.where(scored_S, score_S, torch.nan)
        total_S = total_S + weight * group_norm(known_S, o.group_S, o.num_groups, o.std_floor)
    return whiten(total_S, scored_S.to(total_S.dtype), o.std_floor)


def over_greedy(outcomes: Outcomes) -> Tensor:
    """R - reward of the greedy sample of the prompt (ReMax, arXiv:2310.10505); 0 where either was not scored. (S,)."""
    assert outcomes.greedy_reward_N is not None, "the row needs greedy rewards but the batch has none"
    return (outcomes.reward_S - outcomes.greedy_reward_N[outcomes.group_S]).nan_to_num(0.0)


def spread(earned_S: Tensor, outcomes: Outcomes) -> Tensor:
    """(T,) advantage of every token: the discounted return of what its sample earned and of its penalties."""
    o = outcomes
    if o.penalty_T is None and o.gamma == 1:
        return earned_S.repeat_interleave(o.length_S)
    reward_T = token_rewards(earned_S, o.penalty_T, o.sample_T, o.loss_mask_T)
    return discounted_returns(reward_T, o.sample_T, o.loss_mask_T, gamma=o.gamma).to(earned_S.dtype)


def whiten(advantages_T: Tensor, mask_T: Tensor, std_floor: float = STD_FLOOR) -> Tensor:
    """(T,) advantages with mean 0 and unbiased std 1 over the unmasked tokens of the whole batch; 0 elsewhere.

    In float64: the rounding of a float32 mean, divided by the std of equal advantages, would look like credit.
    """
    known_T, weight_T = advantages_T.double(), mask_T.double()
    count = weight_T.sum()
    centred_T = (known_T - (known_T * weight_T).sum() / count.clamp(min=1)) * weight_T
    variance = centred_T.square().sum() / (count - 1).clamp(min=1)
    return (centred_T / (variance.sqrt() + std_floor)).to(advantages_T.dtype)


def group_mean_whitened(outcomes: Outcomes) -> Tensor:
    """R - group mean, then whitened over the tokens of the batch (REINFORCE++ baseline, arXiv:2501.03262). (T,)."""
    o = outcomes
    return whiten(spread(group_mean(o.reward_S, o.group_S, o.num_groups), o), o.loss_mask_T, o.std_floor)


def whitened_return(outcomes: Outcomes) -> Tensor:
    """Discounted return of the token rewards, whitened over the batch (REINFORCE++, arXiv:2501.03262). (T,)."""
    o = outcomes
    return_T = discounted_returns(_rewards_of_tokens(o), o.sample_T, o.loss_mask_T, gamma=o.gamma)
    return whiten(return_T.to(o.reward_S.dtype), o.loss_mask_T, o.std_floor)


def critic_advantage(outcomes: Outcomes) -> Tensor:
    """(T,) generalised advantages over a critic's values, in reward units; see `returns.gae`."""
    o = outcomes
    assert o.value_T is not None, "the row needs a critic's values but the batch has no value_T"
    return gae(_rewards_of_tokens(o), o.value_T, o.sample_T, o.loss_mask_T, gamma=o.gamma, lam=o.gae_lambda).to(
        o.reward_S.dtype
    )


def _rewards_of_tokens(o: Outcomes) -> Tensor:
    """(T,) float64: the sample's reward at its last own token, but for what single turns were given."""
    return token_rewards(
        o.reward_S.nan_to_num(0.0), o.penalty_T, o.sample_T, o.loss_mask_T, turn_reward_T=o.turn_reward_T
    )


def whitened_gae(outcomes: Outcomes) -> Tensor:
    """`critic_advantage`, whitened over the batch (PPO, arXiv:1707.06347). (T,)."""
    return whiten(critic_advantage(outcomes), outcomes.loss_mask_T, outcomes.std_floor)


def _std(deviation_S: Tensor, reward_S: Tensor, group_S: Tensor, num_groups: int) -> Tensor:
    """(num_groups,) unbiased standard deviation of the scored rewards."""
    count_N = segment_sum((~reward_S.isnan()).to(reward_S.dtype), group_S, num_groups)
    return (segment_sum(deviation_S.square(), group_S, num_groups) / (count_N - 1).clamp(min=1)).sqrt()


CreditFunction = Callable[[Outcomes], Tensor]


def _among_siblings(function: Callable[[Tensor, Tensor, int], Tensor]) -> CreditFunction:
    """Advantage of each sample over its group, spread over its tokens."""
    return lambda o: spread(function(o.reward_S, o.group_S, o.num_groups), o)


def _in_deviations(function: Callable[[Tensor, Tensor, int, float], Tensor]) -> CreditFunction:
    """Like `_among_siblings`, of a function that divides by the group's standard deviation."""
    return lambda o: spread(function(o.reward_S, o.group_S, o.num_groups, o.std_floor), o)


SIBLINGS = frozenset({"siblings"})
CREDIT: dict[str, Entry[CreditFunction]] = {
    "group_norm": Entry(
        _in_deviations(group_norm), "(R - mean) / (std + std_floor) in the group", "arXiv:2402.03300", SIBLINGS
    ),
    "group_mean": Entry(_among_siblings(group_mean), "R - mean in the group", "arXiv:2503.20783", SIBLINGS),
    "leave_one_out": Entry(_among_siblings(leave_one_out), "R - mean of the siblings", "arXiv:2402.14740", SIBLINGS),
    "group_mean_whitened": Entry(
        group_mean_whitened, "R - mean in the group, whitened over the batch", "arXiv:2501.03262", SIBLINGS
    ),
    "length_weighted": Entry(
        lambda o: spread(length_weighted(o), o),
        "R - sum(length R) / sum(length) in the group",
        "arXiv:2505.23585",
        SIBLINGS,
    ),
    "best_of_group": Entry(
        _in_deviations(best_of_group), "(best - second best) / std for the best", "arXiv:2503.19595", SIBLINGS
    ),
    "gdpo": Entry(
        lambda o: spread(by_component(o), o),
        "sum over components of weight (score - mean) / (std + std_floor) in the group, normalised over the batch",
        "arXiv:2601.05242",
        frozenset({"siblings", "scores"}),
    ),
    "remax": Entry(
        lambda o: spread(over_greedy(o), o),
        "R - R of the greedy sample",
        "arXiv:2310.10505",
        frozenset({"greedy_reward"}),
    ),
    "reinforce_pp": Entry(whitened_return, "sum_k gamma^k r_(t+k), whitened over the batch", "arXiv:2501.03262"),
    "gae": Entry(
        whitened_gae,
        "sum_k (gamma lambda)^k (r + gamma V' - V)_(t+k), whitened over the batch",
        "arXiv:1506.02438",
        frozenset({"values"}),
    ),
}


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
