"""Rules of TRL's arguments that look at other arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hone.dialects import shared
from hone.dialects.foreign import ForeignRun, shown
from hone.dialects.rows import to, when, where
from hone.dialects.trl.inputs import dataset
from hone.dialects.values import names, number, positive, truth, whole
from hone.dialects.verdict import ForeignJob, KeyVerdict, Row, default, nothing, placed, put, refused, unknown

OPTIMIZER = "train.optimizer"
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm.aggregate": "sample_mean"},
    "dr_grpo": {"algorithm.aggregate": "fixed_length"},
    "dapo": {"algorithm.aggregate": "token_mean"},
    "bnpo": {"algorithm.aggregate": "token_mean"},
    "cispo": {"algorithm.clip": "cispo", "algorithm.aggregate": "token_mean"},
    "sapo": {"algorithm.clip": "sapo", "algorithm.aggregate": "sample_mean"},
}
SCALES = {
    "group": "group_norm",
    "True": "group_norm",
    "none": "group_mean",
    "False": "group_mean",
    "None": "group_mean",
}
CORRECTIONS = {
    "token_truncate": "tis",
    "token_mask": "icepop",
    "sequence_truncate": "sequence_tis",
    "sequence_mask": "sequence_mask",
}
SHOWN = 8
"""Samples that trackers get where TRL would give them all."""
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}

uses_vllm = where("use_vllm")
uses_adapter = where("use_peft")


def is_bounded(job: ForeignJob) -> bool:
    return job.get("loss_type", "dapo") not in ("sapo", "vespo")


def is_rloo(job: ForeignJob) -> bool:
    return "rloo" in job.foreign.program.lower()


# ---- batches


def _samples_of_optimizer_step(job: ForeignJob) -> int:
    passes = whole(job.get("gradient_accumulation_steps", 1))
    return whole(job.get("per_device_train_batch_size", 8)) * passes * shared.processes(job)


def _samples_together(job: ForeignJob) -> int:
    """Samples that are drawn together: `generation_batch_size`, or what follows from the others."""
    given = job.get("generation_batch_size")
    if given is not None:
        return whole(given)
    passes = job.get("steps_per_generation") or job.get("gradient_accumulation_steps", 1)
    return whole(job.get("per_device_train_batch_size", 8)) * shared.processes(job) * whole(passes)


def batch(job: ForeignJob, value: Any) -> KeyVerdict:
    group = whole(job.get("num_generations", 8))
    samples, step = _samples_together(job), _samples_of_optimizer_step(job)
    if samples % group:
        why = f"{samples} samples drawn together are not a multiple of num_generations = {group}"
        known = job.given("num_processes")
        return refused(why) if known else unknown(f"{why}: the number of processes is not in the command")
    more = shared.samples_per_step(samples // group, group, step)
    if more.kind == "refused":
        return more
    settings = {"train.prompts_per_step": samples // group, **more.settings}
    return put(settings, f"{samples} samples together / num_generations; samples to prompts")


def batch_part(job: ForeignJob, value: Any) -> KeyVerdict:
    return nothing("part of the batch: see per_device_train_batch_size")


def updates(job: ForeignJob, steps: Any) -> int:
    """Policy updates in `steps` optimizer steps."""
    per_update = max(1, _samples_together(job) // _samples_of_optimizer_step(job))
    return max(1, -(-whole(steps) // (per_update * whole(job.get("num_iterations", 1)))))


def max_steps(job: ForeignJob, value: Any) -> KeyVerdict:
    steps = positive(value)
    if steps is None:
        return nothing("off")
    return put({"run.steps": updates(job, steps)}, "optimizer steps to policy updates")


def epochs(job: ForeignJob, value: Any) -> KeyVerdict:
    if positive(job.get("max_steps", -1)) is not None:
        return nothing("max_steps wins")
    return put({"run.epochs": number(value)}, "passes over the prompts")


OFF = ("no", "False")
"""Names of a strategy that does nothing; `no` without quotes is false in the YAML of TRL."""


def save_steps(job: ForeignJob, value: Any) -> KeyVerdict:
    kind = str(job.get("save_strategy", "steps"))
    if kind in OFF:
        return put({"checkpoint.every": 0}, "off: only at the end")
    if kind != "steps":
        return nothing(f"only read with save_strategy = steps, not {kind}")
    return _every("checkpoint.every", job, 500 if value is None else number(value))


def save_strategy(job: ForeignJob, value: Any) -> KeyVerdict:
    if str(value) in OFF:
        return put({"checkpoint.every": 0}, "only at the end")
    if str(value) == "epoch" and number(job.get("num_train_epochs", 3)) <= 1 and positive(job.get("max_steps")) is None:
        return put({"checkpoint.every": 0}, "at the end of the only epoch")
    if str(value) == "best":
        return unknown("where an evaluation is the best: name its metric in checkpoint.best")
    return nothing("see save_steps") if str(value) == "steps" else unknown(ONCE_PER_EPOCH)


ONCE_PER_EPOCH = "once per epoch: give it in policy updates"


def _every(key: str, job: ForeignJob, steps: float) -> KeyVerdict:
    """Optimizer steps between two events; below 1 a share of the run."""
    if 0 < steps < 1:
        total = positive(job.get("max_steps"))
        if total is None:
            return unknown("a share of the run, whose length in steps is not in the file: give it in policy updates")
        steps = -(-whole(total) * steps // 1)
    return put({key: updates(job, steps)}, "optimizer steps to policy updates")


def evaluates(job: ForeignJob) -> bool:
    return job.given("eval_dataset") or (
        bool(job.get("dataset_name")) and str(job.get("eval_strategy", "no")) not in OFF
    )


def eval_strategy(job: ForeignJob, value: Any) -> KeyVerdict:
    """TRL's own scripts evaluate on another split of the same data set."""
    if str(value) in OFF:
        return nothing("off")
    found: dict[str, Any] = {}
    if not job.given("eval_dataset") and job.get("dataset_name"):
        found = dict(dataset("data.eval", "data.eval_split").read(job, job.get("dataset_name")).settings)
        found["data.eval_split"] = str(job.get("dataset_test_split") or "test")
    if str(value) == "epoch":
        return KeyVerdict("hole", found, ONCE_PER_EPOCH)
    if not job.given("eval_steps"):
        found |= eval_steps(job, job.get("logging_steps", 10)).settings
    return put(found, "the data set's other split" if "data.eval" in found else "see eval_steps")


