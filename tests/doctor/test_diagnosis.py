"""`hone doctor RUN_DIR` on run folders, and the same alarms in a run that goes."""

import asyncio
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hone
from hone.assemble.job import LiveAlarms
from hone.cli.main import main
from hone.doctor.rules import RULES
from hone.doctor.walk import MORE_SAMPLES, WALK, walk
from hone.doctor.watch import watch_lines
from hone.errors import ConfigError, RewardError, StoppedByAlarm
from hone.observe.events import read_events
from hone.observe.report import report_data, write_report
from hone.run.status import diagnose

sys.path.insert(0, str(Path(__file__).parents[1] / "loop"))
from tiny import write_run

SETTINGS = {"train": {"optimizer": {"lr": 1e-2}}, "run": {"precision": "float32"}}


def run_folder(folder: Path, values: dict[str, float], steps: int = 20) -> Path:
    """A run that logged the same line `steps` times, and whose last line is torn."""
    folder.mkdir(exist_ok=True)
    (folder / ".identity.json").write_text(json.dumps({"run_file": "run.yaml", "config": SETTINGS}))
    lines = [json.dumps({"stage": "rl", "step": step, "time_s": step, **values}) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines) + '{"stage": "rl", "st')
    return folder


def test_the_first_abnormal_metric_with_cause_evidence_change_and_confirmation(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", {"train/update_kl": 2.5, "rollout/truncated_frac": 0.4})
    assert main(["doctor", str(folder)]) == 1
    shown = capsys.readouterr().out
    for part in (
        "first abnormal  train/update_kl since rl step 1  [optimisation: update_too_large]",
        "evidence        train/update_kl = 2.5; alarm: above 2",
        "train.optimizer.lr = 0.01",
        "likely cause    learning_rate_too_high",
        "change          train.optimizer.lr: a tenth of it",
        "to confirm      With a tenth",
    ):
        assert part in shown
    assert "truncation" not in shown, "it is silent under a stronger alarm"


@pytest.mark.parametrize(("second", "cause"), [(1e-7, "one_engine_differs"), (0.1, "off_policy")])
def test_a_stale_engine_is_distinguished_from_samples_that_are_all_old(second, cause):
    gaps = {"engine/engine-0_mismatch_gap": 0.4, "engine/engine-1_mismatch_gap": second}
    line = {"stage": "rl", "rollout/staleness_mean": 1.0, "train/mismatch_gap": 0.25, **gaps}
    (alarm,) = watch_lines(SETTINGS, [{**line, "step": step} for step in range(1, 10)]).alarms
    assert (alarm.name, alarm.cause) == ("mismatch", cause)


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        (
            "RewardError: 9 samples could not be scored: math: infra fault: http://a:1: ConnectError",
            "reward_service_fails",
        ),
        ("RewardError: 9 samples could not be scored: math: infra fault: ValueError", "reward_code_fails"),
        ("CheckpointError: step-000012: cannot be written: No space left on device.", "disk_full"),
        ("EngineError: engine-1: holds version 9 and samples from another policy", "one_engine_differs"),
        ("ServiceError: service judge ended with exit code 1.\ntorch.OutOfMemoryError: CUDA", "service_out_of_memory"),
        ("ServiceError: service judge ended with exit code 1.\nno such model", "service_fails"),
        ("KeyError: 'x'", "error"),
    ],
)
def test_the_error_that_ended_a_run_comes_first(tmp_path, capsys, why, cause):
    folder = run_folder(tmp_path / "run", {"train/update_kl": 2.5})
    events = [
        {"at": 1.0, "kind": "stage", "stage": "rl", "steps": 40},
        {"at": 2.0, "kind": "stopped", "outcome": "failed", "why": why},
    ]
    texts = [json.dumps(event, separators=(",", ":")) for event in events]
    (folder / "events.jsonl").write_text("".join(f"{text}\n" for text in texts))
    assert [(a.name, a.cause, a.since) for a in diagnose(folder).alarms][:2] == [
        ("run_failed", cause, 21),
        ("update_too_large", "learning_rate_too_high", 1),
    ]
    assert main(["doctor", str(folder)]) == 1
    assert "first abnormal  error in rl step 21  [liveness: run_failed]" in capsys.readouterr().out
    assert main(["compare", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert re.search("state +failed", shown) and re.search(f"first alarm +run_failed: {cause}", shown)
    alarm, *_ = report_data(folder)["alarms"]
    assert (alarm["name"], alarm["stage"], alarm["since"]) == ("run_failed", "rl", 21) and alarm["evidence"] == (why,)
    assert "run_failed" not in [alarm["name"] for alarm in report_data(folder, running=True)["alarms"]]
    with (folder / "events.jsonl").open("a") as file:
        file.write(f"{texts[0]}\n")
    assert [alarm["name"] for alarm in report_data(folder)["alarms"]] == ["update_too_large"], "resumed"


@pytest.mark.slow("begins a run")
def test_a_failed_run_says_why_in_its_events(tmp_path):
    def broken(group):
        raise RuntimeError("no such table")

    run_file = write_run(tmp_path)
    with pytest.raises(RewardError):
        hone.train(str(run_file), rewards=[broken])
    (first, *_) = diagnose(tmp_path / "run").alarms
    assert (first.name, first.cause) == ("run_failed", "reward_code_fails") and "no such table" in first.evidence[0]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rollout/answer_surprise": 0.9}, ("all_wrong", "prompts_unlike_training")),
        ({"rollout/answer_surprise": 0.2}, ("all_wrong", "reward_broken")),
        ({"rollout/answer_pass_rate": 0.0, "rollout/answer_surprise": 0.9}, ("answers_fail", "reward_broken")),
        ({"rollout/answer_pass_rate": 1.0, "rollout/answer_surprise": 0.2}, ("all_wrong", "prompts_too_hard")),
        ({"rollout/answer_pass_rate": 1.0, "rollout/answer_surprise": 0.9}, ("all_wrong", "prompts_unlike_training")),
    ],
)
def test_prompts_that_the_policy_cannot_read_are_distinguished_from_a_broken_reward_and_from_hard_ones(values, named):
    line = {"stage": "rl", "rollout/all_wrong_group_frac": 1.0, "rollout/pass_rate": 0.0}
    lines = [{**line, "step": step, **(values if step == 1 else {})} for step in range(1, 15)]
    (alarm,) = watch_lines(SETTINGS, lines).alarms
    assert (alarm.name, alarm.cause) == named


