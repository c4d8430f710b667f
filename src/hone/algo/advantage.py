"""Credit: how the rewards of samples become the advantage of each token. Pure functions, unscored samples ignored.

Conventions that hold for every function: NaN marks an unscored sample, which enters no baseline and gets advantage 0;
standard deviations are unbiased; a group with one scored member, or with all rewards equal, has nothing to say and
gets 0, never NaN and never the reward itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hone.algo.registry import Entry
from hone.algo.segments import segment_mean, segment_range, segment_sum

STD_FLOOR = 1e-6  # in reward units; keeps a nearly equal group from exploding, as published


@dataclass(frozen=True)
class Outcomes:
    """What credit may be computed from: S samples in groups, T response tokens."""

    reward_S: Tensor
    """(S,) float, shaped; NaN where unscored."""
    group_S: Tensor
    """(S,) int64: which group (prompt) a sample belongs to."""
    num_groups: int
    sample_T: Tensor
    """(T,) int64: which sample a token belongs to."""
    loss_mask_T: Tensor
    """(T,) float, 1 where the policy wrote the token and its sample was scored."""


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
    # The mean of equal floats may differ from them in the last bit: only the range tells that they are equal.
    speaks_S = (segment_range(reward_S, group_S, num_groups) > 0)[group_S]
    return (known_S - mean_N[group_S]) * scored_S * speaks_S


def group_norm(reward_S: Tensor, group_S: Tensor, num_groups: int) -> Tensor:
    """Advantage in standard deviations of the group: (R - mean) / (std + 1e-6) (GRPO, arXiv:2402.03300).

    Weights groups with little spread more than `group_mean` does. Arguments as there; (S,), dimensionless.
    """
    deviation_S = group_mean(reward_S, group_S, num_groups)
    count_N = segment_sum((~reward_S.isnan()).to(reward_S.dtype), group_S, num_groups)
    variance_N = segment_sum(deviation_S.square(), group_S, num_groups) / (count_N - 1).clamp(min=1)
    return deviation_S / (variance_N.sqrt() + STD_FLOOR)[group_S]


CreditFunction = Callable[[Outcomes], Tensor]


def _per_sample(function: Callable[[Tensor, Tensor, int], Tensor]) -> CreditFunction:
    """Give every token the advantage of its sample."""
    return lambda o: function(o.reward_S, o.group_S, o.num_groups)[o.sample_T]


SIBLINGS = frozenset({"siblings"})
CREDIT: dict[str, Entry[CreditFunction]] = {
    "group_norm": Entry(
        _per_sample(group_norm), "(R - mean) / (std + 1e-6) in the group", "arXiv:2402.03300", SIBLINGS
    ),
    "group_mean": Entry(_per_sample(group_mean), "R - mean in the group", "arXiv:2503.20783", SIBLINGS),
}
