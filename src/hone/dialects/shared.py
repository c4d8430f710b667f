"""What the tables of several tools share: reasons, rewards by data set, placement, and rules with the same meaning."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from hone.config.rules.rules import MAX_NAME
from hone.dialects.rows import JobCondition, by, to, when
from hone.dialects.values import names, number, positive, text, truth, whole, zero_if_off
from hone.dialects.verdict import ForeignJob, KeyVerdict, Row, UnknownValue, default, nothing, placed, put, refused

PIPELINE = "pipeline parallelism: Hone shards weights over devices (FSDP2) instead; `hone plan` says whether it fits"
EXPERTS = "expert parallelism: Hone shards experts like other weights; `hone plan` says whether it fits"
ENVIRONMENT = "code of yours that the command does not show: write it as an environment, rollout.environment.use"
CONVERTED = "a converted checkpoint: Hone reads the Hugging Face directory of model.path itself"
MEMORY = "changes memory and speed, not results; `hone plan --preset recommended` finds a value"
LOGGING = "logging: metrics.jsonl, samples, a report and TensorBoard files are always written"
PROFILER = "profiling: every run writes trace.json, for Perfetto"
RESUME = "resuming is a command: `hone train --resume RUN`"
CUT = "samples from a cut distribution, while the ratio is taken with the whole one: biased; nearest: "
RUNTIME = "environment of the job: set it where `hone train` is started"
SHUFFLED = "samples of an update are always shuffled over its optimizer steps, by `seed`"
AS_READ = "rows are tokenised as they are read"
WARM_UP = "optimizer steps; one step ahead of TRL's, which starts at 0"
CONSTANT = "unused by a constant schedule"
NO_CRITIC = "no critic with this estimator"
NO_K1 = "k1 has no gradient on average in a loss; nearest: k2 or k3"
ADAMW = "the optimizer is AdamW; nearest: leave it out and tune the learning rate anew"
NO_AUX_LOSS = (
    "a mean over layers here, only where the model's class has one; nearest: 0, as RL of experts usually has it"
)
QUANTISED = "quantised training is not supported; nearest: lora.rank without it"
TEMPLATE_FILE = "write the template to a file and set model.chat_template"
AS_THEY_ARE = "the trainer's weights are published as they are"
ROUTER = "recorded where algorithm.replay_routing is set"
NO_CORRECTION = default({"algorithm.correction": "none"}, "no correction between sampler and trainer")
VLLM = placed({"cluster.engines.use": "vllm"}, "samples are drawn with vLLM")
DEVICES = by(lambda job, value: placed({}, "see the line `devices`"), "cluster.pools", kind="placement")

REWARDS_BY_DATA: tuple[tuple[str, dict[str, Any], str], ...] = (
    (r"gsm8k", {"use": "gsm8k"}, "the data source's reward: the number after ####"),
    (r"geo3k|geometry.?3k", {"use": "geo3k"}, "the data source's reward: a boxed answer, and the form"),
    (
        r"eurus|prime.?rl|numina",
        {"use": "prime_math"},
        "the data source's reward: a boxed answer or one in words, compared as mathematics",
    ),
    (
        r"dapo|aime|math.?17k",
        {"use": "math_dapo"},
        "the data source's reward: the answer behind `Answer:`, 1 or -1",
    ),
    (
        r"amc|math|deepscaler|omni|orz|polaris|open.?r1|skywork|big.?math",
        {"use": "math"},
        "the data source's reward: a boxed answer, compared as mathematics",
    ),
)


def reward_of_data(path: str) -> tuple[dict[str, Any], str] | None:
    """The reward that a data set's name implies, and why."""
    for pattern, component, why in REWARDS_BY_DATA:
        if re.search(pattern, path.lower()):
            return dict(component), why
    return None


def processes(job: ForeignJob) -> int:
    """Processes that a launcher starts, in the flag of that name."""
    return whole(job.get("num_processes", 1) or 1)


def cluster(nodes: Any, per_node: Any, pools: dict[str, Any] | None = None) -> Iterator[tuple[str, KeyVerdict]]:
    """Settings of a cluster of several devices; none for one device."""
    if not isinstance(nodes, int) or not isinstance(per_node, int) or nodes * per_node <= 1:
        return
    settings: dict[str, Any] = {"cluster.backend": "ray", "cluster.nodes": nodes, "cluster.devices_per_node": per_node}
    if nodes > 1:
        settings["cluster.address"] = "auto"
    if pools:
        settings["cluster.pools"] = pools
    yield "devices", placed(settings, f"{nodes} x {per_node} devices")


def samples_per_step(prompts: int, group: int, per_optimizer_step: int, note: str = "") -> KeyVerdict:
    """`train.samples_per_optimizer_step`, from samples; nothing where it is the whole batch."""
    total = prompts * group
    if per_optimizer_step >= total:
        return put({}, "one optimizer step per update, as is Hone's default")
    if total % per_optimizer_step:
        fits = max(n for n in range(1, per_optimizer_step + 1) if total % n == 0)
        return refused(f"{per_optimizer_step} samples do not divide the {total} of an update; nearest: {fits}")
    return put({"train.samples_per_optimizer_step": per_optimizer_step}, f"{note}in samples of all devices")


# ---- rows with the same meaning in several tools


def shuffled(*, off: bool = False) -> Row:
    """Whether rows are shuffled; `off`: the key turns it off."""
    return to("data.order", lambda value: "shuffled" if truth(value) != off else "source", "inverted" if off else "")


def width(key: str) -> Row:
    """A number of devices that divide something; 1 divides nothing and is left out."""
    return to(key, lambda value: whole(value) if whole(value) > 1 else None, kind="placement")