@pytest.mark.parametrize(("between", "names"), [(0.005, ["reward_random"]), (0.2, [])])
def test_a_random_reward_is_as_high_for_one_prompt_as_for_another(between, names):
    line = {"stage": "rl", "rollout/reward_mean": 0.5, "rollout/reward_std": 0.5, "rollout/pass_rate": 0.5}
    line |= {"rollout/zero_std_group_frac": 0.1, "rollout/reward_prompt_frac": between}
    assert [a.name for a in watch_lines(SETTINGS, [{**line, "step": step} for step in range(1, 60)]).alarms] == names


def test_empty_responses_of_a_policy_that_cannot_read_its_prompts_are_not_almost_all():
    for empty, cause in ((0.6, "prompts_unlike_training"), (0.9, "prompt_ends_the_response")):
        lines = [{"stage": "rl", "step": step, "rollout/empty_frac": empty} for step in range(1, 9)]
        lines[0]["rollout/answer_surprise"] = 1.5
        (alarm,) = watch_lines(SETTINGS, lines).alarms
        assert (alarm.name, alarm.cause) == ("responses_empty", cause)


@pytest.mark.parametrize(
    ("empty", "corr", "named"),
    [
        (lambda step: 0.6, 0.0, ["prompt_ends_the_response"]),
        (lambda step: 0.05 * step, -0.4, ["length_punished"]),
        (lambda step: 0.05 * step, 0.0, ["policy_degenerates"]),
        (lambda step: 0.2, 0.0, []),
    ],
)
def test_empty_responses_from_the_start_are_distinguished_from_those_that_became_empty(empty, corr, named):
    lines = [
        {"stage": "rl", "step": step, "rollout/empty_frac": empty(step), "rollout/length_reward_corr": corr}
        for step in range(1, 15)
    ]
    assert [alarm.cause for alarm in watch_lines(SETTINGS, lines).alarms] == named


@pytest.mark.parametrize(
    ("first", "last", "rise", "named"),
    [
        (0.1, 0.9, 0.05, ["reward_exploited"]),
        (0.1, 0.9, 0.0, ["policy_degenerates"]),
        (0.9, 1.0, 0.05, []),
        (0.1, 0.3, 0.05, []),
    ],
)
def test_one_response_to_every_prompt_is_abnormal_where_it_was_not_so_in_the_first_step(first, last, rise, named):
    shared, reward = "rollout/shared_response_frac", "rollout/reward_mean"
    lines = [
        {"stage": "rl", "step": step, shared: first if step < 6 else last, reward: 0.2 + rise * step}
        | {"rollout/reward_std": 0.4}
        for step in range(1, 20)
    ]
    assert [alarm.cause for alarm in watch_lines(SETTINGS, lines).alarms] == named


