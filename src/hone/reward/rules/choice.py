r"""`choice`: 1 when the response chooses the row's option; else 0.

Searched after the reasoning, in this order: the last `<answer>`, the last `\boxed{}`, the last "answer is B",
"Answer: B", "Final: B" or the like, a last line that is an option and nothing else. In the first two exactly one option
may be named. A letter counts only by itself, in its own case, and if the row has that option: "The answer depends on
pH. Final: A" is A, and "an answer" chooses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pydantic import field_validator

from hone.config.run import Section, key
from hone.reward.rules.answer import after_reasoning, last_boxed, last_tagged
from hone.reward.signature import all_faulty, reward
from hone.types import Fault, Group, Score

# Every repetition is bounded, so that the search is linear.
_ALONE = r"(?<![\w'’\\-])({letters})(?![\w'’]|-\w)"
_ANCHOR = r"(?i:\b(?:answer|option|choice|final))\b(?i:[ \t]{1,4}(?:is|option|choice|answer)){0,3}"
_BETWEEN = r"[ \t]{0,4}[:=]?[\s*_(\[{$\"`]{0,12}(?:\\(?:text|mathrm|mathbf|textbf)\{)?\(?"
_NO_ARTICLE = r"(?!(?<=[AI])[ \t]{1,4}[a-z])"
_LAST_LINE = r"[\s*_(\[$\"`]*({letters})[)\].:*_$\"`]*(?:[ \t]+\S.*)?"


class ChoiceSettings(Section):
    """`args` of `choice`."""

    letters: str = key("ABCD", min_length=2)
    """Names of the options, one character each."""
    options_column: str | None = key(None)
    """Column with the row's options, a list or an object by letter; null: every row has all the letters."""

    @field_validator("letters")
    @classmethod
    def _check_letters(cls, letters: str) -> str:
        if not letters.isalnum() or len(set(letters)) < len(letters):
            raise ValueError("must be different letters or digits")
        return letters


@reward(minimum=0.0, maximum=1.0, settings=ChoiceSettings)
def choice(group: Group, settings: ChoiceSettings) -> list[Score] | tuple[Score, ...]:
    """1 for the right option, 0 for another one or none."""
    try:
        letters = _letters(group.prompt.columns, settings)
        gold = _gold(group.prompt.answer, letters)
    except ValueError as error:
        return all_faulty(len(group.samples), str(error), Fault.DATA)
    found = [chosen(sample.text, letters) for sample in group.samples]
    none = Score(0.0, Fault.MODEL, "chooses no option")
    return [none if option is None else Score(float(option == gold)) for option in found]


def chosen(text: str, letters: str) -> str | None:
    """The option that a response chooses; None when it does not, or names several where one is asked for."""
    region = after_reasoning(text)
    alone, anchored, line = _patterns(letters)
    for marked in (last_tagged(region, "answer"), last_boxed(region)):
        if marked is not None:
            boxed = last_boxed(marked)
            named = set(alone.findall(boxed if boxed is not None else marked))
            return named.pop() if len(named) == 1 else None
    found = anchored.findall(region)
    if found:
        return found[-1]
    last = line.fullmatch(region.rstrip().rpartition("\n")[2])
    return last[1] if last else None


@lru_cache(maxsize=64)
def _patterns(letters: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    alternatives = f"[{letters}]"
    alone = _ALONE.format(letters=alternatives)
    return (
        re.compile(alone),
        re.compile(_ANCHOR + _BETWEEN + alone + _NO_ARTICLE),
        re.compile(_LAST_LINE.format(letters=alternatives)),
    )


def _letters(columns: Any, settings: ChoiceSettings) -> str:
    """The letters of the row's own options. Raises ValueError."""
    if settings.options_column is None:
        return settings.letters
    options = columns.get(settings.options_column)
    if isinstance(options, dict) and options and set(map(str, options)) <= set(settings.letters):
        return "".join(map(str, options))
    if isinstance(options, Sequence) and not isinstance(options, str) and 2 <= len(options) <= len(settings.letters):
        return settings.letters[: len(options)]
    raise ValueError(
        f"column {settings.options_column!r} has no options named by {settings.letters}: {str(options)[:60]}"
    )


def _gold(answer: Any, letters: str) -> str:
    """The right option, from a letter, with or without brackets, or a number from 0. Raises ValueError."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
        return letters[answer]
    name = str(answer).strip().strip("()[]. ")
    if len(name) == 1 and name in letters:
        return name
    raise ValueError(f"the row's answer {str(answer)[:60]!r} is none of the options {letters}")
