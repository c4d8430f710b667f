"""What a loss measures of its tokens, and the metrics that are made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hone.algo.kl import MAX_LOG_RATIO, k3
from hone.algo.loss import LossTokens, Objective, log_ratio

TOKEN_MEANS = {
    "kl": "train/kl_ref",
    "kl_clipped": "train/kl_clipped_frac",
    "entropy": "train/entropy",
    "clip_low": "train/clip_low_frac",
    "clip_high": "train/clip_high_frac",
    "clip_dual": "train/clip_dual_frac",
    "dropped": "train/correction_dropped_frac",
    "correction": "train/correction_mean",
    "ratio": "train/ratio_mean",
    "ratio_clipped": "train/ratio_clipped_mean",
    "mismatch_gap": "train/mismatch_gap",
    "mismatch_ratio": "train/mismatch_ratio_mean",
    "mismatch_kl": "train/mismatch_kl",
    "mismatch_outside": "train/mismatch_outside_frac",
}
"""Sums over loss tokens, and the metrics that are their means."""
TOKEN_MAXIMA = {"mismatch_max": "train/mismatch_max", "ratio_max": "train/ratio_max"}
"""Maxima over loss tokens, and their metrics."""
ENGINE_MEANS = {
    "mismatch_gap": "mismatch_gap",
    "mismatch_kl": "mismatch_kl",
    "mismatch_outside": "mismatch_outside_frac",
}
"""Of those, what is measured for each engine too; and the ends of the metrics' names."""
MEASURES = ("loss", "tokens", *TOKEN_MEANS, "mismatch_square", *TOKEN_MAXIMA)
"""Order of the values that `Algorithm.loss` measures: `loss` is the quantity optimised, the last ones are maxima, the
rest are sums over loss tokens."""
SMALL_RATIO, LARGE_RATIO = 0.9, 1.1
"""Bounds of `train/mismatch_outside_frac`."""


def measure(
    tokens: LossTokens,
    loss: Tensor,
    kl_T: Tensor,
    kl_clipped_T: Tensor,
    objective: Objective,
    correction_T: Tensor,
    bounded_T: Tensor,
) -> Tensor:
    """(len(MEASURES),) values in that order. One product with the mask instead of one reduction per metric."""
    mask_T, dtype = tokens.loss_mask_T, tokens.logprobs_T.dtype
    ratio_T = log_ratio(tokens.logprobs_T, tokens.old_logprobs_T).exp()
    mismatch_T = (tokens.old_logprobs_T - tokens.sampler_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    per_token = torch.stack(
        [
            torch.ones_like(mask_T),
            kl_T,
            kl_clipped_T.to(dtype),
            tokens.entropy_T,
            objective.clipped_low_T.to(dtype),
            objective.clipped_high_T.to(dtype),
            objective.clipped_dual_T.to(dtype),
            (correction_T == 0).to(dtype),
            correction_T,
            ratio_T,
            bounded_T,
            mismatch_T.abs(),
            mismatch_T.exp(),
            k3(-mismatch_T),  # tokens were drawn from the sampler, so its KL to the trainer is what can be estimated
            ((mismatch_T < math.log(SMALL_RATIO)) | (mismatch_T > math.log(LARGE_RATIO))).to(dtype),
            mismatch_T.exp().square(),
        ]
    )
    largest = torch.stack([mismatch_T.abs() * mask_T, ratio_T * mask_T])
    maxima = largest.amax(1) if len(mask_T) else loss.new_zeros(len(TOKEN_MAXIMA))
    of_all = [loss[None], per_token @ mask_T, maxima]
    if tokens.engine_T is None or not tokens.num_engines:
        return torch.cat(of_all)
    engine_E = torch.arange(tokens.num_engines, device=mask_T.device)
    drew_TE = (tokens.engine_T[:, None] == engine_E).to(dtype) * mask_T[:, None]
    rows = [0, *(1 + [*TOKEN_MEANS].index(name) for name in ENGINE_MEANS)]  # the first is the number of tokens
    largest_E = (mismatch_T.abs()[:, None] * drew_TE).amax(0) if len(mask_T) else loss.new_zeros(tokens.num_engines)
    return torch.cat([*of_all, (per_token[rows] @ drew_TE).view(-1), largest_E])


def mismatch_of_engines(measured: Sequence[Sequence[float]], engines: Sequence[str]) -> dict[str, float]:
    """Metrics of each engine that drew loss tokens, from what follows `MEASURES` in each microbatch's row."""
    metrics: dict[str, float] = {}
    for place, name in enumerate(engines):
        own = [row[place :: len(engines)] for row in measured]
        tokens, *sums = (sum(row[i] for row in own) for i in range(1 + len(ENGINE_MEANS)))
        if tokens:
            means = zip(ENGINE_MEANS.values(), sums, strict=True)
            metrics |= {f"engine/{name}_{metric}": value / tokens for metric, value in means}
            metrics[f"engine/{name}_mismatch_max"] = max(row[-1] for row in own)
    return metrics


def importance(mean: float, square: float) -> dict[str, float]:
    """Spread of the importance weights w = trainer / sampler, from E[w] and E[w^2] over tokens drawn by the sampler.

    Effective sample size E[w]^2 / E[w^2] as a fraction of the tokens; chi-square divergence E[w^2] - 1.
    """
    return {
        "train/importance_ess_frac": mean**2 / square,
        "train/importance_std": math.sqrt(max(square - mean**2, 0.0)),
        "train/importance_chi2": square - 1,
    }


def spread(advantages_T: Tensor, mask_T: Tensor) -> dict[str, float]:
    """Standard deviation around 0 of the loss tokens' advantages, and the share of them above 0."""
    tokens = mask_T.sum().clamp(min=1)
    per_token = advantages_T.new_empty((2, len(advantages_T)))
    torch.square(advantages_T, out=per_token[0])
    torch.gt(advantages_T, 0, out=per_token[1])
    square, positive = (per_token @ mask_T.to(advantages_T.dtype)) / tokens
    return {"train/advantage_std": math.sqrt(float(square)), "train/advantage_positive_frac": float(positive)}
