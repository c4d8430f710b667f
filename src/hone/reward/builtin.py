"""Rewards that come with Hone and are trusted to run in this process: pure, fast, never hanging.

Whatever runs code, parses mathematics or calls a service does not belong here, but in a process that can be killed.
"""

from __future__ import annotations

import re
from decimal import Decimal

from hone.reward.signature import reward
from hone.types import Fault, Group, Score

_NUMBER = re.compile(r"\s*([-+]?)\s*\$?\s*([-+]?)(\d[\d,]*(?:\.\d+)?|\.\d+)")


@reward(minimum=0.0, maximum=1.0)
def exact(group: Group) -> list[float | Score]:
    """1 when the response is the answer, white space around both ignored; else 0."""
    if group.prompt.answer is None:
        return [Score(None, Fault.DATA, "the row has no answer")] * len(group.samples)
    answer = str(group.prompt.answer).strip()
    return [1.0 if sample.text.strip() == answer else 0.0 for sample in group.samples]


@reward(minimum=0.0, maximum=1.0)
def gsm8k(group: Group) -> list[float | Score]:
    """1 when the number after the last `####` of the response equals the answer's; else 0.

    The answer is a number, or a solution that ends in `#### number`. `1,234`, `$1234` and `1234.00` are one number.
    """
    answer = str(group.prompt.answer)
    gold = final_number(answer if "####" in answer else f"#### {answer}")
    if gold is None:
        return [Score(None, Fault.DATA, f"no number in the answer {answer[-40:]!r}")] * len(group.samples)
    return [1.0 if final_number(sample.text) == gold else 0.0 for sample in group.samples]


def final_number(text: str) -> Decimal | None:
    """The number right after the last `####`, exactly; None when there is none."""
    _, marker, end = text.rpartition("####")
    match = _NUMBER.match(end) if marker else None
    if match is None or (match[1] and match[2]):
        return None
    return Decimal(match[1] + match[2] + match[3].replace(",", ""))


_RULES = "hone.reward.rules"
BUILTIN: dict[str, str] = {
    "exact": "hone.reward.builtin:exact",
    "gsm8k": "hone.reward.builtin:gsm8k",
    "choice": f"{_RULES}.choice:choice",
    "format": f"{_RULES}.tags:format",
    "strict_format": f"{_RULES}.tags:strict_format",
    "length": f"{_RULES}.shape:length",
    "repetition": f"{_RULES}.shape:repetition",
    "step": f"{_RULES}.mindspeed:step",
}
"""What `use` may name without a path, and where that is: rewards that are called in this process."""

POOLED: dict[str, str] = {
    "math": f"{_RULES}.mathematics:math",
    "acc": f"{_RULES}.mindspeed:acc",
    "base_acc": f"{_RULES}.mindspeed:base_acc",
    "regex": f"{_RULES}.pattern:regex",
    "json_schema": f"{_RULES}.schema:json_schema",
    "poster": "hone.reward.poster:poster",
}
"""Built-in rewards that take milliseconds, or that a response may stall: they run where a user's functions do, in a
killable process."""

HELD: dict[str, str] = {
    "code": "hone.reward.code:CodeReward",
    "reward_model": "hone.reward.reward_model:RewardModel",
    "service": "hone.reward.client:ServiceReward",
    "judge": "hone.reward.judge.scorer:JudgeReward",
    "given": "hone.reward.given:GivenReward",
}
"""Built-in rewards that hold processes or connections: one scorer of this class is made for the component's args, and
started and closed with the run."""

OF_ANSWERS = frozenset({"exact", "gsm8k", "choice", "math", "acc", "base_acc"})
"""Those that compare with the row's answer, and give every right one the same score."""
OF_SHAPE = frozenset({"format", "strict_format", "length", "repetition", "step", "regex", "json_schema"})
"""Those that a row's answer, alone, says nothing about."""


def as_response(use: str, answer: object) -> object:
    """How a policy would give the row's answer where the reward asks for more than the answer itself."""
    if use in ("math", "acc", "base_acc"):
        said = str(answer) if "\\boxed" in str(answer) or "####" in str(answer) else f"\\boxed{{{answer}}}"
        return f"<think>.</think><answer>{said}</answer>" if use == "base_acc" else said
    if use == "gsm8k":
        return f"#### {str(answer).rpartition('####')[2].strip()}"
    if use == "choice":
        return f"Answer: {chr(ord('A') + answer) if isinstance(answer, int) else str(answer).strip(' ()[].')}"
    return answer
