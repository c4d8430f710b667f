"""Per-token estimators of the KL from the policy to a frozen reference (Schulman, "Approximating KL divergence", 2020).

All take d = logprobs - ref_logprobs (T,) of tokens sampled from the policy. k1 is unbiased and may be negative; as a
loss its expected gradient is zero, so there a rule of the configuration refuses it, but not in the reward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hone.algo.registry import Entry

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: beyond it a float32 sum over a batch loses everything else


def k1(difference_T: Tensor) -> Tensor:
    """d. Unbiased, high variance."""
    return difference_T


def k2(difference_T: Tensor) -> Tensor:
    """d^2 / 2. Biased in value; as a loss its gradient is that of the reverse KL."""
    return difference_T.square() / 2


def k3(difference_T: Tensor) -> Tensor:
    """exp(-d) - 1 + d. Unbiased and never negative; exact near 0, where the naive form cancels."""
    bounded_T = difference_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-bounded_T) + bounded_T


def absolute(difference_T: Tensor) -> Tensor:
    """|d|."""
    return difference_T.abs()


KL: dict[str, Entry[Callable[[Tensor], Tensor]]] = {
    "k1": Entry(k1, "d", needs=frozenset({"ref_logprobs"})),
    "k2": Entry(k2, "d^2 / 2", needs=frozenset({"ref_logprobs"})),
    "k3": Entry(k3, "exp(-d) - 1 + d", "arXiv:2402.03300", needs=frozenset({"ref_logprobs"})),
    "abs": Entry(absolute, "|d|", needs=frozenset({"ref_logprobs"})),
    "weighted_k3": Entry(k3, "rho (exp(-d) - 1 + d)", "arXiv:2512.02556", needs=frozenset({"ref_logprobs"})),
}
