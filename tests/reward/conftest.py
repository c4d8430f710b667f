"""Groups made by hand, and reward files written for one test."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hone.config.run import RewardComponent, RewardSection
from hone.reward.rewards import Rewards
from hone.types import Group, Prompt, Sample, VersionSpan


@pytest.fixture
def make_group() -> Callable[..., Group]:
    def make(*texts: str, answer: object = "24", prompt_id: str = "p1") -> Group:
        samples = tuple(
            Sample(prompt_id, i, (5, 1), (-0.5, -0.1), (VersionSpan(0, 2),), "stop", t) for i, t in enumerate(texts)
        )
        return Group(Prompt(prompt_id, 0, "48/2=", (6, 10), answer=answer), samples)

    return make


@pytest.fixture
def make_rewards(tmp_path: Path) -> Callable[..., Rewards]:
    """Rewards from components; a `source` becomes mine.py beside the run file."""

    def make(*components: dict, source: str = "", window_samples: int = 10_000, **settings: object) -> Rewards:
        (tmp_path / "mine.py").write_text(source)
        section = RewardSection(components=tuple(RewardComponent(**c) for c in components), **settings)
        return Rewards.from_config(section, tmp_path, window_samples=window_samples)

    return make
