"""Words, operators and line ends of a shell script, as they are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hone.dialects.foreign import CLOSE, OPEN

_BLANK = re.compile(r"\s")
_OPERATORS = (
    "&&",
    "||",
    ";;",
    "<<<",
    "<<-",
    "<<",
    ">>",
    "&>>",
    "&>",
    ">&",
    ">|",
    "|&",
    ";",
    "|",
    "&",
    "(",
    ")",
    "<",
    ">",
)


@dataclass(frozen=True, slots=True)
class ShellToken:
    """A word as it is written, an operator, or the end of a line."""

    kind: str
    """word, operator, newline, document (`<<END`) or literal (`<<'END'`): text that a command reads."""
    text: str
    line: int


def tokens_of(text: str) -> Iterator[ShellToken]:
    at, line, length = 0, 1, len(text)
    pending: list[str] = []
    while at < length:
        char = text[at]
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif text.startswith("\\\r\n", at):
            at, line = at + 3, line + 1
        elif char == "\n":
            yield ShellToken("newline", "\n", line)
            at, line = at + 1, line + 1
            for delimiter in pending:
                at, line = _skip_document(text, at, line, delimiter)
            pending = []
        elif char.isspace():
            at += 1
        elif char == "#":
            at = _end_of_line(text, at)
        elif operator := next((known for known in _OPERATORS if text.startswith(known, at)), None):
            at += len(operator)
            if operator in ("<<", "<<-"):
                end, _ = _word_end(text, _skip_blanks(text, at))
                delimiter = text[_skip_blanks(text, at) : end]
                pending.append(delimiter.strip("'\"\\"))
                at = end
                is_literal = delimiter[:1] in ("'", '"', "\\")
                yield ShellToken("literal" if is_literal else "document", _document(text, at, pending), line)
            elif operator not in ("<<<",):
                yield ShellToken("operator", operator, line)
        else:
            end, lines = _word_end(text, at)
            end = max(end, at + 1)
            if not (text[at:end].isdecimal() and text[end : end + 1] in ("<", ">")):  # 2>&1: a descriptor, not a word
                yield ShellToken("word", text[at:end], line)
            at, line = end, line + lines


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t":
        at += 1
    return at


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _document(text: str, at: int, delimiters: list[str]) -> str:
    """Text of the last of the documents that start after this line."""
    at, start = _end_of_line(text, at) + 1, at
    for delimiter in delimiters:
        start = at
        at, _ = _skip_document(text, at, 0, delimiter)
    return text[start:at].rstrip("\n").rpartition("\n")[0]


def hole_end(text: str, at: int) -> int:
    """After the hole that starts at `at`."""
    end = text.find(CLOSE, at)
    return len(text) if end < 0 else end + 1


def _skip_document(text: str, at: int, line: int, delimiter: str) -> tuple[int, int]:
    while at < len(text):
        end = _end_of_line(text, at)
        is_last = text[at:end].strip() == delimiter
        at, line = min(end + 1, len(text)), line + 1
        if is_last:
            break
    return at, line


def _word_end(text: str, at: int) -> tuple[int, int]:
    """Where the word that starts here ends, and the line breaks within it."""
    start = at
    while at < len(text):
        char = text[at]
        if char == "\\":
            if text.startswith("\\\n", at) and (at + 2 >= len(text) or text[at + 2].isspace()):
                break
            at += 2
        elif char == OPEN:
            at = hole_end(text, at)
        elif char in "'\"`":
            at = quoted_end(text, at)
        elif char == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = bracket_end(text, at + 1)
        elif char == "(" and text[at - 1 : at] == "=" and at > start:
            at = bracket_end(text, at)
        elif char == "{" or char == "}":
            at += 1
        elif char.isspace() or char in ";|&()<>":
            break
        else:
            at += 1
    at = min(at, len(text))
    return at, text.count("\n", start, at)


def quoted_end(text: str, at: int) -> int:
    """After the quote that closes the one at `at`; where none does, at the end of the line."""
    quote, start = text[at], at
    at += 1
    while at < len(text) and text[at] != quote:
        if quote != "'" and text[at] == "\\":
            at += 1
        elif quote == '"' and text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = bracket_end(text, at + 1) - 1
        elif text[at] == OPEN:
            at = hole_end(text, at) - 1
        at += 1
    return at + 1 if at < len(text) else max(_end_of_line(text, start), start + 1)


def bracket_end(text: str, at: int) -> int:
    """After the bracket that closes the one at `at`; where none does, at the end of the word."""
    opening, start = text[at], at
    closing = {"(": ")", "{": "}", "[": "]"}[opening]
    depth = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char in "'\"`":
            at = quoted_end(text, at) - 1
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    blank = _BLANK.search(text, start)
    return blank.start() if blank else len(text)