@pytest.mark.parametrize(
    ("coefficient", "kl", "rise", "named"),
    [
        (10.0, 0.003, 0.0, ["kl_dominates"]),
        (10.0, 0.003, 0.02, []),
        (1.0, 0.003, 0.0, []),
        (1.0, 0.5, 0.02, ["kl_dominates"]),
    ],
)
def test_a_coefficient_dominates_by_its_penalty_or_where_it_allows_no_change(coefficient, kl, rise, named):
    """Of the last kind: ten times the spread of the advantages, and the reward does not rise."""
    line = {"stage": "rl", "train/kl_coef": coefficient, "train/kl_ref": kl, "train/advantage_std": 1.0}
    lines = [
        {**line, "step": step, "rollout/reward_mean": 0.2 + rise * step, "rollout/reward_std": 0.4}
        for step in range(1, 30)
    ]
    assert [alarm.name for alarm in watch_lines(SETTINGS, lines).alarms] == named


@pytest.mark.parametrize(
    ("gap", "entropy", "settings", "named"),
    [
        (0.4, 0.3, {}, ("mismatch", "tokens_misaligned")),
        (0.4, 1.5, {}, ("mismatch", "sampler_settings_differ")),
        (0.4, 1.5, {"top_k": 2}, ("mismatch", "truncated_sampling")),
        (0.01, 0.3, {"top_k": 2}, ("mismatch_precision", "truncated_sampling")),
        (0.01, 0.3, {}, ("mismatch_precision", "dtype_differs")),
    ],
)
def test_what_a_gap_from_the_first_step_comes_from(gap, entropy, settings, named):
    line = {"stage": "rl", "train/mismatch_gap": gap, "train/entropy": entropy}
    lines = [{**line, "step": step} for step in range(1, 10)]
    (alarm,) = watch_lines({**SETTINGS, "rollout": settings}, lines).alarms
    assert (alarm.name, alarm.cause) == named


@pytest.mark.parametrize(("answer", "cause"), [(6.0, "limit_too_low"), (3.0, "no_end_token")])
def test_where_every_response_is_cut_the_length_of_the_answers_says_why(answer, cause):
    line = {"stage": "rl", "rollout/truncated_frac": 1.0}
    lines = [
        {**line, "step": step} | ({"rollout/answer_tokens_mean": answer} if step == 1 else {}) for step in range(1, 9)
    ]
    (alarm,) = watch_lines({**SETTINGS, "rollout": {"max_response_tokens": 4}}, lines).alarms
    assert (alarm.name, alarm.cause) == ("truncation", cause)


def test_one_component_of_several_that_pays_length_is_seen_where_short_answers_hide_it():
    """Over all samples reward and length do not go together; with one component alone it is not an alarm."""
    line = {"stage": "rl", "rollout/length_reward_corr": -0.1, "reward/judge_length_corr": 0.8}
    lines = [{**line, "step": step, "rollout/response_tokens_mean": 5.0 + 0.2 * step} for step in range(1, 30)]
    assert not watch_lines(SETTINGS, lines).alarms
    (alarm,) = watch_lines(SETTINGS, [{**line, "reward/exact_length_corr": -0.2} for line in lines]).alarms
    assert (alarm.name, alarm.cause) == ("reward_pays_length", "reward_pays_length")


@pytest.mark.parametrize(("free", "checkpoint"), [(lambda step: 0.9, 0.5), (lambda step: 50 - 1.2 * step, 0.01)])
def test_a_disk_that_is_about_to_be_full(free, checkpoint):
    lines = [
        {"stage": "rl", "step": step, "memory/disk_free_gib": free(step), "memory/disk_checkpoint_gib": checkpoint}
        for step in range(1, 40)
    ]
    assert [alarm.name for alarm in watch_lines(SETTINGS, lines).alarms] == ["disk_nearly_full"]
    assert not watch_lines(
        SETTINGS, [line | {"memory/disk_free_gib": 40 + free(line["step"]) / 5} for line in lines]
    ).alarms


