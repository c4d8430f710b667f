"""The kinds of rows that tools' tables are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hone.dialects.values import truth
from hone.dialects.verdict import ForeignJob, KeyVerdict, ReadKey, Row, VerdictKind, nothing, put, refused

OFF = (None, False, 0, "", "none")
JobCondition = Callable[[ForeignJob], Any]


def automatic(why: str) -> Row:
    return Row("automatic", (), lambda job, value: nothing(why), why)


def placement(why: str = "placement and memory: `hone plan` says what is needed here") -> Row:
    return Row("placement", (), lambda job, value: KeyVerdict("placement", {}, why), why)


def missing(why: str, *about: str, off: tuple[Any, ...] = OFF, kind: VerdictKind = "refused") -> Row:
    """Refused unless the value says that it is off."""

    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        plain = job.plain(value)
        is_off = any(plain == other and isinstance(plain, bool) == isinstance(other, bool) for other in off)
        as_here = "off" if plain in (*OFF, [], {}) else "as here"
        return nothing(as_here) if is_off or plain in ([], {}) else KeyVerdict(kind, {}, why)

    return Row(kind, about, read, why)


def rewritten(what: str, *about: str, off: tuple[Any, ...] = OFF) -> Row:
    """A hole unless the value is off: code of the author's own, which the command does not show."""
    return missing(what, *about, off=off, kind="hole")


def to(key: str, convert: Callable[[Any], Any], note: str = "", kind: VerdictKind = "mapped") -> Row:
    """One key of ours, whose value depends on nothing else. None, here or after `convert`, sets nothing."""

    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        plain = job.plain(value)
        converted = None if plain is None else convert(plain)
        if converted is None:
            return nothing("none set") if kind == "mapped" else KeyVerdict(kind, {}, "none set")
        return KeyVerdict(kind, {key: converted}, note)

    return Row(kind, (key,), read, note)


def table(choices: Mapping[str, Any], *about: str, nearest: str = "") -> Row:
    """By the value's name. A choice is a value of the first key of `about`, or several settings; None sets nothing."""

    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if str(value) not in choices:
            return refused(f"nearest: {nearest}" if nearest else f"must be one of {', '.join(choices)}")
        chosen = choices[str(value)]
        return put({} if chosen is None else chosen if isinstance(chosen, dict) else {about[0]: chosen})

    return by(read, *about)


def by(read: ReadKey, *about: str, note: str = "", kind: VerdictKind = "mapped") -> Row:
    """A row that looks at other keys; `read` gets plain data."""
    return Row(kind, about, lambda job, value: read(job, job.plain(value)), note)


def when(condition: JobCondition, why: str, row: Row) -> Row:
    """A row that only counts under a condition; `why` says what holds otherwise."""
    return Row(row.kind, row.to, lambda job, v: row.read(job, v) if condition(job) else nothing(why), row.note)


def where(key: str, *values: Any, other: Any = None) -> JobCondition:
    """The condition that a key has one of these values, or with none of them that it is true."""
    return lambda job: job.get(key, other) in values if values else truth(job.get(key, other) or False)


def under(prefix: str, rows: Mapping[str, Row]) -> dict[str, Row]:
    """The same rows, with a prefix before their keys."""
    return {f"{prefix}.{name}": row for name, row in rows.items()}


def each(keys: str, row: Row) -> dict[str, Row]:
    """One row for several keys, separated by blanks."""
    return dict.fromkeys(keys.split(), row)


def listed(sections: Mapping[str, str]) -> tuple[str, ...]:
    """Names of keys, written by section and separated by blanks."""
    return tuple(f"{section}.{name}" for section, names in sections.items() for name in names.split())
