"""Why a run failed: the alarm `run_failed`, made from the error that ended it. Metrics say nothing of the last step."""

from __future__ import annotations

import re

from hone.doctor.rule import Cause
from hone.doctor.rules.common import LESS_JUDGE_MEMORY
from hone.doctor.watch import Alarm

RUN_FAILED = "run_failed"
FAILURES: tuple[tuple[str, Cause], ...] = (
    (
        "No space left|Disk quota exceeded",
        Cause(
            name="disk_full",
            what="the disk of the run's folder is full.",
            change="free space on that disk; or run.dir on a larger one, checkpoint.keep lower; then --resume",
            confirm="df -h RUN_DIR. If there is room, look for a quota.",
        ),
    ),
    (
        "^RewardError.*could not be scored.*https?://",
        Cause(
            name="reward_service_fails",
            what="a reward service is gone, or gives no valid response.",
            change="start the service again (its URL is in the error), then --resume; services.<name> lets the run "
            "start, watch and restart it",
            confirm="Ask the URL by hand (curl): if it answers, compare its log with the time of the first failure.",
        ),
    ),
    (
        "^RewardError.*could not be scored",
        Cause(
            name="reward_code_fails",
            what="a reward component raises errors, or exceeds its timeout, on too many samples.",
            change="the component that the error names, or reward.components.timeout_s; then --resume",
            confirm="hone check RUN.yaml tries the component on real rows.",
        ),
    ),
    (
        "^RewardError.*were dropped",
        Cause(
            name="groups_without_signal",
            what="almost every group has equal rewards, so there is nothing to train on.",
            change="prompts that are solved in part; rollout.group_size: larger; algorithm.max_dropped_per_kept",
            confirm="rollout/all_wrong_group_frac and all_right_group_frac of the last steps; an alarm that began "
            "before says why.",
        ),
    ),
    (
        "^ServiceError.*(out of memory|OutOfMemoryError|No available memory|larger than the available KV cache)",
        Cause(
            name="service_out_of_memory",
            what="a service of the run file needs more device memory than there is.",
            change=LESS_JUDGE_MEMORY + ". Where its log says that the cache has no memory: a larger "
            "gpu_memory_utilization or a shorter max_model_len",
            confirm="The end of its log, in the error, says what was allocated; nvidia-smi names what else is on its "
            "devices.",
        ),
    ),
    (
        "^ServiceError",
        Cause(
            name="service_fails",
            what="a service of the run file cannot be started or kept running.",
            change="services.<name>: what the end of its log, in the error, asks for",
            confirm="logs/ has the whole log of the service.",
        ),
    ),
    (
        "^GateError",
        Cause(
            name="sampler_and_trainer_differ",
            what="sampler and trainer disagreed before the first update; the error names the likely cause.",
            change="what the error names",
            confirm="The first-step gate passes.",
        ),
    ),
    (
        "^MemoryExhausted|^MemoryError|out of memory",
        Cause(
            name="memory_exhausted",
            what="memory ran out, and no setting was left to lower.",
            change="hone plan RUN.yaml --preset memory proposes settings that fit",
            confirm="hone plan --compare RUN_DIR shows which phase is largest.",
        ),
    ),
    (
        "^EngineError.*samples from another policy",
        Cause(
            name="one_engine_differs",
            what="an engine samples from other weights than those that it was sent.",
            change="restart that engine: then --resume; or its software, dtype and quantisation as of the others",
            confirm="Its engine/<engine>_mismatch_gap alone is large. If all engines have the gap, it is a setting.",
        ),
    ),
    (
        "^(EngineError|ClusterError|ClusterLost)",
        Cause(
            name="process_lost",
            what="an engine, a rank or Ray itself was lost or stuck.",
            change="what the error names; then --resume",
            confirm="hone status RUN_DIR names the process and its last error; logs/ has its output.",
        ),
    ),
    (
        "",
        Cause(
            name="error",
            what="the error that ended the run, as it says itself.",
            change="what the error names; then --resume",
            confirm="The end of logs/training.log.",
        ),
    ),
)
"""Pattern of an error, `Class: message`, and its cause; the first that is found is named."""


def failure_alarm(error: str, *, stage: str, step: int) -> Alarm:
    """The alarm of a run that `error`, `Class: message`, ended in this step."""
    cause = next(cause for pattern, cause in FAILURES if re.search(pattern, error, re.DOTALL))
    return Alarm(
        name=RUN_FAILED,
        level="liveness",
        stage=stage,
        since=step,
        step=step,
        metric="error",
        pattern="an error ended the run",
        cause=cause.name,
        what=cause.what,
        evidence=(error,),
        change=cause.change,
        confirm=cause.confirm,
        source="the error",
    )
