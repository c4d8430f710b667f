"""An audit from a file: every finding, in the order of the recipe's lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.plan.audit.claims import check_claims
from hone.plan.audit.context import Context
from hone.plan.audit.findings import SERIOUS, Finding
from hone.plan.audit.recipe import Read, read_recipe
from hone.plan.audit.settings import CHECKS


@dataclass(frozen=True)
class PlanAudit:
    """What was found."""

    read: Read
    findings: tuple[Finding, ...]

    @property
    def is_sound(self) -> bool:
        """Nothing is impossible or contradicts itself."""
        return not any(finding.kind in SERIOUS for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "recipe": self.read.recipe.name,
            "sound": self.is_sound,
            "findings": [finding.as_dict(self.read.where(finding.path)) for finding in self.findings],
        }

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"{self.read.where(finding.path)}  {finding.kind}: {finding.path}: {finding.text}"
            for finding in self.findings
        ]


def audit(path: Path) -> PlanAudit:
    """Check a recipe.

    Raises:
        ConfigError: the file is not a recipe. DataError: a device or a model in it is not known.
    """
    read = read_recipe(path)
    context = Context.of(read)
    found = [finding for check in CHECKS for finding in check(context)]
    found += check_claims(context)
    return PlanAudit(read, tuple(sorted(found, key=lambda finding: _line(read, finding))))


def _line(read: Read, finding: Finding) -> int:
    node = read.tree.find(finding.path)
    return node.where.line or 0 if node else 0
