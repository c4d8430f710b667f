"""What rewards say of the gold answers: the cheapest test of a reward there is, on all rows and without a model.

Gold answers should score the maximum, and the answers of other rows should not. A reward that fails the first cannot
be earned; one that fails the second teaches nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hone.reward.base import Rewards
from hone.reward.builtin import final_number
from hone.types import Group, Prompt, Sample


@dataclass(frozen=True, slots=True)
class GoldReport:
    """Rewards of gold answers and of shuffled ones."""

    rows: int
    gold: tuple[float | None, ...]
    """Reward of each row's own answer; None where it could not be scored."""
    shuffled: tuple[float | None, ...]
    """Reward of a different answer, taken from another row; empty when one answer fills more than half of the rows."""

    @property
    def gold_mean(self) -> float:
        return _mean(self.gold)

    @property
    def shuffled_mean(self) -> float:
        return _mean(self.shuffled)


async def check_gold(rewards: Rewards, prompts: Sequence[Prompt]) -> GoldReport:
    """Score every prompt's own answer, and another prompt's, as if a model had written them.

    Raises RewardError when more of them than `reward.max_unscored_frac` allows cannot be scored.
    """
    gold = [await _reward(rewards, prompt, str(prompt.answer)) for prompt in prompts]
    others = other_answers([str(prompt.answer) for prompt in prompts])
    shuffled = [await _reward(rewards, prompt, answer) for prompt, answer in zip(prompts, others, strict=False)]
    return GoldReport(len(prompts), tuple(gold), tuple(shuffled))


def other_answers(answers: Sequence[str]) -> list[str]:
    """The same answers in another order in which none stays with its equal; empty where there is no such order.

    Answers are equal when they are one text, or end in `####` and one number. Rows sorted by answer and moved on by
    the size of the largest class of equals never meet their own class, unless that class is more than half of all.
    """
    keys = [answer.strip() if (n := final_number(answer)) is None else f"{n.normalize()}" for answer in answers]
    largest = max(Counter(keys).values(), default=0)
    if 2 * largest > len(answers):
        return []
    order = sorted(range(len(answers)), key=lambda row: keys[row])
    others = [""] * len(answers)
    for place, row in enumerate(order):
        others[row] = answers[order[(place + largest) % len(order)]]
    return others


async def _reward(rewards: Rewards, prompt: Prompt, text: str) -> float | None:
    sample = Sample(prompt.id, 0, (), (), (), "stop", text)
    return (await rewards.score(Group(prompt, (sample,)))).rewards[0]


def _mean(rewards: Sequence[float | None]) -> float:
    scored = [reward for reward in rewards if reward is not None]
    return sum(scored) / len(scored) if scored else float("nan")
