"""Named amounts of memory, the moments at which they are alive together, and the devices that hold them.

A ledger is one kind of device over one step of a run: a list of moments, each of them the sum of its terms. What a
device needs is the largest moment, never a sum over moments: phases take turns. Whatever makes terms says how it
counted them, so that a plan can be checked by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hone.sizes import GIB

PHASES = ("start", "publish", "rollout", "reward", "logprobs", "update", "optimizer", "checkpoint")
"""What a step is made of, in order, and what comes before and after it."""


@dataclass(frozen=True, slots=True)
class Term:
    """One thing that takes memory."""

    name: str
    bytes: int
    formula: str
    """How it was counted, with the numbers put in."""
    knob: str = ""
    """The setting that it follows from most directly; "" where none does."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What is alive at one moment of a phase."""

    phase: str
    name: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> int:
        return sum(term.bytes for term in self.terms)

    @property
    def largest(self) -> Term:
        return max(self.terms, key=lambda term: term.bytes)

    def by_size(self) -> list[Term]:
        """Terms, largest first."""
        return sorted(self.terms, key=lambda term: -term.bytes)


@dataclass(frozen=True, slots=True)
class Ledger:
    """One kind of device, over a run."""

    device: str
    """What it is and what it is for, such as `H100-80G (policy and engine)`."""
    count: int
    capacity_bytes: int
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def headroom_bytes(self) -> int:
        return self.capacity_bytes - self.peak.bytes

    def phase_peaks(self) -> list[Moment]:
        """The largest moment of each phase, in order."""
        by_phase: dict[str, Moment] = {}
        for moment in self.moments:
            if moment.phase not in by_phase or moment.bytes > by_phase[moment.phase].bytes:
                by_phase[moment.phase] = moment
        return sorted(by_phase.values(), key=lambda moment: PHASES.index(moment.phase))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "device": self.device,
            "count": self.count,
            "capacity_bytes": self.capacity_bytes,
            "peak": {"phase": self.peak.phase, "moment": self.peak.name, "bytes": self.peak.bytes},
            "headroom_bytes": self.headroom_bytes,
            "moments": [
                {
                    "phase": moment.phase,
                    "moment": moment.name,
                    "bytes": moment.bytes,
                    "terms": [asdict(term) for term in moment.terms],
                }
                for moment in self.moments
            ],
        }


def term(name: str, num_bytes: float, formula: str, knob: str = "") -> Term:
    """A term of whole bytes."""
    return Term(name, round(num_bytes), formula, knob)


def moment(phase: str, name: str, *parts: Term | Iterable[Term]) -> Moment:
    """A moment of terms and lists of terms; empty terms are left out, those of one name become one."""
    merged: dict[str, Term] = {}
    for part in parts:
        for one in (part,) if isinstance(part, Term) else part:
            if one.bytes <= 0:
                continue
            if one.name in merged:
                other = merged[one.name]
                merged[one.name] = Term(one.name, one.bytes + other.bytes, f"{other.formula} + {one.formula}", one.knob)
            else:
                merged[one.name] = one
    return Moment(phase, name, tuple(merged.values()))


def gib(num_bytes: float) -> str:
    """Bytes for people: `46.9 GiB`, `312 MiB`, `14 KiB`."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= unit:
            value = num_bytes / unit
            return f"{value:.1f} {name}" if value < 100 else f"{value:,.0f} {name}"
    return f"{num_bytes:.0f} B"


def percent(share: float) -> str:
    """`59 %`."""
    return f"{100 * share:.0f} %"
