"""Built-in rewards by name, and rewards that installed packages register under the entry point group `hone.reward`.

A new built-in reward is one file and one row here. Nothing is imported until a run file names it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Literal, NamedTuple

ENTRY_POINTS = "hone.reward"


class BuiltinReward(NamedTuple):
    """Where a built-in reward is, and how a run calls it."""

    path: str
    """`module:function`; of a stateful one, `module:Class`."""
    runs: Literal["in process", "in worker", "stateful"] = "in worker"
    """In process: pure, fast, cannot hang. In worker: called in a killable process, as users' functions are. Stateful:
    holds processes or connections; one scorer is made by `Class.from_args`, started and closed with the run."""
    gold: Callable[[Any], Any] | None = None
    """The response that a policy would give for a row's answer; None: the reward does not compare with the answer."""
    scores_form: bool = False
    """Scores the form of a response, about which a row's answer alone says nothing."""


def _boxed(answer: Any) -> str:
    return str(answer) if "\\boxed" in str(answer) or "####" in str(answer) else f"\\boxed{{{answer}}}"


def _letter(answer: Any) -> str:
    return f"Answer: {chr(ord('A') + answer) if isinstance(answer, int) else str(answer).strip(' ()[].')}"


_RULES = "hone.reward.rules"
BUILTIN_REWARDS = {
    "exact": BuiltinReward(f"{_RULES}.exact:exact", "in process", gold=lambda answer: answer),
    "gsm8k": BuiltinReward(
        f"{_RULES}.exact:gsm8k", "in process", gold=lambda answer: f"#### {str(answer).rpartition('####')[2].strip()}"
    ),
    "choice": BuiltinReward(f"{_RULES}.choice:choice", "in process", gold=_letter),
    "format": BuiltinReward(f"{_RULES}.tags:format", "in process", scores_form=True),
    "strict_format": BuiltinReward(f"{_RULES}.tags:strict_format", "in process", scores_form=True),
    "length": BuiltinReward(f"{_RULES}.shape:length", "in process", scores_form=True),
    "repetition": BuiltinReward(f"{_RULES}.shape:repetition", "in process", scores_form=True),
    "step": BuiltinReward(f"{_RULES}.other_tools:step", "in process", scores_form=True),
    "math": BuiltinReward(f"{_RULES}.mathematics:math", gold=_boxed),
    "acc": BuiltinReward(f"{_RULES}.other_tools:acc", gold=_boxed),
    "base_acc": BuiltinReward(
        f"{_RULES}.other_tools:base_acc", gold=lambda answer: f"<think>.</think><answer>{_boxed(answer)}</answer>"
    ),
    "math_dapo": BuiltinReward(f"{_RULES}.other_tools:math_dapo", gold=lambda answer: f"Answer: {answer}"),
    "prime_math": BuiltinReward(f"{_RULES}.other_tools:prime_math", gold=_boxed),
    "geo3k": BuiltinReward(f"{_RULES}.other_tools:geo3k", gold=lambda answer: f"<think>.</think>{_boxed(answer)}"),
    "regex": BuiltinReward(f"{_RULES}.pattern:regex", scores_form=True),
    "json_schema": BuiltinReward(f"{_RULES}.schema:json_schema", scores_form=True),
    "code": BuiltinReward("hone.reward.code:CodeReward", "stateful"),
    "reward_model": BuiltinReward("hone.reward.reward_model:RewardModel", "stateful"),
    "service": BuiltinReward("hone.reward.client:ServiceReward", "stateful"),
    "judge": BuiltinReward("hone.reward.judge.scorer:JudgeReward", "stateful"),
    "given": BuiltinReward("hone.reward.given:GivenReward", "stateful"),
}


def builtin_reward(use: str) -> BuiltinReward:
    """The row of a built-in reward; for any other `use` that of a function which runs in a worker."""
    return BUILTIN_REWARDS.get(use) or BuiltinReward(use)


def registered_rewards() -> dict[str, str]:
    """Name -> `module:function` of the rewards that installed packages register; reads metadata, imports none."""
    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}
