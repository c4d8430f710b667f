"""Defaults of foreign tools by version: facts taken from the released packages by `hone.tools.foreign_defaults`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from hone.dialects.foreign import ForeignRun

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


def version_key(version: str) -> tuple[int, ...]:
    """For comparing: 0.10.1.post2 -> (0, 10, 1, 2)."""
    return tuple(int(part) for part in re.findall(r"\d+", version))
