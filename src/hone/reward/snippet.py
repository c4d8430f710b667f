"""The program in a response: its last fenced code block, after any reasoning."""

from __future__ import annotations

import re

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*")
_PYTHON = ("", "python", "python3", "py")


class NoProgram(ValueError):
    """A response has no program; says why. A fault of the model."""


def last_program(text: str) -> str:
    """The last code block of what follows the reasoning. Blocks marked as another language than Python are passed over.

    Raises:
        NoProgram: the reasoning has no end, there is no block, or the last one is not closed.
    """
    _, ended, answer = text.rpartition("</think>")
    if not ended and "<think>" in text:
        raise NoProgram("its reasoning has no end")
    found: str | None = None
    fence, language, lines = "", "", []
    for line in answer.split("\n"):
        match = _FENCE.fullmatch(line.rstrip("\r"))
        if not fence:
            if match is not None:
                fence, language, lines = match[1], match[2].lower(), []
        elif match is not None and not match[2] and match[1].startswith(fence):
            if language in _PYTHON:
                found = "\n".join(lines)
            fence = ""
        else:
            lines.append(line)
    if fence and language in _PYTHON:
        raise NoProgram("its last code block is not closed")
    if found is None:
        raise NoProgram("no code block")
    return found
