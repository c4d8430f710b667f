"""Translation of a foreign command: one verdict for each of its keys, and the tool's defaults that differ from ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import Any

from hone.config import schema
from hone.dialects.foreign import ForeignRun, ForeignService, defaults_of, holes_in, known_versions, looks_secret, shown
from hone.dialects.shared import MEMORY
from hone.dialects.verdict import (
    GAPS,
    Dialect,
    ForeignJob,
    KeyVerdict,
    Row,
    RowTable,
    UnknownValue,
    nothing,
    put,
    refused,
    unknown,
)
from hone.errors import nearest

MEMORY_KEYS = frozenset(
    ["train.tokens_per_microbatch"]
    + [f"cluster.engines.{name}" for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len")]
)
"""Keys of ours that change no result: what a foreign file sets them to need not be known."""


@cache
def dialects() -> Mapping[str, Dialect]:
    """Every tool's dialect; imported when asked for."""
    from hone.dialects import mindspeed, nanochat, prime_rl
    from hone.dialects.openrlhf import keys as openrlhf
    from hone.dialects.trl import keys as trl
    from hone.dialects.verl import keys as verl

    return {
        "verl": verl.DIALECT,
        "openrlhf": openrlhf.DIALECT,
        "trl": trl.DIALECT,
        "mindspeed": mindspeed.DIALECT,
        "prime-rl": prime_rl.DIALECT,
        "nanochat": nanochat.DIALECT,
    }


@dataclass(frozen=True)
class Line:
    """One line of the report."""

    key: str
    value: Any
    """As written, secrets hidden."""
    verdict: KeyVerdict
    about: tuple[str, ...]
    """Our keys that it concerns, set or not."""
    line: int | None = None


@dataclass(frozen=True)
class Imported:
    """A translated command."""

    foreign: ForeignRun
    version: str
    keys: tuple[Line, ...]
    """One for each foreign key, in the order of the file."""
    others: tuple[Line, ...]
    """Defaults that were written out, and what follows from the command as a whole."""

    @property
    def lines(self) -> tuple[Line, ...]:
        return (*self.keys, *self.others)

    @property
    def gaps(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.verdict.kind in GAPS)

    def settings(self) -> dict[str, tuple[Any, list[Line]]]:
        """Our keys with their values and the lines that set them; later lines win, and written ones beat defaults."""
        found: dict[str, tuple[Any, list[Line]]] = {}
        for line in (*self.others, *self.keys):
            for key, value in line.verdict.settings.items():
                earlier = found[key][1] if key in found and found[key][0] == value else []
                found[key] = (value, [*earlier, line])
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "tool": self.foreign.tool,
            "version": self.version,
            "program": shown(self.foreign.program),
            "source": self.foreign.source,
            "keys": [_line_dict(line) for line in self.keys],
            "others": [_line_dict(line) for line in self.others],
            "notes": list(self.foreign.notes),
            "files": dict(self.foreign.files),
            "counts": self.counts(),
        }

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for line in self.lines:
            found[line.verdict.kind] = found.get(line.verdict.kind, 0) + 1
        return found


def _line_dict(line: Line) -> dict[str, Any]:
    return {
        "key": line.key,
        "value": line.value,
        "verdict": line.verdict.kind,
        "settings": dict(line.verdict.settings),
        "about": list(line.about),
        "note": line.verdict.note,
        "line": line.line,
    }


def translate(foreign: ForeignRun, version: str | None = None) -> Imported:
    """Give every key of a command its verdict.

    Args:
        version: the tool's; None: the newest that the tables know, or that still spells its keys so.
    """
    dialect = dialects()[foreign.tool]
    version = version or dialect.version(foreign) or known_versions(foreign.tool)[-1]
    job = ForeignJob(foreign, defaults_of(foreign, version), dialect.aliases, version)
    keys = tuple(_line(job, dialect, key.key, key.value, key.line) for key in foreign.keys)
    others: list[Line] = []
    if why := dialect.program(foreign):
        others.append(Line(shown(foreign.program), None, refused(why), (), foreign.line))
    else:
        others += _defaults(job, dialect)
        for name, verdict in _whole(job, dialect):
            row = find_row(dialect.rows, name)
            others.append(Line(name, None, verdict, tuple(verdict.settings) or (row.to if row else ())))
        others += [_service(service) for service in foreign.services]
    others += [
        Line(key.key, "[hidden]", KeyVerdict("secret", {}, "left out: secrets come from the environment"), (), key.line)
        for key in foreign.environment
        if looks_secret(key.key, key.value)
    ]
    found = Imported(foreign, version, keys, tuple(others))
    if not why:
        # What every run needs and the command leaves to a default of the tool's, which is only an example there.
        about = {key for line in found.gaps for key in (line.key, *line.about)} | found.settings().keys()
        others += [
            Line(key, None, unknown(f"the command names no {what}: set {key}"), (key,))
            for key, what in (("model.path", "model"), ("data.train", "data"))
            if key not in about
        ]
        found = replace(found, others=tuple(others))
    return _with_room(_with_whole_layers(found))


