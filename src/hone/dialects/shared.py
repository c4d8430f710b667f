"""What the tables of several tools share: paths, rewards by data set, placement."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from hone.dialects.verdict import ForeignJob, KeyVerdict, Row, UnknownValue, by, names, refused, whole

PIPELINE = "pipeline parallelism: Hone shards weights over devices (FSDP2) instead; `hone plan` says whether it fits"
EXPERTS = "expert parallelism: Hone shards experts like other weights; `hone plan` says whether it fits"
PICTURES = "images in prompts are not supported yet: train on text, or keep this run where it is"
ENVIRONMENT = "code of yours that the command does not show: write it as an environment, rollout.environment.use"
CONVERTED = "a converted checkpoint: Hone reads the Hugging Face directory of model.path itself"
MEMORY = "changes memory and speed, not results; `hone plan --preset recommended` finds a value"
LOGGING = "logging: metrics.jsonl, samples, a report and TensorBoard files are always written"
PROFILER = "profiling: every run writes trace.json, for Perfetto"
RESUME = "resuming is a command: `hone train --resume RUN`"
CUT = "samples from a cut distribution, while the ratio is taken with the whole one: biased; nearest: "
RUNTIME = "environment of the job: set it where `hone train` is started"

REWARDS_BY_DATA: tuple[tuple[str, dict[str, Any], str], ...] = (
    (r"gsm8k", {"use": "gsm8k"}, "the data source's reward: the number after ####"),
    (
        r"dapo|aime|math.?17k|amc|numina|math|deepscaler|omni|orz|polaris|open.?r1|skywork|big.?math",
        {"use": "math"},
        "the data source's reward: a boxed answer, compared as mathematics; 0 and 1 where some give -1 and 1",
    ),
)


def reward_of_data(path: str) -> tuple[dict[str, Any], str] | None:
    """The reward that a data set's name implies, and why."""
    for pattern, component, why in REWARDS_BY_DATA:
        if re.search(pattern, path.lower()):
            return dict(component), why
    return None


def cluster(
    job: ForeignJob, nodes: Any, per_node: Any, pools: dict[str, Any] | None = None
) -> Iterator[tuple[str, KeyVerdict]]:
    """Settings of a cluster of several devices; none for one device."""
    if not isinstance(nodes, int) or not isinstance(per_node, int) or nodes * per_node < 1:
        return
    if nodes * per_node > 1:
        settings: dict[str, Any] = {
            "cluster.backend": "ray",
            "cluster.nodes": nodes,
            "cluster.devices_per_node": per_node,
        }
        if nodes > 1:
            settings["cluster.address"] = "auto"
        if pools:
            settings["cluster.pools"] = pools
        yield "devices", KeyVerdict("placement", settings, f"{nodes} x {per_node} devices")


def samples_per_step(job: ForeignJob, prompts: int, group: int, per_optimizer_step: int) -> KeyVerdict:
    """`train.samples_per_optimizer_step`, from samples; nothing where it is the whole batch."""
    total = prompts * group
    if per_optimizer_step >= total:
        return KeyVerdict("mapped", {}, "one optimizer step per update, as is Hone's default")
    if total % per_optimizer_step:
        fits = max(n for n in range(1, per_optimizer_step + 1) if total % n == 0)
        return refused(f"{per_optimizer_step} samples do not divide the {total} of an update; nearest: {fits}")
    return KeyVerdict("mapped", {"train.samples_per_optimizer_step": per_optimizer_step}, "in samples of all devices")


def width(key: str) -> Row:
    """A number of devices that divide something; 1 divides nothing and is left out."""
    return by(
        lambda job, value: KeyVerdict("placement", {} if whole(value) <= 1 else {key: whole(value)}),
        key,
        kind="placement",
    )


def adapter(
    key: str, convert: Callable[[Any], Any], has: Callable[[ForeignJob], Any], *, without: str = "no adapter"
) -> Row:
    """A setting of a LoRA adapter, for jobs that have one; `convert` gives None where Hone's default is meant."""

    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if not has(job):
            return KeyVerdict("automatic", {}, without)
        converted = convert(value)
        return KeyVerdict("mapped", {} if converted is None else {key: converted})

    return by(read, key)


def targets(value: Any) -> list[str] | None:
    """Modules with an adapter; None for all linear ones, as is Hone's default."""
    return None if value in (None, "all-linear", ["all-linear"]) else names(value)


def unknown_if_hole(job: ForeignJob, *keys: str) -> str | None:
    """The first of these keys that is a hole."""
    for key in keys:
        try:
            job.get(key)
        except UnknownValue:
            return key
    return None
