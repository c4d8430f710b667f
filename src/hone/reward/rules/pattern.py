"""`regex`: 1 when the response matches a pattern of the run file; else 0.

A group named `answer` in it must also equal the row's answer, in the pattern's last match. It runs in a process that
can be killed: a response on which the pattern backtracks without end gets the minimum.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Literal

from pydantic import field_validator

from hone.config.run import Section, key
from hone.reward.rules.answer import after_reasoning
from hone.reward.signature import all_faulty, reward
from hone.types import Fault, Group

ANSWER = "answer"


class PatternSettings(Section):
    """`args` of `regex`."""

    pattern: str = key(..., min_length=1)
    """In Python's syntax; `(?i)`, `(?s)` and the like go in front."""
    match: Literal["anywhere", "whole"] = key("anywhere")
    """What must match: some part of the response, or all of it, white space around it aside."""
    where: Literal["response", "after_reasoning"] = key("response")
    """The whole response, or what follows `</think>`."""

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"no pattern: {error}") from error
        return pattern


@reward(minimum=0.0, maximum=1.0, overrun=Fault.MODEL, settings=PatternSettings)
def regex(group: Group, settings: PatternSettings) -> list[float] | tuple:
    """1 for a match, 0 without one."""
    pattern = re.compile(settings.pattern)
    gold = None
    if ANSWER in pattern.groupindex:
        if group.prompt.answer is None:
            return all_faulty(len(group.samples), "the row has no answer", Fault.DATA)
        gold = str(group.prompt.answer).strip()
    return [float(_matches(pattern, sample.text, settings, gold)) for sample in group.samples]


def _matches(pattern: re.Pattern[str], text: str, settings: PatternSettings, gold: str | None) -> bool:
    region = after_reasoning(text) if settings.where == "after_reasoning" else text
    if settings.match == "whole":
        found = pattern.fullmatch(region.strip())
    elif gold is None:
        found = pattern.search(region)
    else:
        found = next(iter(deque(pattern.finditer(region), maxlen=1)), None)  # the last one
    return found is not None and (gold is None or (found[ANSWER] or "").strip() == gold)
