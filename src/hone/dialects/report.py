"""The report of an import, as text: one line per foreign key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hone.config.render import inline
from hone.dialects.foreign import shown
from hone.dialects.translate import Imported, Line
from hone.dialects.verdict import Kind

_ORDER: tuple[Kind, ...] = ("refused", "hole", "mapped", "default", "placement", "automatic", "secret")
_TITLES: dict[Kind, str] = {
    "refused": "refused: not in Hone",
    "hole": "holes: not known without running the script",
    "mapped": "mapped",
    "default": "defaults written out, because Hone's differ",
    "placement": "placement, memory and speed",
    "automatic": "automatic here",
    "secret": "secrets, left out",
}
_MAX = 60


def report_lines(imported: Imported, to: Path | None) -> Iterator[str]:
    """What became of each key, gaps first."""
    foreign = imported.foreign
    where = f"{foreign.source}:{foreign.line}" if foreign.line else foreign.source
    yield f"{where}: {shown(foreign.program)}, {foreign.tool} {imported.version}"
    yield from (f"note: {shown(note)}" for note in foreign.notes)
    for name in foreign.files:
        where = f"written to {to.with_name(name)}" if to else f"left out: with --to they are written to {name}"
        yield f"note: the reward functions, {where}"
    for kind in _ORDER:
        lines = [line for line in imported.lines if line.verdict.kind == kind]
        if lines:
            yield f"{_TITLES[kind]} ({len(lines)})"
            yield from (f"  {_line(line)}" for line in lines)
    gaps = len(imported.gaps)
    end = f"{gaps} gaps, marked in the file" if gaps else "complete"
    yield f"{f'{to}: ' if to else ''}{len(imported.keys)} keys; {end}"


def _line(line: Line) -> str:
    value = "" if line.value is None else f" = {_cut(str(line.value))}"
    settings = ", ".join(f"{key} = {_cut(inline(value))}" for key, value in line.verdict.settings.items())
    note = f"  ({line.verdict.note})" if line.verdict.note and settings else line.verdict.note
    arrow = f" -> {settings}" if settings else ": " if note else ""
    return f"{line.key}{value}{arrow}{note}"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX else f"{text[: _MAX - 3]}..."
