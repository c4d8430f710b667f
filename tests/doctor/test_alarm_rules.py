"""The table of rules: what it names exists, and every rule works on whatever a run logs."""

import random
import re
from typing import Any

import pytest

from hone.config import schema
from hone.doctor.history import History
from hone.doctor.rules import NAMES, RULES
from hone.doctor.watch import AlarmWatch, is_read
from hone.observe.metrics import METRICS, find_metric


class Asked(History):
    """Remembers every metric and setting that it is asked for."""

    def __init__(self):
        super().__init__("rl", {})
        self.names_asked: set[str] = set()
        self.keys_asked: set[str] = set()

    def names(self, pattern: str) -> list[str]:
        self.names_asked.add(pattern)
        return super().names(pattern)

    def key(self, name: str) -> Any:
        self.keys_asked.add(name)
        return super().key(name)

    def _series_of(self, name: str):
        self.names_asked.add(name)
        return super()._series_of(name)


def asked_by_every_rule() -> Asked:
    """With a value for every metric, so that no test ends at the first of its conditions."""
    history = Asked()
    for value in (1.0, 0.0, -1.0, 50.0):
        for step in range(30):
            history.add(step, {name.replace("<component>", "exact"): value for name in METRICS})
        for rule in RULES:
            rule.when.holds(history)
            for cause in rule.causes:
                cause.applies(history)
    return history


def test_rules_read_registered_metrics_and_keep_what_they_read():
    reads = {name for rule in RULES for cause in rule.causes for name in cause.reads if "/" in name}
    named = reads | {name for rule in RULES for name in rule.metrics}
    asked = {name.replace("exact", "<component>") for name in asked_by_every_rule().names_asked}
    assert all(map(find_metric, named | asked))
    assert not [name for name in asked if not is_read(name.replace("<component>", "exact"))]


def test_rules_read_keys_of_the_run_file():
    named = {name for rule in RULES for cause in rule.causes for name in cause.reads if "/" not in name}
    assert named | asked_by_every_rule().keys_asked <= set(schema.all_keys()) | {"reward.components"}


def test_changes_name_keys_of_the_run_file():
    known = set(schema.all_keys()) | set(schema.all_sections()) | {"reward.components"}
    found = {
        word
        for rule in RULES
        for cause in rule.causes
        for word in re.findall(r"\b(?:[a-z_]+\.)+[a-z_]+\b", cause.change)
    }
    sections = {key.partition(".")[0] for key in known}
    unknown = {w for w in found if w.partition(".")[0] in sections and w not in known}
    assert unknown <= {"reward.components.timeout_s"}


def test_names_are_unique_and_silencers_exist():
    assert len(set(NAMES)) == len(NAMES) > 40
    assert {name for rule in RULES for name in rule.silenced_by} <= set(NAMES)
    for rule in RULES:
        assert rule.name not in rule.silenced_by and rule.of[0] <= rule.of[1]
        assert rule.causes[-1].applies(History("rl", {})), f"{rule.name}: the last cause is named where no other is"


@pytest.mark.parametrize("seed", range(3))
def test_any_metrics_with_gaps_and_non_finite_values_are_taken(seed):
    values = random.Random(seed)
    watch = AlarmWatch({})
    for step in range(120):
        names = values.sample(sorted(METRICS), 60)
        line = {
            name.replace("<component>", "exact"): values.choice([None, 0, 1.0, -1.0, 1e9, values.random()])
            for name in names
        }
        watch.add({"stage": "rl", "step": step, **line})
    assert watch.alarms


def test_a_calm_run_raises_no_alarm():
    line = {
        "rollout/reward_mean": 0.5, "rollout/reward_std": 0.5, "rollout/pass_rate": 0.5, "train/entropy": 0.5,
        "rollout/zero_std_group_frac": 0.3, "rollout/all_wrong_group_frac": 0.15, "rollout/truncated_frac": 0.01,
        "rollout/response_tokens_mean": 10.0, "train/grad_norm": 0.3, "train/update_kl": 1e-3, "train/skipped_steps": 0,
        "train/mismatch_gap": 1e-5, "train/ratio_mean": 1.0, "reward/exact_fault_frac": 0.0, "time/step_s": 1.0,
    }  # fmt: skip
    watch = AlarmWatch({"run": {"precision": "float32"}})
    for step in range(60):
        watch.add({"stage": "rl", "step": step, **line, "rollout/reward_mean": 0.5 + step / 200})
    assert watch.alarms == []


