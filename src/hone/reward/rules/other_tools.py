r"""Rewards of other tools by their own names: verl's `math_dapo`, `prime_math` and `geo3k`, of data sources that no
other rule has, and MindSpeed RL's verifiers `acc`, `base_acc` and `step`.

Same values as verl's `reward_score` and MindSpeed RL's `rule_verifier.py`, with Hone's comparison of answers
(`mathematics`); docs/rewards-rules.md lists the differences. The main one to MindSpeed RL: an answer whose comparison
does not end gets the minimum here; there it gets 0, more than a wrong answer. `gsm8k` and, for MATH, which verl scores
by a boxed answer, `math` are in files of their own; MindSpeed RL's `format` and `strict_format` are in `tags`.
"""

from __future__ import annotations

import re

from hone.reward.rules.answer import after_reasoning, last_boxed
from hone.reward.rules.mathematics import Answer, score_against_gold, score_final, score_response
from hone.reward.rules.tags import TagSettings, is_strict
from hone.reward.signature import reward
from hone.types import Fault, Group, Score

_ANSWER = re.compile(r"answer[ \t]*:[ \t]*([^\n]+)", re.IGNORECASE)
_BEFORE_RESULT = tuple(re.compile(f"answer{end}", re.IGNORECASE) for end in (":", " is", "s are"))
_BEHIND_RESULT = re.compile(r"(?:is|are)(?: the)? answer", re.IGNORECASE)
_LAST_WORD = re.compile(r"\b(?:be|is|are|get)\s|=|:\s", re.IGNORECASE)
RIGHT, FORM = 0.9, 0.1
"""Parts of `geo3k`."""
_STEP = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,")
_ENOUGH_STEPS = 3


@reward(minimum=-1.0, maximum=1.0, overrun=Fault.MODEL)
def math_dapo(group: Group) -> list[Score] | tuple[Score, ...]:
    """1 for the right result behind the last `Answer:`, on its line; -1 for a wrong one or none."""
    return score_against_gold(group, _after_answer)


def _after_answer(text: str, gold: Answer) -> Score:
    lines = _ANSWER.findall(after_reasoning(text))
    if not lines:
        return Score(-1.0, Fault.MODEL, "no line with Answer:")
    line = lines[-1].strip().strip("*").strip()
    boxed = last_boxed(line)
    found = score_final(line.strip("$ ") if boxed is None else boxed, gold)
    return Score(1.0 if found.value == 1.0 else -1.0, found.fault, found.detail)


@reward(minimum=0.0, maximum=1.0, overrun=Fault.MODEL)
def prime_math(group: Group) -> list[Score] | tuple[Score, ...]:
    """1 for the right result in a box or in words such as `the answer is 4`, else 0."""
    return score_against_gold(group, lambda text, gold: score_final(_result_in_words(after_reasoning(text)), gold))


def _result_in_words(text: str) -> str:
    """The box behind the last `answer is`, if there is one there; else what the sentence behind it ends in."""
    for mark in _BEFORE_RESULT:
        text = mark.split(text)[-1]
    if behind := list(_BEHIND_RESULT.finditer(text)):
        text = text[: behind[-1].start()]
    if (boxed := last_boxed(text)) is not None:
        return boxed
    sentence = text.strip().rpartition(". ")
    return _LAST_WORD.split(sentence[0] or sentence[2])[-1].strip().strip("*$").removesuffix(".").strip("$ ")


@reward(minimum=0.0, maximum=1.0, overrun=Fault.MODEL)
def geo3k(group: Group) -> list[Score] | tuple[Score, ...]:
    r"""0.9 for the right result in `\boxed{}`, and 0.1 for `<think>...</think>` with a box behind it."""
    return score_against_gold(group, _right_and_formed)


def _right_and_formed(text: str, gold: Answer) -> Score:
    boxed = last_boxed(after_reasoning(text))
    right = Score(0.0) if boxed is None else score_final(boxed, gold)
    _, closed, rest = text.partition("</think>")
    _, opened, inner = rest.partition("\\boxed{")
    is_formed = bool(text.startswith("<think>") and closed and opened and "}" in inner)
    return Score(RIGHT * (right.value or 0.0) + FORM * is_formed, detail=right.detail)


@reward(minimum=-1.0, maximum=1.0, overrun=Fault.MODEL)
def acc(group: Group) -> list[Score] | tuple[Score, ...]:
    r"""1 for the right result in `\boxed{}`, -0.5 for a wrong one, -1 without a box."""
    return score_against_gold(group, _acc)


def _acc(text: str, gold: Answer) -> Score:
    if last_boxed(after_reasoning(text)) is None:
        return Score(-1.0, Fault.MODEL, "no \\boxed{}")
    found = score_response(text, gold)
    return Score(1.0 if found.value == 1.0 else -0.5, detail=found.detail)


@reward(minimum=0.0, maximum=1.0, overrun=Fault.MODEL)
def base_acc(group: Group) -> list[Score] | tuple[Score, ...]:
    """1 for the right result in a response of strict format; else 0."""
    tags = TagSettings()
    return score_against_gold(
        group, lambda text, gold: score_response(text, gold) if is_strict(text, tags) else Score(0.0)
    )


@reward(minimum=0.0, maximum=1.0)
def step(group: Group) -> list[float]:
    """A third for each mark of step-by-step reasoning, 1 from three on."""
    return [min(1.0, len(_STEP.findall(sample.text)) / _ENOUGH_STEPS) for sample in group.samples]
