"""Rules about processes, services and memory: the run does not compute what it should."""

from __future__ import annotations

import math
from itertools import pairwise

from hone.doctor.history import History
from hone.doctor.rule import AlarmRule, Cause, Condition, above, when
from hone.doctor.rules.common import MILES, NORM, OURS, PRIME, TOO_FAST

PARTS_OF_A_STEP = ("time/generate_s", "time/reward_s", "time/train_s", "time/publish_s")
HOST_MEMORY = "reports of host memory growth: verl issues 429, 630, 2950; limit ours"
PROCESS = "memory/<process>_process_rss_gib"


def _grows_step_by_step(metric: str) -> Condition:
    """Memory of a process, of any that fits the pattern."""

    def grows(h: History, name: str) -> bool:
        most = h.highest(name, 40)
        is_more = h.now(name) > max(1.05 * most, most + 0.05)
        return is_more and sum(b > a for a, b in pairwise(h.recent(name, 41))) >= 30

    return when(
        "5 % and 0.05 GiB more than ever until 40 steps before, growing in 30 of them",
        lambda h: any(grows(h, name) for name in h.names(metric)),
    )


def _has_grown(h: History, name: str) -> float:
    """GiB since 40 steps before."""
    most = h.highest(name, 40)
    return h.now(name) - most if most == most else -math.inf


def _grows_most(h: History, process: str) -> bool:
    """Of all processes this one has grown most."""
    return max(h.names(PROCESS), key=lambda name: _has_grown(h, name), default="") == PROCESS.replace(
        "<process>", process
    )


