"""Memory of Hone's own engine, of judges in it, and of reward models: `local.py`'s closed forms, and their weights.

An engine's cache grows to what is in flight and stays; while others work, it keeps weights, cache and CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hone.plan.architecture import Architecture
from hone.plan.engine import CONTEXT_BYTES
from hone.plan.ledger import Term, term
from hone.plan.local import LocalSettings, ScoringModel, engine_terms, reading_terms
from hone.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class _Whole:
    """One replica, whole on one device."""

    settings: LocalSettings

    @property
    def architecture(self) -> Architecture:
        return self.settings.architecture

    @property
    def count(self) -> int:
        """Parameters."""
        tower = self.architecture.tower
        return self.architecture.total_parameters + (tower.parameters if tower else 0)

    @property
    def bytes_each(self) -> int:
        return self.settings.work.bytes_each

    @property
    def weights_bytes(self) -> int:
        return self.bytes_each * self.count

    def weights(self, name: str) -> Term:
        formula = f"{self.settings.work.bytes_each} B x {self.count:,} parameters"
        return term(f"{name}: weights", self.weights_bytes, formula, "run.precision")


@dataclass(frozen=True, slots=True)
class _ScoringReplica(_Whole):
    """In a process of its own; while it sleeps its weights are on the host."""

    name: ClassVar[str]

    def terms(self) -> list[Term]:
        """What it holds while it scores."""
        raise NotImplementedError

    def asleep_terms(self, level: int) -> list[Term]:
        """What it holds on its device while it scores nothing; level 0 does not sleep."""
        if level == 0:
            return self.terms()
        return self._context() if self.settings.is_gpu else [self.weights(self.name)]

    def _context(self) -> list[Term]:
        context = term(f"{self.name}: CUDA context", CONTEXT_BYTES, "a process of its own (estimate)")
        return [context] if self.settings.is_gpu else []


@dataclass(frozen=True, slots=True)
class Reader(_ScoringReplica):
    """Reward models, the largest in `settings`."""

    name: ClassVar[str] = "reward model"
    models: tuple[ScoringModel, ...]

    @property
    def count(self) -> int:
        return sum(one.architecture.total_parameters for one in self.models)

    def terms(self) -> list[Term]:
        return [self.weights(self.name), *reading_terms(self.settings.work, self.models), *self._context()]


@dataclass(frozen=True, slots=True)
class EmbeddedJudge(_ScoringReplica):
    """A judge that Hone's own engine samples, as `hone serve policy` does."""

    name: ClassVar[str] = "judge"
    workload: Workload
    """Its lengths are those of a judge's prompts and answers, its groups the votes on one sample."""

    def terms(self) -> list[Term]:
        working = (replace(one, name=f"{self.name}: {one.name}") for one in engine_terms(self.settings, self.workload))
        return [self.weights(self.name), *working, *self._context()]


@dataclass(frozen=True, slots=True)
class Embedded(_Whole):
    """An engine."""

    workload: Workload
    """Its share of what is sampled."""

    def terms(self) -> list[Term]:
        """What it holds while it samples."""
        weights = self.weights("engine")
        working = (replace(one, name=f"engine: {one.name}") for one in engine_terms(self.settings, self.workload))
        return [weights, *working]

    def asleep_terms(self, level: int) -> list[Term]:
        """What it holds while it samples nothing: weights, cache and graphs, whatever the level."""
        held = ("engine: weights", "engine: KV cache", "engine: CUDA graphs")
        return [one for one in self.terms() if level == 0 or one.name.startswith(held)]
