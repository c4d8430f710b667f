"""Rules on the metrics of real small runs with one planted fault each, and of healthy ones.

recorded.json.gz has, by fault and seed, the settings of a run and the first lines of its metrics.jsonl: the metrics
that rules read, without times and memory. `quickstart_` are runs of benchmarks/doctor.py (quickstart_lr_x100 is the
quickstart's GRPO); the others add numbers with a model of 30 thousand parameters.
"""

import gzip
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from hone.doctor.watch import AlarmWatch, by_importance, watch_lines

EXPECTED = {
    "lr_x100-0": "learning_rate_too_high",
    "lr_by_1000-0": "learning_rate_too_low",
    "temperature_unknown-0": "sampler_settings_differ",
    "top_p-0": "truncated_sampling",
    "dtype-0": "dtype_differs",
    "sign-0": "weight_negative",
    "parser_broken-0": "reward_broken",
    "judge_likes_length-0": "reward_pays_length",
    "data_hard-0": "prompts_too_hard",
    "no_end_token-0": "no_end_token",
    "clip_zero-0": "clip_range_too_narrow",
    "entropy_bonus-0": "entropy_bonus_too_large",
    "critic_lr_x100-0": "critic_learning_rate_too_high",
    "kl_huge-0": "kl_coefficient_too_large",
    "groups_of_two-0": "group_too_small",
    "quickstart_lr_x100": "learning_rate_too_high",
    "quickstart_lr_by_100-0": "learning_rate_too_low",
    "quickstart_kl_huge-0": "kl_coefficient_too_large",
    "quickstart_kl_off-0": "kl_coefficient_vanished",
    "quickstart_top_k-0": "truncated_sampling",
    "quickstart_logprobs_shifted-0": "tokens_misaligned",
    "quickstart_weights_stuck-0": "weights_stale",
    "quickstart_judge_likes_length-0": "reward_pays_length",
    "quickstart_string_convinces-0": "reward_exploited",
    "quickstart_prompt_has_answer-0": "prompt_ends_the_response",
    "quickstart_tokenizer_other-0": "prompts_unlike_training",
    "quickstart_limit_too_low-0": "limit_too_low",
    "quickstart_critic_lr_x100-0": "critic_learning_rate_too_high",
}


@lru_cache(maxsize=1)
def recorded() -> dict[str, Any]:
    return json.loads(gzip.decompress(Path(__file__).with_name("recorded.json.gz").read_bytes()))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_first_alarm_names_the_planted_fault(name):
    run = recorded()[name]
    first, *_ = by_importance(watch_lines(run["settings"], run["lines"]).alarms)
    assert first.cause == EXPECTED[name]


@pytest.mark.parametrize(("name", "steps"), [("dr_grpo", 80), ("quickstart_ppo", 100), ("sums_overlapped", 40)])
def test_a_healthy_run_raises_no_alarm(name, steps):
    run = recorded()[name]
    assert len(run["lines"]) > steps and watch_lines(run["settings"], run["lines"]).alarms == []


def test_a_fault_is_what_makes_the_difference():
    """The settings of a faulty run with the metrics of the healthy one: no alarm, but for those of the settings."""
    healthy, faulty = recorded()["dr_grpo"]["lines"], recorded()["lr_x100-0"]["settings"]
    assert watch_lines(faulty, healthy).alarms == []


@pytest.mark.parametrize("name", ["lr_x100-0", "parser_broken-0", "dr_grpo"])
def test_a_run_that_is_resumed_over_and_over_raises_the_same_alarms(name):
    """The state of the rules goes through JSON, as in a checkpoint, before every seventh line."""
    run = recorded()[name]
    watch, reported = AlarmWatch(run["settings"]), []
    for index, line in enumerate(run["lines"]):
        if index % 7 == 0 and (state := watch.state()):
            watch = AlarmWatch(run["settings"])
            watch.restore(json.loads(json.dumps(state)))
        reported += [(alarm.name, alarm.step, alarm.ended, alarm.evidence) for alarm in watch.add(line)]
    whole = AlarmWatch(run["settings"])
    assert reported == [
        (alarm.name, alarm.step, alarm.ended, alarm.evidence) for line in run["lines"] for alarm in whole.add(line)
    ]
    assert json.dumps(watch.state()) == json.dumps(whole.state())
