"""What a foreign file asks for: a tool, a program of it, and keys with values. Holes stand for what cannot be known.

And defaults of the tools by version: facts taken from the released packages by `hone.tools.foreign_defaults`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from hone.config.messages import is_secret_key, is_secret_value
from hone.errors import HoneError

Tool = Literal["verl", "openrlhf", "trl", "mindspeed", "prime-rl", "nanochat"]

OPEN, CLOSE = "\ue000", "\ue001"
"""Around the name of what is unknown, within a text."""
_HOLE = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
_TOKEN = re.compile(r"[A-Za-z0-9_\-]{32,}")


class DialectError(HoneError):
    """The foreign file cannot be read, or is of no tool that is known."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """One key of a foreign command, as its author wrote it."""

    key: str
    value: Any
    """Text from a shell; text, numbers, lists and mappings from YAML, TOML and Python. May contain holes."""
    line: int | None = None


@dataclass(frozen=True)
class ForeignService:
    """A server that a script starts in the background, before the command."""

    name: str
    words: tuple[str, ...]
    port: int
    devices: tuple[int, ...]
    line: int | None


@dataclass(frozen=True)
class ForeignRun:
    """One command of a foreign file."""

    tool: Tool
    program: str
    """Such as `verl.trainer.main_ppo` or `GRPOConfig`."""
    keys: tuple[ForeignKey, ...]
    source: str = ""
    line: int | None = None
    environment: tuple[ForeignKey, ...] = ()
    """Environment variables that the script sets."""
    notes: tuple[str, ...] = field(default=())
    services: tuple[ForeignService, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """Files to be written beside the run file: name -> text."""
    script_arguments: frozenset[str] = frozenset()
    """Arguments that a script defines itself; what becomes of them has been read in it."""


def hole(name: str) -> str:
    """Text that stands for something unknown; may be part of a longer text."""
    return f"{OPEN}{_HOLE.sub(lambda found: found[1], name).strip()}{CLOSE}"


def holes_in(value: Any) -> Iterator[str]:
    """Names of what is unknown in a value."""
    if isinstance(value, str):
        yield from _HOLE.findall(value)
    elif isinstance(value, dict):
        for child in value.values():
            yield from holes_in(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from holes_in(child)


def shown(value: Any) -> Any:
    """A value for reports and comments: holes as `<name>`, on one line, secrets hidden."""
    if isinstance(value, dict):
        return {
            str(name): "[hidden]" if looks_secret(str(name), child) else shown(child) for name, child in value.items()
        }
    if isinstance(value, list | tuple):
        return [shown(child) for child in value]
    if not isinstance(value, str):
        return value
    if is_secret_value(value) or any(map(_is_random, _TOKEN.findall(value))):
        return "[hidden]"
    text = _HOLE.sub(lambda found: f"<{found[1]}>", value)
    return " ".join(text.replace(OPEN, "").replace(CLOSE, "").split())


def looks_secret(key: str, value: Any) -> bool:
    """Whether a key or its value is one that no file or report of ours may contain."""
    name = re.split(r"[.\-]", key)[-1]
    named = is_secret_key(name) or (name == "key" and "wandb" in key) or name in ("use_wandb", "use_swanlab")
    if named and isinstance(value, str):
        return value.lower() not in ("true", "false", "none", "null", "")
    return is_secret_value(value) or (isinstance(value, str) and _is_random(value.strip()))


def _is_random(text: str) -> bool:
    """Long, with letters and digits mixed for long without a break; names of models and runs have words."""
    runs = re.findall(r"[A-Za-z0-9]{16,}", text) if _TOKEN.fullmatch(text) else ()
    return any(not run.isalpha() and not run.isdigit() for run in runs)


Table = Mapping[str, Any]
ABSENT = "(absent)"
"""In the facts: from this version on the key does not exist."""


@cache
def _facts(tool: str) -> Table:
    """`{"versions": [...], "programs": {name: {key: [[first version, default], ...]}}}`."""
    file = files("hone.dialects") / "facts" / f"{tool}.json"
    return json.loads(file.read_text("utf-8"))


def known_versions(tool: str) -> tuple[str, ...]:
    return tuple(_facts(tool)["versions"])


def defaults_of(foreign: ForeignRun, version: str) -> dict[str, Any]:
    """Foreign key -> default of the program at a version; of a key that is newer, nothing."""
    programs = _facts(foreign.tool)["programs"]
    kind = next((name for name in programs if name != "*" and name in foreign.program), "*")
    found: dict[str, Any] = {}
    for name in dict.fromkeys(("*", kind)):
        for key, steps in programs.get(name, {}).items():
            values = [value for first, value in steps if version_key(first) <= version_key(version)]
            if values and values[-1] != ABSENT:
                found[key] = values[-1]
    return found


def newest_with(foreign: ForeignRun, names: Collection[str], versions: Collection[str]) -> str | None:
    """Of some versions the newest that has most of the names; None where no version has any of them."""
    has = {version: set(names) & defaults_of(foreign, version).keys() for version in versions}
    if not any(has.values()):
        return None
    return max(versions, key=lambda version: (len(has[version]), version_key(version)))


def version_key(version: str) -> tuple[int, ...]:
    """For comparing: 0.10.1.post2 -> (0, 10, 1, 2)."""
    return tuple(int(part) for part in re.findall(r"\d+", version))
