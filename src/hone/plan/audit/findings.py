"""What an audit finds: one line of a recipe, what is wrong with it or right, and the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["impossible", "contradictory", "wrong", "wasteful", "no effect", "right"]

SERIOUS: tuple[Kind, ...] = ("impossible", "contradictory")


@dataclass(frozen=True, slots=True)
class Finding:
    """One verdict on one line."""

    rule: str
    """Which check it is of, such as `engine_has_room`."""
    kind: Kind
    path: str
    """Dotted path in the recipe."""
    text: str
    values: Mapping[str, float] = field(default_factory=dict)
    """The numbers that the verdict rests on."""

    def as_dict(self, where: str) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "kind": self.kind,
            "where": where,
            "key": self.path,
            "text": self.text,
            "values": dict(self.values),
        }
