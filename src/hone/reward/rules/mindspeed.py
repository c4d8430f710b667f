r"""MindSpeed RL's verifiers by their own names: `acc`, `base_acc`, `step`; `format` and `strict_format` are in `tags`.

Same values as its `rule_verifier.py`, with Hone's comparison; docs/rewards-rules.md lists the differences. The main
one: an answer whose comparison does not end gets the minimum here; there it gets 0, more than a wrong answer.
"""

from __future__ import annotations

import re

from hone.reward.rules.answer import after_reasoning, last_boxed
from hone.reward.rules.mathematics import Answer, score_against_gold, score_response
from hone.reward.rules.tags import TagSettings, is_strict
from hone.reward.signature import reward
from hone.types import Fault, Group, Score

_STEP = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,")
_ENOUGH_STEPS = 3


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
