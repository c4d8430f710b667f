"""Policy loss as three independent choices: ratio, clip and aggregation.

    loss = sum_T weight_T * (-objective_T + kl_coef * kl_T - entropy_coef * entropy_T)

`RATIO` gives the multiplier of the advantage, `CLIP` the objective, `AGGREGATE` weight_T. Every function is pure, on
flat tensors in float32 or float64. A denominator is only ever a count over the whole optimizer step (`Totals`), so the
gradient does not depend on how the step is split into microbatches.

The critic's value loss is here too, with its explained variance; its model is in `train.critic`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.algo.kl import MAX_LOG_RATIO
from hone.algo.registry import Entry
from hone.algo.segments import segment_mean, segment_sum
from hone.types import Totals


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Loss mask and sample index of a microbatch's T tokens.

    Whole samples only: a sample's tokens are never spread over microbatches.
    """

    loss_mask_T: Tensor
    """(T,) 1 where the policy wrote the token and its sample was scored, else 0."""
    sample_T: Tensor
    """(T,) int64 in [0, num_samples): the token's sample within this microbatch."""
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class LossTokens(Ragged):
    """The T response tokens of a microbatch, as the loss sees them. Only `logprobs_T` and `entropy_T` have gradient."""

    logprobs_T: Tensor
    """(T,) of the policy now, at the sampling temperature."""
    entropy_T: Tensor
    """(T,) of the policy's distribution at each token, nats."""
    old_logprobs_T: Tensor
    """(T,) of the policy before the update."""
    sampler_logprobs_T: Tensor
    """(T,) as recorded by the engine."""
    advantages_T: Tensor
    ref_logprobs_T: Tensor | None = None
    """(T,) of the frozen reference; only where the algorithm needs it."""
    outlier_T: Tensor | None = None
    """(T,) 1 for tokens that `covariance_outliers` found; only with clips that ask for them."""
    engine_T: Tensor | None = None
    """(T,) which engine drew each token, of those that have names; from 0."""
    num_engines: int = 0


@dataclass(frozen=True)
class Bounds:
    """Bounds of the clip functions; each reads those it knows."""

    low: float
    """The ratio is kept above 1 - low ..."""
    high: float
    """... and below 1 + high."""
    dual: float | None = None
    """Largest multiple of a negative advantage, or of any (`tv_mask`); None: no such bound."""
    sapo_tau: tuple[float, float] = (1.0, 1.0)
    """Steepness of the soft gate for positive and for negative advantages."""
    kl_coef: float = 0.0
    """Coefficient of the KL to the policy before the update, at the tokens of `LossTokens.outlier_T`."""


@dataclass(frozen=True)
class Objective:
    """Objective of each token, and where clipping removed its gradient."""

    value_T: Tensor
    clipped_low_T: Tensor
    """(T,) bool: the ratio was below its bound with a negative advantage."""
    clipped_high_T: Tensor
    clipped_dual_T: Tensor
    """(T,) bool: the ratio exceeded the dual bound with a negative advantage."""


