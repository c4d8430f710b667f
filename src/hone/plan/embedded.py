"""Hone's own engine as a replica on a device of its own: `local.py`'s closed forms, and the weights.

Its cache grows to what is in flight and stays; while others work, it keeps weights and cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hone.plan.architecture import Architecture
from hone.plan.ledger import Term, term
from hone.plan.local import LocalSettings, engine_terms
from hone.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Embedded:
    """One replica, whole on one device."""

    settings: LocalSettings
    workload: Workload
    """Its share of what is sampled."""

    @property
    def architecture(self) -> Architecture:
        return self.settings.architecture

    @property
    def weights_bytes(self) -> int:
        return self.settings.work.bytes_each * self.architecture.total_parameters

    def terms(self) -> list[Term]:
        """What it holds while it samples."""
        count, p = self.architecture.total_parameters, self.settings.work.bytes_each
        weights = term("engine: weights", self.weights_bytes, f"{p} B x {count:,} parameters", "run.precision")
        working = (replace(one, name=f"engine: {one.name}") for one in engine_terms(self.settings, self.workload))
        return [weights, *working]

    def asleep_terms(self, level: int) -> list[Term]:
        """What it holds while it samples nothing: weights and cache, whatever the level."""
        held = ("engine: weights", "engine: KV cache")
        return [one for one in self.terms() if level == 0 or one.name.startswith(held)]


def share_of(workload: Workload, replicas: int) -> Workload:
    """What one of so many replicas samples."""
    return replace(workload, prompts=-(-workload.prompts // replicas))