def engine(key: str, convert: Callable[[Any], Any] = whole) -> Row:
    """A setting of vLLM; -1 is its own default."""
    return to(f"cluster.engines.{key}", lambda value: None if value == -1 else convert(value))


def offload(*what: str) -> Row:
    key = "cluster.trainer.offload"
    return to(key, lambda value: list(what) if truth(value) else None, MEMORY, kind="placement")


def cut(key: str, off: float, *others: float) -> Row:
    """A bound of the sampler's distribution, refused unless it is off."""

    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        is_off = value is None or number(value) in (off, *others)
        return nothing("off") if is_off else refused(f"{CUT}{key} = {off:g}")

    return by(read, key)


def adapter(has: JobCondition) -> Callable[..., Row]:
    """Maker of rows of a LoRA adapter, for jobs that have one."""
    return lambda key, convert, why="no adapter": when(has, why, to(f"lora.{key}", convert))


def targets(value: Any) -> list[str] | None:
    """Modules with an adapter; None for all linear ones, as is Hone's default."""
    megatron = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    return None if value in ("all-linear", ["all-linear"], "all", megatron) else [n.strip(",") for n in names(value)]


def checkpointing() -> Row:
    return to("train.activation_checkpointing", lambda value: "full" if truth(value) else None)


def bfloat16() -> Row:
    return to("run.precision", lambda value: "bfloat16" if truth(value) else None)


def pictures() -> Row:
    """A column of pictures, or several."""
    return to("data.image_columns", lambda value: names(value) or None, "for models that see pictures")


def tower(sees: JobCondition, has_adapter: JobCondition) -> Row:
    """Whether a vision tower is frozen, which is the default here and not elsewhere."""

    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if truth(value) or has_adapter(job):
            return nothing("frozen, as by default, and always beside an adapter")
        return put({"model.freeze": []}, "the vision tower is trained too")

    return when(sees, "no images", by(read, "model.freeze"))


def run_name() -> Row:
    """The run's name, in what a folder's name may have."""

    def convert(value: Any) -> str | None:
        kept = "".join(char if char.isalnum() or char in "-_.+= " else "-" for char in str(value))[:MAX_NAME]
        return kept.lstrip("-.+= ") or None

    return _or_ours(to("run.name", convert), "a name that the script makes: the run file's own")


def folder() -> Row:
    """The run's folder; one that holds other things is left to Hone's own."""

    def convert(value: Any) -> str | None:
        kept = text(value)
        return None if "{" in kept or kept.rstrip("/") in ("", ".", "..", "~") else kept

    return _or_ours(to("run.dir", convert), "a folder that the script makes: runs/ and the run's name")


def _or_ours(row: Row, why: str) -> Row:
    """A row whose value need not be known."""

    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        try:
            return row.read(job, value)
        except UnknownValue:
            return nothing(why)

    return Row(row.kind, row.to, read)


def slice_of_rows(key: str) -> Row:
    return to(key, lambda value: f"0:{positive(value)}" if positive(value) else None, "a slice of the rows")


def critic_rows(uses_critic: JobCondition, rows: dict[str, Row]) -> dict[str, Row]:
    return {name: when(uses_critic, NO_CRITIC, row) for name, row in rows.items()}


def floor(lr: str, key: str) -> Row:
    """The lowest learning rate, which Hone has as a fraction of the highest, the value of `lr`."""
    return by(lambda job, v: put({key: number(v) / number(job.get(lr, 1e-6))}, "as a fraction of lr"), key)


def overlong(buffer_tokens: Any, limit_tokens: Any, penalty: Any) -> KeyVerdict:
    """The soft penalty of long responses, whose buffer Hone has as a fraction of the limit."""
    frac = number(buffer_tokens) / number(limit_tokens)
    settings = {"algorithm.overlong_buffer_frac": frac, "algorithm.overlong_penalty": number(penalty)}
    return put(settings, f"{buffer_tokens} of {limit_tokens} tokens, as a fraction")


def weighted(components: list[dict[str, Any]], weights: list[Any], note: str) -> KeyVerdict:
    """Components of the reward with their weights; 1 is left out."""
    if len(weights) != len(components):
        return refused(f"{len(components)} rewards and {len(weights)} weights")
    both = zip(components, weights, strict=True)
    return put({"reward.components": [c | ({"weight": number(w)} if number(w) != 1 else {}) for c, w in both]}, note)


TRACKERS = ("wandb", "swanlab", "trackio", "mlflow")


def loggers(listed: list[str], project: Callable[[], Any]) -> KeyVerdict:
    """Trackers that are named; metrics.jsonl and TensorBoard files are always there."""
    named = [name for name in TRACKERS if name in listed] or (["wandb"] if listed == ["all"] else [])
    settings = {f"observe.{name}": str(project()) for name in named}
    others = [name for name in listed if name not in (*TRACKERS, "console", "tensorboard", "file", "none", "all")]
    note = f"no logger for {', '.join(others)}: metrics.jsonl and TensorBoard files have it all" if others else LOGGING
    return put(settings, note) if settings else nothing(note)


def every(key: str, why: str) -> Row:
    """How often something is done, in policy updates; -1 is never, and `why` says when then."""
    return by(lambda job, value: put({key: zero_if_off(value)}, why if number(value) < 0 else "policy updates"), key)


def several(key: str, *parts: tuple[str, float]) -> Row:
    """A list of our own, of the numbers of several keys; each with what it is where the tool has no default for it."""
    return by(lambda job, value: put({key: [number(job.get(name, other)) for name, other in parts]}), key)


def both_bounds(value: Any) -> dict[str, Any]:
    """One number for the lower and the upper bound of the ratio."""
    return {"algorithm.clip_low": number(value), "algorithm.clip_high": number(value)}
