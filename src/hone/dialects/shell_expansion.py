"""Expansion of a shell word: variables, defaults, arrays and arithmetic; what is not known becomes a hole."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from hone.dialects.foreign import OPEN, hole, holes_in
from hone.dialects.shell_words import bracket_end, hole_end, quoted_end, tokens_of

MAX_DEPTH = 12
MAX_CHARS = 1_000_000
"""Of a value: a script that doubles a variable in each line stops there."""
NAME = re.compile(r"[A-Za-z_]\w*")
Variables = dict[str, "str | list[str]"]


@dataclass
class ShellScope:
    """Variables where a command stands."""

    variables: Variables
    exported: dict[str, str] = field(default_factory=dict)
    arguments: list[str] | None = None
    """Positional arguments; None: those of the script, which are unknown."""


def expand(raw: str, scope: ShellScope, *, splits: bool = True) -> list[str]:
    """A word as written -> the words that it becomes."""
    words, current, started = [], "", False
    for text, is_quoted, is_list in _pieces(raw, scope):
        if is_list is not None:
            items = is_list if is_quoted else [part for item in is_list for part in _split(item) if part]
            if not splits:
                current, started = current + " ".join(items), True
            elif items:
                current += items[0]
                for item in items[1:]:
                    words.append(current)
                    current = item
                started = True
        elif is_quoted or not splits:
            current, started = current + text, True
        else:
            parts = _split(text)
            for number, part in enumerate(parts):
                if number:
                    if started or current:
                        words.append(current)
                    current, started = "", False
                current += part
                started = started or bool(part)
    if started or current:
        words.append(current)
    return [word[:MAX_CHARS] for word in words]


def _split(text: str) -> list[str]:
    """By white space outside of holes; a leading or trailing blank gives an empty part."""
    if not _has_holes(text):
        return re.split(r"\s+", text)
    return re.split(r"\s+(?![^\ue000]*\ue001)", text)


def _has_holes(text: str) -> bool:
    return next(holes_in(text), None) is not None


Piece = tuple[str, bool, "list[str] | None"]


def _pieces(raw: str, scope: ShellScope, depth: int = 0) -> Iterator[Piece]:
    """Parts of a word: text, whether it was quoted, and the items of an array."""
    at = 0
    while at < len(raw):
        char = raw[at]
        if char == "\\":
            if raw[at + 1 : at + 2] != "\n":
                yield raw[at + 1 : at + 2], True, None
            at += 2
        elif char == "'":
            end = quoted_end(raw, at)
            yield raw[at + 1 : end - 1] if raw[end - 1 : end] == "'" and end > at + 1 else raw[at + 1 : end], True, None
            at = end
        elif char == '"':
            end = quoted_end(raw, at)
            inner = raw[at + 1 : end - 1] if end > at + 1 and raw[end - 1] == '"' else raw[at + 1 : end]
            yield "", True, None
            for text, items in _in_quotes(inner, scope, depth):
                yield text, True, items
            at = end
        elif char == "`":
            end = quoted_end(raw, at)
            yield hole(raw[at + 1 : end - 1]), True, None
            at = end
        elif char == OPEN:
            end = hole_end(raw, at)
            yield raw[at:end], True, None
            at = end
        elif char == "$":
            text, items, at = _dollar(raw, at, scope, depth)
            yield text, raw[at - 1 : at] == ")", items
        elif char == "~" and at == 0 and raw[1:2] in ("", "/"):
            yield "~", True, None
            at += 1
        else:
            end = at
            while end < len(raw) and raw[end] not in "\\'\"`$\ue000":
                end += 1
            end = max(end, at + 1)
            yield raw[at:end], True, None
            at = end


def _in_quotes(text: str, scope: ShellScope, depth: int) -> Iterator[tuple[str, list[str] | None]]:
    at = 0
    while at < len(text):
        char = text[at]
        if char == "\\" and text[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
            if text[at + 1] != "\n":
                yield text[at + 1], None
            at += 2
        elif char == "`":
            end = quoted_end(text, at)
            yield hole(text[at + 1 : end - 1]), None
            at = end
        elif char == OPEN:
            end = hole_end(text, at)
            yield text[at:end], None
            at = end
        elif char == "$":
            start = at
            found, items, at = _dollar(text, start, scope, depth)
            if (items is not None and text[start:at] in ("$*", "${*}")) or text[start:at].endswith("[*]}"):
                yield found + " ".join(items or []), None
            else:
                yield found, items
        else:
            end = at + 1
            while end < len(text) and text[end] not in "\\`$\ue000":
                end += 1
            yield text[at:end], None
            at = end


def _dollar(text: str, at: int, scope: ShellScope, depth: int) -> tuple[str, list[str] | None, int]:
    """What an expansion at `at` gives: text or items, and where it ends."""
    if text.startswith("$((", at):
        end = bracket_end(text, at + 1)
        return _arithmetic(text[at + 3 : end - 2], scope, depth), None, end
    if text.startswith("$(", at):
        end = bracket_end(text, at + 1)
        return _output(text[at + 2 : end - 1].strip(), scope, depth), None, end
    if text.startswith("${", at):
        end = bracket_end(text, at + 1)
        found, items = _braces(text[at + 2 : end - 1], scope, depth)
        return found, items, end
    if name := NAME.match(text, at + 1):
        found, items = _variable(name[0], scope)
        return found, items, name.end()
    special = text[at + 1 : at + 2]
    if special and special in "@*#?$!-0123456789":
        found, items = _special(special, scope)
        return found, items, at + 2
    return "$", None, at + 1


_CAT = re.compile(r"cat\s*<<-?\s*(['\"]?)(\w+)\1[ \t]*\n(.*?)\n?[ \t]*\2", re.DOTALL)


_REDIRECTED = re.compile(r"\s[12&]?>\s*(/dev/null|&[12])(?=\s|$|;)")


def _output(command: str, scope: ShellScope, depth: int) -> str:
    """Output of a command, where it follows from its text alone."""
    if command == "pwd":
        return "."
    if (found := _CAT.fullmatch(command)) is not None:
        return found[3] if found[1] else expand_document(found[3], scope)
    tokens = list(tokens_of(_REDIRECTED.sub(" ", command))) if command.count("$(") < MAX_DEPTH else []
    if tokens and all(token.kind in ("word", "operator") for token in tokens):
        words = [
            word for token in tokens for word in (expand(token.text, scope) if token.kind == "word" else [token.text])
        ]
        if not any(map(_has_holes, words)) and (path := _path_of(words)) is not None:
            return path
    return hole(f"$({' '.join(command.split())})")


def expand_document(text: str, scope: ShellScope) -> str:
    """A document, `<<END`, with its variables."""
    return "".join(found if items is None else " ".join(items) for found, items in _in_quotes(text, scope, 0))


def _special(name: str, scope: ShellScope) -> tuple[str, list[str] | None]:
    if name in "@*":
        return "", list(scope.arguments or [])
    if name == "#":
        return str(len(scope.arguments or [])), None
    if name.isdecimal() and name != "0" and scope.arguments is not None:
        number = int(name)
        return (scope.arguments[number - 1] if number <= len(scope.arguments) else ""), None
    return (str(scope.variables["0"]) if name == "0" and "0" in scope.variables else hole(f"${name}")), None


def _variable(name: str, scope: ShellScope) -> tuple[str, list[str] | None]:
    value = scope.variables.get(name)
    if value is None:
        return {"HOME": "~", "PWD": "."}.get(name) or hole(f"${name}"), None
    if isinstance(value, list):
        return value[0] if value else "", None
    return value, None


def _length(inner: str, scope: ShellScope) -> str | None:
    """`${#x}`, `${#list[@]}`: characters or items."""
    name = inner.removesuffix("[@]").removesuffix("[*]")
    value = scope.variables.get(name)
    if value is None or (isinstance(value, list) == (name == inner)) or _has_holes("".join(value)):
        return None
    return str(len(value))


_BRACES = re.compile(r"([A-Za-z_]\w*|[0-9@*])(\[[^\]]*\])?(.*)", re.DOTALL)


def _braces(inner: str, scope: ShellScope, depth: int) -> tuple[str, list[str] | None]:
    """`${...}`: a variable, its default, an array."""
    if inner[:1] == "#" and (of_length := _length(inner[1:], scope)) is not None:
        return of_length, None
    found = _BRACES.fullmatch(inner)
    if found is None or depth > MAX_DEPTH:
        return hole(f"${{{inner}}}"), None
    name, index, rest = found[1], found[2], found[3]
    is_special = not (name[0].isalpha() or name[0] == "_")
    is_set = name in scope.variables or (is_special and bool(scope.arguments))
    if index in ("[@]", "[*]") and not rest:
        value = scope.variables.get(name, [])
        return ("", value) if isinstance(value, list) else ("", [value])
    if name == "@" and (cut := re.fullmatch(r":(\d{1,4})", rest)) is not None:
        return "", list(scope.arguments or [])[max(0, int(cut[1]) - 1) :]
    value = scope.variables.get(name)
    if index and not rest and isinstance(value, list) and re.fullmatch(r"\[\d{1,4}\]", index):
        number = int(index[1:-1])
        return (value[number] if number < len(value) else ""), None
    if not index and isinstance(value, str) and len(value) < 4096 and not _has_holes(value + rest):
        other = _changed(value, rest, lambda text: expand_document(text, scope))
        if other is not None:
            return other, None
    if index or (rest and rest[0] not in ":-=?+"):
        return hole(f"${{{inner}}}"), None
    plain, items = _special(name, scope) if is_special else _variable(name, scope)
    if not rest:
        return plain, items
    if (operator := re.match(r":?[-=?+]", rest)) is None:
        return hole(f"${{{inner}}}"), None
    other = "".join(
        text if listed is None else " ".join(listed)
        for text, _, listed in _pieces(rest[operator.end() :], scope, depth + 1)
    )
    kind = operator[0][-1]
    lacks = not is_set or (operator[0][0] == ":" and plain == "" and not items)
    if kind == "+":
        return ("" if lacks else other), None
    if not lacks:
        return plain, items
    if kind == "?":
        return hole(f"${name}"), None
    if kind == "=" and not is_special:
        scope.variables[name] = other
    return other, None


# ---- arithmetic


_ALLOWED = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)


def _arithmetic(text: str, scope: ShellScope, depth: int) -> str:
    """Value of `$((...))`, or a hole where it names something unknown."""
    plain = "".join(piece if items is None else " ".join(items) for piece, _, items in _pieces(text, scope, depth + 1))
    named = NAME.sub(lambda name: _variable(name[0], scope)[0] if not _has_holes(plain) else name[0], plain)
    if _has_holes(named) or len(named) > 500:
        return hole(f"$(({' '.join(text.split())}))")
    try:
        tree = ast.parse(named.strip().lstrip("0 ") or "0", mode="eval")
        return str(_number(tree.body, 0))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return hole(f"$(({' '.join(text.split())}))")


def _number(node: ast.expr, depth: int) -> int:
    if depth > 50:
        raise ValueError("too deep")
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, _ALLOWED):
        left, right = _number(node.left, depth + 1), _number(node.right, depth + 1)
        if isinstance(node.op, ast.Add):
            value = left + right
        elif isinstance(node.op, ast.Sub):
            value = left - right
        elif isinstance(node.op, ast.Mult):
            value = left * right
        elif isinstance(node.op, ast.Pow):
            if not 0 <= right < 64 or abs(left) > 1 << 32:
                raise ValueError("too large")
            value = left**right
        elif isinstance(node.op, ast.Mod):
            value = abs(left) % abs(right) * (1 if left >= 0 else -1)
        else:
            value = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)  # the shell rounds to zero
        if abs(value) < 1 << 63:
            return value
    raise ValueError("not arithmetic")


def _changed(value: str, operator: str, expand: Callable[[str], str]) -> str | None:
    """`${x#a}`, `${x%a}`, `${x/a/b}`, `${x,,}`, `${x:1:2}`: what the operator after the name makes of a value.

    Args:
        expand: variables of a replacement.
    Returns:
        None where the operator is another one.
    """
    if operator[:1] in ("#", "%") and len(operator) > 1:
        is_start, is_longest = operator[0] == "#", operator[:2] in ("##", "%%")
        cuts = range(len(value) + 1) if is_start != is_longest else range(len(value), -1, -1)
        for cut in cuts:
            part, left = (value[:cut], value[cut:]) if is_start else (value[cut:], value[:cut])
            if fnmatchcase(part, operator.lstrip("#%")):
                return left
        return value
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


def _path_of(words: Sequence[str]) -> str | None:
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
