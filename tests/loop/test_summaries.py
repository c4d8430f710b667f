"""By hand: what a step says of groups that it trains on and of those that it dropped, and what an evaluation says."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from hone.config.run import EvalSection
from hone.loop.evaluate import metrics_of, pass_at_k
from hone.loop.summaries import staleness_shares, summarize
from hone.observe.metrics import find_metric
from hone.types import Group, Picture, Prompt, Sample, VersionSpan


def group(*rewards: float | None) -> Group:
    samples = tuple(Sample("p", i, (1, 2), (-1.0, -1.0), (VersionSpan(0, 2),), "stop", "") for i in range(len(rewards)))
    return Group(Prompt("p", 0, "", (7,)), samples, {}, rewards)


def test_the_pass_rate_counts_dropped_groups_and_nothing_else_does():
    """Kept: one of two right. Dropped: none of two, all of three, and one sample that nobody scored."""
    kept, dropped = [group(1.0, 0.0)], [group(0.0, 0.0), group(1.0, 1.0, 1.0, None)]
    metrics = summarize(kept, dropped, version=0, threshold=1.0)
    assert metrics["rollout/pass_rate"] == pytest.approx(4 / 7)
    assert metrics["rollout/accuracy"] == metrics["rollout/reward_mean"] == 0.5
    assert (metrics["rollout/groups_dropped"], metrics["rollout/unscored_frac"]) == (2, 0)


def of_source(source: str, *rewards: float | None) -> Group:
    plain = group(*rewards)
    return replace(plain, prompt=replace(plain.prompt, source=source))


def test_each_source_has_its_own_pass_rate_and_share():
    kept, dropped = [of_source("a", 1.0, 0.0), of_source("b", 1.0)], [of_source("b", 0.0, 0.0), of_source("c", None)]
    metrics = summarize(kept, dropped, version=0, threshold=1.0)
    found = {name: value for name, value in metrics.items() if "source" in name}
    assert found == {
        "rollout/pass_rate[source=a]": 0.5, "rollout/prompts_frac[source=a]": 0.25,
        "rollout/pass_rate[source=b]": pytest.approx(1 / 3), "rollout/prompts_frac[source=b]": 0.5,
        "rollout/prompts_frac[source=c]": 0.25,
    }  # fmt: skip


def test_each_source_has_its_own_accuracy():
    metrics = metrics_of([of_source("a", 1.0, 0.0), of_source("b", 1.0), of_source("b", 1.0)], EvalSection())
    assert (metrics["eval/accuracy[source=a]"], metrics["eval/accuracy[source=b]"]) == (0.5, 1.0)
    assert not any("[" in name for name in metrics_of([group(1.0)], EvalSection())), "one source has no name"


def test_without_dropped_groups_it_is_the_accuracy():
    metrics = summarize([group(1.0, 0.0, 1.0, None)], [], version=0, threshold=1.0)
    assert metrics["rollout/pass_rate"] == metrics["rollout/accuracy"] == pytest.approx(2 / 3)


def test_ages_are_shares_of_the_samples_up_to_the_bound():
    def aged(*versions: int) -> Group:
        samples = tuple(
            Sample("p", i, (1, 2), (-1.0, -1.0), (VersionSpan(v, 1), VersionSpan(9, 1)), "stop", "")
            for i, v in enumerate(versions)
        )
        return Group(Prompt("p", 0, "", (7,)), samples, {}, (0.0,) * len(versions))

    shares = staleness_shares([aged(5, 4), aged(4, 3)], version=5, most=3)
    assert [shares[f"rollout/staleness_{age}_frac"] for age in range(4)] == [1 / 4, 1 / 2, 1 / 4, 0]
    assert staleness_shares([aged(5)], version=5, most=0) == {}, "a run that never is stale says nothing"


@pytest.mark.parametrize(
    ("right", "k", "expected"), [(2, 1, 1 / 2), (2, 2, 5 / 6), (2, 3, 1), (0, 2, 0), (1, 3, 3 / 4)]
)
def test_pass_at_k_of_four_samples_by_hand(right, k, expected):
    """Of C(4, k) draws without replacement, those that hold a right sample."""
    assert pass_at_k([group(*[1.0] * right, *[0.0] * (4 - right))], k, 1.0) == pytest.approx(expected)


@pytest.mark.parametrize("right", range(8))
@pytest.mark.parametrize("k", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(right, k):
    rewards = [1.0] * right + [0.0] * (7 - right)
    draws = list(itertools.combinations(rewards, k))
    assert pass_at_k([group(*rewards)], k, 1.0) == pytest.approx(sum(max(draw) for draw in draws) / len(draws))


def test_pass_at_k_leaves_out_who_has_too_few_scored_samples():
    """2 of 2 scored, and 1 of 1 scored, which says nothing of two."""
    groups = [group(1.0, 1.0, None), group(0.0, None, None)]
    assert pass_at_k(groups, 2, 1.0) == 1
    assert pass_at_k(groups, 1, 1.0) == 0.5
    assert math.isnan(pass_at_k(groups, 3, 1.0))


def test_evaluation_by_hand():
    """Four scored samples of five: 1, 0, 0.5 and 1. Half of each prompt's samples are right, so that prompts do not
    differ."""
    metrics = metrics_of([group(1.0, 0.0), group(0.5, 1.0, None)], EvalSection(samples=3, pass_k=(2,)))
    assert metrics["eval/accuracy"] == 0.5 and metrics["eval/accuracy_se"] == 0
    assert metrics["eval/reward_mean"] == 0.625
    assert metrics["eval/unscored_frac"] == pytest.approx(0.2)
    assert metrics["eval/pass@2"] == 1


def test_the_standard_error_of_one_sample_a_prompt_is_that_of_a_share():
    """3 of 4 right: the root of 0.75 x 0.25 / 3."""
    groups = [group(1.0), group(1.0), group(0.0), group(1.0), group(None)]
    assert metrics_of(groups, EvalSection())["eval/accuracy_se"] == pytest.approx(math.sqrt(0.75 * 0.25 / 3))


def test_each_evaluation_metric_has_its_error_over_prompts():
    """Means of prompts 1, 0 and 0.5, which deviate by 0.5; two of them are of easy rows and deviate by 0.71."""
    rows = [(1.0, 1.0), (0.0, 0.0), (0.0, 1.0)]
    groups = []
    for rewards, level in zip(rows, ("easy", "easy", "hard"), strict=True):
        one = group(*rewards)
        groups.append(replace(one, prompt=replace(one.prompt, columns={"level": level})))
    metrics = metrics_of(groups, EvalSection(samples=2, pass_k=(1,), by="level"))
    each = 0.5 / math.sqrt(3)
    names = ("eval/accuracy_se", "eval/reward_mean_se", "eval/pass@1_se")
    assert [metrics[name] for name in names] == pytest.approx([each] * 3)
    assert metrics["eval/accuracy_se[level=easy]"] == pytest.approx(math.sqrt(0.5) / math.sqrt(2))
    assert "eval/accuracy_se[level=hard]" not in metrics, "one prompt"
    assert all(find_metric(name) for name in metrics)


def sized(*pairs: tuple[int, float | None], prompt: tuple[int, ...] = (7,)) -> Group:
    """A group of samples of these lengths and rewards."""
    samples = tuple(
        Sample("p", i, (1,) * n, (-1.0,) * n, (VersionSpan(0, n),), "stop", "") for i, (n, _) in enumerate(pairs)
    )
    return Group(Prompt("p", 0, "", prompt), samples, {}, tuple(reward for _, reward in pairs))


def test_groups_without_signal_are_right_or_wrong_and_dropped_ones_count():
    kept = [group(1.0, 0.0), group(0.5, 0.5)]
    dropped = [group(1.0, 1.0), group(0.0, 0.0)]
    metrics = summarize(kept, dropped, version=0, threshold=1.0)
    assert metrics["rollout/all_right_group_frac"] == 0.25 and metrics["rollout/all_wrong_group_frac"] == 0.5


def test_the_share_of_the_variance_between_prompts_by_hand():
    """Means 0.5, 0 and 1 of two samples each: 0.5 between and 1/6 within, so (1/2 - 1/6) / (1/2 + 1/6)."""
    name, groups = "rollout/reward_prompt_frac", [group(1.0, 0.0), group(0.0, 0.0, None), group(1.0, 1.0)]
    assert summarize(groups[:2], groups[2:], version=0, threshold=1.0)[name] == pytest.approx(0.5)
    alike = [group(1.0, 0.0), group(0.0, 1.0)]
    assert summarize(alike, [], version=0, threshold=1.0)[name] == -1, "prompts differ less than chance would have it"
    for equal in ([group(1.0, 1.0), group(1.0, 1.0)], [group(1.0, 0.0)], [group(1.0), group(0.0)]):
        assert name not in summarize(equal, [], version=0, threshold=1.0)


def test_length_and_reward_by_hand():
    """Right: 1 and 2 tokens. Wrong: 3 and 4. The unscored sample of 9 tokens counts nowhere."""
    metrics = summarize([sized((1, 1.0), (2, 1.0), (3, 0.0), (4, 0.0), (9, None))], [], version=0, threshold=1.0)
    assert metrics["rollout/length_reward_corr"] == pytest.approx(-2 / math.sqrt(5))
    assert (metrics["rollout/right_tokens_mean"], metrics["rollout/wrong_tokens_mean"]) == (1.5, 3.5)
    alike = summarize([sized((2, 1.0), (2, 1.0))], [], version=0, threshold=1.0)
    assert "rollout/length_reward_corr" not in alike and "rollout/wrong_tokens_mean" not in alike


def test_what_truncation_costs_by_hand():
    """Of four scored samples one is cut: a quarter of 0.75 - 0.25, the means of the others and of it."""
    name, whole = "rollout/truncation_cost", group(1.0, 0.5, 0.75, 0.25, None)
    *ended, cut, lost = whole.samples
    cut, lost = (replace(sample, finish_reason="length") for sample in (cut, lost))
    metrics = summarize([replace(whole, samples=(*ended, cut, lost))], [], version=0, threshold=1.0)
    assert metrics[name] == pytest.approx(0.125) and metrics["rollout/truncated_frac"] == 0.4
    assert name not in summarize([whole], [], version=0, threshold=1.0), "nothing is cut"


def test_repeated_prompts_are_counted_by_their_tokens():
    groups = [sized((1, 1.0), prompt=prompt) for prompt in ((1,), (2,), (1,), (1,))]
    assert summarize(groups, [], version=0, threshold=1.0)["rollout/repeated_prompt_frac"] == 0.5
    shown = [Picture(digest, 0, 1, 1, (0.0,) * 3, (1.0,) * 3, read=np.zeros) for digest in ("red", "blue")]
    pictured = [replace(one := group(1.0, 0.0), prompt=replace(one.prompt, pictures=(picture,))) for picture in shown]
    assert summarize(pictured, [], version=0, threshold=1.0)["rollout/repeated_prompt_frac"] == 0


def test_empty_responses_are_those_without_text():
    """Of four samples one has no text and one white space alone."""
    whole = group(1.0, 0.0, 0.5, 0.0)
    texts = ("42", "", " \n", "x")
    changed = [replace(sample, text=text) for sample, text in zip(whole.samples, texts, strict=True)]
    metrics = summarize([replace(whole, samples=tuple(changed))], [], version=0, threshold=1.0)
    assert metrics["rollout/empty_frac"] == 0.5


def test_a_shared_response_counts_each_different_prompt_once():
    """The most widespread response has two tokens: of the prompts 1, 1, 2 and 3 it is given to 1, 1 and 2."""
    name = "rollout/shared_response_frac"
    groups = [sized((2, 1.0), (3, 1.0), prompt=(1,)), sized((2, 1.0), (2, 0.0), prompt=(1,))]
    assert name not in summarize(groups, [], version=0, threshold=1.0), "there is one prompt alone"
    groups += [sized((2, 0.0), prompt=(2,)), sized((4, 1.0), prompt=(3,))]
    assert summarize(groups, [], version=0, threshold=1.0)[name] == pytest.approx(2 / 3)
