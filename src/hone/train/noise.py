"""Gradient noise scale from the gradients of a microbatch and of the whole step (arXiv:1812.06162, appendix A.1).

The expected squared norm of a mean gradient over B samples is |G|^2 + tr(S) / B, with the true gradient G and the
covariance S of one sample's gradient. Two sizes give two equations. One step's estimates are noisy: average both
over tens of steps before dividing. tr(S) / |G|^2 is the number of samples per step at which noise and signal are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class GradientNoise(NamedTuple):
    """Unbiased estimates of one optimizer step; `signal` may be negative by chance."""

    signal: float
    """|G|^2, squared norm of the true gradient."""
    noise: float
    """tr(S), variance of the gradient of one sample, over all weights."""


def gradient_noise(small_norm: float, norm: float, small_frac: float, samples: int) -> GradientNoise:
    """Signal and noise of a step's gradient.

    Args:
        small_norm: norm of the part that the first microbatch adds to the step's gradient.
        norm: norm of the step's gradient.
        small_frac: share of the step's samples in that microbatch, below 1.
        samples: samples of the step.
    """
    small, small_square, square = small_frac * samples, (small_norm / small_frac) ** 2, norm**2
    return GradientNoise(
        signal=(samples * square - small * small_square) / (samples - small),
        noise=(small_square - square) / (1 / small - 1 / samples),
    )


def mean_noise(found: Sequence[GradientNoise]) -> dict[str, float]:
    """Metrics of an update: means over its optimizer steps; nothing where none was measured."""
    if not found:
        return {}
    return {
        "train/gradient_signal": sum(each.signal for each in found) / len(found),
        "train/gradient_noise": sum(each.noise for each in found) / len(found),
    }
