"""TRL's arguments: `trl grpo`, its YAML, and `GRPOConfig(...)` with `GRPOTrainer(...)` in Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hone.dialects import shared
from hone.dialects.foreign import ForeignRun
from hone.dialects.shared import ENVIRONMENT, LOGGING, MEMORY, RESUME
from hone.dialects.verdict import (
    Dialect,
    ForeignJob,
    KeyVerdict,
    Row,
    automatic,
    by,
    mapped,
    missing,
    names,
    number,
    placement,
    positive,
    refused,
    rewritten,
    text,
    to,
    truth,
    whole,
)

_OPT = "train.optimizer"


def _rloo(job: ForeignJob) -> bool:
    return "RLOO" in job.foreign.program or "rloo" in job.foreign.program


def _processes(job: ForeignJob) -> int:
    value = job.get("num_processes", 1)
    return whole(number(value)) if value else 1


def _samples_of_optimizer_step(job: ForeignJob) -> int:
    return (
        whole(number(job.get("per_device_train_batch_size", 8)))
        * whole(number(job.get("gradient_accumulation_steps", 1)))
        * _processes(job)
    )


def _generation_samples(job: ForeignJob) -> int:
    """Samples that are drawn together: `generation_batch_size`, or what follows from the others."""
    given = job.get("generation_batch_size")
    if given is not None:
        return whole(number(given))
    step = whole(number(job.get("per_device_train_batch_size", 8))) * _processes(job)
    passes = job.get("steps_per_generation") or job.get("gradient_accumulation_steps", 1)
    return step * whole(number(passes))


def _batch(job: ForeignJob, value: Any) -> KeyVerdict:
    group = whole(number(job.get("num_generations", 8)))
    samples, step = _generation_samples(job), _samples_of_optimizer_step(job)
    if samples % group:
        why = f"{samples} samples drawn together are no multiple of num_generations = {group}"
        if job.given("num_processes"):
            return refused(why)
        return KeyVerdict("hole", {}, f"{why}: the number of processes is not in the command")
    settings: dict[str, Any] = {"train.prompts_per_step": samples // group}
    if step < samples:
        more = shared.samples_per_step(job, samples // group, group, step)
        if more.kind == "refused":
            return more
        settings |= more.settings
    return KeyVerdict("mapped", settings, f"{samples} samples together / num_generations; samples to prompts")


def _batch_part(job: ForeignJob, value: Any) -> KeyVerdict:
    job.plain(value)
    return KeyVerdict("automatic", {}, "part of the batch: see per_device_train_batch_size")


def _beta(job: ForeignJob, value: Any) -> KeyVerdict:
    if _rloo(job):
        settings: dict[str, Any] = {"algorithm.kl_reward_coef": number(value)}
        return KeyVerdict("mapped", settings | ({"algorithm.kl_estimator": "k1"} if value else {}), "KL in the reward")
    return KeyVerdict("mapped", {"algorithm.kl_loss_coef": number(value)}, "KL in the loss (k3)")


def _epsilon(job: ForeignJob, value: Any) -> KeyVerdict:
    high = job.get("epsilon_high")
    settings = {"algorithm.clip_low": number(value)}
    if high is None:
        settings["algorithm.clip_high"] = number(value)
    return KeyVerdict("mapped", _bounds(job, settings))


def _bounds(job: ForeignJob, settings: dict[str, Any]) -> dict[str, Any]:
    return {} if job.get("loss_type", "dapo") in ("sapo", "vespo") else settings


def _epsilon_high(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return KeyVerdict("automatic", {}, "epsilon, on both sides")
    return KeyVerdict("mapped", _bounds(job, {"algorithm.clip_high": number(value)}))


_LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm.aggregate": "sample_mean"},
    "dr_grpo": {"algorithm.aggregate": "fixed_length"},
    "dapo": {"algorithm.aggregate": "token_mean"},
    "bnpo": {"algorithm.aggregate": "token_mean"},
    "cispo": {"algorithm.clip": "cispo", "algorithm.aggregate": "token_mean"},
    "sapo": {"algorithm.clip": "sapo", "algorithm.aggregate": "sample_mean"},
}


def _loss(job: ForeignJob, value: Any) -> KeyVerdict:
    if value not in _LOSSES:
        return refused(f"no such loss here; nearest: {', '.join(_LOSSES)}")
    note = "over the optimizer step; bnpo averages over a microbatch" if value == "bnpo" else ""
    return KeyVerdict("mapped", _LOSSES[value], note)


def _scale(job: ForeignJob, value: Any) -> KeyVerdict:
    if _rloo(job):
        return KeyVerdict("automatic", {}, "not read by RLOO")
    kinds = {
        "group": "group_norm",
        "none": "group_mean",
        "True": "group_norm",
        "False": "group_mean",
        "None": "group_mean",
    }
    if str(value) not in kinds:
        return refused("a standard deviation over the batch; nearest: group, or algorithm.credit = group_mean_whitened")
    return KeyVerdict("mapped", {"algorithm.credit": kinds[str(value)]})


def _level(job: ForeignJob, value: Any) -> KeyVerdict:
    if value not in ("token", "sequence"):
        return refused("nearest: token or sequence")
    return KeyVerdict("mapped", {"algorithm.ratio": "sequence"} if value == "sequence" else {})


def _taus(job: ForeignJob, value: Any) -> KeyVerdict:
    if job.get("loss_type", "dapo") != "sapo":
        return KeyVerdict("automatic", {}, "only read by sapo")
    return mapped(
        "",
        algorithm__sapo_tau=[
            number(job.get("sapo_temperature_pos", 1.0)),
            number(job.get("sapo_temperature_neg", 1.05)),
        ],
    )


def _of_loss(loss: str) -> Row:
    return by(
        lambda job, v: (
            KeyVerdict("automatic", {}, f"only read by {loss}")
            if job.get("loss_type", "dapo") != loss
            else KeyVerdict("automatic", {}, f"part of loss_type = {loss}")
        )
    )


def _correction(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value) or not truth(job.get("use_vllm", False)):
        return KeyVerdict("mapped", {"algorithm.correction": "none"} if not truth(value) else {}, "only with vLLM")
    kinds = {
        "token_truncate": "tis",
        "token_mask": "icepop",
        "sequence_truncate": "sequence_tis",
        "sequence_mask": "sequence_mask",
    }
    mode = str(job.get("vllm_importance_sampling_mode", "sequence_mask"))
    cap = job.get("vllm_importance_sampling_clip_max") or job.get("vllm_importance_sampling_cap") or 3.0
    if mode not in kinds:
        return refused(f"vllm_importance_sampling_mode must be one of {', '.join(kinds)}")
    settings: dict[str, Any] = {"algorithm.correction": kinds[mode], "algorithm.correction_high": number(cap)}
    if "mask" in mode:
        settings["algorithm.correction_low"] = number(job.get("vllm_importance_sampling_clip_min") or 0.0)
    return KeyVerdict("mapped", settings)


def _correction_part(job: ForeignJob, value: Any) -> KeyVerdict:
    job.plain(value)
    return KeyVerdict("automatic", {}, "part of vllm_importance_sampling_correction")


def _reference(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value) or number(job.get("beta", 0.0)) == 0:
        return KeyVerdict("automatic", {}, "no reference that changes")
    if number(job.get("ref_model_mixup_alpha", 0.6)) != 1:
        return refused("a reference that is mixed with the policy; nearest: ref_model_mixup_alpha = 1")
    return mapped(
        "policy updates", algorithm__reference_refresh_every=whole(number(job.get("ref_model_sync_steps", 512)))
    )


def _cut(key: str, off: Any):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if value is None or number(value) == off or (key.endswith("top_k") and number(value) <= 0):
            return KeyVerdict("automatic", {}, "off")
        return refused(f"{shared.CUT}{off}")

    return by(read, key)


def _steps(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict(
        "mapped",
        {} if positive(value) is None else {"run.steps": _updates(job, positive(value) or 1)},
        "optimizer steps to policy updates",
    )


def _updates(job: ForeignJob, steps: int) -> int:
    """Policy updates of so many optimizer steps."""
    per_update = max(1, _generation_samples(job) // _samples_of_optimizer_step(job)) * whole(
        number(job.get("num_iterations", 1))
    )
    return max(1, -(-steps // per_update))


def _epochs(job: ForeignJob, value: Any) -> KeyVerdict:
    if positive(job.get("max_steps", -1)) is not None:
        return KeyVerdict("automatic", {}, "max_steps wins")
    return mapped("passes over the prompts", run__epochs=number(value))


def _every(key: str, strategy: str):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        kind = str(job.get(strategy, "steps" if strategy == "save_strategy" else "no"))
        if kind == "no":
            return KeyVerdict("mapped", {key: 0} if key == "checkpoint.every" else {}, "off: only at the end")
        steps = number(value) if value is not None else 500
        if kind == "epoch" or 0 < steps < 1:
            return refused("a share of the run, or an epoch: give it in policy updates")
        return KeyVerdict("mapped", {key: _updates(job, whole(steps))}, "optimizer steps to policy updates")

    return by(read, key)


def _strategy(key: str):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if str(value) == "no":
            return KeyVerdict("mapped", {key: 0} if key == "checkpoint.every" else {}, "only at the end")
        if str(value) == "steps":
            return KeyVerdict("automatic", {}, "see the number of steps")
        return refused("once per epoch: give it in policy updates")

    return by(read, key)


def _schedule(job: ForeignJob, value: Any) -> KeyVerdict:
    kinds = {
        "linear": "linear",
        "cosine": "cosine",
        "constant": "constant",
        "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
    }
    if value not in kinds:
        return refused("nearest: constant, linear or cosine")
    settings: dict[str, Any] = {f"{_OPT}.schedule": kinds[value]}
    if value == "cosine_with_min_lr":
        extra = job.get("lr_scheduler_kwargs") or {}
        if not isinstance(extra, dict):
            return refused("lr_scheduler_kwargs must name min_lr_rate")
        floor = extra.get("min_lr_rate")
        if floor is None and "min_lr" in extra:
            floor = number(extra["min_lr"]) / number(job.get("learning_rate", 1e-6))
        settings[f"{_OPT}.final_lr_frac"] = number(floor or 0.0)
    return KeyVerdict("mapped", settings)


def _warmup(job: ForeignJob, value: Any) -> KeyVerdict:
    steps = number(value or 0)
    if 0 < steps < 1:
        return KeyVerdict("mapped", {f"{_OPT}.warmup_frac": steps}, "of the optimizer steps")
    return KeyVerdict("mapped", {f"{_OPT}.warmup_steps": whole(steps)} if steps else {}, "optimizer steps")


def _warmup_ratio(job: ForeignJob, value: Any) -> KeyVerdict:
    if not value or number(job.get("warmup_steps", 0) or 0) > 0:
        return KeyVerdict("automatic", {}, "none, or warmup_steps wins")
    return KeyVerdict("mapped", {f"{_OPT}.warmup_frac": number(value)}, "of the optimizer steps")


def _beta1(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict(
        "mapped", {f"{_OPT}.betas": [number(job.get("adam_beta1", 0.9)), number(job.get("adam_beta2", 0.999))]}
    )


def _optimizer(job: ForeignJob, value: Any) -> KeyVerdict:
    if str(value).startswith(
        ("adamw_torch", "adamw_hf", "default_optim", "adamw_bnb", "adamw_apex", "adamw_anyprecision", "None")
    ):
        return KeyVerdict("automatic", {}, "AdamW, with float32 moments")
    if "adamw" in str(value) or "8bit" in str(value):
        return KeyVerdict("automatic", {}, "AdamW; its moments are float32, sharded or offloaded instead of quantised")
    return refused("the optimizer is AdamW; nearest: adamw_torch")


def _precision(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict(
        "mapped", {"run.precision": "bfloat16"} if value is None or truth(value) else {}, "" if value else "float32"
    )


def _dtype(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict("automatic", {}, "dtype of the weights: master weights are float32 here; bf16 says what computes")


def _checkpointing(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict("mapped", {"train.activation_checkpointing": "full"} if truth(value) else {})


def _dataset(key: str, split: str):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if isinstance(value, dict):
            path = value.get("path")
            if isinstance(path, list):
                return KeyVerdict("mapped", {key: path[0] if len(path) == 1 else path})
            if value.get("config") is not None:
                path = f"{path}:{value['config']}"
            name, _, rows = str(value.get("split", "train")).partition("[")
            settings: dict[str, Any] = {key: str(path), split: name}
            if rows and re.fullmatch(r":\d+\]", rows):
                settings[f"{key}_rows"] = f"0{rows[:-1]}"
            elif rows:
                return refused(f"a share of a split ({value['split']}): give rows in {key}_rows")
            return KeyVerdict("mapped", settings)
        config = job.get("dataset_config")
        return KeyVerdict("mapped", {} if value is None else {key: f"{value}:{config}" if config else str(value)})

    return by(read, key)


def _rewards(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return KeyVerdict("automatic", {}, "none here")
    listed = value if isinstance(value, list) else names(value)
    weights = job.get("reward_weights")
    weights = (
        weights if isinstance(weights, list) else [weights] if isinstance(weights, int | float) else [1.0] * len(listed)
    )
    if len(weights) != len(listed):
        return refused(f"{len(listed)} rewards and {len(weights)} reward_weights")
    known = {"accuracy_reward": "math", "think_format_reward": "format"}
    components = []
    for item, weight in zip(listed, weights, strict=True):
        name = str(item).rpartition(".")[2].rpartition(":")[2]
        if name == "get_soft_overlong_punishment":
            return refused("algorithm.overlong_buffer_frac and overlong_penalty are this reward")
        if name in known and ".py:" not in str(item):
            component: dict[str, Any] = {"use": known[name]}
        elif ":" in str(item):
            component = {"use": str(item)}
        elif "/" in str(item):
            component = {"use": "reward_model", "args": {"path": str(item)}}
        elif re.fullmatch(r"[\w.]+\.\w+", str(item)):
            module, _, function = str(item).rpartition(".")
            component = {"use": f"{module}:{function}"}
        else:
            return refused(f"{item}: name your function as file.py:{item} in reward.components")
        components.append(component | ({"weight": number(weight)} if weight != 1 else {}))
    return KeyVerdict("mapped", {"reward.components": components}, "completions: called as TRL does")


def _reward_model(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return KeyVerdict("automatic", {}, "none")
    return mapped("", reward__components=[{"use": "reward_model", "args": {"path": str(value)}}])


def _reports(job: ForeignJob, value: Any) -> KeyVerdict:
    loggers = [] if value in (None, "none") else names(value)
    if "wandb" in loggers or loggers == ["all"]:
        return mapped("", observe__wandb=str(job.get("project") or "hone"))
    others = [name for name in loggers if name not in ("tensorboard", "none")]
    return KeyVerdict(
        "automatic",
        {},
        f"no logger for {', '.join(others)}: metrics.jsonl and TensorBoard files have it all" if others else LOGGING,
    )


def _adapter(key: str, convert):
    return shared.adapter(
        key, convert, lambda job: truth(job.get("use_peft", False)), without="no adapter without use_peft"
    )


def _peft(job: ForeignJob, value: Any) -> KeyVerdict:
    return (
        mapped("", lora__rank=whole(number(job.get("lora_r", 16))))
        if truth(value)
        else KeyVerdict("automatic", {}, "off")
    )


def _vllm(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return KeyVerdict("placement", {}, "Hone's own engine")
    return KeyVerdict("placement", {"cluster.backend": "ray", "cluster.engines.use": "vllm"})


def _engine(key: str, convert=whole):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if value is None or not truth(job.get("use_vllm", False)):
            return KeyVerdict("placement", {}, "only with use_vllm")
        return KeyVerdict("placement", {f"cluster.engines.{key}": convert(number(value))})

    return by(read, f"cluster.engines.{key}", kind="placement")


def _model_kwargs(job: ForeignJob, value: Any) -> KeyVerdict:
    harmless = ("attn_implementation", "torch_dtype", "dtype", "use_cache", "device_map", "low_cpu_mem_usage")
    given = value if isinstance(value, dict) else {}
    if given.get("trust_remote_code") is True:
        return mapped("", model__trust_remote_code=True)
    others = [name for name in given if name not in (*harmless, "trust_remote_code")]
    if others or (value and not isinstance(value, dict)):
        return refused(f"arguments of the model's class ({', '.join(others) or value}): edit its config.json")
    return KeyVerdict("automatic", {}, "kernels and dtypes are Hone's own")


def _seed(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict("mapped", {} if value is None else {"seed": whole(number(value))})


_RUNTIME = automatic("of the launcher: `hone train` starts its processes itself")
_DATALOADER = automatic("rows are tokenised as they are read")

ROWS: dict[str, Row] = {
    "model_name_or_path": to("model.path", text),
    "model": to("model.path", text),
    "model_revision": missing("download the revision and name its directory", "model.path", off=("main", None)),
    "trust_remote_code": to("model.trust_remote_code", truth),
    "dtype": by(_dtype, "run.precision"),
    "torch_dtype": by(_dtype, "run.precision"),
    "attn_implementation": automatic("attention is Hone's own"),
    "model_init_kwargs": by(_model_kwargs, "model.path"),
    "cast_lm_head_to_fp32": automatic("logits are float32"),
    "disable_dropout": automatic("models train without dropout"),
    "router_aux_loss_coef": missing("no load-balancing loss; nearest: 0", off=(0, 0.0, None)),
    "chat_template_path": to("model.chat_template", text),
    "dataset_name": _dataset("data.train", "data.train_split"),
    "train_dataset": _dataset("data.train", "data.train_split"),
    "eval_dataset": _dataset("data.eval", "data.eval_split"),
    "dataset_config": automatic("part of dataset_name"),
    "dataset_train_split": to("data.train_split", text),
    "dataset_test_split": by(
        lambda job, v: KeyVerdict("automatic", {}, "evaluation data is data.eval; set it to evaluate"), "data.eval"
    ),
    "dataset_streaming": automatic("rows are read as they are needed"),
    "datasets": missing("a mixture of data sets: write it to one file", "data.train", off=(None,)),
    "shuffle_dataset": to("data.shuffle", lambda v: None if v is None else truth(v)),
    "max_prompt_length": to("data.max_prompt_tokens", lambda v: None if v is None else whole(v)),
    "max_completion_length": to("rollout.max_response_tokens", lambda v: None if v is None else whole(v)),
    "num_generations": to("rollout.group_size", whole),
    "num_generations_eval": by(
        lambda job, v: KeyVerdict(
            "mapped", {} if v is None or not job.given("eval_dataset") else {"eval.samples": whole(v)}
        ),
        "eval.samples",
    ),
    "temperature": to("rollout.temperature", number),
    "top_p": _cut("rollout.top_p", 1),
    "top_k": _cut("rollout.top_k", 0),
    "min_p": _cut("rollout.min_p", 0),
    "repetition_penalty": missing("samples must be of the policy's own distribution; nearest: 1", off=(1, 1.0, None)),
    "generation_kwargs": missing("set rollout's keys", "rollout.stop", off=(None, {})),
    "chat_template_kwargs": to("data.template_args", lambda v: v if isinstance(v, dict) and v else None),
    "per_device_train_batch_size": by(
        _batch, "train.prompts_per_step", note="samples of all devices / num_generations"
    ),
    "gradient_accumulation_steps": by(_batch_part, "train.prompts_per_step"),
    "generation_batch_size": by(_batch_part, "train.prompts_per_step"),
    "steps_per_generation": by(_batch_part, "train.samples_per_optimizer_step"),
    "num_processes": by(_batch_part, "cluster.devices_per_node"),
    "num_iterations": to("train.passes_per_batch", whole),
    "per_device_eval_batch_size": automatic("evaluation is batched by the engine"),
    "auto_find_batch_size": automatic("out of memory, the ladder lowers what changes no result"),
    "max_steps": by(_steps, "run.steps"),
    "num_train_epochs": by(_epochs, "run.epochs"),
    "beta": by(_beta, "algorithm.kl_loss_coef"),
    "epsilon": by(_epsilon, "algorithm.clip_low", "algorithm.clip_high"),
    "epsilon_high": by(_epsilon_high, "algorithm.clip_high"),
    "delta": to("algorithm.dual_clip", lambda v: None if v is None else number(v)),
    "loss_type": by(_loss, "algorithm.aggregate", "algorithm.clip"),
    "scale_rewards": by(_scale, "algorithm.credit"),
    "normalize_advantages": missing(
        "RLOO's advantages are not normalised; nearest: algorithm.credit = group_mean_whitened", "algorithm.credit"
    ),
    "importance_sampling_level": by(_level, "algorithm.ratio"),
    "sapo_temperature_pos": by(_taus, "algorithm.sapo_tau"),
    "sapo_temperature_neg": by(_taus, "algorithm.sapo_tau"),
    "vespo_*": _of_loss("vespo"),
    "mask_truncated_completions": by(
        lambda job, v: mapped("", algorithm__mask_truncated=True) if truth(v) else KeyVerdict("automatic", {}, "off"),
        "algorithm.mask_truncated",
    ),
    "top_entropy_quantile": missing("tokens of all entropies count; nearest: 1.0", off=(1, 1.0, None)),
    "entropy_coef": by(
        lambda job, v: KeyVerdict("mapped", {"algorithm.entropy_coef": number(v)}), "algorithm.entropy_coef"
    ),
    "use_adaptive_entropy": missing("a fixed entropy_coef; nearest: algorithm.entropy_coef", "algorithm.entropy_coef"),
    "entropy_*": automatic("only read by use_adaptive_entropy"),
    "sync_ref_model": by(_reference, "algorithm.reference_refresh_every"),
    "ref_model_sync_steps": automatic("part of sync_ref_model"),
    "ref_model_mixup_alpha": automatic("part of sync_ref_model"),
    "use_bias_correction_kl": automatic("only differs with several optimizer steps per batch"),
    "off_policy_mask_threshold": missing(
        "masks by divergence; nearest: algorithm.correction = icepop", "algorithm.correction", off=(None,)
    ),
    "vllm_importance_sampling_correction": by(_correction, "algorithm.correction"),
    "vllm_importance_sampling_*": by(_correction_part, "algorithm.correction"),
    "reward_funcs": by(_rewards, "reward.components"),
    "reward_model_name_or_path": by(_reward_model, "reward.components"),
    "reward_weights": automatic("weights of reward.components: part of reward_funcs"),
    "multi_objective_aggregation": missing(
        "the weighted sum is normalised in its group; nearest: sum_then_normalize",
        "reward.components",
        off=("sum_then_normalize", None),
    ),
    "reward_clip_range": to("algorithm.reward_clip", lambda v: None if v is None else [number(x) for x in v]),
    "learning_rate": to(f"{_OPT}.lr", number),
    "lr_scheduler_type": by(_schedule, f"{_OPT}.schedule"),
    "lr_scheduler_kwargs": automatic("part of lr_scheduler_type"),
    "warmup_steps": by(_warmup, f"{_OPT}.warmup_steps"),
    "warmup_ratio": by(_warmup_ratio, f"{_OPT}.warmup_frac"),
    "weight_decay": to(f"{_OPT}.weight_decay", number),
    "adam_beta1": by(_beta1, f"{_OPT}.betas"),
    "adam_beta2": by(_beta1, f"{_OPT}.betas"),
    "adam_epsilon": to(f"{_OPT}.eps", number),
    "max_grad_norm": to(f"{_OPT}.grad_clip", number),
    "optim": by(_optimizer, f"{_OPT}.lr"),
    "optim_args": missing("the optimizer is AdamW", f"{_OPT}.lr", off=(None,)),
    "bf16": by(_precision, "run.precision"),
    "fp16": missing("nearest: bf16", "run.precision"),
    "tf32": automatic("matrix products follow run.precision"),
    "gradient_checkpointing": by(_checkpointing, "train.activation_checkpointing"),
    "gradient_checkpointing_kwargs": automatic("never reentrant"),
    "use_peft": by(_peft, "lora.rank"),
    "lora_r": _adapter("lora.rank", lambda v: whole(number(v))),
    "lora_alpha": _adapter("lora.alpha", number),
    "lora_target_modules": _adapter("lora.targets", shared.targets),
    "lora_dropout": automatic("adapters have no dropout: RL's trainer and sampler must agree"),
    "lora_task_type": automatic("a causal language model"),
    "task_type": automatic("a causal language model"),
    "bias": missing("biases are not trained with an adapter", "lora.rank", off=("none", None)),
    "lora_modules_to_save": missing("adapters only", "lora.targets", off=(None,)),
    "use_rslora": missing("alpha / rank scales the adapter; nearest: lora.alpha = alpha x sqrt(rank)", "lora.alpha"),
    "use_dora": missing("DoRA is not supported; nearest: lora.rank", "lora.rank"),
    "load_in_4bit": missing("quantised training is not supported; nearest: lora.rank without it", "lora.rank"),
    "load_in_8bit": missing("quantised training is not supported; nearest: lora.rank without it", "lora.rank"),
    "bnb_4bit_*": automatic("only read with load_in_4bit"),
    "use_bnb_nested_quant": automatic("only read with load_in_4bit"),
    "use_vllm": by(_vllm, "cluster.engines.use", kind="placement"),
    "vllm_mode": placement("cluster.pools: together by default, or `rollout` on a pool of its own"),
    "vllm_gpu_memory_utilization": _engine("gpu_memory_utilization", number),
    "vllm_tensor_parallel_size": _engine("tensor_parallel_size"),
    "vllm_max_model_length": _engine("max_model_len"),
    "vllm_max_model_len": _engine("max_model_len"),
    "vllm_structured_outputs_regex": missing("constrained sampling is not supported", off=(None,)),
    "vllm_guided_decoding_regex": missing("constrained sampling is not supported", off=(None,)),
    "vllm_*": placement("of vLLM's server: Hone starts its engines itself"),
    "use_transformers_*": automatic("continuous batching, always"),
    "transformers_continuous_batching_config": automatic("continuous batching, always"),
    "cache_implementation": automatic("Hone's own cache"),
    "ds3_gather_for_generation": automatic("weights are published to the engine"),
    "use_liger_kernel": automatic("logits are made in chunks"),
    "use_liger_loss": automatic("logits are made in chunks"),
    "liger_kernel_config": automatic("logits are made in chunks"),
    "pad_to_multiple_of": automatic("never padded"),
    "torch_compile*": automatic("cluster.trainer.compile compiles layers"),
    "torch_empty_cache_steps": automatic(MEMORY),
    "activation_offloading": automatic(MEMORY),
    "environment_factory": rewritten(ENVIRONMENT, "rollout.environment.use", off=(None,)),
    "rollout_func": rewritten(ENVIRONMENT, "rollout.environment.use", off=(None,)),
    "tools": rewritten(ENVIRONMENT, "rollout.environment.use", off=(None, [])),
    "max_tool_calling_iterations": automatic("rollout.environment.max_turns, where there are turns"),
    "max_staleness": to("rollout.max_staleness", whole, "policy updates"),
    "max_inflight_tasks": automatic("rollout.max_concurrent_samples"),
    "queue_maxsize": automatic("rollout.max_staleness bounds it"),
    "weight_sync_steps": missing("weights are published after every update", off=(1, None)),
    "remove_unused_columns": automatic("rewards see every column"),
    "no_remove_unused_columns": automatic("rewards see every column"),
    "output_dir": to("run.dir", text),
    "run_name": automatic("the run's name is its folder's"),
    "seed": by(_seed, "seed"),
    "data_seed": automatic("order follows `seed`"),
    "full_determinism": automatic("a synchronous run on one process repeats bit for bit"),
    "save_steps": _every("checkpoint.every", "save_strategy"),
    "save_strategy": _strategy("checkpoint.every"),
    "save_total_limit": to("checkpoint.keep", lambda v: positive(v)),
    "save_only_model": automatic("checkpoints are whole"),
    "save_*": automatic("checkpoints are whole, as safetensors"),
    "load_best_model_at_end": automatic("checkpoint.best keeps and exports the best"),
    "metric_for_best_model": automatic("checkpoint.best"),
    "greater_is_better": automatic("checkpoint.best"),
    "eval_steps": by(
        lambda job, v: (
            KeyVerdict("mapped", {"eval.every": _updates(job, whole(number(v)))}, "optimizer steps to policy updates")
            if job.given("eval_dataset") and v is not None and number(v) >= 1
            else KeyVerdict("automatic", {}, "set data.eval to evaluate")
        ),
        "eval.every",
    ),
    "eval_strategy": by(lambda job, v: KeyVerdict("automatic", {}, "data.eval and eval.every"), "eval.every"),
    "eval_on_start": automatic("evaluated before the first update where data.eval is set"),
    "eval_*": automatic("data.eval and eval.every"),
    "do_eval": automatic("data.eval and eval.every"),
    "do_train": automatic("`hone train`"),
    "report_to": by(_reports, "observe.wandb"),
    "project": automatic("the project of report_to"),
    "trackio_*": automatic(LOGGING),
    "log_*": automatic(LOGGING),
    "logging_*": automatic(LOGGING),
    "num_completions_to_print": automatic("samples/ has every response"),
    "wandb_*": automatic(LOGGING),
    "disable_tqdm": automatic("observe.console"),
    "include_num_input_tokens_seen": automatic(LOGGING),
    "push_to_hub": automatic("`hone export` writes a directory that the hub's own command uploads"),
    "hub_*": automatic("`hone export` writes a directory that the hub's own command uploads"),
    "resume_from_checkpoint": automatic(RESUME),
    "dataloader_*": _DATALOADER,
    "dataset_num_proc": _DATALOADER,
    "ddp_*": placement("of the launcher"),
    "deepspeed": placement("the trainer is FSDP2: cluster.trainer"),
    "fsdp*": placement("the trainer is FSDP2: cluster.trainer"),
    "accelerate_config": placement("cluster.devices_per_node"),
    "config_file": placement("cluster.devices_per_node"),
    "config": Row(
        "hole", (), lambda job, v: KeyVerdict("hole", {}, "a configuration file: import it too, and merge"), "a file"
    ),
    "accelerator_config": placement("of the launcher"),
    "parallelism_config": placement("cluster.trainer"),
    "use_cpu": by(lambda job, v: KeyVerdict("mapped", {"run.device": "cpu"} if truth(v) else {}), "run.device"),
    "average_tokens_across_devices": automatic("losses are normalised over the whole optimizer step"),
    "skip_memory_metrics": automatic(LOGGING),
    "local_rank": _RUNTIME,
    "ignore_data_skip": automatic("a resumed run continues in the data exactly"),
    "lr_scheduler": automatic("lr_scheduler_type"),
    "neftune_noise_alpha": missing("no noise in embeddings", off=(None,)),
    "label_smoothing_factor": missing("no labels to smooth", off=(0, 0.0, None)),
}

WRITTEN = (
    "max_prompt_length",
    "max_completion_length",
    "num_generations",
    "per_device_train_batch_size",
    "num_train_epochs",
    "learning_rate",
    "lr_scheduler_type",
    "adam_beta2",
    "beta",
    "epsilon",
    "loss_type",
    "scale_rewards",
    "vllm_importance_sampling_correction",
    "save_steps",
    "seed",
    "gradient_checkpointing",
    "bf16",
)
_RL = re.compile(r"grpo|rloo|gspo|openenv|openreward", re.IGNORECASE)


def _program(foreign: ForeignRun) -> str | None:
    if foreign.program == "trl" and any(
        key.key in ("num_generations", "max_completion_length", "reward_funcs") for key in foreign.keys
    ):
        return None
    if _RL.search(foreign.program):
        return None
    keys = {key.key.replace("-", "_") for key in foreign.keys}
    if "num_generations" in keys and not re.search(r"sft|dpo|distil|gkd|gold|sdft|kto", foreign.program, re.IGNORECASE):
        return None
    return f"{foreign.program} is not GRPO or RLOO; stages: [sft] and [reward_model] train those here"


def _whole(job: ForeignJob) -> Iterator[tuple[str, KeyVerdict]]:
    if _rloo(job):
        yield (
            "RLOO",
            KeyVerdict(
                "default",
                {
                    "algorithm.credit": "leave_one_out",
                    "algorithm.aggregate": "fixed_length",
                    "algorithm.ratio": "sequence",
                },
                "each sample against its siblings; the ratio is the sequence's",
            ),
        )
    if not any(job.given(key) for key in ("reward_funcs", "reward_model_name_or_path")):
        yield (
            "reward_funcs",
            KeyVerdict("hole", {}, "the reward functions are in the trainer's call: name them in reward.components"),
        )
    if not any(job.given(key) for key in ("dataset_name", "train_dataset", "datasets")):
        yield "train_dataset", KeyVerdict("hole", {}, "the data is in the trainer's call: name it in data.train")
    if not any(job.given(key) for key in ("model_name_or_path", "model")):
        yield "model", KeyVerdict("hole", {}, "the model is in the trainer's call: name it in model.path")
    yield "data.chat", KeyVerdict("default", {"data.chat": True}, "TRL's prompts are messages")
    yield from shared.cluster(job, 1, _processes(job))


DIALECT = Dialect(ROWS, WRITTEN, _program, _whole, {"async_num_generations": "num_generations"})
