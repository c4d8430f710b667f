"""Conditions of a shell script, as far as they are known, and variables that differ by an unknown one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from hone.dialects.foreign import hole, holes_in
from hone.dialects.shell_expansion import Variables

_SETTING = re.compile(r"[+~]{0,2}[A-Za-z_][\w@/.\-]*=")
_NUMBERS = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}


def tested(words: Sequence[str]) -> bool | None:
    """Result of `[ ... ]`, `[[ ... ]]` or `test ...`, given as expanded words; None where it is not known."""
    if not words or any(next(holes_in(word), None) is not None for word in words):
        return None
    if words[0] == "!":
        found = tested(words[1:])
        return None if found is None else not found
    for joint in ("||", "-o", "&&", "-a"):
        if joint in words[1:]:
            at = words.index(joint, 1)
            left, right, is_or = tested(words[:at]), tested(words[at + 1 :]), joint in ("||", "-o")
            if left is is_or or right is is_or:
                return is_or
            return None if left is None or right is None else not is_or
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2:
        return {"-z": not words[1], "-n": bool(words[1])}.get(words[0])
    if len(words) != 3:
        return None
    first, operator, second = words
    if operator in ("=", "=="):
        return fnmatchcase(first, second)
    if operator == "!=":
        return not fnmatchcase(first, second)
    if operator in _NUMBERS and all(re.fullmatch(r"\s*-?\d+\s*", side) for side in (first, second)):
        return _NUMBERS[operator](int(first), int(second))
    return None


def matched(word: str, patterns: Sequence[str]) -> bool | None:
    """Whether a word of `case` is one of an arm's patterns; None where it is not known."""
    if any(next(holes_in(text), None) is not None for text in (word, *patterns)):
        return True if "*" in patterns else None
    return any(fnmatchcase(word, pattern) for pattern in patterns)


def merge(into: Variables, results: Sequence[Variables]) -> None:
    """Variables after arms of which one was run: those that differ are unknown, lists from where they differ."""
    for name in dict.fromkeys(name for result in results for name in result):
        values = [result.get(name) for result in results]
        lists = [value for value in values if isinstance(value, list)]
        texts = [value for value in values if isinstance(value, str)]
        if all(value == values[0] for value in values) and values[0] is not None:
            into[name] = values[0]
        elif len(lists) == len(values):
            into[name] = _merged(name, lists)
        elif len(texts) == len(values) and any(len(text.split()) > 1 for text in texts):
            into[name] = " ".join(_merged(name, [re.split(r"\s+(?![^\ue000]*\ue001)", text) for text in texts]))
        else:
            into[name] = hole(f"{name}, which depends on a condition")


def _merged(name: str, lists: Sequence[list[str]]) -> list[str]:
    """What all lists start with; then each setting that some of them add, with an unknown value."""
    same = 0
    while all(same < len(items) for items in lists) and len({items[same] for items in lists}) == 1:
        same += 1
    added: dict[str, str] = {}
    for word in (word for items in lists for word in items[same:]):
        found = _SETTING.match(word)
        unknown = hole(f"{name}, which depends on a condition")
        added[found[0] if found else ""] = f"{found[0]}{unknown}" if found else unknown
    return [*lists[0][:same], *added.values()]