def eval_steps(job: ForeignJob, value: Any) -> KeyVerdict:
    if str(job.get("eval_strategy", "steps")) in (*OFF, "epoch"):
        return nothing("only read with eval_strategy = steps")
    return nothing("as logging_steps") if value is None else _every("eval.every", job, number(value))


# ---- algorithm


def beta(job: ForeignJob, value: Any) -> KeyVerdict:
    if not is_rloo(job):
        return put({"algorithm.kl_loss_coef": number(value)}, "KL in the loss (k3)")
    settings: dict[str, Any] = {"algorithm.kl_reward_coef": number(value)}
    return put(settings | ({"algorithm.kl_estimator": "k1"} if value else {}), "KL in the reward")


def epsilon(job: ForeignJob, value: Any) -> KeyVerdict:
    return put(shared.both_bounds(value) if job.get("epsilon_high") is None else {"algorithm.clip_low": number(value)})


def loss(job: ForeignJob, value: Any) -> KeyVerdict:
    if value not in LOSSES:
        return refused(f"no such loss here; nearest: {', '.join(LOSSES)}")
    return put(LOSSES[value], "over the optimizer step; bnpo averages over a microbatch" if value == "bnpo" else "")


def adaptive_entropy(job: ForeignJob, value: Any) -> KeyVerdict:
    return put({"algorithm.entropy_target": number(job.get("entropy_target", 0.2))}) if truth(value) else nothing("off")


