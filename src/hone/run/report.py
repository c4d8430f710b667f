"""What `hone check` found beyond the configuration: made by `run/check.py`, shown by `cli/check.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class CheckReport:
    """Findings about data, tokenizer, model and rewards; each check adds its own."""

    problems: list[str] = field(default_factory=list)
    """What must be fixed before training; any makes the check fail."""
    warnings: list[str] = field(default_factory=list)
    """What is probably not intended, though training can do it. Does not make the check fail."""
    not_checked: list[str] = field(default_factory=list)
    """What could not be checked from here, and why. Does not make the check fail."""
    figures: dict[str, float | int | str] = field(default_factory=dict)
    """Named numbers, such as `train rows: 7473` or `gold answers scored by exact: 1.0`."""
    lines: list[str] = field(default_factory=list)
    """For people, in order: previews of prompts and tokens, what was dropped and why."""
    placement: Mapping[str, Any] | None = None
    """Roles by device, of a run on a cluster: `Topology.as_dict()`."""

    @property
    def is_ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {"ok": self.is_ok, **asdict(self)}
