"""Memory calibration: measured against planned memory of earlier runs on this machine, per user, for later plans.

One small JSON file in the user's state folder ($XDG_STATE_HOME, else ~/.local/state). Losing it loses nothing but
experience, so nothing here ever fails a run: what cannot be read or written is as if it were empty.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from hone.plan.ledger import Ledger, Moment, term
from hone.plan.planner import Plan
from hone.plan.verdict import judge
from hone.runtime.files import state_folder, write_user_state

MOST_ENTRIES = 400
MOST_RUNS = 20
"""Newest runs of a phase that an estimate uses."""
FORMAT = 3
"""Raised too when the closed forms change so much that older residuals say nothing of them."""
RESIDUAL = "beyond plans so far"
"""Name of the term."""
PLAUSIBLE = (0.2, 5.0)
"""Ratios outside are errors of measurement."""


@dataclass(frozen=True, slots=True)
class Residual:
    """Measured over planned, of one phase."""

    runs: int
    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"x{self.middle:.2f} of what was planned in {self.runs} runs ({self.low:.2f} to {self.high:.2f})"


def device_key(kind: str) -> str:
    """What this machine's devices are known by: experience of one machine says little of another."""
    return f"{kind} of {platform.node()}"


def path() -> Path:
    """Where it is kept."""
    return state_folder() / "memory.json"


def remember(device: str, phases: Mapping[str, tuple[int, int]]) -> None:
    """Add a run: bytes planned and measured, by phase."""
    with suppress(OSError):
        entries = _read() + [
            {"device": device, "phase": phase, "planned_bytes": planned, "measured_bytes": measured}
            for phase, (planned, measured) in phases.items()
            if PLAUSIBLE[0] < measured / planned < PLAUSIBLE[1]
        ]
        write_user_state(path(), json.dumps({"format": FORMAT, "entries": entries[-MOST_ENTRIES:]}, indent=1))


def residuals(device: str, ledger: Ledger) -> dict[str, Residual]:
    """What is known of a device by phase, of runs about as large as the ledger's: half to twice.

    What a process takes for itself is a large part of a small run and a small one of a large run.
    """
    entries = [entry for entry in _read() if entry["device"] == device]
    found: dict[str, Residual] = {}
    for moment in ledger.phase_peaks():
        ratios = [
            entry["measured_bytes"] / entry["planned_bytes"]
            for entry in entries
            if entry["phase"] == moment.phase and moment.bytes / 2 <= entry["planned_bytes"] <= 2 * moment.bytes
        ][-MOST_RUNS:]
        if ratios:
            found[moment.phase] = Residual(len(ratios), min(ratios), median(ratios), max(ratios))
    return found


def calibrated(ledger: Ledger, known: Mapping[str, Residual]) -> Ledger:
    """A ledger with what earlier runs took beyond their plans; runs that took less change nothing.

    Most runs take less than planned, for few responses reach the limit that a plan is made for.
    """

    def corrected(moment: Moment) -> Moment:
        residual = known.get(moment.phase)
        if residual is None or residual.middle <= 1:
            return moment
        more = term(RESIDUAL, (residual.middle - 1) * moment.bytes, str(residual))
        return replace(moment, terms=(*moment.terms, more))

    return replace(ledger, moments=tuple(corrected(moment) for moment in ledger.moments))


def with_experience(found: Plan) -> Plan:
    """A plan for this machine, with what earlier runs on it took beyond theirs, and notes that say so."""
    if not found.inputs.is_local:
        return found
    device, *host = found.ledgers
    known = residuals(device_key(found.inputs.hardware.kind), device)
    corrected = calibrated(device, known)
    notes = [f"measured on this machine: {phase} came to {residual}" for phase, residual in known.items()]
    found = replace(found, notes=(*found.notes, *notes))
    if corrected == device:
        return found
    ledgers = (corrected, *host)
    return replace(found, ledgers=ledgers, verdict=judge(ledgers, found.verdict.problems))


def _read() -> list[dict[str, Any]]:
    """Every whole entry, oldest first."""
    try:
        data = json.loads(path().read_text())
        found = data["entries"] if data["format"] == FORMAT else []
        return [entry for entry in found if _is_whole(entry)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _is_whole(entry: Any) -> bool:
    names = isinstance(entry["device"], str) and isinstance(entry["phase"], str)
    return names and entry["planned_bytes"] > 0 and entry["measured_bytes"] > 0
