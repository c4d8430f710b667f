"""Importance sampling correction between sampler and trainer, and rejection of what differs too much between them.

The sampler may be an older policy, another program, or of lower precision. The importance weight w = exp(l_old - l_s)
repairs the expectation; each function that weights bounds its variance in its own way. Weights are detached, and never
the product of 0 and infinity: the log is bounded first. They need l_s of the distribution really sampled from.

Rejection is of tokens and samples. What is rejected leaves the loss and its denominators; its reward still counts in
the baseline. Correction and rejection may both be on, and neither reads the other. Each function that rejects gives
(T,) bool, True for what is kept, from r = l_s - l_old (sampler less trainer) of a sample's own tokens. k1 = r is
bounded on both sides, as a ratio sampler / trainer; k2 = r^2 / 2 and k3 = exp(-r) - 1 + r are never negative, and
bounded above, in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hone.algo.kl import MAX_LOG_RATIO, k1, k2, k3
from hone.algo.loss import LossTokens, log_ratio
from hone.algo.registry import Entry
from hone.algo.segments import segment_mean, segment_sum


def truncated(tokens: LossTokens, low: float, high: float) -> Tensor:
    """min(w, high): truncated importance sampling (TIS, arXiv:1802.01561). `low` is not used."""
    return _weight(tokens).clamp(max=high)


def sequence_truncated(tokens: LossTokens, low: float, high: float) -> Tensor:
    """min(product of a sample's w, high), for all its tokens: the weight of the sample as a whole. `low` is not used.

    Unbiased but for the bound, where `truncated` also leaves out how likely a token's past was; of long samples the
    product is soon at the bound or near 0.
    """
    log_S = segment_sum(_log_weight(tokens) * tokens.loss_mask_T, tokens.sample_T, tokens.num_samples)
    return log_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=high)[tokens.sample_T]


def icepop(tokens: LossTokens, low: float, high: float) -> Tensor:
    """w inside [low, high], 0 outside: masked importance sampling (arXiv:2510.18855)."""
    weight_T = _weight(tokens)
    return torch.where((weight_T >= low) & (weight_T <= high), weight_T, 0.0)


def sequence_mask(tokens: LossTokens, low: float, high: float) -> Tensor:
    """0 for samples whose geometric-mean w is outside [low, high]; min(w, high) for the tokens of the rest."""
    mean_S = segment_mean(_log_weight(tokens), tokens.loss_mask_T, tokens.sample_T, tokens.num_samples).exp()
    kept_S = (mean_S >= low) & (mean_S <= high)
    return torch.where(kept_S[tokens.sample_T], _weight(tokens).clamp(max=high), 0.0)


def none(tokens: LossTokens, low: float, high: float) -> Tensor:
    """1: assume that sampler and trainer are the same policy."""
    return torch.ones_like(tokens.loss_mask_T)


def _log_weight(tokens: LossTokens) -> Tensor:
    return log_ratio(tokens.old_logprobs_T, tokens.sampler_logprobs_T).detach()


def _weight(tokens: LossTokens) -> Tensor:
    return _log_weight(tokens).exp()


CorrectionFunction = Callable[[LossTokens, float, float], Tensor]
OLD = frozenset({"old_logprobs"})
CORRECTION: dict[str, Entry[CorrectionFunction]] = {
    "none": Entry(none, "1"),
    "tis": Entry(truncated, "min(w, high)", "arXiv:1802.01561", OLD),
    "sequence_tis": Entry(sequence_truncated, "min(exp(sum_t log w_t), high)", "", OLD),
    "icepop": Entry(icepop, "w if low <= w <= high else 0", "arXiv:2510.18855", OLD),
    "sequence_mask": Entry(
        sequence_mask, "0 if exp(mean_t log w_t) is outside [low, high], else min(w, high)", "", OLD
    ),
}


Statistic = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Estimates (T,), mask (T,), sample (T,) and number of samples -> (T,) what is compared with the bounds."""


def of_token(estimate_T: Tensor, mask_T: Tensor, sample_T: Tensor, num_samples: int) -> Tensor:
    """Each token's own."""
    return estimate_T


def sample_sum(estimate_T: Tensor, mask_T: Tensor, sample_T: Tensor, num_samples: int) -> Tensor:
    """The sum over a sample's tokens."""
    return segment_sum(estimate_T * mask_T, sample_T, num_samples)[sample_T]


def sample_mean(estimate_T: Tensor, mask_T: Tensor, sample_T: Tensor, num_samples: int) -> Tensor:
    """The mean over a sample's tokens."""
    return segment_mean(estimate_T, mask_T, sample_T, num_samples)[sample_T]


def sample_max(estimate_T: Tensor, mask_T: Tensor, sample_T: Tensor, num_samples: int) -> Tensor:
    """The largest of a sample's tokens; for estimates that are never negative."""
    most_S = estimate_T.new_zeros(num_samples)
    return most_S.scatter_reduce(0, sample_T, estimate_T * mask_T, "amax")[sample_T]


def keep(
    statistic: Statistic,
    estimator: Callable[[Tensor], Tensor],
    old_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    num_samples: int,
    low: float | None,
    high: float,
) -> Tensor:
    """(T,) bool: the tokens that are kept.

    Args:
        low: of the ratio, with k1; None: 1 / high. Not used by k2 and k3.
        high: of the ratio with k1, of the estimate in nats with k2 and k3.
    """
    log_ratio_T = (sampler_logprobs_T - old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    found_T = statistic(estimator(log_ratio_T) * mask_T, mask_T, sample_T, num_samples)
    if estimator is not k1:
        return found_T <= high
    ratio_T = found_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return (ratio_T >= (1 / high if low is None else low)) & (ratio_T <= high)


def keep_all(old_logprobs_T: Tensor, *_: object) -> Tensor:
    """Nothing is rejected."""
    return torch.ones_like(old_logprobs_T, dtype=torch.bool)


RejectionFunction = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None, float], Tensor]
NEEDS = frozenset({"policy_logprobs"})
PAPER = "arXiv:2512.23075"
_ESTIMATORS = (("k1", k1, "r_t"), ("k2", k2, "r_t^2 / 2"), ("k3", k3, "exp(-r_t) - 1 + r_t"))


def _entries(
    level: str, statistic: Statistic, over: str, kinds: tuple[str, ...]
) -> dict[str, Entry[RejectionFunction]]:
    found = {}
    for kind, estimator, formula in _ESTIMATORS:
        if kind in kinds:
            value = over.format(formula)
            bounds = f"low <= exp({value}) <= high" if kind == "k1" else f"{value} <= high"
            found[f"{level}_{kind}"] = Entry(partial(keep, statistic, estimator), f"kept if {bounds}", PAPER, NEEDS)
    return found


REJECTION: dict[str, Entry[RejectionFunction]] = {
    "none": Entry(keep_all, "all are kept"),
    **_entries("token", of_token, "{}", ("k1", "k2", "k3")),
    **_entries("sample_sum", sample_sum, "sum_t {}", ("k1", "k2", "k3")),
    **_entries("sample_mean", sample_mean, "mean_t {}", ("k1", "k2", "k3")),
    **_entries("sample_max", sample_max, "max_t {}", ("k2", "k3")),
}
