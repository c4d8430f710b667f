"""Shares of a device's peak that were measured on it (`make gpu`), which replace a plan's priors.

One small JSON file in the user's state folder, or at HONE_EFFICIENCY: a list of entries, each of one device, model size
and sequence length, and one of decoding steps. What cannot be read is as if it were not there: the priors hold then.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from hone.plan.time import Efficiency
from hone.runtime.files import state_folder, write_user_state

VARIABLE = "HONE_EFFICIENCY"
NEAR = 4.0
"""Largest ratio of parameters, or of tokens, at which a measurement says something of another model or length."""
PLAUSIBLE = (0.001, 1.0)


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """What one device reached with one model at one length."""

    device: str
    """Its name in hardware.toml."""
    parameters: int
    tokens: int
    """Of a sequence."""
    bytes_each: int
    """Of a number that is computed with."""
    training_flops: float
    forward_flops: float

    @property
    def is_plausible(self) -> bool:
        low, high = PLAUSIBLE
        rates = (self.training_flops, self.forward_flops)
        return low < min(rates) and max(rates) <= high and min(self.parameters, self.tokens) > 0

    def distance(self, parameters: float, tokens: float) -> float:
        """0 for the same model and length; infinite where it says nothing of them."""
        ratios = (abs(math.log(self.parameters / parameters)), abs(math.log(self.tokens / tokens)))
        return math.inf if max(ratios) > math.log(NEAR) else sum(ratios)


@dataclass(frozen=True, slots=True)
class MeasuredDecoding:
    """What one device reached in decoding steps of Hone's own engine with one model."""

    device: str
    """Its name in hardware.toml."""
    parameters: int
    bytes_each: int
    """Of a number that is computed with."""
    graphs: bool
    """Whether the steps were CUDA graphs."""
    bandwidth: float
    """Share of that of the device's memory."""
    overhead_s: float
    """Of a step, besides what it reads."""

    @property
    def is_plausible(self) -> bool:
        low, high = PLAUSIBLE
        return low < self.bandwidth <= high and 0 <= self.overhead_s < 1 and self.parameters > 0


EfficiencyEntry = TypeVar("EfficiencyEntry", MeasuredRates, MeasuredDecoding)


def efficiency_path() -> Path:
    """Where the measurements are kept."""
    return Path(os.environ.get(VARIABLE) or state_folder() / "efficiency.json")


def known_rates() -> list[MeasuredRates]:
    """Every whole entry of passes."""
    return _known("entries", MeasuredRates)


def known_decoding() -> list[MeasuredDecoding]:
    """Every whole entry of decoding steps."""
    return _known("decoding", MeasuredDecoding)


def _known(key: str, kind: Callable[..., EfficiencyEntry]) -> list[EfficiencyEntry]:
    """The entries under a key of the file; none where it cannot be read."""
    try:
        found = [kind(**entry) for entry in json.loads(efficiency_path().read_text("utf-8"))[key]]
        return [one for one in found if one.is_plausible]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def remember_rates(new: Sequence[MeasuredRates] = (), decoding: Sequence[MeasuredDecoding] = ()) -> Path:
    """Add measurements of passes and of decoding steps; of the same device, model and length, or the same kind of
    steps, the new one stays. Returns the file."""
    kept = {
        (one.device, one.parameters, one.tokens, one.bytes_each): one
        for one in [*known_rates(), *(one for one in new if one.is_plausible)]
    }
    steps = {
        (one.device, one.parameters, one.bytes_each, one.graphs): one
        for one in [*known_decoding(), *(one for one in decoding if one.is_plausible)]
    }
    found = {"entries": [asdict(one) for one in kept.values()], "decoding": [asdict(one) for one in steps.values()]}
    place = efficiency_path()
    write_user_state(place, json.dumps(found, indent=1) + "\n")
    return place


def with_measured(
    prior: Efficiency, device: str, *, parameters: float, tokens: float, bytes_each: int
) -> tuple[Efficiency, MeasuredRates | None]:
    """The prior with what was measured nearest to a model and length, and that measurement; None leaves the prior."""
    near = [
        (one.distance(parameters, tokens), one)
        for one in known_rates()
        if one.device == device and one.bytes_each == bytes_each
    ]
    distance, found = min(near, key=lambda pair: pair[0], default=(math.inf, None))
    if found is None or math.isinf(distance):
        return prior, None
    return replace(prior, training_flops=found.training_flops, forward_flops=found.forward_flops), found


def with_measured_decoding(
    prior: Efficiency, device: str, *, parameters: float, bytes_each: int, graphs: bool
) -> tuple[Efficiency, MeasuredDecoding | None]:
    """As `with_measured`, of the decoding steps of Hone's own engine, with CUDA graphs or without."""
    near = [
        (abs(math.log(one.parameters / parameters)), one)
        for one in known_decoding()
        if (one.device, one.bytes_each, one.graphs) == (device, bytes_each, graphs)
    ]
    distance, found = min(near, key=lambda pair: pair[0], default=(math.inf, None))
    if found is None or distance > math.log(NEAR):
        return prior, None
    return replace(prior, decode_bandwidth=found.bandwidth, decode_overhead_s=found.overhead_s), found