LIVENESS = (
    AlarmRule(
        name="gradient_not_finite",
        level="liveness",
        pattern="optimizer steps are skipped because the gradient is not finite",
        metrics=("train/skipped_steps",),
        when=above("train/skipped_steps", 0),
        of=(1, 1),
        causes=(
            TOO_FAST,
            Cause(
                name="batch_not_finite",
                what="a reward, logprob or advantage of this batch is not finite or too large for the arithmetic.",
                change="the component named in reward/<component>_max; algorithm.reward_clip bounds it",
                confirm="The samples of this step in samples/ hold an infinite or huge score. If all scores are usual "
                "and train/grad_norm rose before, the learning rate is the cause.",
                reads=(NORM, "train.optimizer.lr"),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="critic_gradient_not_finite",
        level="liveness",
        pattern="critic steps are skipped because the gradient is not finite",
        metrics=("critic/skipped_steps",),
        when=above("critic/skipped_steps", 0),
        of=(1, 1),
        causes=(
            Cause(
                name="critic_learning_rate_too_high",
                what="the critic's learning rate is too high, or the rewards are too large for it.",
                change="critic.optimizer.lr: a tenth of it; algorithm.normalize_rewards: true",
                confirm="critic/loss rose before the first skipped step.",
                reads=("critic/loss", "critic.optimizer.lr"),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="rewards_fail",
        level="liveness",
        pattern="a reward component fails to score samples",
        metrics=("reward/<component>_fault_frac", "rollout/unscored_frac"),
        when=above("reward/<component>_fault_frac", 0.05),
        causes=(
            Cause(
                name="reward_service_fails",
                what="requests to the component's service fail or get no valid response.",
                change="services.<name>: more replicas or a longer timeout; look at logs/ of the service",
                confirm="hone status RUN_DIR shows the service's state; its log has the error.",
                applies=lambda h: any(
                    h.mean(name, 10) > 0
                    for kind in ("failed", "given_up")
                    for name in h.names(f"reward/<component>_http_{kind}")
                ),
                reads=("reward/<component>_http_failed", "reward/<component>_http_given_up"),
            ),
            Cause(
                name="reward_code_fails",
                what="the component raises errors, or exceeds its timeout_s, on some samples.",
                change="the component's code, or reward.components.timeout_s",
                confirm="logs/training.log names the most frequent error; hone check RUN.yaml tries the component on "
                "real rows.",
            ),
        ),
        source=f"errors above 5 % sustained: {PRIME}; miles",
    ),
    AlarmRule(
        name="samples_unscored",
        level="liveness",
        pattern="samples have no reward, though no single component fails often",
        metrics=("rollout/unscored_frac",),
        when=above("rollout/unscored_frac", 0.05),
        silenced_by=("rewards_fail", "groups_lost"),
        causes=(
            Cause(
                name="reward_code_fails",
                what="several components, or several services of them, each fail on a few samples.",
                change="the components' code, or reward.components.timeout_s",
                confirm="logs/training.log names the most frequent error; the shares of reward/<component>_fault_frac "
                "add up to this one. If they are 0, the samples themselves failed.",
                applies=lambda h: any(h.mean(name, 5) > 0 for name in h.names("reward/<component>_fault_frac")),
                reads=("reward/<component>_fault_frac",),
            ),
            Cause(
                name="environment_fails",
                what="the environment raises errors or exceeds its timeout, so the sample has no end to score.",
                change="the environment's code, or rollout.environment.timeout_s",
                confirm="logs/training.log names the most frequent error. Without the environment no sample is lost.",
                applies=lambda h: bool(h.names("rollout/turns_mean")),
                reads=("rollout/turns_mean", "rollout.environment.timeout_s"),
            ),
            Cause(
                name="samples_fail",
                what="samples failed before they were scored, or their rows do not have what the reward needs.",
                change="data.train: the rows that logs/training.log names",
                confirm="samples/ has the fault of each sample; hone check RUN.yaml tries the reward on real rows.",
            ),
        ),
        source=f"errored or empty samples above 5 % sustained: {PRIME}",
    ),
    AlarmRule(
        name="groups_lost",
        level="liveness",
        pattern="whole groups are replaced because too few of their samples could be scored",
        metrics=("rollout/groups_dropped",),
        when=when(
            "above a fifth of train.prompts_per_step, with algorithm.drop_uninformative off",
            lambda h: (
                h.mean("rollout/groups_dropped", 5) > 0.2 * h.number("train.prompts_per_step")
                and not h.key("algorithm.drop_uninformative")
            ),
        ),
        silenced_by=("rewards_fail",),
        causes=(
            Cause(
                name="reward_code_fails",
                what="a reward component raises errors, or exceeds its timeout, for whole groups.",
                change="the component's code, or reward.components.timeout_s",
                confirm="logs/training.log names the most frequent error. If a service is behind it, hone status "
                "RUN_DIR shows its state.",
                reads=("train.prompts_per_step", "reward.min_valid_per_group"),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="step_stalls",
        level="liveness",
        pattern="a step or a part of it took half an hour or more and six times the usual",
        metrics=("time/step_s", *PARTS_OF_A_STEP),
        when=when(
            "or one of its parts above 1800 and above 6 times its median of the 50 steps before",
            lambda h: any(
                h.now(name) > 1800 and h.now(name) > 6 * h.median(name, 50)
                for name in ("time/step_s", *PARTS_OF_A_STEP)
            ),
        ),
        of=(1, 1),
        causes=(
            Cause(
                name="reward_stalls",
                what="the rewards of that step took most of the time.",
                change="reward.components.timeout_s, services.<name>.silence_timeout_s",
                confirm="trace.json shows which component was waited for.",
                applies=lambda h: h.now("time/reward_s") > 0.5 * h.now("time/step_s"),
            ),
            Cause(
                name="sampling_stalls",
                what="the samples of that step took most of the time: an engine hangs, or a response never ends.",
                change="rollout.timeout_s: below the observed time, so that a stuck group ends",
                confirm="hone status RUN_DIR shows replicas that restart; engine/<engine>_queue_peak of one alone is "
                "large.",
                applies=lambda h: h.now("time/generate_s") > 0.5 * h.now("time/step_s"),
            ),
            Cause(
                name="training_stalls",
                what="the update, or publishing its weights, took most of the time: a rank, a disk or the network.",
                change="cluster.call_timeout_s: below the observed time, so that a stuck rank is restarted",
                confirm="trace.json shows which role was busy: a rank that waits for another, or the transport.",
            ),
        ),
        source=f"6 times its median and 30 minutes: {MILES}",
    ),
    AlarmRule(
        name="engine_lost",
        level="liveness",
        pattern="requests are repeated because an engine failed",
        metrics=("engine/requeued", "engine/replicas_up"),
        when=above("engine/requeued", 0),
        of=(2, 10),
        causes=(
            Cause(
                name="engine_fails",
                what="an engine dies or hangs repeatedly, most often out of memory.",
                change="cluster.engines.gpu_memory_utilization: lower",
                confirm="hone status RUN_DIR names the replica and its last error.",
                reads=("engine/replicas_up",),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="disk_nearly_full",
        level="liveness",
        pattern="the disk of the run's folder is nearly full",
        metrics=("memory/disk_free_gib", "memory/disk_checkpoint_gib", "memory/samples_mib"),
        when=when(
            "below two checkpoints, or below what has been used since steps 5 to 20",
            lambda h: (
                h.now("memory/disk_free_gib") < 2 * h.now("memory/disk_checkpoint_gib")
                or h.now("memory/disk_free_gib") < h.base("memory/disk_free_gib") - h.now("memory/disk_free_gib")
            ),
        ),
        of=(2, 5),
        causes=(
            Cause(
                name="disk_full",
                what="free space is about to run out, and the next checkpoint cannot be written then.",
                change="free space on that disk; or run.dir on a larger one, checkpoint.keep lower, "
                "observe.samples_max_mib lower",
                confirm="df -h RUN_DIR and du -sh RUN_DIR/*: if the run's own folder is small, something else fills "
                "the disk.",
                reads=("checkpoint.keep", "checkpoint.every"),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="memory_grows",
        level="liveness",
        pattern="resident memory of the main process grows step by step",
        metrics=("memory/rss_gib",),
        when=_grows_step_by_step("memory/rss_gib"),
        of=(3, 3),
        after=60,
        causes=(
            Cause(
                name="memory_leak",
                what="something in the process keeps what it made: a reward, an environment or a callback that runs "
                "in it.",
                change="the component: keep nothing between calls; a user's function runs in a process of its own",
                confirm="Without the suspected component (or with reward.workers processes) memory/rss_gib is flat.",
            ),
        ),
        source=HOST_MEMORY,
    ),
    AlarmRule(
        name="process_memory_grows",
        level="liveness",
        pattern="resident memory of another process of the run grows step by step",
        metrics=(PROCESS,),
        when=_grows_step_by_step(PROCESS),
        of=(3, 3),
        after=60,
        worst=_has_grown,
        causes=(
            Cause(
                name="memory_leak",
                what="a reward function keeps what it made: a list, a cache or a client that grows with every call.",
                change="the function of reward.components: keep nothing between calls, or bound its cache",
                confirm="Without the suspected component memory/reward_workers_process_rss_gib is flat. If it still "
                "grows, it is another function of the same processes.",
                applies=lambda h: _grows_most(h, "reward_workers"),
            ),
            Cause(
                name="memory_leak",
                what="an environment keeps what it made after its episode has ended.",
                change="the environment of rollout.environment.use: keep nothing outside the object of the episode",
                confirm="With environments that do nothing memory/environments_process_rss_gib is flat.",
                applies=lambda h: _grows_most(h, "environments"),
            ),
            Cause(
                name="memory_leak",
                what="an engine or a rank keeps host memory: its caches, pinned memory, or a leak of a library.",
                change="a fixed version of the library that the process runs; until then --resume, which begins with "
                "new processes",
                confirm="Those of other engines or ranks grow alike: a library or a setting. If one alone grows, "
                "restart it.",
                reads=("memory/rss_gib",),
            ),
        ),
        source=HOST_MEMORY,
    ),
)
