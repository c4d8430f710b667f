import asyncio
import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hone.config.run import RewardComponent, RewardSection
from hone.errors import RewardError
from hone.reward.aggregate import component_metrics
from hone.reward.pool import RewardPool
from hone.reward.rewards import Component, Rewards, UnscoredBound, first_fault
from hone.types import Fault, Group, Prompt, Sample, Score, VersionSpan


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
        pool = RewardPool(num_workers=1, folder=tmp_path)
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


def test_what_is_only_tried_counts_towards_no_bound(fixed_rewards, make_group):
    rewards = fixed_rewards((1.0, (LOST,)), max_unscored_frac=0.0)
    assert asyncio.run(rewards.try_on(make_group("a"))).rewards == (None,)
    assert rewards.summary() == "0 of 0 samples could not be scored"
    with pytest.raises(RewardError, match="1 of the last 1 samples"):
        score(rewards, make_group("a"))


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

    metrics = component_metrics([scored(0.0, 1.0), scored(1.0, 1.0), scored(None, 1.0)], {"match": 1.0})
    assert metrics == {
        "reward/match_mean": pytest.approx(0.8),
        "reward/match_std": pytest.approx(0.4),
        "reward/match_min": 0.0,
        "reward/match_max": 1.0,
        "reward/match_fault_frac": pytest.approx(1 / 6),
        "reward/match_zero_std_group_frac": 0.5,
        "reward/match_variance_share": pytest.approx(1.0),
    }


def test_a_response_that_broke_the_scorer_is_no_fault_of_the_component(make_group):
    """Of four samples one is lost and one earns the least score."""
    scores = (Score(0.0, Fault.MODEL, "no JSON"), Score(1.0), LOST, Score(0.5))
    metrics = component_metrics([make_group(*"xxxx").scored({"poster": scores}, (0.0, 1.0, None, 0.5))])
    assert metrics["reward/poster_fault_frac"] == 0.25 and metrics["reward/poster_broken_response_frac"] == 0.25
    whole = component_metrics([make_group("x", "x").scored({"poster": (Score(1.0), LOST)}, (1.0, None))])
    assert "reward/poster_broken_response_frac" not in whole


def test_component_metrics_without_a_single_score(make_group):
    assert component_metrics([lost_of(make_group, 2, 2)], {"judge": 1.0}) == {"reward/judge_fault_frac": 1.0}
    assert component_metrics([], {}) == {}


def shares(make_group, weights, *groups):
    """`_variance_share` of each component; a group is a mapping of its components' scores, None for lost ones."""
    scored = []
    for scores in groups:
        size = len(next(iter(scores.values())))
        rewards = [
            None
            if any(values[n] is None for values in scores.values())
            else sum(weights[name] * values[n] for name, values in scores.items())
            for n in range(size)
        ]
        typed = {name: tuple(LOST if v is None else Score(v) for v in values) for name, values in scores.items()}
        scored.append(make_group(*"x" * size).scored(typed, tuple(rewards)))
    found = component_metrics(scored, weights)
    return {name: found[key] for name in weights if (key := f"reward/{name}_variance_share") in found}


def test_variance_share_by_hand(make_group):
    # a: 0 0 1 1, twice b: 0 2 0 2, so R = 0 2 1 3, mean 1.5, var 1.25; cov(a, R) = 0.25, cov(2b, R) = 1
    found = shares(make_group, {"a": 1.0, "b": 2.0}, {"a": [0, 0], "b": [0, 1]}, {"a": [1, 1], "b": [0, 1]})
    assert found == {"a": pytest.approx(0.2), "b": pytest.approx(0.8)}


def test_a_component_that_works_against_the_others_has_a_negative_share(make_group):
    # a: 0 1, b: 0 -0.25, R: 0 0.75
    found = shares(make_group, {"a": 1.0, "b": 0.5}, {"a": [0, 1], "b": [0, -0.5]})
    assert found == {"a": pytest.approx(4 / 3), "b": pytest.approx(-1 / 3)}


def test_variance_share_is_of_scored_samples_and_left_out_where_nothing_varies(make_group):
    weights = {"a": 1.0, "b": 1.0, "watched": 0.0}
    found = shares(make_group, weights, {"a": [0, 1, 5], "b": [0, 0, None], "watched": [1, 2, 3]})
    assert found == {"a": pytest.approx(1.0), "b": pytest.approx(0.0)}
    assert shares(make_group, weights, {"a": [1, 1], "b": [0, 0], "watched": [1, 2]}) == {}


def test_length_correlation_is_of_the_weighted_score_and_left_out_without_spread(make_group):
    """Lengths 1, 2, 3 and scores 0, 1, 5: covariance 5/3, variances 2/3 and 14/3."""
    group = make_group("a", "bb", "ccc")
    samples = [
        replace(sample, token_ids=(1,) * n, sampler_logprobs=(-1.0,) * n, versions=(VersionSpan(0, n),))
        for n, sample in enumerate(group.samples, start=1)
    ]
    scores = {"a": (0.0, 1.0, 5.0), "same": (1.0, 1.0, 1.0), "watched": (0.0, 1.0, 5.0)}
    typed = {name: tuple(map(Score, values)) for name, values in scores.items()}
    scored = replace(group, samples=tuple(samples)).scored(typed, (0.0, 1.0, 5.0))
    found = component_metrics([scored], {"a": -2.0, "same": 1.0, "watched": 0.0})
    assert found["reward/a_length_corr"] == pytest.approx(-5 / 3 / math.sqrt(2 / 3 * 14 / 3))
    assert not {"reward/same_length_corr", "reward/watched_length_corr"} & set(found)


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=2, max_size=9), st.floats(-3, 3))
def test_shares_sum_to_1(scores, weight):
    samples = tuple(Sample("p", i, (5,), (-0.5,), (VersionSpan(0, 1),), "stop", "x") for i in range(len(scores)))
    rewards = tuple(a + weight * b for a, b in scores)
    typed = {"a": tuple(Score(a) for a, _ in scores), "b": tuple(Score(b) for _, b in scores)}
    group = Group(Prompt("p", 0, "", ()), samples).scored(typed, rewards)
    found = component_metrics([group], {"a": 1.0, "b": weight})
    total = [value for key, value in found.items() if key.endswith("variance_share")]
    assert max(rewards) - min(rewards) < 1e-3 or sum(total) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), "much"])
def test_a_weight_that_is_no_number_is_refused(weight):
    with pytest.raises(ValidationError, match="weight"):
        RewardComponent(use="exact", weight=weight)
