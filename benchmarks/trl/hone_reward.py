"""The Hone side's reward for noisy responses: `cases.correct`, called in a reward process like any user's function."""

from __future__ import annotations

from cases import correct as is_correct

from hone.types import Group


def correct(group: Group) -> list[float]:
    """1 when the text before the first semicolon is the sum."""
    return [is_correct(sample.text, group.prompt.answer) for sample in group.samples]