@pytest.mark.parametrize(("moved", "cause"), [(0.1, "off_policy"), (1e-3, "weights_stale")])
def test_weights_that_stay_behind_are_distinguished_from_old_samples_by_how_far_updates_move(moved, cause):
    line = {"stage": "rl", "rollout/staleness_mean": 1.0, "train/mismatch_gap": 0.3, "train/mismatch_kl": 0.2}
    (alarm, *_) = watch_lines(SETTINGS, [{**line, "step": s, "train/update_kl": moved} for s in range(1, 10)]).alarms
    assert (alarm.name, alarm.cause) == ("mismatch", cause)


def test_training_prompts_with_their_answers_are_distinguished_from_easy_ones():
    line = {"stage": "rl", "rollout/all_right_group_frac": 0.9, "rollout/pass_rate": 0.95}
    for accuracy, cause in ((0.3, "answers_leak"), (0.9, "prompts_too_easy")):
        evaluated = {"stage": "rl", "step": 0, "eval/accuracy": accuracy}
        (alarm,) = watch_lines(SETTINGS, [evaluated, *({**line, "step": step} for step in range(1, 15))]).alarms
        assert (alarm.name, alarm.cause) == ("all_right", cause)


def test_without_an_alarm_it_walks_through_what_learning_needs(tmp_path, capsys):
    healthy = {"rollout/pass_rate": 0.3, "rollout/zero_std_group_frac": 0.3, "train/mismatch_gap": 1e-7}
    folder = run_folder(tmp_path / "run", {**healthy, "train/update_kl": 5e-6, "eval/accuracy": 0.3})
    main(["doctor", str(folder), "--all"])
    shown = capsys.readouterr().out
    rows = {question: answer for answer, question in re.findall(r"^(yes|no|unknown) +(.+?\?) ", shown, re.M)}
    assert rows == {
        "Do gold answers score 1?": "unknown",
        "Are right answers likelier than guesses?": "unknown",
        "Does the start ever succeed?": "yes",
        "Does the policy ever succeed?": "yes",
        "Does the reward vary within groups?": "yes",
        "Do responses end?": "unknown",
        "Do sampler and trainer agree?": "yes",
        "Does an update change the policy?": "no",
        "Is an update small enough?": "yes",
        "Does evaluation follow?": "yes",
        "Would more samples per step help?": "unknown",
    }
    assert re.search(r"train/update_kl = 5e-06; at least 1e-5\n +Do: a higher train.optimizer.lr", shown)
    assert max(len(line) for line in shown.splitlines()[1:]) <= 110
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    table = page.partition("## It does not learn")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (.+?\?) \|", table, re.M) == [*(step.question for step in WALK), MORE_SAMPLES]
    assert walk({}, [{"stage": "sft", "step": 1, "sft/loss": 1.0}]) == ()
    gold, *_ = walk({}, [{"stage": "rl", "step": 1, "rollout/answer_pass_rate": 0.5}, {"stage": "rl", "step": 2}])
    assert (gold.answer, gold.found) == ("no", "rollout/answer_pass_rate = 0.5; at least 0.9 in the first step")


@pytest.mark.parametrize(("noise", "answer", "twice"), [(100.0, "yes", 1.83), (1.0, "no", 1.05)])
def test_the_walk_says_what_more_samples_per_step_are_worth(noise, answer, twice):
    """A noise scale N of 2,500 or 25 samples, and B = 256 in a step: (1 + N / B) / (1 + N / 2B)."""
    settings = {"train": {"prompts_per_step": 16}, "rollout": {"group_size": 16}}
    line = {"stage": "rl", "train/gradient_signal": 0.04, "train/gradient_noise": noise}
    lines = [{**line, "step": step, "rollout/pass_rate": 0.3} for step in range(1, 61)]
    (*_, found), (*_, early) = walk(settings, lines), walk(settings, lines[:40])
    assert (found.question, found.answer, bool(found.do)) == (MORE_SAMPLES, answer, answer == "yes")
    assert found.figures["worth_of_twice"] == pytest.approx(twice, abs=0.01)
    assert f"an update with twice the samples is worth {twice:.2f}" in found.found
    assert early.answer == "unknown" and "needs 50 steps" in early.found


@pytest.mark.parametrize(("moved", "answer"), [(0.25, "yes"), (0.37, "no")])
def test_the_walk_has_the_limit_of_the_alarm_for_the_size_of_an_update(moved, answer):
    lines = [{"stage": "rl", "step": step, "train/update_kl": moved} for step in range(1, 31)]
    for taken, expected in ((lines, answer), (lines[:10], "yes")):
        (one,) = [one for one in walk({}, taken) if one.question == "Is an update small enough?"]
        alarms = [alarm.name for alarm in watch_lines({}, taken).alarms]
        assert one.answer == expected and ("update_too_large" in alarms) == (expected == "no")


