"""The Hone side's reward for noisy responses: `cases.correct`, called in a reward process like any user's function."""

from __future__ import annotations

import sys
from pathlib import Path

from hone.types import Group

sys.path.insert(0, str(Path(__file__).parent))
from cases import correct as is_correct


def correct(group: Group) -> list[float]:
    """1 when the text before the first semicolon is the sum."""
    return [is_correct(sample.text, group.prompt.answer) for sample in group.samples]
