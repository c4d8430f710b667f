"""YAML parser with positions: a tree of values that know their lines.

A run file uses the plain part of YAML 1.2: mappings, lists, scalars, anchors and aliases. Scalars follow the 1.2
core schema, so `1e-6`, `1E5` and `.5` are numbers and `yes`, `no`, `on`, `off` are text. Tags, several documents,
keys that are not text and keys written twice are refused, because each of them hides a mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

MAX_DEPTH = 24
MAX_NODES = 20_000
"""Aliases counted at full size: a few lines of nested aliases can otherwise stand for billions of values."""
MAX_DIGITS = 400

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_BASED_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Where:
    """Where a value was written: a file (or preset) and a line, or the command line."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


COMMAND_LINE = Where("command line")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where it was written, the key it concerns ("" for a whole file), what to do."""

    where: Where
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}  {self.key}: {self.message}" if self.key else f"{self.where}  {self.message}"


@dataclass(frozen=True, slots=True)
class Node:
    """A value and where it was written. `value` is a scalar, a `list[Node]` or a `dict[str, Node]`."""

    value: Any
    where: Where

    @classmethod
    def of(cls, plain: Any, where: Where) -> Node:
        """The tree of ordinary Python data, all of it from one place; what else stands in it stays as it is."""
        if isinstance(plain, Mapping):
            return cls({str(name): cls.of(child, where) for name, child in plain.items()}, where)
        if isinstance(plain, list | tuple):
            return cls([cls.of(child, where) for child in plain], where)
        if isinstance(plain, Path):
            return cls(str(plain), where)
        if isinstance(plain, Real) and not isinstance(plain, int | float):  # numpy's numbers
            return cls(int(plain) if isinstance(plain, Integral) else float(plain), where)
        return cls(plain, where)

    def plain(self) -> Any:
        """The value as ordinary Python data."""
        if isinstance(self.value, dict):
            return {name: child.plain() for name, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def scalars(self) -> Iterator[Any]:
        """Every value below that holds no other."""
        if isinstance(self.value, list | dict):
            for child in self.value.values() if isinstance(self.value, dict) else self.value:
                yield from child.scalars()
        else:
            yield self.value

    def leaves(self, path: str = "") -> Iterator[tuple[str, Node]]:
        """Every value that holds no mapping with names in it: scalars, and lists of them as one value.

        With its dotted path, in which entries of lists of mappings go by number.
        """
        if not self._is_leaf():
            named = self.value.items() if isinstance(self.value, dict) else enumerate(self.value)
            for name, child in named:
                yield from child.leaves(f"{path}.{name}" if path else str(name))
        else:
            yield path, self

    def _is_leaf(self) -> bool:
        if isinstance(self.value, list):
            return all(item._is_leaf() for item in self.value)
        return not (isinstance(self.value, dict) and self.value)

    def find(self, path: str) -> Node | None:
        """The node at a dotted path, or None."""
        node: Node | None = self
        for part in path.split(".") if path else ():
            children = node.value if node else None
            if isinstance(children, dict):
                node = children.get(part)
            elif isinstance(children, list):
                node = children[int(part)] if part.isdecimal() and int(part) < len(children) else None
            else:
                return None
        return node


class _RefusedNode(Exception):
    """The text stops making sense at a line; nothing after it can be trusted."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line, self.message = line, message


def read_yaml(
    text: str, source: str, first_line: int | None = 1, repeated: list[Problem] | None = None
) -> tuple[Node | None, list[Problem]]:
    """Parse one YAML document.

    Args:
        source: how problems name the text.
        first_line: number of the text's first line; None where lines mean nothing (the command line).
        repeated: where given, of a key that is written twice the last one counts, as in PyYAML, and it is listed here;
            else such a key is a problem.
    Returns:
        The tree (None for an empty document or one that cannot be parsed) and every problem found.
    """
    builder = _Builder(source, first_line, repeated)
    try:
        return builder.document(YAML(typ="safe", pure=True).parse(text)), builder.problems
    except _RefusedNode as refused:
        line, message = refused.line, refused.message
    except MarkedYAMLError as error:
        line, message = _yaml_error(error, text)
    except YAMLError:
        found = _UNPRINTABLE.search(text)
        line = text.count("\n", 0, found.start()) if found else 0
        message = "holds a character that text files do not have"
    except (ValueError, IndexError, RecursionError):  # the YAML parser's own bugs on garbage such as "%YAML 1"
        line, message = 0, "is not valid YAML"
    return None, [*builder.problems, Problem(builder.where(line), "", message)]


