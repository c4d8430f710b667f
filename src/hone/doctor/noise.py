"""What more or fewer samples per step would change, by the gradient noise that a run has logged (arXiv:1812.06162)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hone.doctor.history import History
from hone.doctor.rules.common import NOISE_METRICS, NOISE_STEPS, noise_scale, samples_per_step


@dataclass(frozen=True, slots=True)
class NoiseAdvice:
    """Samples per step against the gradient noise scale."""

    scale: float
    """Samples per step at which noise and signal of the gradient are equal."""
    samples: int
    """Samples of an optimizer step at present."""

    def worth(self, factor: float) -> float:
        """Progress of one update with `factor` times the samples, over today's: (1 + N / B) / (1 + N / (factor B))."""
        return (1 + self.scale / self.samples) / (1 + self.scale / (factor * self.samples))

    def as_dict(self) -> dict[str, float]:
        """JSON values; what twice and half of the samples are worth among them."""
        return {
            "noise_scale_samples": self.scale,
            "samples_per_step": self.samples,
            "worth_of_twice": self.worth(2),
            "worth_of_half": self.worth(0.5),
        }

    @property
    def lines(self) -> tuple[str, str]:
        """In words."""
        double, half = self.worth(2), self.worth(0.5)
        return (
            f"gradient noise scale: {self.scale:,.0f} samples (last {NOISE_STEPS} steps); a step has {self.samples:,}",
            f"an update with twice the samples is worth {double:.2f} of today's (train.optimizer.lr x "
            f"{math.sqrt(double):.2f}), with half of them {half:.2f} (x {math.sqrt(half):.2f}); square root, for AdamW",
        )


def noise_advice(settings: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> NoiseAdvice | None:
    """From the lines of metrics.jsonl; None where too little was measured, or the signal is lost in the noise.

    Args:
        settings: the resolved run file, nested.
    """
    history = History("rl", settings)
    history.read(lines, NOISE_METRICS)
    return advice_of(history)


def advice_of(history: History) -> NoiseAdvice | None:
    """Like `noise_advice`, of a history of the rl stage."""
    scale, samples = noise_scale(history), samples_per_step(history)
    if history.count(NOISE_METRICS[0]) < NOISE_STEPS or math.isnan(scale) or math.isnan(samples):
        return None
    return NoiseAdvice(scale, round(samples))
