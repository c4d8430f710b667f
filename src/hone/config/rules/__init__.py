"""Rules between keys of the run file, by what they are about; and what a rule yields when it does not hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Breach:
    """A rule that does not hold."""

    keys: tuple[str, ...]
    """Every key that the rule depends on, the one to name in the message first. A rule is silent while one of them
    has a problem of its own."""
    message: str
    """What is read after the first key: what was got, the rule, the nearest legal value."""
