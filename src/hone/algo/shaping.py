"""Reward shaping before the baseline: clipping, truncation, normalisation, length penalty.

The order matters: a clip after the baseline would not bound the reward. Not here: how scores become a reward (that is
`reward/`), or a reward an advantage (`advantage.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hone.algo.advantage import STD_FLOOR
from hone.algo.segments import segment_index
from hone.config.algorithm import AlgorithmSection
from hone.types import Batch, Control


class Shaping:
    """The shaping of a row, in its order.

    Args:
        control: holds the running statistics that `normalize_rewards` divides by; changed by `of_samples`.
        max_response_tokens: the rollout's limit; only the overlong penalty needs it.
    """

    def __init__(self, section: AlgorithmSection, control: Control, max_response_tokens: int) -> None:
        self.section, self.control, self.max_response_tokens = section, control, max_response_tokens

    def of_samples(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """(S,) shaped rewards, NaN where unscored; and metrics of the scored ones."""
        section, metrics, raw_S = self.section, {}, batch.reward_S
        scored_S = ~raw_S.isnan()
        num_scored = max(int(scored_S.sum()), 1)
        cut_S = self._cut(raw_S, batch.columns.get("truncated_S"))
        if section.reward_clip is not None:
            outside_S = clip_rewards(raw_S, section.reward_clip) != raw_S
            metrics["train/reward_clipped_frac"] = int(outside_S[scored_S].sum()) / num_scored
        if section.normalize_rewards:
            observe_rewards(self.control, cut_S)
            metrics["train/reward_running_mean"] = self.control.reward_mean
            metrics["train/reward_running_std"] = reward_std(self.control)
        before_S = self._normalized(cut_S)
        reward_S = self._penalised(before_S, batch.length_S)
        if section.overlong_buffer_frac:
            metrics["train/overlong_penalty_mean"] = float((reward_S - before_S)[scored_S].sum()) / num_scored
        return reward_S, metrics

    def of_turns(self, batch: Batch) -> Tensor | None:
        """(T,) the part of the shaped reward that belongs to single turns, at their last tokens; None without turns.

        To be called after `of_samples`. The clip bounds the sum so far, the deviation divides each turn's reward; what
        else shaping does is done to the sample, at its end.
        """
        turn_reward_T = batch.columns.get("turn_reward_T")
        if turn_reward_T is None:
            return None
        if self.section.reward_clip is not None:
            turn_reward_T = clip_running_sums(turn_reward_T, segment_index(batch.length_S), self.section.reward_clip)
        return turn_reward_T / reward_scale(self.control) if self.section.normalize_rewards else turn_reward_T

    def of_greedy(self, batch: Batch) -> Tensor | None:
        """(N,) rewards of the greedy samples, shaped as those that are compared with them; None without any."""
        reward_N = batch.columns.get("greedy_reward_N")
        if reward_N is None:
            return None
        cut_N = self._cut(reward_N, batch.columns["greedy_truncated_N"])
        return self._penalised(self._normalized(cut_N), batch.columns["greedy_length_N"])

    def _cut(self, reward: Tensor, truncated: Tensor | None) -> Tensor:
        section = self.section
        if section.reward_clip is not None:
            reward = clip_rewards(reward, section.reward_clip)
        if section.truncated_reward_factor < 1:
            assert truncated is not None, "truncated_reward_factor needs to know which samples were truncated"
            reward = keep_fraction(reward, truncated, section.truncated_reward_factor)
        return reward

    def _normalized(self, reward: Tensor) -> Tensor:
        return normalized(reward, self.control) if self.section.normalize_rewards else reward

    def _penalised(self, reward: Tensor, length: Tensor) -> Tensor:
        section = self.section
        if not section.overlong_buffer_frac:
            return reward
        penalty = overlong_penalty(
            length,
            max_tokens=self.max_response_tokens,
            buffer_frac=section.overlong_buffer_frac,
            factor=section.overlong_penalty,
        )
        return reward + penalty.to(reward.dtype)


def clip_rewards(reward_S: Tensor, bounds: tuple[float, float]) -> Tensor:
    """(S,) raw rewards kept in [low, high]; NaN (unscored) stays NaN."""
    return reward_S.clamp(*bounds)


def clip_running_sums(reward_T: Tensor, sample_T: Tensor, bounds: tuple[float, float]) -> Tensor:
    """(T,) float64 rewards whose sums from a sample's start on are kept in [low, high] (and 0, where nothing is yet).

    So what is still to come is never more than the bounds are apart. Bounds of 0 and 1 make 1, 0, -1 of 5, 5, -20.
    """
    low, high = min(bounds[0], 0.0), max(bounds[1], 0.0)
    total_T = reward_T.double().cumsum(0)
    starts_T = torch.ones_like(sample_T, dtype=torch.bool)
    starts_T[1:] = sample_T[1:] != sample_T[:-1]
    before_start_K = (total_T - reward_T.double())[starts_T]
    so_far_T = (total_T - before_start_K[starts_T.cumsum(0) - 1]).clamp(low, high)
    before_T = torch.where(starts_T, 0.0, so_far_T.roll(1))
    return so_far_T - before_T


def keep_fraction(reward_S: Tensor, truncated_S: Tensor, factor: float) -> Tensor:
    """(S,) rewards where a truncated sample keeps `factor` of a positive one; a negative one is unchanged."""
    return torch.where((truncated_S > 0) & (reward_S > 0), reward_S * factor, reward_S)


def overlong_penalty(length_S: Tensor, *, max_tokens: int, buffer_frac: float, factor: float) -> Tensor:
    """DAPO's soft length penalty (arXiv:2503.14476): linear over the last `buffer_frac` of the limit, to -factor.

    Args:
        length_S: (S,) response tokens.
    Returns:
        (S,) float, in [-factor, 0], to be added to the reward.
    """
    buffer_tokens = buffer_frac * max_tokens
    excess_S = length_S - (max_tokens - buffer_tokens)
    return (-excess_S / buffer_tokens * factor).clamp(-factor, 0)


def informative(rewards: Sequence[float | None], bounds: tuple[float, float] | None) -> bool:
    """Whether a group's rewards differ after the clip, so that a group baseline leaves a gradient.

    The length penalty does not count: a group of correct answers alone stays uninformative whatever their lengths.
    """
    low, high = bounds or (float("-inf"), float("inf"))
    return len({min(max(reward, low), high) for reward in rewards if reward is not None}) > 1


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


def steer_entropy(control: Control, *, coef: float, entropy: float, target: float, step: float, most: float) -> None:
    """Raise the entropy coefficient by `step` while the entropy is at most its target, lower it else, within [0, most];
    the bonus counts only while it is (adaptive entropy control, Skywork-OR1, arXiv:2505.22312)."""
    control.entropy_is_low = entropy <= target
    control.entropy_coef = min(max(coef + (step if control.entropy_is_low else -step), 0.0), most)


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
