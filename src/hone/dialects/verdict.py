"""Verdicts on foreign keys, and the rows of a tool's table that give them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hone.dialects.foreign import ForeignRun, holes_in, shown
from hone.dialects.hydra import plain_value

Kind = Literal["mapped", "default", "automatic", "placement", "refused", "hole", "secret"]
"""default: not in the foreign file, and written into ours because the tools' defaults differ. automatic: nothing to set
here. placement: devices, memory or speed, never the algorithm. secret: left out."""

GAPS: tuple[Kind, ...] = ("refused", "hole")


@dataclass(frozen=True)
class KeyVerdict:
    """What becomes of one foreign key."""

    kind: Kind
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Our keys with their values."""
    note: str = ""
    """Change of unit; why it is automatic; why it is refused, and what to do."""


class UnknownValue(Exception):
    """A value that a verdict needs is a hole."""


@dataclass
class ForeignJob:
    """A foreign command with the defaults of its tool, for rows that look at other keys."""

    foreign: ForeignRun
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of other versions -> the name in the table."""

    def __post_init__(self) -> None:
        self.values = {self.name(key.key): key.value for key in self.foreign.keys}

    def name(self, key: str) -> str:
        """A key as the table names it: without Hydra's signs, with dots and underscores."""
        plain = key.lstrip("+~") if self.foreign.tool == "verl" else key
        if self.foreign.tool in ("trl", "openrlhf"):
            plain = plain.replace("-", "_")
        return self.aliases.get(plain, plain)

    def given(self, key: str) -> bool:
        return key in self.values

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
        return plain_value(text)


Read = Callable[[ForeignJob, Any], KeyVerdict]


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    kind: Kind
    """What the key usually becomes."""
    to: tuple[str, ...]
    """Our keys that it is about; none where nothing is set."""
    read: Read
    note: str = ""
    """For the page: change of unit, or why."""


Rows = Mapping[str, Row]
"""Foreign key -> row. A key may end with `*`, or have it in place of one part."""


@dataclass(frozen=True)
class Dialect:
    """How one tool's commands are translated."""

    rows: Rows
    written: tuple[str, ...]
    """Keys whose default matters when they are not given, in the order of the report."""
    program: Callable[[ForeignRun], str | None]
    """Why a program of the tool is not imported; None: it is."""
    whole: Callable[[ForeignJob], Iterator[tuple[str, KeyVerdict]]]
    """What follows from the command as a whole, such as where its roles are placed: name and verdict."""
    aliases: Mapping[str, str]
    version: Callable[[ForeignRun], str | None] = lambda foreign: None
    """The newest version that has the command's spelling; None: the newest of all."""


def refused(note: str) -> KeyVerdict:
    return KeyVerdict("refused", {}, note)


def automatic(why: str) -> Row:
    return Row("automatic", (), lambda job, value: KeyVerdict("automatic", {}, why), why)


def placement(why: str = "placement and memory: `hone plan` says what is needed here") -> Row:
    return Row("placement", (), lambda job, value: KeyVerdict("placement", {}, why), why)


def missing(why: str, *about: str, off: tuple[Any, ...] = (None, False, 0, "", "none")) -> Row:
    """Refused unless the value says that it is off."""

    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        plain = job.plain(value)
        is_off = any(plain == choice and type(plain) is type(choice) for choice in off) or plain in ([], {})
        return KeyVerdict("automatic", {}, "off") if is_off else refused(why)

    return Row("refused", about, read, why)


def rewritten(what: str, *about: str, off: tuple[Any, ...] = (None, False, 0, "", "none")) -> Row:
    """A hole unless the value is off: code of the author's own, which the command does not show."""
    asked = missing(what, *about, off=off)

    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        verdict = asked.read(job, value)
        return KeyVerdict("hole", {}, what) if verdict.kind == "refused" else verdict

    return Row("hole", about, read, what)


def to(key: str, convert: Callable[[Any], Any], note: str = "", kind: Kind = "mapped") -> Row:
    """One key of ours, whose value depends on nothing else. None sets nothing."""

    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        plain = job.plain(value)
        converted = convert(plain)
        return KeyVerdict(
            kind, {} if converted is None else {key: converted}, note if converted is not None else "none set"
        )

    return Row(kind, (key,), read, note)


def by(read: Callable[[ForeignJob, Any], KeyVerdict], *about: str, note: str = "", kind: Kind = "mapped") -> Row:
    """A row that looks at other keys; `read` gets plain data."""
    return Row(kind, about, lambda job, value: read(job, job.plain(value)), note)


def mapped(note: str = "", /, **settings: Any) -> KeyVerdict:
    """A mapped verdict; `__` in names stands for a dot."""
    return KeyVerdict("mapped", {name.replace("__", "."): value for name, value in settings.items()}, note)


# ---- conversions; each raises ValueError for what it cannot convert


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError("must be a whole number")
    return int(value)


def number(value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError("must be a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    return value


def truth(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return value.lower() in ("true", "yes", "on")
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise ValueError("must be true or false")


def text(value: Any) -> str | None:
    if value is None or isinstance(value, dict | list):
        if value is None:
            return None
        raise ValueError("must be text")
    return str(value)


def positive(value: Any) -> int | None:
    """-1, 0 and null: off."""
    return None if value is None or number(value) <= 0 else whole(number(value))


def zero_if_off(value: Any) -> int:
    return 0 if value is None or number(value) < 0 else whole(number(value))


def names(value: Any) -> list[str]:
    """A list of text, or text with commas."""
    if isinstance(value, str):
        value = [part.strip() for part in value.replace(" ", ",").split(",") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("must be a list of names")
    return value


def choice(**choices: Any) -> Callable[[Any], Any]:
    """By name, `-` as `_`."""

    def convert(value: Any) -> Any:
        name = str(value).replace("-", "_")
        if name not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return choices[name]

    return convert
