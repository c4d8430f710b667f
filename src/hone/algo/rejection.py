"""Rejection of tokens and samples whose logprobs differ too much between sampler and trainer.

What is rejected leaves the loss and its denominators; its reward still counts in the baseline. Not for weights on the
objective, which `correction.py` has: both may be on, and neither reads the other.

Each function gives (T,) bool, True for what is kept, from r = l_s - l_old (sampler less trainer) of a sample's own
tokens. k1 = r is bounded on both sides, as a ratio sampler / trainer; k2 = r^2 / 2 and k3 = exp(-r) - 1 + r are never
negative, and bounded above, in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hone.algo.kl import MAX_LOG_RATIO, k1, k2, k3
from hone.algo.registry import Entry
from hone.algo.segments import segment_mean, segment_sum

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