def scale(job: ForeignJob, value: Any) -> KeyVerdict:
    if is_rloo(job):
        return nothing("not read by RLOO")
    if job.get("multi_objective_aggregation") == "normalize_then_sum":
        return nothing("each reward is scaled by itself")
    if str(value) not in SCALES:
        return refused("a standard deviation over the batch; nearest: group, or algorithm.credit = group_mean_whitened")
    return put({"algorithm.credit": SCALES[str(value)]})


def correction(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return put({"algorithm.correction": "none"})
    if not uses_vllm(job):
        return nothing("only with vLLM")
    mode = str(job.get("vllm_importance_sampling_mode", "sequence_mask"))
    if mode not in CORRECTIONS:
        return refused(f"vllm_importance_sampling_mode must be one of {', '.join(CORRECTIONS)}")
    cap = job.get("vllm_importance_sampling_clip_max") or job.get("vllm_importance_sampling_cap") or 3.0
    settings: dict[str, Any] = {"algorithm.correction": CORRECTIONS[mode], "algorithm.correction_high": number(cap)}
    if "mask" in mode:
        settings["algorithm.correction_low"] = number(job.get("vllm_importance_sampling_clip_min") or 0.0)
    return put(settings)


def reference(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value) or number(job.get("beta", 0.0)) == 0:
        return nothing("no reference that changes")
    if number(job.get("ref_model_mixup_alpha", 0.6)) != 1:
        return refused("a reference that is mixed with the policy; nearest: ref_model_mixup_alpha = 1")
    steps = whole(job.get("ref_model_sync_steps", 512))
    return put({"algorithm.reference_refresh_every": steps}, "policy updates")


# ---- optimizer


def schedule(job: ForeignJob, value: Any) -> KeyVerdict:
    if value not in SCHEDULES:
        return refused("nearest: constant, linear or cosine")
    settings: dict[str, Any] = {f"{OPTIMIZER}.schedule": SCHEDULES[value]}
    if value == "cosine_with_min_lr":
        extra = job.get("lr_scheduler_kwargs") or {}
        if not isinstance(extra, dict):
            return refused("lr_scheduler_kwargs must name min_lr_rate")
        floor = number(extra.get("min_lr", 0.0)) / number(job.get("learning_rate", 1e-6))
        settings[f"{OPTIMIZER}.final_lr_frac"] = number(extra.get("min_lr_rate", floor))
    return put(settings)


def warmup(job: ForeignJob, value: Any) -> KeyVerdict:
    steps = number(value or 0)
    if 0 < steps < 1:
        return put({f"{OPTIMIZER}.warmup_frac": steps}, f"share of the {shared.WARM_UP}")
    return put({f"{OPTIMIZER}.warmup_steps": whole(steps)} if steps else {}, shared.WARM_UP if steps else "")


def warmup_ratio(job: ForeignJob, value: Any) -> KeyVerdict:
    if not value or number(job.get("warmup_steps", 0) or 0) > 0:
        return nothing("none, or warmup_steps wins")
    return put({f"{OPTIMIZER}.warmup_frac": number(value)}, f"share of the {shared.WARM_UP}")


def optimizer(job: ForeignJob, value: Any) -> KeyVerdict:
    if "adamw" in str(value) or "8bit" in str(value) or str(value) in ("default_optim", "None"):
        return nothing("AdamW; its moments are float32, sharded or offloaded instead of quantised")
    return refused("the optimizer is AdamW; nearest: adamw_torch")


# ---- sampling and records


def precision(job: ForeignJob, value: Any) -> KeyVerdict:
    """bf16 is on where nothing is said; without it arithmetic has the type of the weights."""
    loaded = shown(job.values.get("model_init_kwargs"))
    of_weights = [job.get("dtype"), job.get("torch_dtype"), *(loaded.values() if isinstance(loaded, dict) else ())]
    is_bf16 = value is None or truth(value) or any("bfloat16" in str(name) for name in of_weights)
    return put({"run.precision": "bfloat16" if is_bf16 else "float32"})


def reports(job: ForeignJob, value: Any) -> KeyVerdict:
    listed = [] if value in (None, "none") else names(value)
    return shared.loggers(listed, lambda: job.get("project") or "hone")


def completions(job: ForeignJob, value: Any) -> KeyVerdict:
    count = positive(job.get("num_completions_to_print")) or SHOWN
    return put({"observe.tracker_samples": count} if truth(value) else {})


def vllm(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return placed({}, "Hone's own engine")
    return placed({"cluster.backend": "ray", "cluster.engines.use": "vllm"})


def generation(job: ForeignJob, value: Any) -> KeyVerdict:
    """Arguments for the engine: texts that end a response; those that cut its distribution are refused."""
    if not value or not isinstance(value, dict):
        return refused("set rollout's keys") if value else nothing("none")
    others = sorted(value.keys() - {"stop", "stop_strings"})
    if others:
        return refused(f"{', '.join(others)}: set rollout's keys")
    texts = [text for one in value.values() if one for text in (one if isinstance(one, list) else [one])]
    return put({"rollout.stop": texts} if texts else {})


def engine(key: str, convert=whole) -> Row:
    row = to(f"cluster.engines.{key}", lambda value: convert(number(value)), kind="placement")
    return when(uses_vllm, "only with use_vllm", row)


OF_COMMAND = "of the script's command line: import the command that starts it"


# ---- the command as a whole


def configuration(job: ForeignJob, value: Any) -> KeyVerdict:
    if "config" in job.foreign.script_arguments:
        return nothing("read with the command")
    return unknown("a configuration file that is not here: import it too, and merge")


def program(foreign: ForeignRun) -> str | None:
    if re.search(r"grpo|rloo|gspo|openenv|openreward", foreign.program, re.IGNORECASE):
        return None
    keys = {key.key.replace("-", "_") for key in foreign.keys}
    if foreign.program == "trl" and keys & {"num_generations", "max_completion_length", "reward_funcs"}:
        return None
    others = re.search(r"sft|dpo|distil|gkd|gold|sdft|kto", foreign.program, re.IGNORECASE)
    if "num_generations" in keys and not others:
        return None
    return f"{foreign.program} is not GRPO or RLOO; stages: [sft] and [reward_model] train those here"


IN_THE_CALL = {
    ("reward_funcs", "reward_model_name_or_path"): "the reward functions are in the trainer's call: name them in "
    "reward.components",
    ("train_dataset", "dataset_name", "datasets"): "the data is in the trainer's call: name it in data.train",
    ("model_name_or_path", "model"): "the model is in the trainer's call: name it in model.path",
}
RLOO = {"algorithm.credit": "leave_one_out", "algorithm.aggregate": "fixed_length", "algorithm.ratio": "sequence"}


def whole_command(job: ForeignJob) -> Iterator[tuple[str, KeyVerdict]]:
    if is_rloo(job):
        yield "RLOO", default(RLOO, "each sample against its siblings; the ratio is the sequence's")
    else:
        yield "std_floor", default({"algorithm.std_floor": 1e-4}, "TRL adds 1e-4 to the standard deviation")
        if "loss_type" not in {**job.defaults, **job.values}:  # before the argument: 0.14, and 0.16, which has epsilon
            kind = "token_mean" if "epsilon" in job.defaults else "sample_mean"
            yield "aggregate", default({"algorithm.aggregate": kind}, "TRL's loss at this version")
    if job.is_hole("beta") or number(job.get("beta", 0.0)) > 0:
        yield "kl_clip", default({"algorithm.kl_clip": None}, "TRL's KL of a token has no bound")
    for keys, why in IN_THE_CALL.items():
        if not any(job.given(key) for key in keys):
            yield keys[0], unknown(why)
    yield "data.chat", default({"data.chat": True}, "prompts are messages; without a template for plain text: false")
    corrects = uses_vllm(job) and "vllm_importance_sampling_correction" in {**job.defaults, **job.values}
    if not corrects and (uses_vllm(job) or shared.processes(job) > 1):  # where `auto` would correct
        yield "correction", shared.NO_CORRECTION
    yield from shared.cluster(1, shared.processes(job))
