"""Alarms by hand: when they begin and end, what they say, which one is named first."""

import math

import pytest

from hone.doctor.history import History
from hone.doctor.rule import AlarmRule, Cause, above, grows, spikes
from hone.doctor.watch import AlarmWatch, by_importance, watch_lines

CAUSE = Cause(name="because", what="it is so.", change="run.steps: 1", confirm="Look again.", reads=("run.steps",))


HIGH = above("train/entropy", 1.0)


def rule(name: str = "high", when=HIGH, metric: str = "train/entropy", **fields) -> AlarmRule:
    known = {"level": "data", "pattern": "too high", "of": (2, 3), "causes": (CAUSE,), "source": "ours"} | fields
    return AlarmRule(name=name, when=when, metrics=(metric,), **known)


def lines(values, metric: str = "train/entropy", stage: str = "rl") -> list[dict]:
    return [{"stage": stage, "step": step, "time_s": 0.0, metric: v} for step, v in enumerate(values, 1)]


def watched(values, *rules: AlarmRule) -> AlarmWatch:
    watch = AlarmWatch({"run": {"steps": 7}}, rules or (rule(),))
    for line in lines(values):
        watch.add(line)
    return watch


def test_an_alarm_begins_with_k_of_n_and_ends_when_none_is_left():
    """Abnormal at 2, 4 and 5: two of three at step 4, the first of them step 2; the last leaves the window at 8."""
    (alarm,) = watched([0, 2, 0, 2, 2, 0, 0, 0, 0]).alarms
    assert (alarm.since, alarm.step, alarm.ended) == (2, 4, 8)


def test_one_abnormal_step_is_not_enough_and_an_unknown_value_is_not_abnormal():
    assert watched([0, 2, 0, 0, 2, 0]).alarms == []
    assert watched([None, math.nan, None, math.nan]).alarms == []


def test_an_alarm_says_value_limit_setting_cause_and_change():
    (alarm,) = watched([2, 3]).alarms
    assert alarm.evidence == ("train/entropy = 3; alarm: above 1", "run.steps = 7")
    assert alarm.line == (
        "alarm high since rl step 1: too high (train/entropy = 3; alarm: above 1). "
        "Likely cause: it is so. Change: run.steps: 1"
    )


def test_a_figure_of_a_cause_says_the_limit_that_it_crossed():
    """That of the rule `truncation`, 0.25; a value within the limits says none."""
    cause = Cause(name="long", what="", change="", confirm="", reads=("rollout/truncated_frac",))
    for value, text in (
        (0.4, "rollout/truncated_frac = 0.4; healthy: up to 0.25"),
        (0.1, "rollout/truncated_frac = 0.1"),
    ):
        watch = AlarmWatch({}, (rule(causes=(cause,), of=(1, 1)),))
        watch.add({"stage": "rl", "step": 1, "train/entropy": 2.0, "rollout/truncated_frac": value})
        assert watch.alarms[0].evidence[1] == text


def test_the_first_cause_whose_test_holds_is_named():
    never = Cause(name="never", what="", change="", confirm="", applies=lambda h: h.now("train/lr") > 0)
    (alarm,) = watched([2, 2], rule(causes=(never, CAUSE))).alarms
    assert alarm.cause == "because"


def test_a_stronger_alarm_silences_a_weaker_one_as_long_as_it_lasts():
    strong = rule("strong", above("train/entropy", 5.0))
    weak = rule("weak", silenced_by=("strong",))
    found = watched([9, 9, 9, 9, 2, 2, 2, 2, 2], strong, weak).alarms
    assert [(alarm.name, alarm.since, alarm.step) for alarm in found] == [("strong", 1, 2), ("weak", 5, 7)]


def test_nothing_is_evaluated_before_enough_values():
    (alarm,) = watched([2, 2, 2, 2, 2], rule(after=3)).alarms
    assert (alarm.since, alarm.step) == (4, 5)


def test_steps_that_are_repeated_after_a_restart_count_once():
    watch = AlarmWatch({}, (rule(of=(3, 3)),))
    for step in (1, 2, 1, 2, 1, 2):
        watch.add({"stage": "rl", "step": step, "train/entropy": 2.0})
    assert watch.alarms == []


def test_an_alarm_ends_with_its_stage():
    watch = AlarmWatch({}, (rule(),))
    for line in (*lines([2, 2], stage="sft"), *lines([0, 0])):
        watch.add(line)
    (alarm,) = watch.alarms
    assert (alarm.stage, alarm.ended) == ("sft", 2)


def test_each_member_of_a_family_is_looked_at_and_the_worst_is_named():
    pattern = "reward/<component>_fault_frac"
    watch = AlarmWatch({}, (rule(when=above(pattern, 0.05), metric=pattern, of=(1, 1)),))
    watch.add({"stage": "rl", "step": 1, "reward/a_fault_frac": 0.0, "reward/b_fault_frac": 0.5})
    (alarm,) = watch.alarms
    assert alarm.metric == "reward/b_fault_frac"


@pytest.mark.parametrize(
    ("condition", "last", "holds"),
    [
        (grows("train/entropy", 2.0, mean=1), 2.1, True),
        (grows("train/entropy", 2.0, mean=1), 1.9, False),
        (spikes("train/entropy", 10), 10.5, True),
        (spikes("train/entropy", 10), 9.5, False),
    ],
)
def test_baselines_are_means_of_steps_5_to_20(condition, last, holds):
    """Four warm-up values of 100, then 1: the baseline is 1."""
    history = History("rl", {})
    for step, value in enumerate([100.0] * 4 + [1.0] * 20 + [last]):
        history.add(step, {"train/entropy": value})
    assert condition.holds(history) is holds


def alarm_of(name: str, level: str, since: int, ended: int | None = None):
    found = watch_lines({}, [])
    assert found.alarms == []
    (alarm,) = watched([2, 2], rule(name, level=level)).alarms
    alarm.since, alarm.ended = since, ended
    return alarm


def test_the_first_to_begin_is_named_first_and_of_those_together_the_more_urgent_level():
    alarms = [
        alarm_of("advice", "tuning", 1),
        alarm_of("collapse", "optimisation", 12),
        alarm_of("blip", "liveness", 10, ended=11),
        alarm_of("wrong", "data", 18),
        alarm_of("late", "liveness", 90),
    ]
    assert [alarm.name for alarm in by_importance(alarms)] == ["wrong", "collapse", "late", "blip", "advice"]
