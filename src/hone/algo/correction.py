"""Importance sampling correction between sampler and trainer.

The sampler may be an older policy, another program, or of lower precision. The importance weight w = exp(l_old - l_s)
repairs the expectation; each function here bounds its variance in its own way. Weights are detached, and never the
product of 0 and infinity: the log is bounded first. They need l_s of the distribution really sampled from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hone.algo.kl import MAX_LOG_RATIO
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
