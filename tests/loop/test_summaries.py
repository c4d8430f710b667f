"""What a step says of the groups that it trains on, and of those that it dropped."""

import pytest

from hone.loop.run import summarize
from hone.types import Group, Prompt, Sample


def group(*rewards: float | None) -> Group:
    samples = tuple(Sample("p", i, (1, 2), (-1.0, -1.0), (0, 0), "stop", "") for i in range(len(rewards)))
    return Group(Prompt("p", 0, "", (7,)), samples, {}, rewards)


def test_the_pass_rate_counts_dropped_groups_and_nothing_else_does():
    """Kept: one of two right. Dropped: none of two, all of three, and one sample that nobody scored."""
    kept, dropped = [group(1.0, 0.0)], [group(0.0, 0.0), group(1.0, 1.0, 1.0, None)]
    metrics = summarize(kept, dropped, version=0, threshold=1.0)
    assert metrics["rollout/pass_rate"] == pytest.approx(4 / 7)
    assert metrics["rollout/accuracy"] == metrics["rollout/reward_mean"] == 0.5
    assert (metrics["rollout/groups_dropped"], metrics["rollout/unscored_frac"]) == (2, 0)


def test_without_dropped_groups_it_is_the_accuracy():
    metrics = summarize([group(1.0, 0.0, 1.0, None)], [], version=0, threshold=1.0)
    assert metrics["rollout/pass_rate"] == metrics["rollout/accuracy"] == pytest.approx(2 / 3)