def test_all_alarms_and_json(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", {"train/skipped_steps": 1, "rollout/truncated_frac": 1.0})
    assert main(["doctor", str(folder)]) == 1
    first = capsys.readouterr().out
    assert "gradient_not_finite" in first and "1 more, --all shows them: truncation (step 1)" in first
    main(["doctor", str(folder), "--all"])
    assert "no_end_token" in capsys.readouterr().out
    main(["doctor", str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["last_steps"] == {"rl": 20}
    assert [(a["name"], a["cause"], a["since"]) for a in found["alarms"]] == [
        ("gradient_not_finite", "batch_not_finite", 1),
        ("truncation", "no_end_token", 1),
    ]


def test_a_healthy_run_has_no_alarm_and_exit_code_0(tmp_path, capsys):
    assert main(["doctor", str(run_folder(tmp_path / "run", {"rollout/truncated_frac": 0.0}))]) == 0
    assert "\nno alarm\n" in capsys.readouterr().out


def test_advice_alone_is_no_failure_and_no_alarm(tmp_path, capsys):
    values = {"time/reward_s": 3.0, "time/step_s": 4.0, "rollout/pass_rate": 0.5}
    folder = run_folder(tmp_path / "run", values)
    assert main(["doctor", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "\nno alarm\n" in shown and "\nadvice          time/reward_s since" in shown
    assert "first abnormal" not in shown and "If it does not learn" in shown
    assert main(["compare", str(folder)]) == 0
    assert re.search("first alarm +none", capsys.readouterr().out)


def test_an_alarm_that_ended_is_shown_as_ended_and_counts(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", {"rollout/truncated_frac": 0.4})
    with (folder / "metrics.jsonl").open("a") as file:
        lines = [{"stage": "rl", "step": n, "time_s": n, "rollout/truncated_frac": 0.0} for n in range(21, 60)]
        file.write("\n" + "".join(json.dumps(line) + "\n" for line in lines))
    assert main(["doctor", str(folder)]) == 1
    assert re.search(r"first abnormal  rollout/truncated_frac in rl steps 1 to \d+, ended", capsys.readouterr().out)


def test_no_run_no_metrics(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert "there is no run here" in capsys.readouterr().err
    folder = run_folder(tmp_path / "run", {}, steps=0)
    assert main(["doctor", str(folder)]) == 0
    assert "no metrics" in capsys.readouterr().out


def test_the_report_has_the_alarms_with_their_curve(tmp_path):
    page = write_report(run_folder(tmp_path / "run", {"rollout/truncated_frac": 0.4})).read_text()
    data = json.loads(page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])
    (alarm,) = data["alarms"]
    assert (alarm["name"], alarm["metric"], alarm["stage"]) == ("truncation", "rollout/truncated_frac", "rl")


def test_a_stop_on_that_is_no_alarm_is_refused(tmp_path):
    run_file = write_run(tmp_path)
    run_file.write_text(run_file.read_text().replace("console: quiet", "console: quiet, stop_on: [truncated]"))
    with pytest.raises(
        ConfigError, match=r"observe\.stop_on: has 'truncated', which is not an alarm. Did you mean trunc"
    ):
        hone.train(str(run_file))


def test_live_alarms_are_said_recorded_and_stop_the_run():
    """An alarm that a resumed run has already is not reported again; the next one named in stop_on ends it."""
    warned, recorded, followed = [], [], []
    observer: Any = SimpleNamespace(
        warn=warned.append,
        event=lambda kind, **fields: recorded.append((kind, fields)),
        follow=lambda *calls: followed.append(calls),
    )
    before = watch_lines(SETTINGS, [{"stage": "rl", "step": step, "rollout/truncated_frac": 0.4} for step in range(21)])
    stop = asyncio.Event()
    saved = json.loads(json.dumps(before.state()))
    live = LiveAlarms(SETTINGS, observer, saved=saved, stop_on=["truncation", "rewards_fail"], stop=stop)
    ((take, state),) = followed
    assert json.dumps(state()) == json.dumps(before.state()) and not warned and not recorded and not stop.is_set()
    for step in range(21, 26):
        take({"stage": "rl", "step": step, "rollout/truncated_frac": 0.0, "reward/exact_fault_frac": 0.5})
    assert stop.is_set() and live.stopped("resume it").exit_code == 6
    assert str(live.stopped("resume it")).startswith("stopped by alarm rewards_fail: ")
    (_, began), ended = recorded
    names = ("name", "level", "stage", "step", "since", "metric", "cause")
    assert [began[name] for name in names] == [
        "rewards_fail", "liveness", "rl", 23, 21, "reward/exact_fault_frac", "reward_code_fails"
    ]  # fmt: skip
    assert ended == ("alarm_ended", {"name": "truncation", "stage": "rl", "step": 25})
    assert warned[0].startswith("alarm rewards_fail since rl step 21: ") and len(warned) == 3


def test_live_advice_is_called_advice_and_is_no_warning():
    """A quiet console shows warnings alone."""
    said, recorded, followed = [], [], []
    observer: Any = SimpleNamespace(
        say=said.append,
        event=lambda kind, **fields: recorded.append((kind, fields)),
        follow=lambda *calls: followed.append(calls),
    )
    LiveAlarms(SETTINGS, observer, saved={}, stop_on=[], stop=asyncio.Event())
    for step in range(1, 40):
        followed[0][0]({"stage": "rl", "step": step, "time/reward_s": 3.0 * (step < 20), "time/step_s": 4.0})
    assert said[0].startswith("advice rewards_slow since rl step") and said[1].startswith("advice rewards_slow ended")
    assert [kind for kind, _ in recorded] == ["alarm", "alarm_ended"] and recorded[0][1]["level"] == "tuning"


@pytest.mark.slow("trains a run and resumes it")
def test_alarms_of_a_run_go_to_events_and_end_it_with_a_checkpoint(tmp_path):
    """Half of the untrained responses do not end within four tokens. Resumed, the run is not stopped by an alarm that
    is active already."""
    run_file = write_run(tmp_path, save_every=0)
    run_file.write_text(
        run_file.read_text()
        .replace("stages: [sft, rl]", "stages: [rl]")
        .replace("console: quiet", "console: quiet, stop_on: [truncation]")
        .replace("eval: {every: 4}", "eval: {every: 0}")
    )
    with pytest.raises(StoppedByAlarm, match=r"stopped by alarm truncation.*hone train --resume") as stopped:
        hone.train(str(run_file))
    assert stopped.value.exit_code == 6
    folder = tmp_path / "run"
    events = list(read_events(folder / "events.jsonl"))
    (alarm,) = [event for event in events if event["kind"] == "alarm" and event["name"] == "truncation"]
    assert (alarm["stage"], alarm["since"], alarm["cause"]) == ("rl", 1, "policy_untrained")
    assert events[-1]["outcome"] == "stopped by alarm truncation"
    assert list((folder / "checkpoints").iterdir())
    assert "alarm truncation since rl step 1" in (folder / "logs" / "training.log").read_text()
    live = [(event["name"], event["since"]) for event in events if event["kind"] == "alarm"]
    assert live == [(alarm.name, alarm.since) for alarm in sorted(diagnose(folder).alarms, key=lambda a: a.step)]

    hone.train(str(run_file), resume=True)
    assert diagnose(folder).last_steps == {"rl": 8}
    again = [event for event in read_events(folder / "events.jsonl") if event.get("name") == "truncation"]
    assert [event["kind"] for event in again].count("alarm") == 1


def test_every_rule_is_in_the_reference():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "alarms.md").read_text()
    assert all(f"### `{rule.name}`" in page for rule in RULES)


DAMAGED = ("{torn", "[1, 2]", '{"step": 3, "time_s": 1}', '{"stage": "rl", "step": 3, "time_s": 1, "train/loss": "x"}')


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_of_metrics_is_left_out_and_said(tmp_path, capsys, line):
    folder = run_folder(tmp_path / "run", {"rollout/truncated_frac": 0.4})
    first, *others = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([first, f"{line}\n", *others]))
    assert main(["doctor", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "1 damaged line was left out (line 2: " in shown and "truncation" in shown
    main(["doctor", str(folder), "--json"])
    (found,) = json.loads(capsys.readouterr().out)["broken_lines"]
    assert found.startswith("line 2: ")
    assert main(["compare", str(folder)]) == 0
    assert re.search("damaged lines +1 left out", capsys.readouterr().out)
    assert "1 damaged line was left out (line 2: " in write_report(folder).read_text()
