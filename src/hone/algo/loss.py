"""The policy loss as three independent choices: what multiplies the advantage, how it is bounded, how tokens add up.

    loss = sum_T weight_T * (-objective_T + kl_coef * kl_T - entropy_coef * entropy_T)

`RATIO` gives the multiplier, `CLIP` makes the objective of it, `AGGREGATE` gives weight_T. Every function is pure, on
flat tensors in float32 or float64. A denominator is only ever a count over the whole optimizer step (`Totals`), so the
gradient does not depend on how the step is split into microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algo.kl import MAX_LOG_RATIO
from hone.algo.registry import Entry
from hone.algo.segments import segment_sum
from hone.types import Totals


@dataclass(frozen=True)
class Tokens:
    """The T response tokens of one microbatch, as the loss sees them. Only `logprobs_T` and `entropy_T` have gradient.

    Whole samples only: a sample's tokens are never spread over microbatches.
    """

    logprobs_T: Tensor
    """(T,) of the policy now, at the sampling temperature."""
    entropy_T: Tensor
    """(T,) of the policy's distribution at each token, nats."""
    old_logprobs_T: Tensor
    """(T,) of the policy before the update."""
    sampler_logprobs_T: Tensor
    """(T,) as recorded by the engine."""
    advantages_T: Tensor
    loss_mask_T: Tensor
    """(T,) 1 where the policy wrote the token and its sample was scored, else 0."""
    sample_T: Tensor
    """(T,) int64 in [0, num_samples): the token's sample within this microbatch."""
    num_samples: int
    ref_logprobs_T: Tensor | None = None
    """(T,) of the frozen reference; only where the algorithm needs it."""


@dataclass(frozen=True)
class Bounds:
    """The ratio is kept in [1 - low, 1 + high]."""

    low: float
    high: float


@dataclass(frozen=True)
class Objective:
    """What is maximised at each token, and where a bound took the gradient away."""

    value_T: Tensor
    clipped_low_T: Tensor
    """(T,) bool: the ratio had fallen below its bound and the advantage pushed it further."""
    clipped_high_T: Tensor


def log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """(T,) log of the policy ratio, kept in +-20 so that its exp is finite."""
    return (logprobs_T - old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# ---- ratio: (tokens) -> the (T,) multiplier of the advantage, with gradient ---------------------------------------


def token_ratio(tokens: Tokens) -> Tensor:
    """pi(token) / pi_old(token) (PPO, arXiv:1707.06347)."""
    return log_ratio(tokens.logprobs_T, tokens.old_logprobs_T).exp()


def no_ratio(tokens: Tokens) -> Tensor:
    """log pi(token): REINFORCE, and with advantage 1 the likelihood that supervised training maximises."""
    return tokens.logprobs_T


# ---- clip: (multiplier, tokens, bounds) -> objective --------------------------------------------------------------


def ppo_clip(ratio_T: Tensor, tokens: Tokens, bounds: Bounds) -> Objective:
    """min(rho A, clip(rho, 1 - low, 1 + high) A): pessimistic, no reward for leaving the bounds (arXiv:1707.06347)."""
    advantages_T = tokens.advantages_T
    clipped_T = ratio_T.clamp(1 - bounds.low, 1 + bounds.high)
    return Objective(
        torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T),
        clipped_low_T=(ratio_T < 1 - bounds.low) & (advantages_T < 0),
        clipped_high_T=(ratio_T > 1 + bounds.high) & (advantages_T > 0),
    )


def no_clip(ratio_T: Tensor, tokens: Tokens, bounds: Bounds) -> Objective:
    """The multiplier times the advantage; the bounds have no meaning here."""
    never_T = torch.zeros_like(tokens.loss_mask_T, dtype=torch.bool)
    return Objective(ratio_T * tokens.advantages_T, never_T, never_T)


# ---- aggregate: -> the (T,) weights whose sum with the token losses is the loss -----------------------------------


def token_mean(tokens: Tokens, totals: Totals, max_response_tokens: int) -> Tensor:
    """Every token of the optimizer step counts the same (DAPO, arXiv:2503.14476)."""
    return tokens.loss_mask_T / max(totals.loss_tokens, 1)


def sample_mean(tokens: Tokens, totals: Totals, max_response_tokens: int) -> Tensor:
    """Mean over a sample's tokens, then over samples: a token of a long response counts less (GRPO)."""
    mask_T, sample_T = tokens.loss_mask_T, tokens.sample_T
    tokens_S = segment_sum(mask_T, sample_T, tokens.num_samples)
    return mask_T / (tokens_S.clamp(min=1) * max(totals.samples, 1))[sample_T]


def fixed_length(tokens: Tokens, totals: Totals, max_response_tokens: int) -> Tensor:
    """Sum over tokens / (samples x max_response_tokens): no length bias at all (Dr. GRPO, arXiv:2503.20783)."""
    return tokens.loss_mask_T / (max(totals.samples, 1) * max_response_tokens)


RatioFunction = Callable[[Tokens], Tensor]
ClipFunction = Callable[[Tensor, Tokens, Bounds], Objective]
AggregateFunction = Callable[[Tokens, Totals, int], Tensor]

RATIO: dict[str, Entry[RatioFunction]] = {
    "token": Entry(token_ratio, "rho_t = exp(l - l_old)", "arXiv:1707.06347", frozenset({"old_logprobs"})),
    "none": Entry(no_ratio, "l"),
}
CLIP: dict[str, Entry[ClipFunction]] = {
    "ppo": Entry(ppo_clip, "min(rho A, clip(rho, 1 - low, 1 + high) A)", "arXiv:1707.06347"),
    "none": Entry(no_clip, "rho A"),
}
AGGREGATE: dict[str, Entry[AggregateFunction]] = {
    "token_mean": Entry(token_mean, "sum over tokens / tokens", "arXiv:2503.14476"),
    "sample_mean": Entry(sample_mean, "mean over samples of the mean over tokens", "arXiv:2402.03300"),
    "fixed_length": Entry(fixed_length, "sum over tokens / (samples x max_response_tokens)", "arXiv:2503.20783"),
}
