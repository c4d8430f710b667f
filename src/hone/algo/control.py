"""State between updates: the adaptive KL coefficient and the running reward statistics.

The state is `types.Control`, part of every checkpoint; these functions update it.
"""

from __future__ import annotations

import math

from torch import Tensor

from hone.algo.advantage import STD_FLOOR
from hone.types import Control

MAX_KL_ERROR = 0.2  # relative; a KL further off its target moves the coefficient no faster (arXiv:1909.08593)
ALARM_STEPS = 50


def steer_kl(control: Control, *, coef: float, kl: float, target: float, samples: int, horizon_samples: int) -> bool:
    """Multiply the coefficient by 1 + clip(kl / target - 1, +-0.2) * samples / horizon (arXiv:1909.08593).

    Args:
        coef: the coefficient of this update.
        kl, target: of one unit, per token or per sequence.
    Returns:
        Whether to raise an alarm: for another 50 updates in a row the KL was beyond +-20% on one side.
    """
    error = kl / target - 1
    control.kl_coef = coef * (1 + max(-MAX_KL_ERROR, min(MAX_KL_ERROR, error)) * samples / horizon_samples)
    if abs(error) <= MAX_KL_ERROR:
        control.kl_missed_steps = 0
    else:
        side = 1 if error > 0 else -1
        control.kl_missed_steps = side + (control.kl_missed_steps if control.kl_missed_steps * side > 0 else 0)
    return control.kl_missed_steps != 0 and control.kl_missed_steps % ALARM_STEPS == 0


def observe_rewards(control: Control, reward_S: Tensor) -> None:
    """Add the scored rewards (NaN is unscored) to the running statistics, by merging two sets of moments."""
    known = reward_S[~reward_S.isnan()].double()
    count = len(known)
    if count == 0:
        return
    mean = float(known.mean())
    total = control.reward_count + count
    shift = mean - control.reward_mean
    control.reward_squares += float((known - mean).square().sum()) + shift**2 * control.reward_count * count / total
    control.reward_mean += shift * count / total
    control.reward_count = total


def reward_std(control: Control) -> float:
    """Unbiased standard deviation of all rewards observed."""
    return math.sqrt(control.reward_squares / max(control.reward_count - 1, 1))


def reward_scale(control: Control) -> float:
    """Divisor of the normalisation, in reward units."""
    return reward_std(control) + STD_FLOOR


def normalized(reward_S: Tensor, control: Control) -> Tensor:
    """(reward - running mean) / running std, dimensionless; NaN stays NaN."""
    return (reward_S - control.reward_mean) / reward_scale(control)
