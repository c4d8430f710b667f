"""What `hone check` found beyond the configuration: made by `build`, shown by `cli/check.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hone.config.load import Loaded
from hone.config.topology import Topology


@dataclass(frozen=True)
class CheckReport:
    """Findings about data, tokenizer, model and rewards."""

    lines: tuple[str, ...] = ()
    """For people, in order: previews of prompts and tokens, what was dropped and why."""
    problems: tuple[str, ...] = ()
    """What must be mended before training; any makes the check fail."""
    warnings: tuple[str, ...] = ()
    """What is probably not meant, though training can do it. Does not make the check fail."""
    not_checked: tuple[str, ...] = ()
    """What could not be looked at from here, and why. Does not make the check fail."""
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    """Named numbers, such as `train rows: 7473` or `gold answers scored by exact: 1.0`."""
    placement: Mapping[str, Any] | None = None
    """Who works on which devices, of a run on a cluster: `Topology.as_dict()`."""

    @property
    def is_ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "ok": self.is_ok,
            "problems": list(self.problems),
            "warnings": list(self.warnings),
            "not_checked": list(self.not_checked),
            "figures": dict(self.figures),
            "lines": list(self.lines),
            "placement": self.placement,
        }


@dataclass
class Findings:
    """A report in the making."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    figures: dict[str, float | int | str] = field(default_factory=dict)
    topology: Topology | None = None

    def report(self, loaded: Loaded) -> CheckReport:
        """Each problem and warning once, behind the line of the run file whose key it begins with."""
        problems, warnings = (
            tuple(dict.fromkeys(map(loaded.located, found))) for found in (self.problems, self.warnings)
        )
        placement = self.topology.as_dict() if self.topology else None
        return CheckReport(tuple(self.lines), problems, warnings, tuple(self.not_checked), self.figures, placement)