def scalar(text: str) -> Any:
    """The value of an unquoted scalar by the YAML 1.2 core schema."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if len(text) <= MAX_DIGITS:
        if _INT.fullmatch(text):
            return int(text)
        if _BASED_INT.fullmatch(text):
            return int(text, 0)
        if _FLOAT.fullmatch(text):
            return float(text)
    if infinite := _INFINITE.fullmatch(text):
        return float(f"{infinite[1]}inf")
    return float("nan") if _NAN.fullmatch(text) else text


def too_large(value: Any) -> str | None:
    """What is wrong with an integer that other programs could not hold; None for all else."""
    if not isinstance(value, int) or -(2**63) <= value < 2**63:
        return None
    return "an integer must be from -2^63 to 2^63 - 1; make it smaller, or text in quotes"


class _Builder:
    """Turns parser events into nodes; collects the problems that do not end parsing."""

    def __init__(self, source: str, first_line: int | None, repeated: list[Problem] | None) -> None:
        self.source, self.first_line, self.repeated = source, first_line, repeated
        self.problems: list[Problem] = []
        self._anchors: dict[str, tuple[Node, int]] = {}
        self._num_nodes = 0

    def where(self, line: int) -> Where:
        return Where(self.source, None if self.first_line is None else self.first_line + line)

    def document(self, events: Iterator[Event]) -> Node | None:
        root, num_documents = None, 0
        for event in events:
            if isinstance(event, DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    raise _RefusedNode(_line(event), "holds a second document (`---`); a run file is one")
            elif isinstance(event, ScalarEvent | AliasEvent | MappingStartEvent | SequenceStartEvent):
                root = self._node(event, events, depth=0)
        return root

    def _node(self, event: Any, events: Iterator[Event], depth: int) -> Node:
        line = _line(event)
        if isinstance(event, AliasEvent):
            if event.anchor not in self._anchors:
                raise _RefusedNode(line, f"*{event.anchor} names an anchor that is not defined above it")
            node, size = self._anchors[event.anchor]
            self._count(size, line)
            return node
        if depth > MAX_DEPTH:
            raise _RefusedNode(line, f"is nested more than {MAX_DEPTH} deep")
        size_before = self._num_nodes
        self._count(1, line)
        if isinstance(event, ScalarEvent):
            if _SURROGATE.search(event.value):
                raise _RefusedNode(line, "holds half a character (a lone surrogate such as \\ud800)")
            value = scalar(event.value) if event.implicit[0] else event.value
            if refusal := too_large(value):
                self._problem(line, refusal)
            node = Node(value, self.where(line))
        elif isinstance(event, SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(inner := next(events), SequenceEndEvent):
                items.append(self._node(inner, events, depth + 1))
            node = Node(items, self.where(line))
        else:
            node = Node(self._entries(events, depth), self.where(line))
        if event.tag is not None and str(event.tag):
            self._problem(line, f"YAML tags are not used in run files (got {event.tag})")
        if event.anchor:
            self._anchors[event.anchor] = (node, self._num_nodes - size_before)
        return node

    def _entries(self, events: Iterator[Event], depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        while not isinstance(event := next(events), MappingEndEvent):
            line = _line(event)
            name = self._node(event, events, depth + 1).plain()
            value = self._node(next(events), events, depth + 1)
            if not isinstance(name, str):
                self._problem(line, f"a key must be text (got {name!r})")
                continue
            if name in entries:
                message = f"{name} is written twice (first on line {entries[name].where.line}); keep one"
                if self.repeated is None:
                    self._problem(line, message)
                    continue
                self.repeated.append(Problem(self.where(line), name, message))
            entries[name] = Node(value.value, self.where(line))
        return entries

    def _count(self, num_nodes: int, line: int) -> None:
        self._num_nodes += num_nodes
        if self._num_nodes > MAX_NODES:
            raise _RefusedNode(line, f"holds more than {MAX_NODES} values")

    def _problem(self, line: int, message: str) -> None:
        self.problems.append(Problem(self.where(line), "", message))


def _line(event: Any) -> int:
    return event.start_mark.line


def _yaml_error(error: MarkedYAMLError, text: str) -> tuple[int, str]:
    """Line (from 0) and words for a syntax error, with the two commonest mistakes named as such."""
    mark = error.problem_mark or error.context_mark
    line: int = mark.line if mark else 0
    lines = text.splitlines()
    here = lines[line] if line < len(lines) else ""
    if "\t" in here[: len(here) - len(here.lstrip())]:
        return line, "is indented with a tab; YAML indents with spaces"
    if error.problem and "mapping values are not allowed" in error.problem:
        return line, "is not valid YAML: a second `:` on the line, or wrong indentation; quote text that holds `: `"
    context = f" {error.context}" if error.context else ""
    return line, f"is not valid YAML: {error.problem or 'cannot be read'}{context}"
