"""What a shell makes of a text that is known: cut, replaced, in capitals; and folders and names of paths."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase


def changed(value: str, operator: str, expand: Callable[[str], str]) -> str | None:
    """`${x#a}`, `${x%a}`, `${x/a/b}`, `${x,,}`, `${x:1:2}`: what the operator after the name makes of a value.

    Args:
        expand: variables of a replacement.
    Returns:
        None where the operator is another one.
    """
    if operator[:1] in ("#", "%") and len(operator) > 1:
        return _without(value, operator)
    if operator in (",", ",,", "^", "^^"):
        change = str.lower if operator[0] == "," else str.upper
        return change(value) if len(operator) == 2 else change(value[:1]) + value[1:]
    if (cut := re.fullmatch(r":\s*(\d{1,4})(?::\s*(\d{1,4}))?", operator)) is not None:
        start = int(cut[1])
        return value[start:] if cut[2] is None else value[start : start + int(cut[2])]
    if operator[:1] == "/" and (parts := re.fullmatch(r"/(/?)((?:[^\\/]|\\.)+)(?:/(.*))?", operator, re.DOTALL)):
        pattern, replacement = re.sub(r"\\(.)", r"\1", parts[2]), expand(parts[3] or "")
        if re.search(r"[*?\[\]$#%]", parts[2]) or len(value) * max(1, len(replacement)) > 1_000_000:
            return None
        return value.replace(pattern, replacement, -1 if parts[1] else 1)
    return None


def _without(value: str, operator: str) -> str:
    """`${x#pattern}`, `##`, `%`, `%%`: without the shortest or the longest start or end that fits."""
    is_start, is_longest = operator[0] == "#", operator[:2] in ("##", "%%")
    pattern = operator.lstrip("#%")
    cuts = range(len(value) + 1) if is_start != is_longest else range(len(value), -1, -1)
    for cut in cuts:
        part, left = (value[:cut], value[cut:]) if is_start else (value[cut:], value[:cut])
        if fnmatchcase(part, pattern):
            return left
    return value


def path_of(words: Sequence[str]) -> str | None:
    """What `basename`, `dirname`, `realpath` or `cd ... && pwd` prints, by the text alone; None for other commands.

    Relative paths stay relative.
    """
    words = [word for word in words if word not in ("--", "-P", "-f", "-e", "-m")]
    if len(words) == 4 and words[0] == "cd" and words[2:] in (["&&", "pwd"], [";", "pwd"]):
        return posixpath.normpath(words[1])
    if len(words) == 3 and words[0] == "basename":
        name = posixpath.basename(words[1].rstrip("/"))
        return name.removesuffix(words[2]) or name
    if len(words) != 2:
        return None
    path = words[1].rstrip("/") or "/"
    if words[0] == "basename":
        return posixpath.basename(path) or "/"
    if words[0] == "dirname":
        return posixpath.dirname(path) or "."
    return posixpath.normpath(path) if words[0] in ("realpath", "readlink") else None