_DIVIDES = ("cluster.trainer.tensor_parallel", "cluster.trainer.sequence_parallel")


def _with_whole_layers(imported: Imported) -> Imported:
    """Where prompts have pictures, without what divides the trainer's layers or sequences, which check refuses."""
    settings = imported.settings()
    if "data.image_columns" not in settings:
        return imported

    def whole(line: Line) -> Line:
        written = line.verdict.settings
        dropped = [key for key in _DIVIDES if key in written]
        if not dropped:
            return line
        note = (
            f"left out: a model that sees pictures is refused with {dropped[0]} = {written[dropped[0]]}; all ranks "
            "shard its weights instead"
        )
        kept = {key: value for key, value in written.items() if key not in dropped}
        return replace(line, verdict=KeyVerdict("placement", kept, note))

    return replace(imported, keys=tuple(map(whole, imported.keys)), others=tuple(map(whole, imported.others)))


_BUDGET = "train.tokens_per_microbatch"


def _with_room(imported: Imported) -> Imported:
    """With a token budget that holds the longest sample, which Hone asks for and other tools grow by themselves."""
    settings = {key: value for key, (value, _) in imported.settings().items()}
    sizes = [settings.get(key, schema.all_keys()[key].default) for key in _LONGEST]
    longest, budget = sum(sizes), settings.get(_BUDGET, schema.all_keys()[_BUDGET].default)
    if longest <= budget:
        return imported
    note = f"the longest sample has {sizes[0]} + {sizes[1]} tokens"
    keys = tuple(
        replace(line, verdict=KeyVerdict(line.verdict.kind, dict(line.verdict.settings) | {_BUDGET: longest}, note))
        if _BUDGET in line.verdict.settings
        else line
        for line in imported.keys
    )
    room = Line("longest sample", longest, KeyVerdict("placement", {_BUDGET: longest}, note), (_BUDGET,))
    return replace(imported, keys=keys, others=(*imported.others, room))


_LONGEST = ("data.max_prompt_tokens", "rollout.max_response_tokens")


def _service(service: ForeignService) -> Line:
    """A server of the script as a service of the run file, which starts, watches and stops it."""
    words = [str(shown(word)) for word in service.words]
    about = ("services",)
    label = f"service {service.name}"
    if any("[hidden]" in word for word in words):
        return Line(label, "[hidden]", KeyVerdict("secret", {}, "its command has a secret: write it by hand"), about)
    if next(holes_in(service.words), None) is not None:
        return Line(label, " ".join(words), unknown("words of its command are unknown"), about, service.line)
    prefix = f"services.{service.name}"
    command = [word.replace(str(service.port), "{port}") for word in words]
    settings: dict[str, Any] = {f"{prefix}.command": command, f"{prefix}.port": service.port}
    settings |= {f"{prefix}.devices": list(service.devices)} if service.devices else {}
    note = "started with the run, which waits for its /health, watches and stops it"
    return Line(label, " ".join(words), put(settings, note), about, service.line)


def _whole(job: ForeignJob, dialect: Dialect) -> Iterator[tuple[str, KeyVerdict]]:
    try:
        yield from dialect.whole(job)
    except (UnknownValue, ValueError) as error:
        why = f"unknown without running the script: {error}" if isinstance(error, UnknownValue) else str(error)
        yield "devices", unknown(f"{why}: set cluster.nodes and cluster.devices_per_node")


