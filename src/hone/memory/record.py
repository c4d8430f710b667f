"""Memory record (memory.json): planned memory of a run, and how the ladder changed its settings.

Written at every change and at the end of a stage, aside and renamed, so that a killed run has it too; a resumed run
continues from it. Measurements are in metrics.jsonl; `comparison` puts the two together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import get_args

from hone.config.run import StageName
from hone.errors import RunFolderError
from hone.memory.rungs import Change
from hone.observe.sinks import metric_lines
from hone.plan.ledger import PHASES, Moment, gib, percent
from hone.runtime.files import write_whole
from hone.sizes import MIB

FILE, FORMAT = "memory.json", 1
STAGES = get_args(StageName)


@dataclass(frozen=True, slots=True)
class Expected:
    """A phase's largest moment, by the plan."""

    moment: str
    bytes: int
    largest: str
    """Its largest term."""
    largest_bytes: int

    @classmethod
    def of(cls, moment: Moment) -> Expected:
        return cls(moment.name, moment.bytes, moment.largest.name, moment.largest.bytes)


@dataclass(frozen=True)
class Record:
    """Contents of memory.json."""

    device: str
    """What calibration knows the device by."""
    what: str
    """Name of what was measured, for messages."""
    limit_bytes: int
    has_limit: bool
    """Whether the limit is the device's or the user's, and not all memory of a machine."""
    expected: Mapping[str, Mapping[str, Expected]] = field(default_factory=dict)
    """Stage -> phase -> what the plan says, at the settings that the stage ended with."""
    measured: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Stage -> phase -> bytes since the last change, in the process that wrote this."""
    changes: Sequence[Change] = ()

    def write(self, folder: Path) -> None:
        """Replace the file in one step."""
        write_whole(folder / FILE, json.dumps({"format": FORMAT, **asdict(self)}, indent=1))

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """None where there is no such file. Raises RunFolderError for one that is not ours."""
        path = folder / FILE
        if not path.exists():
            return None
        try:
            data = json.loads(path.read_text())
            if data.pop("format") != FORMAT:
                raise ValueError("another format")
            data["expected"] = {
                stage: {phase: Expected(**found) for phase, found in phases.items()}
                for stage, phases in data["expected"].items()
            }
            data["changes"] = [Change(**change) for change in data["changes"]]
            return cls(**data)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunFolderError(f"{path} cannot be read ({error}). Remove it to continue without it.") from error


@dataclass(frozen=True, slots=True)
class Compared:
    """One phase of one stage."""

    stage: str
    phase: str
    measured_bytes: int
    expected: Expected | None

    @property
    def ratio(self) -> float | None:
        """Measured over expected."""
        return self.measured_bytes / self.expected.bytes if self.expected else None


def comparison(folder: Path) -> tuple[Record, list[Compared]]:
    """A run's record, and its peaks, finished or not, beside what was planned; since the last change of a setting.

    Raises:
        RunFolderError: no run here, or one of a version that measured nothing.
    """
    record = Record.read(folder)
    if record is None:
        raise RunFolderError(f"{folder}: no {FILE} in it. Name the run.dir that `hone train` printed.")
    last_change = {change.stage: change.step for change in record.changes}
    peaks: dict[tuple[str, str], int] = {}
    for line in metric_lines(folder / "metrics.jsonl"):
        if line["step"] <= last_change.get(line["stage"], -1):
            continue
        for name, value in line.items():
            if name.startswith("memory/") and name.endswith("_peak_mib"):
                place = line["stage"], name.removeprefix("memory/").removesuffix("_peak_mib")
                peaks[place] = max(round(value * MIB), peaks.get(place, 0))
    for stage, phases in record.measured.items():
        for phase, seen in phases.items():
            peaks[stage, phase] = max(seen, peaks.get((stage, phase), 0))
    in_order = sorted(peaks, key=lambda place: (STAGES.index(place[0]), PHASES.index(place[1])))
    return record, [
        Compared(stage, phase, peaks[stage, phase], record.expected.get(stage, {}).get(phase))
        for stage, phase in in_order
    ]


def table(found: Sequence[Compared], record: Record) -> list[str]:
    """The comparison as lines of text, with what practice E would advise where the device has a limit."""
    if not found:
        return []
    lines = [f"memory, {record.what}: measured beside planned"]
    for row in found:
        planned = f"{gib(row.expected.bytes):>9} planned, {row.expected.moment}" if row.expected else "not planned"
        ratio = f" (x{row.ratio:.2f})" if row.ratio else ""
        lines.append(f"  {row.stage} {row.phase:<10} {gib(row.measured_bytes):>9}  {planned}{ratio}")
    if record.has_limit:
        lines.append(advice(max(row.measured_bytes for row in found) / record.limit_bytes, record.limit_bytes))
    return lines


def advice(used: float, limit_bytes: int) -> str:
    """What the share of memory in use asks for."""
    share = f"  {percent(used)} of {gib(limit_bytes)} used at most"
    if used < 0.75:
        return f"{share}: below 75-85 %. plan.autotune=true raises what pays; hone plan --preset recommended shows what"
    if used > 0.85:
        return f"{share}: above 75-85 %, a longer response may be too much; the ladder would then step in"
    return f"{share}: within 75-85 %"
