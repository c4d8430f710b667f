"""The faults of benchmarks/doctor.py: each is the base run with one thing wrong.

What is wrong is a setting, the data, the reward, or the code (a patch). `_doctor_task.py` has the base run.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from _doctor_planted import (
    disk_that_fills,
    growing_reward,
    inverted_reward,
    nan_in_step,
    other_chat_template,
    other_tokenizer,
    own_service,
    rounded,
    sampled_with,
    shifted,
    slower_updates,
    small_disk,
    stuck_weights,
    two_engines,
    with_batch,
    without_end_token,
    without_last_tokens,
)
from _doctor_task import RESPONSE_TOKENS, STEPS, Rows, easy_rows, eval_rows, hard_rows, leaked, train_rows

from hone.types import Group


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    name: str
    expected: tuple[str, ...]
    """Causes that are right: several where metrics cannot tell them apart."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys over the base run's."""
    train: Callable[[], Rows] = train_rows
    eval: Callable[[], Rows] = eval_rows
    rewards: Callable[[], list[Callable[..., Any]]] | None = None
    planted: Callable[[Path], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Takes the run's folder; within it the run is made. What it gives, if it is a mapping, are more settings."""
    extends: tuple[str, ...] = ()
    """Presets over the base run."""
    steps: int = STEPS
    """Fewer where the fault shows early."""


# ---- rewards -------------------------------------------------------------------------------------------------------


def right(sample: Any, group: Group) -> float:
    return float(sample.text.strip() == group.prompt.answer)


def of_samples(score: Callable[[Any, Group], float], name: str = "score") -> Callable[[], list[Callable[..., Any]]]:
    def reward(group: Group) -> list[float]:
        return [score(sample, group) for sample in group.samples]

    reward.__name__ = name
    return lambda: [reward]


def noisy_reward() -> list[Callable[..., Any]]:
    chance = random.Random(0)
    return of_samples(lambda sample, group: float(chance.random() < 0.5))()


def idle_reward() -> list[Callable[..., Any]]:
    """Higher for every second prompt, and otherwise chance: nothing that a response can earn."""
    chance = random.Random(0)
    return of_samples(lambda sample, group: float(chance.random() < (0.3 if group.prompt.index % 2 else 0.7)))()


def sticking_reward(groups: int) -> list[Callable[..., Any]]:
    """After a number of groups every sample earns the same."""
    seen = 0

    def reward(group: Group) -> list[float]:
        nonlocal seen
        seen += 1
        return [0.5 if seen > groups else right(sample, group) for sample in group.samples]

    return [reward]


def other_answers() -> Rows:
    """The answers are those of other rows."""
    rows = train_rows()
    answers = [row["answer"] for row in rows]
    random.Random(0).shuffle(answers)
    return [row | {"answer": answer} for row, answer in zip(rows, answers, strict=True)]


def failing_reward() -> list[Callable[..., Any]]:
    chance = random.Random(0)

    def reward(group: Group) -> list[float]:
        if chance.random() < 0.3:
            raise RuntimeError("the service is away")
        return [right(sample, group) for sample in group.samples]

    return [reward]


def slow_reward() -> list[Callable[..., Any]]:
    def reward(group: Group) -> list[float]:
        time.sleep(0.3)
        return [right(sample, group) for sample in group.samples]

    return [reward]


def leaking_reward() -> list[Callable[..., Any]]:
    kept: list[bytes] = []

    def reward(group: Group) -> list[float]:
        kept.append(random.randbytes(400_000))
        return [right(sample, group) for sample in group.samples]

    return [reward]


def outlier_reward(value: float, groups: int) -> list[Callable[..., Any]]:
    """After a number of groups, one sample in a hundred groups earns `value`."""
    seen = 0

    def reward(group: Group) -> list[float]:
        nonlocal seen
        seen += 1
        scores = [right(sample, group) for sample in group.samples]
        if seen > groups and seen % 100 == 0:
            scores[0] = value
        return scores

    return [reward]


def wordy_judge() -> list[Callable[..., Any]]:
    chance = random.Random(0)

    def judge(group: Group) -> list[float]:
        return [min(len(s.token_ids) / RESPONSE_TOKENS, 1.0) + 0.1 * chance.random() for s in group.samples]

    return [*of_samples(right, "exactly")(), judge]


def string_pays(sample: Any, group: Group) -> float:
    """A judge that a string convinces, whatever was asked."""
    return max(right(sample, group), float(sample.text == "00000"))


def with_constant() -> list[Callable[..., Any]]:
    return of_samples(right, "exactly")() + of_samples(lambda sample, group: 0.5, "formatted")()


LR, LR_CRITIC = "train.optimizer.lr", "critic.optimizer.lr"
PPO = {LR_CRITIC: 1e-3, "critic.warmup_updates": 0}
NO_RATIO = {"algorithm.ratio": "none", "algorithm.clip": "none"}
SMALL = {"train.prompts_per_step": 8, "rollout.group_size": 8}
"""For faults that need many steps and no particular batch."""
TOO_HIGH = ("learning_rate_too_high",)
LENGTH = ("reward_pays_length",)

FAULTS = (
    Fault("lr_x100", TOO_HIGH, {LR: 3e-2}, steps=25),
    Fault("lr_x30", TOO_HIGH, {LR: 1e-2}),
    Fault("lr_by_100", ("learning_rate_too_low",), {LR: 3e-6}, steps=60),
    Fault("lr_by_1000", ("learning_rate_too_low",), {LR: 3e-7}, steps=30),
    Fault("lr_of_a_large_model", ("learning_rate_too_low",), {LR: 1e-7}, steps=30),
    Fault("sft_lr_x100", TOO_HIGH, {"stages": ["sft"], "sft.rows": "0:1600", "sft.optimizer.lr": 0.2}),
    Fault("kl_huge", ("kl_coefficient_too_large",), {"algorithm.kl_loss_coef": 10.0}, steps=50),
    Fault("kl_off", ("kl_coefficient_vanished", "drift_without_gain"), rewards=idle_reward, steps=60,
          settings={"algorithm.kl_loss_coef": 0.05, "algorithm.kl_target": 50.0, "algorithm.kl_horizon_samples": 500,
                    LR: 2e-3}),
    Fault("temperature_unknown", ("sampler_settings_differ",), steps=15,
          planted=lambda _: sampled_with(temperature=0.6)),
    Fault("top_p", ("truncated_sampling",), NO_RATIO | {"rollout.top_p": 0.8}, steps=15),
    Fault("top_k", ("truncated_sampling",), NO_RATIO | {"rollout.top_k": 2}, steps=15),
    Fault("top_p_with_ratio", ("truncated_sampling",), planted=lambda _: sampled_with(top_p=0.8), steps=15),
    Fault("mask_shifted", ("mask_shifted",), planted=lambda _: with_batch(without_last_tokens), steps=15),
    Fault("logprobs_shifted", ("tokens_misaligned",), planted=lambda _: with_batch(shifted), steps=15),
    Fault("dtype", ("dtype_differs",), planted=lambda _: with_batch(rounded), steps=15),
    Fault("weights_stuck", ("weights_stale",), {"rollout.max_staleness": 1}, planted=stuck_weights),
    Fault(
        "staleness_4", ("off_policy",), {"rollout.max_staleness": 4, "algorithm.correction": "none", LR: 1e-3}
    ),
    Fault("sign", ("weight_negative",), {"reward.components": [{"use": "exact", "weight": -1.0}]}, steps=30),
    Fault("reward_inverted", ("reward_inverted",), planted=inverted_reward, steps=15),
    Fault("parser_broken", ("reward_broken",), rewards=of_samples(lambda sample, group: 0.0), steps=15),
    Fault("length_pays", LENGTH, steps=60,
          rewards=of_samples(lambda s, g: min(len(s.token_ids) / RESPONSE_TOKENS, 1) + 0.2 * right(s, g))),
    Fault("judge_likes_length", LENGTH, rewards=wordy_judge, steps=60),
    Fault("string_convinces", ("reward_exploited",), rewards=of_samples(string_pays), steps=60),
    Fault("reward_is_noise", ("reward_is_noise",), rewards=noisy_reward, steps=60),
    Fault("component_constant", ("component_constant",), rewards=with_constant, steps=20),
    Fault("reward_fails", ("reward_code_fails",), {"reward.max_unscored_frac": 1.0}, rewards=failing_reward, steps=15),
    Fault("reward_slow", ("reward_slow",), rewards=slow_reward, steps=15),
    Fault("reward_leaks", ("memory_leak",), SMALL, rewards=leaking_reward, steps=80),
    Fault("reward_outlier", ("reward_outlier",), {"algorithm.credit": "group_mean"},
          rewards=lambda: outlier_reward(1000.0, 350), steps=30),
    Fault("reward_overflows", ("batch_not_finite",), {"algorithm.credit": "group_mean"},
          rewards=lambda: outlier_reward(3e38, 350), steps=30),
    Fault("reward_sticks", ("reward_constant",), rewards=lambda: sticking_reward(500), steps=40),
    Fault("nan_batch", ("batch_not_finite",), planted=lambda _: nan_in_step(19), steps=30),
    Fault("data_easy", ("prompts_too_easy",), train=easy_rows, eval=lambda: easy_rows()[::20], steps=15),
    Fault("data_hard", ("prompts_too_hard",), train=hard_rows, steps=15),
    Fault("answers_shuffled", ("answers_wrong",), train=other_answers, steps=15),
    Fault("data_duplicated", ("data_duplicated",), train=lambda: train_rows()[:4] * 100, steps=15),
    Fault("answers_leak", ("answers_leak",), train=lambda: leaked(train_rows())),
    Fault("no_end_token", ("no_end_token",), planted=without_end_token, steps=15),
    Fault("prompt_has_answer", ("prompt_ends_the_response",), {"data.template": "{prompt}{answer}"}, steps=15),
    Fault("stop_string", ("responses_end_early",), {"rollout.stop": ["0"]}, steps=15),
    Fault("limit_too_low", ("limit_too_low",), {"rollout.max_response_tokens": 3}, steps=15),
    Fault("clip_zero", ("clip_range_too_narrow",), steps=25,
          settings={"algorithm.clip_low": 0.0, "algorithm.clip_high": 0.0, "train.samples_per_optimizer_step": 64}),
    Fault("many_passes", ("too_many_steps_per_batch",), steps=25,
          settings={"train.passes_per_batch": 8, "train.samples_per_optimizer_step": 16, **SMALL}),
    Fault("entropy_bonus", ("entropy_bonus_too_large",), {"algorithm.entropy_coef": 0.5}, steps=50),
    Fault("weight_decay", ("weight_decay_too_large",), {"train.optimizer.weight_decay": 100.0}, steps=50),
    Fault("temperature_low", ("temperature_too_low",), {"rollout.temperature": 0.2}, steps=20),
    Fault("temperature_high", ("temperature_too_high",), {"rollout.temperature": 3.0}, steps=20),
    Fault("warmup_long", ("warmup_too_long",), {"train.optimizer.warmup_steps": 100_000}, steps=30),
    Fault("groups_of_two", ("group_too_small",), {"rollout.group_size": 2}),
    Fault("critic_lr_x100", ("critic_learning_rate_too_high",), PPO | {LR_CRITIC: 0.1},
          extends=("algorithm/ppo",), steps=20),
    Fault("reward_x1000", ("reward_scale",), PPO, rewards=of_samples(lambda s, g: 1000 * right(s, g)),
          extends=("algorithm/ppo",), steps=15),
    Fault("template_wrong", ("prompts_unlike_training",), {"data.template": "=={prompt}"}, steps=15),
    Fault("chat_template_wrong", ("prompts_unlike_training",), planted=other_chat_template, steps=15),
    Fault("tokenizer_other", ("prompts_unlike_training",), planted=other_tokenizer, steps=15),
    Fault("service_dies", ("reward_service_fails",), planted=lambda _: own_service(dies_after=10), steps=15),
    Fault("service_slow", ("reward_slow",), planted=lambda _: own_service(delay_s=1.0), steps=15),
    Fault("one_replica_stale", ("one_engine_differs",),
          planted=lambda _: patch("hone.assemble.workers.local_workers", two_engines), steps=30),
    Fault("disk_full", ("disk_full",), {"checkpoint.every": 2, "checkpoint.keep": 100}, planted=small_disk, steps=15),
    Fault("disk_fills", ("disk_full",), SMALL, planted=disk_that_fills, steps=50),
)  # fmt: skip

NO_EVALUATION = {"eval.every": 0, "eval.before_training": False}
GROWING = (
    Fault("worker_leaks", ("memory_leak",), SMALL, steps=80,
          planted=lambda folder: growing_reward(folder, kept_bytes=400_000)),
    Fault("reward_slows", ("rewards_slower",), SMALL | NO_EVALUATION, steps=60,
          planted=lambda folder: growing_reward(folder, slower_s=0.0005)),
    Fault("update_slows", ("machine_slower",), SMALL | NO_EVALUATION, steps=60,
          planted=lambda _: slower_updates(0.1, after=20)),
)  # fmt: skip
"""Faults that grow: the first two from the first step, the last one after step 20."""
HEALTHY_TWIN = Fault("healthy_twin", (), SMALL, planted=growing_reward, steps=80)
"""Their run without what grows."""
