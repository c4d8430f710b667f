"""Schema of the run file as data: path, type in words, unit, default, bounds, meaning. Derived from `run.py`.

For messages, `hone explain` and the generated documentation. Paths are dotted; `*` stands for a list entry's number
or for a name that the user gives, as in `reward.components.*.weight` and `services.*.port`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hone.config.run import RunConfig, Section


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the run file."""

    path: str
    kind: str
    """Type in words, such as "a whole number"."""
    bounds: str
    """Such as "at least 1"; "" when there are none."""
    lowest: float | None
    """Smallest legal value, if there is one (`above 0` has none)."""
    highest: float | None
    choices: tuple[str, ...]
    unit: str
    default: Any
    required: bool
    meaning: str
    is_path: bool
    """See `section.key`."""
    is_text: bool
    """Text or null and nothing else, so that a value on the command line needs no quotes."""

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def rule(self) -> str:
        """Type and bounds: "a whole number, at least 1"."""
        return f"{self.kind}, {self.bounds}" if self.bounds else self.kind


@cache
def all_keys() -> Mapping[str, Key]:
    """Every key by path, in the order of `run.py`; sections and lists of sections are not keys themselves, except lists
    with a short form, such as `data.train`."""
    return {key.path: key for key in _walk(RunConfig, "")}


@cache
def all_sections() -> Mapping[str, type[Section]]:
    """Every section by path: `run`, `train.optimizer`, `reward.components.*`; the root is ""."""
    return dict(_sections(RunConfig, ""))


@cache
def section_maps() -> frozenset[str]:
    """Paths of the mappings from names that the user gives to sections: `services`."""
    return frozenset(
        join_path(path, name)
        for path, section in all_sections().items()
        for name, field in section.model_fields.items()
        if get_origin(field.annotation) is dict and _inner_section(field.annotation)[0]
    )


def generic(path: str) -> str:
    """A concrete path with list numbers and given names replaced: `reward.components.0.use` and `services.judge.port`
    become `reward.components.*.use` and `services.*.port`."""
    parts: list[str] = []
    for part in path.split("."):
        parts.append("*" if part.isdecimal() or ".".join(parts) in section_maps() else part)
    return ".".join(parts)


def find_key(path: str) -> Key | None:
    """The key that a concrete path belongs to, itself or the free-form mapping or list that holds it."""
    parts = generic(path).split(".")
    for length in range(len(parts), 0, -1):
        if key := all_keys().get(".".join(parts[:length])):
            return key
    return None


FILE_ARGS = ("path", "template", "tokenizer", "ca_file")
"""Arguments of built-in rewards that name files as keys with `is_path` do."""


def may_name_a_file(path: str) -> bool:
    """Whether the text at a concrete path is one that `section.key` calls a path."""
    key = find_key(path)
    if key is None or key.path != "reward.components.*.args":
        return key is not None and key.is_path
    return path.rpartition(".")[2] in FILE_ARGS


def is_section(path: str) -> bool:
    return generic(path) in all_sections()


def is_section_list(path: str) -> bool:
    return f"{generic(path)}.*" in all_sections() and path not in section_maps()


def _sections(section: type[Section], path: str) -> Iterator[tuple[str, type[Section]]]:
    yield path, section
    for name, field in section.model_fields.items():
        inner, is_many = _inner_section(field.annotation)
        if inner:
            yield from _sections(inner, join_path(path, f"{name}.*" if is_many else name))


def _walk(section: type[Section], path: str, defaults: Section | None = None) -> Iterator[Key]:
    """Keys below a path. `defaults`: the section that stands there by default, where it is not the class's own."""
    for name, field in section.model_fields.items():
        here, default = join_path(path, name), field.default if defaults is None else getattr(defaults, name)
        inner, is_many = _inner_section(field.annotation)
        if inner is None or inner.short_key:
            yield _key(here, field, default)
        if inner:
            yield from _walk(inner, f"{here}.*" if is_many else here, default if isinstance(default, inner) else None)


def _key(path: str, field: FieldInfo, default: Any) -> Key:
    bounds, lowest, highest = _bounds(field.metadata)
    kinds = set(get_args(field.annotation)) if _is_union(field.annotation) else {field.annotation}
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    return Key(
        path=path,
        kind=_words(field.annotation),
        bounds=bounds,
        lowest=lowest,
        highest=highest,
        choices=_choices(field.annotation),
        unit=str(extra.get("unit", "")),
        default=None if default is PydanticUndefined else default,
        required=field.is_required(),
        meaning=field.description or "",
        is_path=bool(extra.get("is_path")),
        is_text=str in kinds and kinds <= {str, type(None)},
    )


def join_path(path: str, name: str) -> str:
    """The path of a key or section in the section at `path`; the root has none."""
    return f"{path}.{name}" if path else name


def _inner_section(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section class behind an annotation, and whether it holds many of them: a list, or a mapping by name."""
    if _is_union(annotation):  # one that may be left out
        annotation = next((part for part in get_args(annotation) if part is not type(None)), None)
    place = {tuple: 0, dict: 1}.get(get_origin(annotation))  # type: ignore[arg-type]
    inner = annotation if place is None else get_args(annotation)[place]
    return (inner, place is not None) if isinstance(inner, type) and issubclass(inner, Section) else (None, False)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return tuple(choice for part in get_args(annotation) for choice in _choices(part))


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def _words(annotation: Any) -> str:
    if annotation in _KINDS:
        return _KINDS[annotation]
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(_choices(annotation))}"
    if (inner := _inner_section(annotation)[0]) is not None and inner.short_key:
        return f"text, or a list of texts and mappings{' or null' * _is_union(annotation)}"
    if _is_union(annotation):
        return " or ".join(_words(part) for part in get_args(annotation))
    if get_origin(annotation) is tuple:
        first, *rest = get_args(annotation)
        each = _PLURALS.get(first) or f"entries, each {_words(first)}"
        if get_origin(first) is Literal:
            return f"a list, each {_words(first)}"
        return f"a list of {each}" if rest == [...] else f"a list of {1 + len(rest)} {each}"
    return "a mapping"


def _bounds(metadata: list[Any]) -> tuple[str, float | None, float | None]:
    words: list[str] = []
    lowest = highest = None
    for bound in metadata:
        match bound:
            case Ge(ge=limit):
                words.append(f"at least {limit}")
                lowest = limit
            case Gt(gt=limit):
                words.append(f"above {limit}")
            case Le(le=limit):
                words.append(f"at most {limit}")
                highest = limit
            case Lt(lt=limit):
                words.append(f"below {limit}")
            case MinLen(min_length=limit) if limit:
                words.append("not empty")
    return " and ".join(words), lowest, highest  # type: ignore[return-value]
