import re

import pytest

from hone.observe.metrics import METRICS, PHASES, find_metric


def test_an_exact_name_wins_over_a_pattern():
    assert find_metric("time/step_s") is METRICS["time/step_s"]
    assert find_metric("time/generate_s") is METRICS["time/<span>_s"]


def test_the_longest_pattern_wins():
    assert find_metric("reward/exact_mean") is METRICS["reward/<component>_mean"]
    assert find_metric("reward/exact_zero_std_group_frac") is METRICS["reward/<component>_zero_std_group_frac"]
    assert find_metric("eval/accuracy[seen=false]").unit == "fraction"
    assert find_metric("eval/pass@8") is METRICS["eval/pass@<k>"]


@pytest.mark.parametrize("name", ["train/x", "rollout/reward", "loss", "reward/a/b_mean", "eval/pass@"])
def test_an_unregistered_name_is_refused_with_where_to_register(name):
    with pytest.raises(ValueError, match=r"not registered.*hone/observe/metrics\.py"):
        find_metric(name)


def test_every_entry_says_unit_and_meaning():
    for name, metric in METRICS.items():
        assert name.count("/") == 1 and metric.unit, name
        assert metric.meaning.endswith("."), name
    assert all(find_metric(f"time/{phase}_s") for phase in PHASES)


def test_a_meaning_is_complete_without_another_row():
    """The generated table is sorted by name, so the row above is not the one that the registry has above."""
    leans = re.compile(r"^(The same|As )|\bthose\b")
    assert [name for name, metric in METRICS.items() if leans.search(metric.meaning)] == []


def test_one_word_stands_for_an_engines_name():
    assert [name for name in METRICS if "<replica>" in name] == []
