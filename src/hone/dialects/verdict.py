"""Verdicts on foreign keys, the job that rows look at, and what a tool's dialect consists of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hone.dialects.foreign import ForeignRun, holes_in, shown
from hone.dialects.values import plain_value

VerdictKind = Literal["mapped", "default", "automatic", "placement", "refused", "hole", "secret"]
"""default: not in the foreign file, and written into ours because the tools' defaults differ. automatic: nothing to set
here. placement: devices, memory or speed, never the algorithm. secret: left out."""

GAPS: tuple[VerdictKind, ...] = ("refused", "hole")
HOLE = "???"
"""Value of a required key that is not known."""


@dataclass(frozen=True)
class KeyVerdict:
    """What becomes of one foreign key."""

    kind: VerdictKind
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Our keys with their values."""
    note: str = ""
    """Change of unit; why it is automatic; why it is refused, and what to do."""


def put(settings: Mapping[str, Any], note: str = "") -> KeyVerdict:
    """Mapped to keys of ours; to none of them: nothing to be done."""
    return KeyVerdict("mapped", settings, note) if settings else nothing(note or "as here")


def default(settings: Mapping[str, Any], note: str) -> KeyVerdict:
    return KeyVerdict("default", settings, note)


def placed(settings: Mapping[str, Any], note: str = "") -> KeyVerdict:
    return KeyVerdict("placement", settings, note)


def nothing(why: str) -> KeyVerdict:
    """Automatic here."""
    return KeyVerdict("automatic", {}, why)


def refused(why: str) -> KeyVerdict:
    return KeyVerdict("refused", {}, why)


def unknown(what: str) -> KeyVerdict:
    """A hole: the command does not show it."""
    return KeyVerdict("hole", {}, what)


class UnknownValue(Exception):
    """A value that a verdict needs is a hole."""


@dataclass
class ForeignJob:
    """A foreign command with the defaults of its tool, for rows that look at other keys."""

    foreign: ForeignRun
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of other versions -> the name in the table."""
    version: str = ""
    """The tool's, of the defaults."""

    def __post_init__(self) -> None:
        self.values = {self.name(key.key): key.value for key in self.foreign.keys}

    def name(self, key: str) -> str:
        """A key as the table names it: without Hydra's signs, with dots and underscores."""
        plain = key.lstrip("+~") if self.foreign.tool == "verl" else key
        if self.foreign.tool in ("trl", "openrlhf", "nanochat"):
            plain = plain.replace("-", "_")
        return self.aliases.get(plain, plain)

    def given(self, key: str) -> bool:
        return key in self.values

    def is_hole(self, key: str) -> bool:
        return next(holes_in(self.values.get(key)), None) is not None

    def get(self, key: str, other: Any = None) -> Any:
        """The value of a key: given, or the tool's default. Raises UnknownValue for a hole."""
        if key in self.values:
            return self.plain(self.values[key])
        return self.defaults.get(key, other)

    def plain(self, value: Any, depth: int = 0) -> Any:
        """Plain data of a value as written; references to other keys are followed."""
        if next(holes_in(value), None) is not None:
            raise UnknownValue(str(shown(value)))
        if not isinstance(value, str):
            return value
        text = re.sub(r"(?<![\w/])\$(HOME|\{HOME\})(?=/)", "~", value.strip())  # quoted, where no shell replaced it
        if text.startswith("${") and text.endswith("}") and ":" not in text and depth < 4:
            inner = self.values.get(text[2:-1], self.defaults.get(text[2:-1]))
            return self.plain(inner, depth + 1)
        if (resolved := re.fullmatch(r"\$\{([\w.]+):([^{}]*)\}", text)) is not None:
            _, _, other = resolved[2].partition(",")
            if resolved[1] != "oc.env" or not other:
                raise UnknownValue(str(shown(value)))
            return plain_value(other.strip())  # the default of a variable, as of the shell's
        return plain_value(text)


ReadKey = Callable[[ForeignJob, Any], KeyVerdict]
"""A value as written -> its verdict."""


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    kind: VerdictKind
    """What the key usually becomes."""
    to: tuple[str, ...]
    """Our keys that it is about; none where nothing is set."""
    read: ReadKey
    note: str = ""
    """For the page: change of unit, or why."""


RowTable = Mapping[str, Row]
"""Foreign key -> row. A key may end with `*`, or have it in place of one part."""


@dataclass(frozen=True)
class Dialect:
    """How one tool's commands are translated."""

    rows: RowTable
    written: tuple[str, ...]
    """Keys whose default matters when they are not given, in the order of the report."""
    program: Callable[[ForeignRun], str | None]
    """Why a program of the tool is not imported; None: it is."""
    whole: Callable[[ForeignJob], Iterator[tuple[str, KeyVerdict]]]
    """What follows from the command as a whole, such as where its roles are placed: name and verdict."""
    aliases: Mapping[str, str]
    version: Callable[[ForeignRun], str | None] = lambda foreign: None
    """The newest version that has the command's spelling; None: the newest of all."""
