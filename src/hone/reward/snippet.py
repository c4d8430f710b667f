"""The program in a response: its last fenced code block, after any reasoning."""

from __future__ import annotations

import re

_FENCE = re.compile(r"( *)(`{3,}|~{3,})([^`]*)")
_LIST_ITEM = re.compile(r" *(?:[-*+]|\d{1,9}[.)]) +")
_MOST_INDENTED = 3
_PYTHON = re.compile(r"|\{?\s*\.?(?:python|py)(?:\d[\d.]*)?(?:[\s,:{}].*)?", re.IGNORECASE | re.DOTALL)
"""Info strings of Python: python, py, python3.11, {python}, {.python .numberLines}, python title=a.py, or none."""


class NoProgram(ValueError):
    """A response has no program; says why. A fault of the model."""


def last_program(text: str) -> str:
    """The last code block of what follows the reasoning, as CommonMark reads it: what its fence is indented by is taken
    off its lines. Blocks marked as another language than Python are passed over.

    Raises:
        NoProgram: the reasoning has no end, there is no block, or the last one is not closed.
    """
    _, ended, answer = text.rpartition("</think>")
    if not ended and "<think>" in text:
        raise NoProgram("its reasoning has no end")
    found: str | None = None
    fence, info, lines = "", "", []
    indented = margin = 0
    for line in answer.split("\n"):
        if not fence:
            margin = _margin(line, margin)
            opening = _FENCE.fullmatch(" " * margin + line[margin:].rstrip("\r"))
            if opening is not None and len(opening[1]) <= margin + _MOST_INDENTED:
                indented, fence, info, lines = len(opening[1]), opening[2], opening[3].strip(), []
            continue
        closing = _FENCE.fullmatch(line.rstrip("\r"))
        if (
            closing is not None
            and len(closing[1]) <= margin + _MOST_INDENTED
            and closing[2].startswith(fence)
            and not closing[3].strip()
        ):
            if _PYTHON.fullmatch(info):
                found = "\n".join(lines)
            fence = ""
        else:
            spaces = len(line) - len(line.lstrip(" "))
            lines.append(line[min(indented, spaces) :])
    if fence and _PYTHON.fullmatch(info):
        raise NoProgram("its last code block is not closed")
    if found is None:
        raise NoProgram("no code block")
    return found


def _margin(line: str, margin: int) -> int:
    """Where the text of the list item begins that a line is in; 0 outside of lists."""
    if item := _LIST_ITEM.match(line):
        return item.end()
    return margin if not line.strip() or line.startswith(" " * margin) else 0
