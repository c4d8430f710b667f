r"""Extraction of final answers: after the reasoning; in the last `\boxed{}`, behind the last `####`, in `<answer>`.

Every search is linear in the response. Answers are not compared here.
"""

from __future__ import annotations

import re

BOX = r"\\{1,2}(?:boxed|fbox)\s*\{"
_BOX_OR_BRACE = re.compile(BOX + r"|\\.|[{}]", re.DOTALL)
_BOX = re.compile(BOX)


def after_reasoning(text: str) -> str:
    """What follows the last `</think>`; nothing where a `<think>` was not closed, everything where there is none."""
    _, closed, rest = text.rpartition("</think>")
    return "" if not closed and "<think>" in text else rest


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` (or `\fbox`) with balanced braces holds; of nested ones the outermost."""
    opened: list[int | None] = []
    found: str | None = None
    for mark in _BOX_OR_BRACE.finditer(text):
        if _BOX.match(mark[0]):
            opened.append(mark.end())
        elif mark[0] == "{":
            opened.append(None)
        elif mark[0] == "}" and opened and (start := opened.pop()) is not None:
            found = text[start : mark.start()]
    return found


def after_hashes(text: str) -> str | None:
    """The line behind the last `####`, without white space around it; None when there is none or it is empty."""
    _, hashes, rest = text.rpartition("####")
    line = rest.partition("\n")[0].strip()
    return line if hashes and line else None


def final_answer(text: str) -> str | None:
    r"""The final answer: the last balanced `\boxed`, else what follows `####`."""
    region = after_reasoning(text)
    boxed = last_boxed(region)
    return boxed if boxed is not None else after_hashes(region)


def last_tagged(text: str, tag: str) -> str | None:
    """What the last `<tag>...</tag>` holds."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, inner = before.rpartition(f"<{tag}>")
    return inner if closed and opened else None