def _line(job: ForeignJob, dialect: Dialect, key: str, value: Any, line: int | None) -> Line:
    label = str(shown(key))
    if looks_secret(key, value):
        return Line(
            label, "[hidden]", KeyVerdict("secret", {}, "left out: secrets come from the environment"), (), line
        )
    row = find_row(dialect.rows, job.name(key))
    if row is None:
        return Line(label, shown(value), _unknown(job, dialect, key), (), line)
    return Line(label, shown(value), read_row(job, row, value), row.to, line)


def read_row(job: ForeignJob, row: Row, value: Any) -> KeyVerdict:
    """A row's verdict on a value, checked against the type and bounds of our key."""
    try:
        verdict = row.read(job, value)
    except UnknownValue as error:
        if row.kind == "placement" or (row.to and MEMORY_KEYS.issuperset(row.to)):
            return KeyVerdict("placement", {}, f"{MEMORY}; its value is unknown without running the script: {error}")
        return KeyVerdict("hole", {}, f"unknown without running the script: {error}")
    except (ValueError, TypeError, OverflowError, ZeroDivisionError, AttributeError, KeyError) as error:
        return refused(f"{error} (got {shown(value)!r})")
    for name, converted in verdict.settings.items():
        key = schema.find_key(name)
        if key is None or isinstance(converted, bool) or not isinstance(converted, int | float):
            continue
        if (key.lowest is not None and converted < key.lowest) or (key.highest is not None and converted > key.highest):
            return refused(f"{name} must be {key.bounds} (got {converted})")
    return verdict


def _unknown(job: ForeignJob, dialect: Dialect, written: str) -> KeyVerdict:
    if next(holes_in(written), None) is not None:
        return KeyVerdict("hole", {}, f"words that are unknown without running the script: {shown(written)}")
    if job.name(written) in job.foreign.script_arguments:
        return nothing("an argument of the script itself, which was read with it")
    close = nearest(job.name(written), [row for row in dialect.rows if "*" not in row], cutoff=85)
    hint = f"; nearest: {close}" if close else ""
    if job.foreign.tool == "trl" and (job.foreign.program == "trl" or job.foreign.program.endswith(".py")):
        return unknown(f"an argument of the script itself, and not of TRL: what it does is in its code{hint}")
    return refused(f"no such key in the table{hint}. Find its meaning and set it by hand")


def find_row(rows: RowTable, name: str) -> Row | None:
    """The row of a key: by its name, else the most specific pattern."""
    if row := rows.get(name):
        return row
    best = _best_pattern(tuple(pattern for pattern in rows if "*" in pattern), name)
    return rows[best] if best else None


@lru_cache(maxsize=8192)
def _best_pattern(patterns: tuple[str, ...], name: str) -> str | None:
    parts = name.split(".")
    return max((p for p in patterns if _matches(p.split("."), parts)), key=_specific, default=None)


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    for number, part in enumerate(pattern):
        if part == "**":
            return True
        if number >= len(parts):
            return False
        if not fnmatchcase(parts[number], part):
            return False
    return len(pattern) == len(parts)


def _specific(pattern: str) -> tuple[int, int]:
    parts = pattern.split(".")
    return sum("*" not in part for part in parts), len(pattern)


def _defaults(job: ForeignJob, dialect: Dialect) -> list[Line]:
    """Lines of keys that were not given and whose default means something else than ours."""
    found = []
    for name in dialect.written:
        row = find_row(dialect.rows, name)
        if job.given(name) or row is None or name not in job.defaults:
            continue
        verdict = read_row(job, row, job.defaults[name])
        if verdict.kind == "hole" or verdict.kind == "refused":
            found.append(Line(name, shown(job.defaults[name]), verdict, row.to))
        elif any(default_of(key) != value for key, value in verdict.settings.items()):
            note = "; ".join(part for part in (f"{job.foreign.tool}'s default", verdict.note) if part)
            found.append(
                Line(
                    name,
                    shown(job.defaults[name]),
                    KeyVerdict("default" if verdict.settings else verdict.kind, verdict.settings, note),
                    row.to,
                )
            )
    return found


def default_of(key: str) -> Any:
    """The default of a key of ours as a run file has it; of one that is required or unknown, what no value equals."""
    known = schema.all_keys().get(key)
    if known is None or known.required:
        return ...
    return list(known.default) if isinstance(known.default, tuple) else known.default
