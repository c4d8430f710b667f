r"""`math`: 1 when the response's final answer equals the row's, as mathematics; else 0.

The answer is the last balanced `\boxed{}` after the reasoning, else what follows `####`; the row's is a value, or a
solution that ends in one of these. Both are read and compared by math-verify, with its time-outs off: an alarm cannot
interrupt code that is stuck in C, and a thread cannot be stopped at all, so the guard is the pool that kills the
process. An answer that stalls the comparison earns the minimum; a row that does so is a fault of the data.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from hone.reward.rules.answer import after_hashes, final_answer, last_boxed
from hone.reward.signature import all_faulty, reward
from hone.types import Fault, Group, Score

MAX_ANSWER_CHARACTERS = 1000
"""Longer final answers are none: nothing worth comparing is that long."""
_AS_LATEX = (LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0),)
_TEXT = re.compile(r"\s*\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}\s*")
_WORD = re.compile(r"[^\W\d_]{4}")
_SCIENTIFIC = re.compile(r"[+-]?\d+(?:\.\d+)?[eE][+-]?\d{1,2}", re.ASCII)
_NARROW = {0xFF01 + place: 0x21 + place for place in range(94)}
_NOT_WORDS = re.compile(r"[\\^_={}<>+*/$|]|\d")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off; so they should be


class Unreadable(ValueError):
    """No answer that could be compared; says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as mathematics and as words."""

    parsed: list[Any]
    words: str | None
    """Of an answer that is words, not a formula: how it reads, for comparing as text."""


@reward(minimum=0.0, maximum=1.0, overrun=Fault.MODEL)
def math(group: Group) -> list[Score] | tuple[Score, ...]:
    """1 for the right result, 0 for a wrong one or none."""
    try:
        gold = gold_answer(group.prompt.answer)
    except Unreadable as error:
        return all_faulty(len(group.samples), f"the row's answer: {error}", Fault.DATA)
    return [score_response(sample.text, gold) for sample in group.samples]


def score_response(text: str, gold: Answer) -> Score:
    """1, or 0 with the reason where there was nothing to compare."""
    found = final_answer(text)
    if found is None:
        return Score(0.0, Fault.MODEL, "no \\boxed{} and no ####")
    try:
        return Score(float(equal(gold, read(found))))
    except Unreadable as error:
        return Score(0.0, Fault.MODEL, str(error))


def gold_answer(answer: Any) -> Answer:
    """The row's answer. Raises Unreadable when it is none; computes without end when no answer could be compared."""
    if answer is None or isinstance(answer, bool) or not str(answer).strip():
        raise Unreadable(f"{answer!r} is none")
    return _gold(str(answer))


@lru_cache(maxsize=4096)
def _gold(text: str) -> Answer:
    boxed = last_boxed(text)
    gold = read(boxed if boxed is not None else after_hashes(text) or text)
    equal(gold, read("0"))  # what cannot be compared with this in time cannot be compared with anything
    return gold


def read(text: str) -> Answer:
    """One answer. Raises Unreadable."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        raise Unreadable(f"an answer of {len(text)} characters; at most {MAX_ANSWER_CHARACTERS} are read")
    text = _in_ascii(text)
    parsed = parse(f"\\boxed{{{text}}}", extraction_config=_AS_LATEX, parsing_timeout=0)
    words = _words(text)
    if words is None and all(isinstance(part, str) for part in parsed):
        raise Unreadable(f"cannot be read as mathematics: {text[:60]!r}")
    return Answer(parsed, words)


def equal(gold: Answer, found: Answer) -> bool:
    """Whether an answer is the gold one. Words are compared as words, without regard to case."""
    if gold.words is not None and found.words is not None:
        return gold.words == found.words
    return bool(verify(gold.parsed, found.parsed, timeout_seconds=0))


def _words(text: str) -> str | None:
    """`text` in a form to compare if it is words: four letters in a row, no formula, in `\\text{}` perhaps."""
    marked = _TEXT.fullmatch(text)
    plain = marked[1] if marked else text
    if _NOT_WORDS.search(plain) or not _WORD.search(plain):
        return None
    return " ".join(plain.casefold().split())


def _in_ascii(text: str) -> str:
    """Without a final full stop, full-width signs narrowed, and 1.5e3 written out."""
    text = text.translate(_NARROW).strip().removesuffix(".")
    return f"{Decimal(text):f}" if _SCIENTIFIC.fullmatch(text) else text
