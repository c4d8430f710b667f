"""What `hone check` found beyond the configuration: made by `build`, shown by `cli/check.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CheckReport:
    """Findings about data, tokenizer, model and rewards."""

    lines: tuple[str, ...] = ()
    """For people, in order: previews of prompts and tokens, what was dropped and why."""
    problems: tuple[str, ...] = ()
    """What must be mended before training; any makes the check fail."""
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
            "not_checked": list(self.not_checked),
            "figures": dict(self.figures),
            "lines": list(self.lines),
            "placement": self.placement,
        }