def log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """(T,) log of the policy ratio, kept in +-20 so that its exp is finite."""
    return (logprobs_T - old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# ---- ratio: (tokens) -> the (T,) multiplier of the advantage, with gradient ---------------------------------------


def token_ratio(tokens: LossTokens) -> Tensor:
    """pi(token) / pi_old(token) (PPO, arXiv:1707.06347)."""
    return log_ratio(tokens.logprobs_T, tokens.old_logprobs_T).exp()


def sequence_ratio(tokens: LossTokens) -> Tensor:
    """exp(mean over the sample of log rho), its gradient handed to each token alike (GSPO, arXiv:2507.18071)."""
    log_ratio_T = log_ratio(tokens.logprobs_T, tokens.old_logprobs_T)
    mean_S = segment_mean(log_ratio_T.detach(), tokens.loss_mask_T, tokens.sample_T, tokens.num_samples)
    return (mean_S[tokens.sample_T] + tokens.logprobs_T - tokens.logprobs_T.detach()).exp()


def no_ratio(tokens: LossTokens) -> Tensor:
    """log pi(token): REINFORCE, and with advantage 1 the likelihood that supervised training maximises."""
    return tokens.logprobs_T


# ---- clip: (multiplier, tokens, bounds) -> objective --------------------------------------------------------------


def ppo_clip(ratio_T: Tensor, tokens: LossTokens, bounds: Bounds) -> Objective:
    """min(rho A, clip(rho, 1 - low, 1 + high) A): pessimistic, no reward for leaving the bounds (arXiv:1707.06347).

    With `bounds.dual` = c, at least c A where A < 0 (dual clip, arXiv:1912.09729): one token that became likely
    against its advantage cannot outweigh the rest.
    """
    advantages_T = tokens.advantages_T
    clipped_T = ratio_T.clamp(1 - bounds.low, 1 + bounds.high)
    value_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    dual_T = _never(tokens)
    if bounds.dual is not None:
        dual_T = (advantages_T < 0) & (ratio_T > bounds.dual)
        value_T = torch.where(dual_T, bounds.dual * advantages_T, value_T)
    return Objective(value_T, *_outside(ratio_T, tokens, bounds), dual_T)


def cispo_clip(ratio_T: Tensor, tokens: LossTokens, bounds: Bounds) -> Objective:
    """stop_gradient(min(rho, 1 + high)) A log pi: a clipped token keeps a gradient (CISPO, arXiv:2506.13585)."""
    weight_T = ratio_T.detach().clamp(max=1 + bounds.high)
    never_T = _never(tokens)
    return Objective(weight_T * tokens.advantages_T * tokens.logprobs_T, never_T, ratio_T > 1 + bounds.high, never_T)


def geo_mean_clip(ratio_T: Tensor, tokens: LossTokens, bounds: Bounds) -> Objective:
    """exp(mean over the sample of bounded log rho) A: PPO's clip inside a geometric mean (GMPO, arXiv:2507.20673)."""
    log_ratio_T, advantages_T = ratio_T.log(), tokens.advantages_T
    bounded_T = torch.where(
        advantages_T > 0,
        log_ratio_T.clamp(max=math.log1p(bounds.high)),
        log_ratio_T.clamp(min=math.log1p(-bounds.low)),
    )
    mean_S = segment_mean(bounded_T, tokens.loss_mask_T, tokens.sample_T, tokens.num_samples)
    value_T = mean_S.exp()[tokens.sample_T] * advantages_T
    return Objective(value_T, *_outside(ratio_T, tokens, bounds), _never(tokens))


def sapo_gate(ratio_T: Tensor, tokens: LossTokens, bounds: Bounds) -> Objective:
    """4 / tau * sigmoid(tau (rho - 1)) A: a soft gate, with slope 1 at rho = 1 (SAPO, arXiv:2511.20347)."""
    positive, negative = bounds.sapo_tau
    tau_T = torch.where(tokens.advantages_T > 0, positive, negative).to(ratio_T.dtype)
    never_T = _never(tokens)
    return Objective(4 / tau_T * (tau_T * (ratio_T - 1)).sigmoid() * tokens.advantages_T, never_T, never_T, never_T)


def clip_cov(ratio_T: Tensor, tokens: LossTokens, bounds: Bounds) -> Objective:
    """PPO's clip, and no gradient at all for the batch's `covariance_outliers` (Clip-Cov, arXiv:2505.22617)."""
    assert tokens.outlier_T is not None, "the row clips by covariance but the batch has no outlier_T"
    objective = ppo_clip(ratio_T, tokens, bounds)
    value_T = torch.where(tokens.outlier_T > 0, objective.value_T.detach(), objective.value_T)
    return replace(objective, value_T=value_T)


def kl_cov(ratio_T: Tensor, tokens: LossTokens, bounds: Bounds) -> Objective:
    """rho A, less kl_coef |log rho_t| at the batch's `covariance_outliers` (KL-Cov, arXiv:2505.22617)."""
    assert tokens.outlier_T is not None, "the row penalises by covariance but the batch has no outlier_T"
    moved_T = log_ratio(tokens.logprobs_T, tokens.old_logprobs_T).abs()
    never_T = _never(tokens)
    value_T = ratio_T * tokens.advantages_T - bounds.kl_coef * moved_T * tokens.outlier_T
    return Objective(value_T, never_T, never_T, never_T)


def tv_mask(ratio_T: Tensor, tokens: LossTokens, bounds: Bounds) -> Objective:
    """stop_gradient(min(rho, dual)) A log pi where the token's probability is within its bounds, else 0 (DPPO,
    arXiv:2602.04879).

    Bounds are on pi - pi_old, the token's share of the total variation: above with A > 0, below else. A ratio's clip
    stops rare tokens, whose ratio moves most, long before they change the distribution.
    """
    change_T = tokens.logprobs_T.detach().exp() - tokens.old_logprobs_T.exp()
    high_T = (change_T > bounds.high) & (tokens.advantages_T > 0)
    low_T = (change_T < -bounds.low) & (tokens.advantages_T <= 0)
    weight_T = ratio_T.detach() if bounds.dual is None else ratio_T.detach().clamp(max=bounds.dual)
    value_T = torch.where(high_T | low_T, 0.0, weight_T * tokens.advantages_T * tokens.logprobs_T)
    return Objective(value_T, low_T & (tokens.advantages_T < 0), high_T, _never(tokens))


def covariance_outliers(
    logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor, *, share: float, low: float, high: float
) -> Tensor:
    """(T,) 1 for the tokens of the batch that drive entropy down the most, at most `share` of all (at least one).

    Those are tokens with a large (l - mean l) (A - mean A), means over the batch's unmasked tokens. The paper draws
    them at random from those in (low, high); here the largest are taken, so that a batch alone decides. Equals of
    the last one taken are taken too.
    """
    count = mask_T.sum()
    means = [(value_T * mask_T).sum() / count.clamp(min=1) for value_T in (logprobs_T, advantages_T)]
    covariance_T = (logprobs_T - means[0]) * (advantages_T - means[1])
    inside_T = (mask_T > 0) & (covariance_T > low) & (covariance_T < high)
    candidates = covariance_T[inside_T]
    if len(candidates) == 0:
        return torch.zeros_like(mask_T)
    least = candidates.topk(min(max(int(share * float(count)), 1), len(candidates))).values[-1]
    return (inside_T & (covariance_T >= least)).to(mask_T.dtype)


def no_clip(ratio_T: Tensor, tokens: LossTokens, bounds: Bounds) -> Objective:
    """The multiplier times the advantage; the bounds are not used."""
    never_T = _never(tokens)
    return Objective(ratio_T * tokens.advantages_T, never_T, never_T, never_T)


def _never(tokens: LossTokens) -> Tensor:
    return torch.zeros_like(tokens.loss_mask_T, dtype=torch.bool)


def _outside(ratio_T: Tensor, tokens: LossTokens, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Where the ratio left its bounds in the direction of the advantage: below, above."""
    low_T = (ratio_T < 1 - bounds.low) & (tokens.advantages_T < 0)
    high_T = (ratio_T > 1 + bounds.high) & (tokens.advantages_T > 0)
    return low_T, high_T


# ---- aggregate: -> the (T,) weights whose sum with the token losses is the loss -----------------------------------


def token_mean(tokens: Ragged, totals: Totals, max_response_tokens: int) -> Tensor:
    """Every token of the optimizer step counts the same (DAPO, arXiv:2503.14476)."""
    return tokens.loss_mask_T / max(totals.loss_tokens, 1)


def sample_mean(tokens: Ragged, totals: Totals, max_response_tokens: int) -> Tensor:
    """Mean over a sample's tokens, then over samples: a token of a long response counts less (GRPO)."""
    mask_T, sample_T = tokens.loss_mask_T, tokens.sample_T
    tokens_S = segment_sum(mask_T, sample_T, tokens.num_samples)
    return mask_T / (tokens_S.clamp(min=1) * max(totals.samples, 1))[sample_T]


def fixed_length(tokens: Ragged, totals: Totals, max_response_tokens: int) -> Tensor:
    """Sum over tokens / (samples x max_response_tokens): no length bias at all (Dr. GRPO, arXiv:2503.20783)."""
    return tokens.loss_mask_T / (max(totals.samples, 1) * max_response_tokens)


def token_sum(tokens: Ragged, totals: Totals, max_response_tokens: int) -> Tensor:
    """Plain sum over all tokens: the learning rate then depends on the size of the step."""
    return tokens.loss_mask_T


RatioFunction = Callable[[LossTokens], Tensor]
ClipFunction = Callable[[Tensor, LossTokens, Bounds], Objective]
AggregateFunction = Callable[[Ragged, Totals, int], Tensor]

OLD = frozenset({"old_logprobs"})
RATIO: dict[str, Entry[RatioFunction]] = {
    "token": Entry(token_ratio, "rho_t = exp(l - l_old)", "arXiv:1707.06347", frozenset({"old_logprobs"})),
    "sequence": Entry(
        sequence_ratio, "s = exp(mean_t log rho_t), gradient s grad l", "arXiv:2507.18071", frozenset({"old_logprobs"})
    ),
    "none": Entry(no_ratio, "l"),
}
CLIP: dict[str, Entry[ClipFunction]] = {
    "ppo": Entry(ppo_clip, "min(rho A, clip(rho, 1 - low, 1 + high) A)", "arXiv:1707.06347"),
    "cispo": Entry(cispo_clip, "stop_gradient(min(rho, 1 + high)) A l", "arXiv:2506.13585"),
    "geo_mean": Entry(geo_mean_clip, "exp(mean_t bounded log rho_t) A", "arXiv:2507.20673"),
    "sapo": Entry(sapo_gate, "4 / tau sigmoid(tau (rho - 1)) A", "arXiv:2511.20347"),
    "clip_cov": Entry(clip_cov, "as ppo; no gradient where (l - mean l)(A - mean A) is largest", "arXiv:2505.22617"),
    "kl_cov": Entry(
        kl_cov, "rho A, less c |log rho_t| where (l - mean l)(A - mean A) is largest", "arXiv:2505.22617", OLD
    ),
    "tv_mask": Entry(
        tv_mask,
        "stop_gradient(min(rho, dual)) A l where pi - pi_old is in [-low, high] on the side of A, else 0",
        "arXiv:2602.04879",
        OLD,
    ),
    "none": Entry(no_clip, "rho A"),
}
AGGREGATE: dict[str, Entry[AggregateFunction]] = {
    "token_mean": Entry(token_mean, "sum over tokens / tokens", "arXiv:2503.14476"),
    "sample_mean": Entry(sample_mean, "mean over samples of the mean over tokens", "arXiv:2402.03300"),
    "fixed_length": Entry(fixed_length, "sum over tokens / (samples x max_response_tokens)", "arXiv:2503.20783"),
    "token_sum": Entry(token_sum, "sum over tokens"),
}


@dataclass(frozen=True, kw_only=True)
class Values(Ragged):
    """The T response tokens of one microbatch, as the value loss sees them. Only `value_T` has gradient."""

    value_T: Tensor
    """(T,) of the critic now: the return expected from the state before each token, in reward units."""
    old_value_T: Tensor
    """(T,) of the critic before the update."""
    return_T: Tensor
    """(T,) target: advantage, before whitening, plus old value."""


def value_loss(values: Values, clip: float | None) -> tuple[Tensor, Tensor]:
    """0.5 max((V - R)^2, (clip(V, V_old +- c) - R)^2): pessimistic.

    Returns:
        (T,) loss, and (T,) bool: where clipping removed the gradient.
    """
    error_T = (values.value_T - values.return_T).square()
    if clip is None:
        return 0.5 * error_T, torch.zeros_like(error_T, dtype=torch.bool)
    bounded_T = values.old_value_T + (values.value_T - values.old_value_T).clamp(-clip, clip)
    bounded_error_T = (bounded_T - values.return_T).square()
    return 0.5 * torch.maximum(error_T, bounded_error_T), bounded_error_T > error_T


def explained_variance(value_T: Tensor, return_T: Tensor, mask_T: Tensor) -> float | None:
    """1 - var(R - V) / var(R) over unmasked tokens: 1 is a perfect critic, 0 one that predicts the mean.

    None where all returns are equal.
    """
    own = mask_T > 0
    known_T, error_T = return_T[own].double(), (return_T - value_T)[own].double()
    if len(known_T) == 0 or float(known_T.max() - known_T.min()) == 0:
        return None
    return float(1 - error_T.var(correction=0) / known_T.var(correction=0))


def pairwise_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor) -> Tensor:
    """(P,) -log sigmoid(chosen - rejected - margin), in nats.

    Without a margin the negative log-likelihood of the preferences under Bradley and Terry's model (1952), as in
    InstructGPT (arXiv:2203.02155, equation 1); the margin is Llama 2's (arXiv:2307.09288, section 3.2.2). Equal scores
    and no margin give log 2.
    """
    return -F.logsigmoid(chosen_P - rejected_P - margin_P)
