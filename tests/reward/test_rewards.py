import asyncio
from dataclasses import dataclass

import pytest

from hone.config.run import RewardSection
from hone.errors import RewardError
from hone.reward.base import Component, Rewards, UnscoredBound, component_metrics, first_fault
from hone.reward.pool import WorkerPool
from hone.types import Fault, Score


@dataclass
class Fixed:
    """A scorer that says what it is told to."""

    scores: tuple[Score, ...]

    async def score(self, group):
        return self.scores


LOST = Score(None, Fault.INFRA, "service down")


@pytest.fixture
def fixed_rewards(tmp_path):
    def make(*weighted, window_samples=1000, **settings):
        components = [Component(f"c{i}", weight, Fixed(scores)) for i, (weight, scores) in enumerate(weighted)]
        pool = WorkerPool(num_workers=1, folder=tmp_path)
        return Rewards(components, RewardSection(**settings), window_samples=window_samples, pool=pool)

    return make


def score(rewards, group):
    return asyncio.run(rewards.score(group))


def test_reward_is_the_weighted_sum(fixed_rewards, make_group):
    rewards = fixed_rewards((2.0, (Score(1.0), Score(0.5))), (-1.0, (Score(0.25), Score(0.0))))
    assert score(rewards, make_group("a", "b")).rewards == (1.75, 1.0)


def test_one_missing_weighted_score_leaves_the_sample_without_a_reward(fixed_rewards, make_group):
    rewards = fixed_rewards((1.0, (Score(1.0), Score(1.0))), (1.0, (LOST, Score(1.0))))
    group = score(rewards, make_group("a", "b"))
    assert group.rewards == (None, 2.0)
    assert group.scores["c0"] == (Score(1.0), Score(1.0))
    assert first_fault(group) == "c1: infra fault: service down"


def test_a_missing_score_of_weight_0_costs_nothing(fixed_rewards, make_group):
    rewards = fixed_rewards((1.0, (Score(1.0),)), (0.0, (LOST,)))
    assert score(rewards, make_group("a")).rewards == (1.0,)


def test_a_fault_of_the_model_counts_with_its_value(fixed_rewards, make_group):
    rewards = fixed_rewards((1.0, (Score(0.0, Fault.MODEL, "unparsable"),)))
    group = score(rewards, make_group("a"))
    assert group.rewards == (0.0,)
    assert first_fault(group) == ""


@pytest.mark.parametrize(("num_lost", "enough"), [(0, True), (2, True), (3, False), (4, False)])
def test_quorum(fixed_rewards, make_group, num_lost, enough):
    rewards = fixed_rewards((1.0, (LOST,) * num_lost + (Score(1.0),) * (4 - num_lost)), min_valid_per_group=2)
    assert rewards.enough(score(rewards, make_group(*"abcd"))) is enough


def test_a_group_smaller_than_the_quorum_needs_all_its_samples(fixed_rewards, make_group):
    rewards = fixed_rewards((1.0, (Score(1.0),)), min_valid_per_group=2)
    assert rewards.enough(score(rewards, make_group("a")))


def lost_of(make_group, num_lost, num_samples, detail="service down"):
    scores = (Score(None, Fault.INFRA, detail),) * num_lost + (Score(1.0),) * (num_samples - num_lost)
    group = make_group(*"x" * num_samples)
    return group.scored({"judge": scores}, tuple(s.value for s in scores))


def test_bound_allows_its_share_of_the_window_and_not_one_more(make_group):
    bound = UnscoredBound(0.05, window_samples=80)  # 4 samples
    for _ in range(4):
        bound.observe(lost_of(make_group, 1, 8))
    with pytest.raises(RewardError, match=r"5 of the last 40 samples"):
        bound.observe(lost_of(make_group, 1, 8))


def test_bound_forgets_what_left_the_window(make_group):
    bound = UnscoredBound(0.05, window_samples=80)
    for _ in range(10):
        bound.observe(lost_of(make_group, 4, 8))
        for _ in range(10):
            bound.observe(lost_of(make_group, 0, 8))


def test_bound_names_the_most_frequent_cause(make_group):
    bound = UnscoredBound(0.05, window_samples=80)
    bound.observe(lost_of(make_group, 1, 8, "rare"))
    with pytest.raises(RewardError, match=r"Most frequent cause, 8 samples: judge: infra fault: common") as error:
        bound.observe(lost_of(make_group, 8, 8, "common"))
    assert error.value.exit_code == 3


def test_bound_of_1_never_ends_a_run_and_of_0_ends_it_at_once(make_group):
    never, at_once = UnscoredBound(1.0, 8), UnscoredBound(0.0, 8)
    for _ in range(5):
        never.observe(lost_of(make_group, 8, 8))
        at_once.observe(lost_of(make_group, 0, 8))
    with pytest.raises(RewardError):
        at_once.observe(lost_of(make_group, 1, 8))


def test_component_metrics(make_group):
    def scored(*values):
        scores = tuple(LOST if value is None else Score(value) for value in values)
        return make_group(*"x" * len(values)).scored({"match": scores}, tuple(s.value for s in scores))

    metrics = component_metrics([scored(0.0, 1.0), scored(1.0, 1.0), scored(None, 1.0)])
    assert metrics == {
        "reward/match_mean": pytest.approx(0.8),
        "reward/match_std": pytest.approx(0.4),
        "reward/match_min": 0.0,
        "reward/match_max": 1.0,
        "reward/match_fault_frac": pytest.approx(1 / 6),
        "reward/match_zero_std_group_frac": 0.5,
    }


def test_component_metrics_without_a_single_score(make_group):
    assert component_metrics([lost_of(make_group, 2, 2)]) == {"reward/judge_fault_frac": 1.0}
    assert component_metrics([]) == {}
