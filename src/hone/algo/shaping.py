"""What happens to a reward before any baseline is taken from it: clip of the raw value, truncation, length penalty.

The order matters: a clip after the baseline would not bound the reward. Not here: how scores become a reward (that is
`reward/`), or a reward an advantage (`advantage.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def clip_rewards(reward_S: Tensor, bounds: tuple[float, float]) -> Tensor:
    """(S,) raw rewards kept in [low, high]; NaN (unscored) stays NaN."""
    return reward_S.clamp(*bounds)


def keep_fraction(reward_S: Tensor, truncated_S: Tensor, factor: float) -> Tensor:
    """(S,) rewards where a truncated sample keeps `factor` of a positive one; a negative one stays as bad as it is."""
    return torch.where((truncated_S > 0) & (reward_S > 0), reward_S * factor, reward_S)


def overlong_penalty(length_S: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float) -> Tensor:
    """DAPO's soft length penalty (arXiv:2503.14476): 0 up to `max_tokens - buffer_tokens`, then linear to -factor.

    Args:
        length_S: (S,) response tokens.
    Returns:
        (S,) float, in [-factor, 0] for lengths up to `max_tokens`; to be added to the reward.
    """
    excess_S = length_S - (max_tokens - buffer_tokens)
    return (-excess_S / buffer_tokens * factor).clamp(max=0)


def informative(rewards: Sequence[float | None], bounds: tuple[float, float] | None) -> bool:
    """Whether a group's rewards differ after the clip, so that a group baseline leaves something to learn from.

    The length penalty does not count: a group of nothing but right answers is not made worth a step by their lengths.
    """
    low, high = bounds or (float("-inf"), float("inf"))
    return len({min(max(reward, low), high) for reward in rewards if reward is not None}) > 1
