"""Advice on the time of steps: what the run waits for, and what has become slower."""

from __future__ import annotations

import math
import statistics

from hone.doctor.history import History
from hone.doctor.rule import AlarmRule, Cause, Limit, below, when
from hone.doctor.rules.common import LENGTH, MILES, OURS
from hone.doctor.rules.judge import JUDGE_CACHE, JUDGE_CACHE_FULL, JUDGE_PROMPTS_DIFFER_EARLY
from hone.doctor.rules.liveness import PARTS_OF_A_STEP


def _grown_s(h: History, name: str) -> float:
    """Seconds that the median of the last ten steps is above the mean of steps 5 to 20."""
    return statistics.median(h.recent(name, 10) or [math.nan]) - h.base(name)


def _reward_slows(h: History) -> bool:
    """Rewards take 1.5 times as long as 100 steps before, or as in the first steps."""
    seconds = h.recent("time/reward_s", 100)
    return len(seconds) >= 10 and sum(seconds[-5:]) > 1.5 * sum(seconds[:5])


def _is_most_of_the_growth(h: History, part: str) -> bool:
    return _grown_s(h, f"time/{part}_s") > 0.5 * _grown_s(h, "time/step_s")


SPEED = (
    AlarmRule(
        name="rewards_slow",
        level="tuning",
        pattern="most of the time of a step is spent waiting for rewards",
        metrics=("time/reward_s", "time/step_s"),
        when=when(
            "more than half of time/step_s, and 0.1 s",
            lambda h: h.now("time/reward_s") > max(0.5 * h.now("time/step_s"), 0.1),
        ),
        of=(8, 10),
        after=3,
        causes=(
            JUDGE_CACHE_FULL,
            JUDGE_PROMPTS_DIFFER_EARLY,
            Cause(
                name="rewards_slower",
                what="the rewards take longer from step to step.",
                change="the reward: what grows with each call; for a service more replicas",
                confirm="time/reward_s rises while rollout/response_tokens_mean does not. If both rise, a judge has "
                "more to read.",
                applies=_reward_slows,
                reads=(LENGTH,),
            ),
            Cause(
                name="judge_busy",
                what="a judge has room in its cache and shares its prompts: it has more to write than its devices can.",
                change="args of the judge: fewer votes, a shorter response_length; services.<name>.devices: more; "
                "rollout.max_staleness: 1 overlaps it",
                confirm="Half the votes take half the time/reward_s.",
                applies=lambda h: bool(h.names(JUDGE_CACHE)),
                reads=(JUDGE_CACHE, "rollout.max_staleness"),
            ),
            Cause(
                name="reward_slow",
                what="scoring is slower than sampling and training together.",
                change="reward.workers: more processes; for a service more replicas; rollout.max_staleness: 1 overlaps "
                "it",
                confirm="trace.json shows each component's time. If they wait for each other, more workers help; if "
                "the service is busy, more replicas do.",
                reads=("reward.workers", "rollout.max_staleness"),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="steps_slower",
        level="tuning",
        pattern="a step takes several times as long as it did",
        metrics=("time/step_s", *PARTS_OF_A_STEP),
        when=when(
            "the median of ten above 3 times its mean of steps 5 to 20, and 1 s more",
            lambda h: _grown_s(h, "time/step_s") > max(2 * h.base("time/step_s"), 1),
            Limit("time/step_s", high=3, of_baseline=True),
        ),
        of=(8, 10),
        after=20,
        silenced_by=("step_stalls",),
        causes=(
            Cause(
                name="rewards_slower",
                what="the rewards take most of the added time.",
                change="the reward: what grows with each call; for a service more replicas",
                confirm="trace.json has each component's time. If the responses are longer, so is what a judge reads.",
                applies=lambda h: _is_most_of_the_growth(h, "reward"),
                reads=(LENGTH,),
            ),
            Cause(
                name="responses_longer",
                what="responses are longer, so sampling and training take longer.",
                change="rollout.max_response_tokens, algorithm.overlong_buffer_frac: 0.2; nothing where right answers "
                "need the length",
                confirm="rollout/response_tokens_mean grew with time/step_s. If it did not, something else slows "
                "sampling.",
                applies=lambda h: h.mean(LENGTH, 10) > 1.5 * h.base(LENGTH),
                reads=(LENGTH,),
            ),
            Cause(
                name="sampling_slower",
                what="sampling takes most of the added time, and responses are as long as before: an engine is slow, "
                "or shares its machine.",
                change="what else runs on the engines' devices; restart the slow engine",
                confirm="engine/<engine>_queue_peak of one engine alone is large. If all are, compare "
                "engine/replicas_up with before.",
                applies=lambda h: _is_most_of_the_growth(h, "generate"),
                reads=("engine/replicas_up", "engine/<engine>_queue_peak"),
            ),
            Cause(
                name="machine_slower",
                what="every part takes longer, or the update or its publishing does: something else uses the machine.",
                change="what else runs there (hone doctor without a run shows the load)",
                confirm="time/train_s grew though train/tokens did not.",
                reads=("train/tokens",),
            ),
        ),
        source="time per step is among the figures to watch in common guides; 3 times ours",
    ),
    AlarmRule(
        name="samples_late",
        level="tuning",
        pattern="the trainer waits for samples most of the time, although they are drawn ahead",
        metrics=("time/generate_s", "time/step_s", "rollout/groups_ready", "rollout/groups_in_flight"),
        when=when(
            "more than half of time/step_s, and 0.1 s, with rollout.max_staleness",
            lambda h: (
                h.number("rollout.max_staleness") > 0
                and h.now("time/generate_s") > max(0.5 * h.now("time/step_s"), 0.1)
            ),
        ),
        of=(8, 10),
        after=3,
        silenced_by=("rewards_slow",),
        causes=(
            Cause(
                name="sampling_binds",
                what="sampling takes longer than training, and bounds the speed of the run.",
                change="cluster.engines: more of the devices, where cluster.trainer can spare them; "
                "rollout.max_concurrent_samples: larger, while the engines' caches have room",
                confirm="hone plan RUN.yaml has the shares of both that fit. If engine/<engine>_queue_peak of one "
                "replica alone is large, its machine is slow.",
                reads=("engine/<engine>_queue_peak", "engine/<engine>_prefix_hit_frac", "rollout.max_staleness"),
            ),
        ),
        source="waiting of the trainer names the role that binds: prime-rl docs/training.md; half ours",
    ),
    AlarmRule(
        name="samples_pile_up",
        level="tuning",
        pattern="scored groups wait for the trainer",
        metrics=("rollout/groups_ready", "time/step_s"),
        when=when(
            "all that rollout.max_staleness admits, on average of ten",
            lambda h: (
                h.mean("rollout/groups_ready", 10)
                >= 0.9 * h.number("rollout.max_staleness") * h.number("train.prompts_per_step")
                > 0
            ),
        ),
        of=(8, 10),
        after=3,
        causes=(
            Cause(
                name="training_binds",
                what="training takes longer than sampling: samples become old while engines wait.",
                change="cluster.trainer: more of the devices; or rollout.max_staleness: lower, as samples are ready "
                "long before they are needed",
                confirm="time/train_s is nearly time/step_s, and hone plan RUN.yaml has the shares that fit.",
                reads=("time/train_s", "rollout/staleness_mean", "rollout.max_staleness"),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="publishing_slow",
        level="tuning",
        pattern="publishing weights takes a large part of a step",
        metrics=("time/publish_s", "time/step_s"),
        when=when(
            "more than a quarter of time/step_s, and 1 s",
            lambda h: h.now("time/publish_s") > max(0.25 * h.now("time/step_s"), 1.0),
        ),
        of=(8, 10),
        after=3,
        causes=(
            Cause(
                name="publishing_slow",
                what="weights reach the engines slowly.",
                change="cluster.transport: a faster one (docs/publishing.md)",
                confirm="engine/published_over_least above 1 means that bytes are moved more often than needed.",
                reads=("engine/published_mib", "engine/published_over_least"),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="device_idle",
        level="tuning",
        pattern="the GPU is idle a large part of the time",
        metrics=("memory/device_busy_frac",),
        when=below("memory/device_busy_frac", 0.8, mean=10),
        of=(8, 10),
        after=10,
        causes=(
            Cause(
                name="waits_for_rewards",
                what="it waits for rewards.",
                change="rollout.max_staleness: 1; reward.workers: more",
                confirm="time/reward_s is the largest part of time/step_s.",
                applies=lambda h: h.mean("time/reward_s", 10) > 0.4 * h.mean("time/step_s", 10),
                reads=("time/reward_s", "time/step_s"),
            ),
            Cause(
                name="batches_too_small",
                what="too little is computed at once.",
                change="rollout.max_concurrent_samples, train.tokens_per_microbatch: larger (hone plan RUN.yaml)",
                confirm="memory/device_frac is low. If it is high, compare with the shares of hone plan.",
                reads=("memory/device_frac",),
            ),
        ),
        source="busy 80 % of the time or more is usual advice",
    ),
    AlarmRule(
        name="training_far_from_peak",
        level="tuning",
        pattern="updates use little of the devices' arithmetic",
        metrics=("train/mfu",),
        when=below("train/mfu", 0.15, mean=10),
        of=(8, 10),
        after=10,
        causes=(
            Cause(
                name="microbatches_small",
                what="microbatches are too small to fill the devices.",
                change="train.tokens_per_microbatch: larger; plan.autotune: true",
                confirm="memory/device_frac is low; train/microbatches is above one for each device.",
                applies=lambda h: h.mean("memory/device_frac", 10) < 0.7,
                reads=("memory/device_frac", "train.tokens_per_microbatch"),
            ),
            Cause(
                name="passes_slow",
                what="passes take longer than their arithmetic: they wait for weights, memory or the host.",
                change="run.fused_kernels: true; cluster.trainer: sharded over fewer devices",
                confirm="make gpu measures each part on this machine; hone plan RUN.yaml says what it expects.",
                reads=("time/train_s", "run.fused_kernels"),
            ),
        ),
        source=f"below 0.15: {MILES}",
    ),
)