def memory_alarms(used_gib) -> list[int]:
    """Steps at which `memory_grows` begins."""
    watch = AlarmWatch({})
    for step, value in enumerate(used_gib):
        watch.add({"stage": "rl", "step": step, "memory/rss_gib": value})
    return [alarm.since for alarm in watch.alarms if alarm.name == "memory_grows"]


def test_memory_that_returns_to_an_earlier_peak_is_no_leak():
    """As an allocator does: evaluations need more, then much is given back, then it comes again bit by bit."""
    after_evaluation = [0.84, *(0.70 + 0.0005 * min(step, 120) for step in range(199))]
    assert memory_alarms([*(0.70 for _ in range(100)), *after_evaluation, *after_evaluation]) == []


def test_memory_beyond_every_earlier_peak_is_a_leak():
    before = [*(0.70 for _ in range(100)), 0.84, *(0.70 for _ in range(99))]
    (begun,) = memory_alarms([*before, *(0.70 + 0.004 * step for step in range(100))])
    assert 235 < begun < 260


@pytest.mark.parametrize(
    ("process", "what"),
    [("reward_workers", "a reward function"), ("environments", "an environment"), ("engine-1", "an engine or a rank")],
)
def test_the_process_that_grows_is_named_not_the_largest(process, what):
    watch = AlarmWatch({})
    for step in range(100):
        grown = {f"memory/{name}_process_rss_gib": size for name, size in (("rank-0", 30.0), ("engine-0", 20.0))}
        grown[f"memory/{process}_process_rss_gib"] = 1 + 0.5 * step
        watch.add({"stage": "rl", "step": step, "memory/rss_gib": 1.0, **grown})
    (alarm,) = watch.alarms
    assert (alarm.name, alarm.cause, alarm.metric) == (
        "process_memory_grows",
        "memory_leak",
        f"memory/{process}_process_rss_gib",
    )
    assert alarm.what.startswith(what)


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        ({"cache_used": 0.98, "prefix_hit": 0.02}, "judge_cache_full"),
        ({"cache_used": 0.4, "prefix_hit": 0.02}, "judge_prompts_differ_early"),
        ({"cache_used": 0.4, "prefix_hit": 0.7}, "judge_busy"),
        ({}, "reward_slow"),
    ],
)
def test_a_slow_judge_is_explained_by_its_own_figures(figures, cause):
    watch = AlarmWatch({})
    for step in range(20):
        measured = {f"reward/judge_{name}_frac_mean": value for name, value in figures.items()}
        watch.add({"stage": "rl", "step": step, "time/reward_s": 9.0, "time/step_s": 10.0, **measured})
    (alarm,) = [alarm for alarm in watch.alarms if alarm.name == "rewards_slow"]
    assert alarm.cause == cause


