"""Rendering of a resolved configuration as readable YAML that `load_config` reads back to the same values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hone.config import schema
from hone.config.run import RunConfig
from hone.config.yaml_tree import Where, scalar

_COMMENT_COLUMN = 44
_UNPRINTABLE = re.compile("[^\x20-\x7e\xa1-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_STRING_OR_NOT_FINITE = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN')
_AS_YAML = {"Infinity": ".inf", "-Infinity": "-.inf", "NaN": ".nan"}
_NEEDS_NO_QUOTES = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)


def resolved_yaml(
    config: RunConfig, where: Callable[[str], Where | None], *, title: str = "", section: str = ""
) -> str:
    """YAML of the whole configuration, or of one section, with the origin of each value as a comment.

    Args:
        where: origin of a dotted path, None for a default.
        title: first line, as a comment.
        section: dotted path of the only section to show.
    """
    data = value_at(config, section) if section else config.model_dump(mode="json")
    lines = list(_lines(data, section, 0, where))
    head = [f"# {_UNPRINTABLE.sub('?', title)}"] if title else []
    return "\n".join([*head, *lines]) + "\n"


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{'a': {'b': 1}}` -> `{'a.b': 1}`. Lists stay whole; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        is_inner = isinstance(value, Mapping) and value
        flat |= flattened(value, f"{prefix}{name}.") if is_inner else {f"{prefix}{name}": value}
    return flat


def value_at(config: RunConfig, path: str) -> Any:
    """The value of a dotted path as plain data, None in a section that is null. Raises KeyError if there is none."""
    value: Any = config.model_dump(mode="json")
    parts = path.split(".")
    for depth, part in enumerate(parts):
        value = _in_long_form(value, ".".join(parts[:depth]))
        if value is None:
            return None
        if isinstance(value, list):
            if not (part.isdecimal() and int(part) < len(value)):
                raise KeyError(path)
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            raise KeyError(path)
    return value


def _in_long_form(value: Any, path: str) -> Any:
    """A list or an entry of it that is dumped in short form (`Section.short_key`), with all of its keys."""
    if schema.is_section_list(path):
        return [value] if isinstance(value, str) else value
    section = schema.all_sections().get(schema.generic(path))
    if section is None or not section.short_key:
        return value
    given = {section.short_key: value} if isinstance(value, str) else value
    return {**dict.fromkeys(section.model_fields), **given}


def inline(value: Any) -> str:
    """A value on one line, quoted only where YAML needs it."""
    if isinstance(value, str) and _NEEDS_NO_QUOTES.fullmatch(value) and scalar(value) == value:
        return value
    text = json.dumps(value, ensure_ascii=False)
    text = _STRING_OR_NOT_FINITE.sub(lambda found: _AS_YAML.get(found[0], found[0]), text)
    return _UNPRINTABLE.sub(lambda found: f"\\U{ord(found[0]):08x}", text)


def _lines(value: dict[str, Any], path: str, depth: int, where: Callable[[str], Where | None]) -> Iterator[str]:
    for name, child in value.items():
        child_path = f"{path}.{name}" if path else name
        label = f"{'  ' * depth}{inline(name)}:"
        if isinstance(child, dict) and child:
            yield label
            yield from _lines(child, child_path, depth + 1, where)
        elif schema.is_section_list(child_path) and isinstance(child, list) and child:
            yield label
            for number, entry in enumerate(child):
                if not isinstance(entry, dict):
                    yield from _value(f"{'  ' * (depth + 1)}- {inline(entry)}", f"{child_path}.{number}", where)
                    continue
                lines = list(_lines(entry, f"{child_path}.{number}", depth + 2, where))
                dash = "  " * (depth + 1) + "- "
                yield dash + lines[0][len(dash) :]
                yield from lines[1:]
        else:
            yield from _value(f"{label} {inline(child)}", child_path, where)


def _value(text: str, path: str, where: Callable[[str], Where | None]) -> Iterator[str]:
    origin = _UNPRINTABLE.sub("?", str(where(path) or "default"))
    yield f"{text:<{_COMMENT_COLUMN}}  # {origin}"