def alarms_of(settings: dict[str, Any], *lines: dict[str, float], times: int = 60) -> list[tuple[str, str]]:
    """Alarms of a run that logs each line `times` steps, one after the other."""
    watch = AlarmWatch(settings)
    for step in range(times * len(lines)):
        watch.add({"stage": "rl", "step": step, **lines[step // times]})
    return [(alarm.name, alarm.cause) for alarm in watch.alarms]


def test_a_mismatch_that_grows_is_named_before_it_is_large_with_what_grows_beside_it():
    before, after = {"train/mismatch_gap": 0.004, "train/grad_norm": 0.2}, {"train/mismatch_gap": 0.02}
    assert alarms_of({}, before, after | {"train/grad_norm": 0.5}) == [("mismatch_grows", "gradient_follows_mismatch")]
    assert alarms_of({}, before, after | {"train/grad_norm": 0.2}) == [("mismatch_grows", "weights_stale")]
    assert alarms_of({}, after, after) == [], "it was so from the start"
    stale = {"rollout/staleness_mean": 1.0}
    assert alarms_of({}, before | stale, after | stale) == [], "old samples explain it"


@pytest.mark.parametrize(("after", "reward", "expected"), [(2.0, 0.5, True), (1.2, 0.5, False), (2.0, 0.9, False)])
def test_a_gradient_that_rises_without_a_gain(after, reward, expected):
    first = {"train/grad_norm": 0.3, "rollout/reward_mean": 0.5, "rollout/reward_std": 0.5}
    found = alarms_of({}, first, {**first, "train/grad_norm": after, "rollout/reward_mean": reward})
    assert (("gradient_rises", "training_unstable") in found) == expected


@pytest.mark.parametrize(
    ("settings", "line", "expected"),
    [
        ({"max_staleness": 1}, {"time/generate_s": 6.0}, [("samples_late", "sampling_binds")]),
        ({"max_staleness": 0}, {"time/generate_s": 6.0}, []),
        ({"max_staleness": 1}, {"rollout/groups_ready": 8}, [("samples_pile_up", "training_binds")]),
        ({"max_staleness": 2}, {"rollout/groups_ready": 8}, []),
        ({"max_staleness": 0}, {"rollout/groups_ready": 8}, []),
    ],
)  # fmt: skip
def test_advice_names_the_role_that_binds(settings, line, expected):
    run = {"rollout": settings, "train": {"prompts_per_step": 8}}
    assert alarms_of(run, {"time/step_s": 10.0, "rollout/groups_ready": 0, **line}) == expected


@pytest.mark.parametrize(
    ("steps", "clipped", "expected"), [(4, 0.0, [("clip_idle", "steps_too_small")]), (4, 1e-4, []), (1, 0.0, [])]
)
def test_no_clipped_token_in_several_optimizer_steps_is_worth_a_word(steps, clipped, expected):
    line = {"train/optimizer_steps": steps, "train/clip_high_frac": clipped, "train/clip_low_frac": 0.0}
    assert alarms_of({}, line) == expected


@pytest.mark.parametrize(
    ("reached", "used", "expected"),
    [
        (0.1, 0.5, [("training_far_from_peak", "microbatches_small")]),
        (0.1, 0.8, [("training_far_from_peak", "passes_slow")]),
        (0.2, 0.5, []),
    ],
)
def test_updates_far_from_the_devices_peak(reached, used, expected):
    assert alarms_of({}, {"train/mfu": reached, "memory/device_frac": used}) == expected


@pytest.mark.parametrize(("used", "names"), [(0.08, ["memory_unused"]), (0.8, []), (0.97, ["memory_nearly_full"])])
def test_memory_that_is_not_used_or_nearly_full(used, names):
    assert [name for name, _ in alarms_of({}, {"memory/device_frac": used})] == names


@pytest.mark.parametrize(
    ("ratio", "kl", "cause"),
    [
        (0.939, 0.0046, "truncated_sampling"),  # 0.0046 + 1 - 0.939 = 0.0656, of a gap of 0.066: all of one sign
        (0.984, 0.0196, "sampler_settings_differ"),  # 0.036: of both signs, as at another temperature
    ],
)
def test_truncation_that_no_setting_names_is_seen_by_the_sign_of_the_mismatch(ratio, kl, cause):
    line = {"train/mismatch_gap": 0.066, "train/mismatch_ratio_mean": ratio, "train/mismatch_kl": kl}
    assert alarms_of({}, line) == [("mismatch", cause)]


@pytest.mark.parametrize(
    ("line", "settings", "is_found"),
    [
        ({}, {}, True),
        ({"rollout/turns_mean": 2.0}, {}, False),
        ({"rollout/unscored_frac": 0.04}, {}, False),
        ({}, {"mask_truncated": True}, False),
        ({}, {"rejection": "token_k1"}, False),
    ],
)
def test_masked_tokens_are_abnormal_where_nothing_masks_them(line, settings, is_found):
    masked = {"train/masked_frac": 0.16, "rollout/unscored_frac": 0.0, **line}
    expected = [("tokens_masked", "mask_shifted")] if is_found else []
    assert alarms_of({"algorithm": {"rejection": "none", **settings}}, masked) == expected


@pytest.mark.parametrize(
    ("steps", "moved", "rise", "is_found"),
    [(32, 0.05, 0.0, True), (32, 0.05, 0.02, False), (32, 0.01, 0.0, False), (4, 0.05, 0.0, False)],
)
def test_a_batch_used_too_often_moves_the_policy_without_a_gain(steps, moved, rise, is_found):
    watch = AlarmWatch({})
    for step in range(1, 31):
        line = {"rollout/reward_mean": 0.3 + rise * step, "rollout/reward_std": 0.4, "train/optimizer_steps": steps}
        measured = {"train/update_kl": moved} if step <= 10 or step % 10 == 0 else {}
        watch.add({"stage": "rl", "step": step, **line, **measured})
    expected = [("batch_overused", "too_many_steps_per_batch", 20)] if is_found else []
    assert [(alarm.name, alarm.cause, alarm.step) for alarm in watch.alarms] == expected


def test_a_reward_that_stops_to_differ_at_once_has_changed_and_one_that_fades_has_not():
    spread = {"rollout/reward_std": 0.4}
    assert alarms_of({}, spread, {"rollout/reward_std": 0.0}, times=30) == [("reward_constant", "reward_constant")]
    fading = [{"rollout/reward_std": 0.4 * 0.9**step} for step in range(30)]
    assert alarms_of({}, *[spread] * 20, *fading, *[{"rollout/reward_std": 0.0}] * 5, times=1) == []
    assert alarms_of({}, {"rollout/reward_std": 0.0}) == [], "it was so from the start"


def test_responses_that_end_within_the_answer_are_distinguished_from_hard_prompts():
    line = {"rollout/all_wrong_group_frac": 1.0, "rollout/pass_rate": 0.0, "rollout/answer_tokens_mean": 6.0}
    line["rollout/answer_pass_rate"] = 1.0
    for tokens, cause in ((2.5, "responses_end_early"), (6.0, "prompts_too_hard")):
        assert alarms_of({}, line | {"rollout/response_tokens_mean": tokens}) == [("all_wrong", cause)]


@pytest.mark.parametrize("part", ["generate", "reward", "train"])
def test_a_part_of_a_step_that_takes_half_an_hour_and_six_times_as_long_stalls(part):
    usual = {"time/step_s": 900.0, "time/generate_s": 300.0, "time/reward_s": 300.0, "time/train_s": 300.0}
    slow = usual | {f"time/{part}_s": 2000.0, "time/step_s": 2600.0}  # the step itself: less than three times as long
    found = alarms_of({}, *[usual] * 20, slow, times=1)
    names = {"generate": "sampling_stalls", "reward": "reward_stalls", "train": "training_stalls"}
    assert ("step_stalls", names[part]) in found


def test_conditions_name_the_other_metrics_that_they_are_about():
    (rule,) = [rule for rule in RULES if rule.name == "importance_weights"]
    assert rule.when.text == (
        "below 0.3 or train/importance_std above 1 or train/importance_chi2 above 1 or train/mismatch_kl outside "
        "-0.1 to 0.1"
    )


@pytest.mark.parametrize(
    ("own", "accuracy", "cause"),
    [(0.2, 0.3, "answers_wrong"), (0.5, 0.3, "prompts_too_hard"), (0.2, 0.0, "prompts_unlike_training")],
)
def test_wrong_answers_are_distinguished_from_hard_prompts_by_what_the_policy_finds_likely(own, accuracy, cause):
    line = {"rollout/all_wrong_group_frac": 1.0, "rollout/pass_rate": 0.0, "eval/accuracy": accuracy}
    line |= {"rollout/answer_surprise": 0.7, "rollout/response_surprise": own}
    assert alarms_of({}, line) == [("all_wrong", cause)]


@pytest.mark.parametrize("abnormal", ["all_wrong_group_frac", "zero_std_group_frac", "truncated_frac"])
def test_a_high_temperature_is_named_whatever_it_leads_to(abnormal):
    line = {f"rollout/{abnormal}": 0.9, "rollout/answer_surprise": 0.1, "eval/accuracy": 0.4}
    ((_, cause),) = alarms_of({"rollout": {"temperature": 3.0}}, line)
    assert cause == "temperature_too_high"
    assert alarms_of({"rollout": {"temperature": 1.0}}, line)[0][1] != cause


@pytest.mark.parametrize(("warmup", "cause"), [(1000, "warmup_too_long"), (20, "learning_rate_too_low")])
def test_a_learning_rate_in_warmup_is_distinguished_from_one_that_is_too_low(warmup, cause):
    settings = {"train": {"optimizer": {"lr": 1e-4, "warmup_steps": warmup}}}
    rates = [1e-4 * min(step / warmup, 1) for step in range(1, 41)]
    lines = [{"train/lr": rate, "train/update_kl": 1e-8, "rollout/reward_mean": 0.3} for rate in rates]
    assert alarms_of(settings, *lines, times=1) == [("update_too_small", cause)]


@pytest.mark.parametrize(
    ("seen", "expected"), [(0.73, []), (1.0, [("evaluation_seen", "evaluation_rows_in_training")])]
)
def test_an_evaluation_on_training_rows_is_worth_a_word(seen, expected):
    assert alarms_of({}, {"eval/seen_frac": seen, "eval/accuracy": 0.5}) == expected


@pytest.mark.parametrize(
    ("answers", "policy", "weight", "expected"),
    [
        (0.0, 0.6, 1.0, [("answers_fail", "reward_inverted")]),
        (0.0, 0.0, 1.0, [("answers_fail", "reward_broken")]),
        (0.0, 0.0, -1.0, [("answers_fail", "weight_negative")]),
        (0.5, 0.6, 1.0, [("answers_fail", "some_answers_fail")]),
        (0.95, 0.6, 1.0, []),
    ],
)
def test_answers_without_reward_are_named_in_the_first_step(answers, policy, weight, expected):
    settings = {"reward": {"components": [{"use": "exact", "weight": weight}]}}
    assert alarms_of(settings, {"rollout/answer_pass_rate": answers, "rollout/pass_rate": policy}, times=1) == expected


@pytest.mark.parametrize(("explained", "warmup", "is_found"), [(0.0, 0, True), (0.0, 60, False), (0.3, 0, False)])
def test_a_critic_that_explains_nothing_long_after_its_warmup(explained, warmup, is_found):
    line = {"critic/explained_variance": explained, "critic/loss": 0.1, "rollout/reward_std": 0.5}
    expected = [("critic_idle", "critic_untrained")] if is_found else []
    assert alarms_of({"critic": {"warmup_updates": warmup}}, line, times=80) == expected
    assert alarms_of({}, line | {"rollout/reward_std": 0.0}, times=80) == [], "there is nothing to explain"


@pytest.mark.parametrize(("staleness", "cause"), [(0.0, "few_tokens_differ"), (2.0, "off_policy")])
def test_a_mean_importance_weight_far_from_1_needs_no_correction_to_be_seen(staleness, cause):
    line = {"train/mismatch_ratio_mean": 3.0, "rollout/staleness_mean": staleness}
    assert alarms_of({}, line) == [("correction_weights", cause)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({}, [("samples_unscored", "samples_fail")]),
        ({"rollout/turns_mean": 2.0}, [("samples_unscored", "environment_fails")]),
        ({"reward/a_fault_frac": 0.04, "reward/b_fault_frac": 0.04}, [("samples_unscored", "reward_code_fails")]),
        ({"reward/a_fault_frac": 0.2}, [("rewards_fail", "reward_code_fails")]),
        ({"rollout/unscored_frac": 0.04}, []),
    ],
)
def test_samples_without_a_reward_are_seen_whatever_fails(line, expected):
    assert alarms_of({}, {"rollout/unscored_frac": 0.2, **line}) == expected


def test_a_judge_that_likes_worthless_responses_is_named_with_the_one_that_it_likes():
    line = {"reward/judge_canary_empty_mean": 0.1, "reward/judge_canary_colon_mean": 0.95}
    watch = AlarmWatch({})
    for step in range(3):
        watch.add({"stage": "rl", "step": step, **line})
    assert [(alarm.name, alarm.metric) for alarm in watch.alarms] == [
        ("judge_deceived", max(line, key=line.__getitem__))
    ]
    assert alarms_of({}, line | {"reward/judge_canary_colon_mean": 0.3}) == []


@pytest.mark.parametrize(("flag", "first", "last", "is_found"), [
    ("directive", 0.0, 0.4, True), ("directive", 0.3, 0.4, False), ("boxed", 0.0, 0.9, False),
])  # fmt: skip
def test_signs_of_being_written_for_a_judge_spread(flag, first, last, is_found):
    other = {"reward/judge_flag_invisible_mean": 0.05}
    lines = [{f"reward/judge_flag_{flag}_mean": share, **other} for share in (first, last)]
    watch = AlarmWatch({})
    for step in range(60):
        watch.add({"stage": "rl", "step": step, **lines[step // 30]})
    found = [(alarm.name, alarm.metric) for alarm in watch.alarms]
    assert found == ([("responses_flatter", "reward/judge_flag_directive_mean")] if is_found else [])


@pytest.mark.parametrize(("spread", "is_found"), [(0.2, True), (0.5, False)])
def test_entropy_that_falls_is_a_collapse_where_rewards_differ_less_too(spread, is_found):
    before = {"train/entropy": 1.0, "rollout/reward_std": 0.4, "rollout/reward_mean": 0.5, "rollout/pass_rate": 0.5}
    found = alarms_of({}, before, before | {"train/entropy": 0.1, "rollout/reward_std": spread})
    assert (("entropy_collapse", "exploration_lost") in found) == is_found


@pytest.mark.parametrize(
    ("later", "cause"),
    [
        ({"time/reward_s": 24.0}, "rewards_slower"),
        ({"time/generate_s": 42.0, "rollout/response_tokens_mean": 900.0}, "responses_longer"),
        ({"time/generate_s": 42.0}, "sampling_slower"),
        ({"time/train_s": 42.0}, "machine_slower"),
    ],
)
def test_steps_that_take_five_times_as_long(later, cause):
    before = {f"time/{part}_s": 2.0 for part in ("reward", "generate", "train")}
    before |= {"time/step_s": 10.0, "rollout/response_tokens_mean": 100.0}
    found = [
        cause for name, cause in alarms_of({}, before, before | {"time/step_s": 50.0} | later) if name == "steps_slower"
    ]
    assert found == [cause]
    assert alarms_of({}, before, before | {"time/step_s": 20.0}) == []


def test_two_very_long_steps_do_not_make_steps_slower():
    """Their mean over ten steps is above 3 times the usual for twelve steps; the median is not."""
    watch = AlarmWatch({})
    for step in range(60):
        watch.add({"stage": "rl", "step": step, "time/step_s": 120.0 if step in (40, 42) else 5.0})
    assert watch.alarms == []


@pytest.mark.parametrize(
    ("first_s", "growth_s", "expected"),
    [
        (0.02, 0.03, [("rewards_slow", "rewards_slower"), ("steps_slower", "rewards_slower")]),
        (2.0, 0.15, [("rewards_slow", "reward_slow"), ("steps_slower", "rewards_slower")]),
        (2.0, 0.0, [("rewards_slow", "reward_slow")]),
        (0.02, 0.0, []),
    ],
)
def test_rewards_that_take_longer_from_step_to_step(first_s, growth_s, expected):
    """Also where they took most of the time from the beginning."""
    watch = AlarmWatch({})
    for step in range(90):
        reward_s = first_s + growth_s * step
        watch.add({"stage": "rl", "step": step, "time/reward_s": reward_s, "time/step_s": 0.4 + reward_s})
    assert [(alarm.name, alarm.cause) for alarm in watch.alarms] == expected


@pytest.mark.parametrize(
    ("spread", "cause"), [(20.0, "advantages_not_normalised"), (1.0, "advantage_bound_too_narrow")]
)
def test_why_many_advantages_are_clipped(spread, cause):
    line = {"train/advantage_clipped_frac": 0.2, "train/advantage_std": spread}
    assert alarms_of({}, line) == [("advantages_clipped", cause)]


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"cache_used_frac": 1.0, "prefix_hit_frac": 0.6}, [("judge_cache_full", "judge_cache_full")]),
        ({"cache_used_frac": 0.3, "prefix_hit_frac": 0.01}, [("judge_prompts_differ", "judge_prompts_differ_early")]),
        ({"device_used_gib": 79.0, "device_total_gib": 80.0}, [("judge_memory_full", "judge_memory_tight")]),
        ({"device_used_gib": 73.0, "device_total_gib": 80.0, "cache_used_frac": 0.5, "prefix_hit_frac": 0.6}, []),
    ],
)
def test_a_crowded_judge_is_worth_a_word_where_nothing_waits_for_it(figures, expected):
    line = {f"reward/judge_{name}_mean": value for name, value in figures.items()}
    assert alarms_of({}, line | {"time/reward_s": 0.1, "time/step_s": 10.0}) == expected


@pytest.mark.parametrize("abnormal", ["all_wrong_group_frac", "zero_std_group_frac", "truncated_frac", "empty_frac"])
@pytest.mark.parametrize(
    ("settings", "surprise", "expected"),
    [
        ({"model": {"init": {"model_type": "qwen3"}}, "stages": ["rl"]}, 1.0, "policy_untrained"),
        ({"model": {"init": {"model_type": "qwen3"}}, "stages": ["sft", "rl"]}, 1.0, "prompts_unlike_training"),
        ({"model": {"path": "trained"}, "stages": ["rl"]}, 1.0, "prompts_unlike_training"),
    ],
)
def test_a_policy_of_random_weights_is_told_to_learn_first(abnormal, settings, surprise, expected):
    line = {f"rollout/{abnormal}": 0.85 if abnormal != "empty_frac" else 0.5, "rollout/answer_surprise": surprise}
    assert alarms_of(settings, line)[0][1] == expected
