"""OpenRLHF's flags: `openrlhf.cli.train_ppo_ray`, dotted as since 0.10.2, flat ones of before by their alias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hone.dialects import shared
from hone.dialects.foreign import ForeignRun
from hone.dialects.shared import ENVIRONMENT, LOGGING, MEMORY, PICTURES, RESUME
from hone.dialects.verdict import (
    Dialect,
    ForeignJob,
    KeyVerdict,
    Row,
    automatic,
    by,
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
    zero_if_off,
)

_CREDITS = {
    "gae": "gae",
    "reinforce": "reinforce_pp",
    "rloo": "leave_one_out",
    "reinforce_baseline": "group_mean_whitened",
    "group_norm": "group_norm",
    "grpo": "group_norm",
    "dr_grpo": "group_mean",
}


def _credit_name(job: ForeignJob) -> str:
    return str(job.get("algo.advantage.estimator", "gae"))


def _uses_critic(job: ForeignJob) -> bool:
    return _credit_name(job) == "gae"


def _credit(job: ForeignJob, value: Any) -> KeyVerdict:
    if value not in _CREDITS:
        return refused(f"no advantage estimator of this kind; nearest: {', '.join(sorted(set(_CREDITS.values())))}")
    return KeyVerdict("mapped", {"algorithm.credit": _CREDITS[value]})


def _std_norm(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return KeyVerdict("automatic", {}, "off")
    if _credit_name(job) == "group_norm":
        return KeyVerdict("mapped", {"algorithm.credit": "group_mean"}, "no division by the standard deviation")
    return refused("advantages of this estimator are always whitened; nearest: algorithm.credit = group_mean")


def _kl_coef(job: ForeignJob, value: Any) -> KeyVerdict:
    if truth(job.get("algo.kl.use_loss", False)):
        return KeyVerdict("mapped", {"algorithm.kl_loss_coef": number(value)}, "in the loss, because of use_loss")
    return KeyVerdict("mapped", {"algorithm.kl_reward_coef": number(value)}, "KL in the reward")


def _kl_loss(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict("automatic", {}, "KL in the loss" if truth(value) else "KL in the reward")


def _kl_estimator(job: ForeignJob, value: Any) -> KeyVerdict:
    if number(job.get("algo.kl.init_coef", 0.01)) == 0:
        return KeyVerdict("automatic", {}, "no KL")
    if value == "k1" and truth(job.get("algo.kl.use_loss", False)):
        return refused("k1 has no gradient on average in a loss; nearest: k2 or k3")
    if value not in ("k1", "k2", "k3"):
        raise ValueError("must be k1, k2 or k3")
    return KeyVerdict("mapped", {"algorithm.kl_estimator": value})


def _kl_target(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return KeyVerdict("automatic", {}, "a fixed coefficient")
    if number(job.get("algo.kl.init_coef", 0.01)) == 0:
        return KeyVerdict("automatic", {}, "no KL")
    return KeyVerdict(
        "mapped",
        {"algorithm.kl_target": number(value)},
        "per token, as there: 6.0 turns the control off",
    )


def _kl_horizon(job: ForeignJob, value: Any) -> KeyVerdict:
    if job.get("algo.kl.target") is None:
        return KeyVerdict("automatic", {}, "only read with a target")
    return KeyVerdict("mapped", {"algorithm.kl_horizon_samples": whole(value)}, "samples")


def _batch(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict("mapped", {"train.prompts_per_step": whole(value)}, "prompts")


def _train_batch(job: ForeignJob, value: Any) -> KeyVerdict:
    group = whole(number(job.get("rollout.n_samples_per_prompt", 1)))
    return shared.samples_per_step(job, whole(job.get("rollout.batch_size", 1024)), group, whole(value))


def _clip(job: ForeignJob, value: Any) -> KeyVerdict:
    if job.get("actor.eps_clip_low_high") is not None:
        return KeyVerdict("automatic", {}, "eps_clip_low_high wins")
    return KeyVerdict("mapped", {"algorithm.clip_low": number(value), "algorithm.clip_high": number(value)})


def _numbers(value: Any) -> list[float]:
    parts = value if isinstance(value, list) else str(value).replace(",", " ").split()
    return [number(part) for part in parts]


def _clips(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return KeyVerdict("automatic", {}, "eps_clip is used")
    low, high = _numbers(value)
    return KeyVerdict("mapped", {"algorithm.clip_low": low, "algorithm.clip_high": high})


def _loss_type(job: ForeignJob, value: Any) -> KeyVerdict:
    if value not in ("ppo", "gspo"):
        return refused("nearest: ppo or gspo")
    return KeyVerdict(
        "mapped", {"algorithm.ratio": "sequence", "algorithm.aggregate": "sample_mean"} if value == "gspo" else {}
    )


def _aggregate(job: ForeignJob, value: Any) -> KeyVerdict:
    if job.get("actor.policy_loss_type", "ppo") == "gspo":
        return KeyVerdict("automatic", {}, "gspo averages per sample")
    kinds = {"token-mean": "token_mean", "seq-mean-token-mean": "sample_mean"}
    if value not in kinds:
        return refused(f"must be one of {', '.join(kinds)}")
    return KeyVerdict("mapped", {"algorithm.aggregate": kinds[value]})


def _critic_only(key: str, convert=number):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if not _uses_critic(job):
            return KeyVerdict("automatic", {}, "no critic with this estimator")
        return KeyVerdict("mapped", {} if value is None else {key: convert(value)})

    return by(read, key)


def _schedule(prefix: str, ours: str, role: str):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if role == "critic" and not _uses_critic(job):
            return KeyVerdict("automatic", {}, "no critic with this estimator")
        kind = str(value)
        if kind in ("cosine_with_min_lr", "cosine"):
            final = number(job.get(f"{prefix}.min_lr_ratio", 0.1)) if kind == "cosine_with_min_lr" else 0.0
            return KeyVerdict("mapped", {f"{ours}.schedule": "cosine", f"{ours}.final_lr_frac": final})
        if kind in ("constant", "constant_with_warmup", "linear"):
            return KeyVerdict("mapped", {f"{ours}.schedule": kind.split("_")[0]})
        return refused("nearest: constant, linear or cosine")

    return by(read, f"{ours}.schedule")


def _optimizer(prefix: str, ours: str) -> dict[str, Row]:
    role = prefix

    def row(name: str, convert=number) -> Row:
        return (
            _critic_only(f"{ours}.{name}", convert)
            if role == "critic"
            else by(
                lambda job, v: KeyVerdict("mapped", {} if v is None else {f"{ours}.{name}": convert(v)}),
                f"{ours}.{name}",
            )
        )

    return {
        f"{prefix}.adam.lr": row("lr"),
        f"{prefix}.adam.betas": row("betas", lambda v: _numbers(v)),
        f"{prefix}.adam.eps": row("eps"),
        f"{prefix}.adam.weight_decay": row("weight_decay"),
        f"{prefix}.max_norm": row("grad_clip"),
        f"{prefix}.lr_warmup_ratio": row("warmup_frac"),
        f"{prefix}.lr_scheduler": _schedule(prefix, ours, role),
        f"{prefix}.min_lr_ratio": automatic("part of lr_scheduler"),
        f"{prefix}.optim": missing("the optimizer is AdamW", f"{ours}.lr", off=("adam", None)),
        f"{prefix}.muon.*": by(
            lambda job, v: (
                KeyVerdict("automatic", {}, "only read with optim = muon")
                if job.get(f"{prefix}.optim", "adam") != "muon"
                else refused("the optimizer is AdamW")
            )
        ),
    }


def _prompts(job: ForeignJob, value: Any) -> KeyVerdict:
    listed = names(value) if isinstance(value, list) or "," in str(value) else [str(value)]
    paths = [part.rpartition("@")[2] for part in listed]
    return KeyVerdict("mapped", {"data.train": paths[0] if len(paths) == 1 else paths})


def _probs(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None or "," not in str(job.get("data.prompt_dataset", "")):
        return KeyVerdict("automatic", {}, "one data set")
    return refused("weights of several data sets: repeat a file in data.train to weigh it")


def _input_key(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict("mapped", {"data.prompt_column": str(value)})


def _template(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None or "{}" not in str(value):
        return KeyVerdict("automatic", {}, "none")
    if truth(job.get("data.apply_chat_template", False)):
        return KeyVerdict("automatic", {}, "unused with apply_chat_template")
    return KeyVerdict(
        "mapped", {"data.template": str(value).replace("\\n", "\n").replace("{}", "{prompt}")}, "{} to {prompt}"
    )


def _max_samples(job: ForeignJob, value: Any) -> KeyVerdict:
    rows = whole(number(value))
    return KeyVerdict("mapped", {} if rows >= 10_000_000 else {"data.train_rows": f"0:{rows}"}, "a slice of the rows")


def _reward_url(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return KeyVerdict("automatic", {}, "none")
    if job.values.get("train.agent_func_path"):
        return KeyVerdict("hole", {}, ENVIRONMENT)
    urls = names(value)
    if len(urls) == 1 and urls[0].split(":")[0].endswith(".py"):
        path = urls[0] if ":" in urls[0] else f"{urls[0]}:reward_func"
        return KeyVerdict(
            "mapped", {"reward.components": [{"use": path}]}, "queries, prompts, labels: called as OpenRLHF does"
        )
    return KeyVerdict(
        "hole",
        {},
        "what answers at the address is not in the command: name its function, file.py:reward_func",
    )


def _reward_model(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None or job.values.get("reward.remote_url") or job.values.get("train.agent_func_path"):
        return KeyVerdict("automatic", {}, "reward.remote_url is used")
    components = [{"use": "reward_model", "args": {"path": path}} for path in names(value)]
    return KeyVerdict("mapped", {"reward.components": components})


def _reward_range(job: ForeignJob, value: Any) -> KeyVerdict:
    low, high = _numbers(value)
    return KeyVerdict("mapped", {"algorithm.reward_clip": [low, high]})


def _overlong(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return KeyVerdict("automatic", {}, "off")
    limit = job.get("rollout.max_new_tokens")
    if limit is None:
        return refused("needs rollout.max_new_tokens: the buffer is a share of it")
    frac = number(value) / number(limit)
    penalty = number(job.get("reward.overlong_penalty_factor", 1))
    return KeyVerdict(
        "mapped",
        {"algorithm.overlong_buffer_frac": frac, "algorithm.overlong_penalty": penalty},
        "tokens to a fraction",
    )


def _truncated(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return KeyVerdict("automatic", {}, "off")
    return (
        KeyVerdict("mapped", {"algorithm.truncated_reward_factor": number(value)})
        if number(value) >= 0
        else refused("a fixed penalty; nearest: truncated_reward_factor = 0")
    )


def _lengths(job: ForeignJob, value: Any) -> KeyVerdict:
    new = job.get("rollout.max_new_tokens")
    total = whole(value)
    if new is None:
        half = total // 2
        return KeyVerdict(
            "mapped",
            {"data.max_prompt_tokens": half, "rollout.max_response_tokens": total - half},
            "one limit for both: half for each, as nothing else is said",
        )
    left = total - whole(new)
    if left < 1:
        return refused(f"leaves no tokens for the prompt: {total} - {new}")
    return KeyVerdict("mapped", {"data.max_prompt_tokens": left}, f"{total} - max_new_tokens = {left}")


def _filter_range(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(job.get("algo.dynamic_filtering_enable", False)):
        return KeyVerdict("automatic", {}, "only read by dynamic filtering")
    low, high = _numbers(value)
    if (low, high) != (0, 1):
        return refused("groups with equal rewards are dropped, not those outside bounds; nearest: 0 1")
    return KeyVerdict(
        "automatic", {}, "drops groups whose rewards are all equal, which for rewards of 0 and 1 is the same"
    )


def _is_correction(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return KeyVerdict("automatic", {}, "off, as here")
    kinds = {"tis": "tis", "icepop": "icepop", "seq-mask-tis": "sequence_mask"}
    kind = kinds[str(job.get("algo.advantage.is_correction_type", "tis"))]
    low, high = _numbers(job.get("algo.advantage.is_correction_threshold", [0.5, 5.0]))
    return KeyVerdict(
        "mapped", {"algorithm.correction": kind, "algorithm.correction_low": low, "algorithm.correction_high": high}
    )


def _is_level(job: ForeignJob, value: Any) -> KeyVerdict:
    if value == "off":
        return KeyVerdict("automatic", {}, "off, as here")
    if job.get("algo.advantage.is_correction_gating", "ratio") != "ratio":
        return refused("bounds of the ratio only; nearest: is_correction_gating = ratio")
    mode = str(job.get("algo.advantage.is_correction_mode", "mask"))
    kinds = {
        ("token", "clip"): "tis",
        ("token", "mask"): "icepop",
        ("seq", "clip"): "sequence_tis",
        ("seq", "mask"): "sequence_mask",
    }
    bounds = _numbers(job.get("algo.advantage.is_correction_threshold", [0.5, 5.0]))
    low, high = bounds if len(bounds) == 2 else (0.0, bounds[0])
    return KeyVerdict(
        "mapped",
        {
            "algorithm.correction": kinds[(str(value), mode)],
            "algorithm.correction_low": low,
            "algorithm.correction_high": high,
        },
    )


def _asynchronous(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return KeyVerdict("automatic", {}, "off, as here")
    return KeyVerdict(
        "mapped", {"rollout.max_staleness": max(1, whole(job.get("train.async_queue_size", 1)))}, "policy updates"
    )


def _offload(*what: str):
    return by(
        lambda job, v: KeyVerdict("placement", {"cluster.trainer.offload": list(what)} if truth(v) else {}, MEMORY),
        "cluster.trainer.offload",
        kind="placement",
    )


def _engine(key: str, convert=whole):
    return to(f"cluster.engines.{key}", convert)


def _adapter(key: str, convert):
    return shared.adapter(key, convert, lambda job: positive(job.get("ds.lora.rank", 0)))


def _top_p(job: ForeignJob, value: Any) -> KeyVerdict:
    if number(value) >= 1:
        return KeyVerdict("automatic", {}, "off")
    return refused(f"{shared.CUT}1")


def _tensorboard(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict("automatic", {}, "TensorBoard files are in the run's folder")


def _devices(job: ForeignJob, value: Any) -> KeyVerdict:
    job.plain(value)
    return KeyVerdict("placement", {}, "see the line `devices`")


ROWS: dict[str, Row] = {
    # placement
    "*.num_nodes": by(_devices, "cluster.pools", kind="placement"),
    "*.num_gpus_per_node": by(_devices, "cluster.pools", kind="placement"),
    "vllm.num_engines": by(_devices, "cluster.pools", kind="placement"),
    "train.colocate_actor_ref": by(_devices, "cluster.pools", kind="placement"),
    "train.colocate_critic_reward": by(_devices, "cluster.pools", kind="placement"),
    "train.colocate_all": by(_devices, "cluster.pools", kind="placement"),
    "vllm.tensor_parallel_size": by(
        lambda job, v: KeyVerdict(
            "placement", {} if whole(v) <= 1 else {"cluster.engines.tensor_parallel_size": whole(v)}
        ),
        "cluster.engines.tensor_parallel_size",
        kind="placement",
    ),
    "vllm.sync_backend": placement("how weights are published: cluster.transport"),
    "vllm.sync_with_ray": placement("how weights are published: cluster.transport"),
    "vllm.enable_prefix_caching": _engine("enable_prefix_caching", truth),
    "vllm.enforce_eager": _engine("enforce_eager", truth),
    "vllm.enable_sleep": automatic("engines on the trainer's devices sleep in turn"),
    "vllm.gpu_memory_utilization": _engine("gpu_memory_utilization", number),
    "vllm.generate_batch_size": automatic("requests are asynchronous"),
    "rollout.vllm_generate_batch_size": automatic("requests are asynchronous"),
    "ds.enable_sleep": automatic("the trainer sleeps while engines on its devices work"),
    "ds.zero_stage": placement(
        "FSDP2 shards weights, gradients and moments, as stage 3; cluster.trainer.shard replicates"
    ),
    "ds.zpg": placement("cluster.trainer.shard"),
    "ds.adam_offload": _offload("optimizer"),
    "ref.offload": _offload("reference"),
    "reward.offload": placement("reward models are offloaded where they take turns"),
    "ds.tensor_parallel_size": shared.width("cluster.trainer.tensor_parallel"),
    "ds.ring_attn_size": shared.width("cluster.trainer.sequence_parallel"),
    "ds.ring_attn_head_stride": placement("sequences are divided by Ulysses"),
    "ds.packing_samples": automatic("never padded"),
    "ds.attn_implementation": automatic("attention is Hone's own"),
    "ds.experts_implementation": automatic("Transformers' own"),
    "ds.use_liger_kernel": automatic("Hone's kernels"),
    "ds.grad_accum_dtype": automatic("gradients are accumulated in float32"),
    "ds.overlap_comm": automatic("communication overlaps computation"),
    "ds.deepcompile": automatic("cluster.trainer.compile compiles layers"),
    "ds.use_universal_ckpt": automatic("checkpoints are independent of the number of devices"),
    "ds.param_dtype": by(
        lambda job, v: KeyVerdict("mapped", {"run.precision": "bfloat16"}) if v == "bf16" else refused("nearest: bf16"),
        "run.precision",
    ),
    "ds.load_in_4bit": missing("quantised training is not supported; nearest: lora.rank without it", "lora.rank"),
    "ds.lora.rank": to("lora.rank", positive),
    "ds.lora.alpha": _adapter("lora.alpha", number),
    "ds.lora.target_modules": _adapter("lora.targets", shared.targets),
    "ds.lora.dropout": missing("adapters have no dropout", "lora.rank", off=(0, 0.0, None)),
    "ds.value_head_prefix": automatic("the value head is found by its shape"),
    # models
    "actor.model_name_or_path": to("model.path", text),
    "critic.model_name_or_path": _critic_only("critic.path", text),
    "reward.model_name_or_path": by(_reward_model, "reward.components"),
    "reward.remote_url": by(_reward_url, "reward.components"),
    "train.agent_func_path": rewritten(ENVIRONMENT, "rollout.environment.use", off=(None,)),
    "actor.gradient_checkpointing_enable": by(
        lambda job, v: KeyVerdict("mapped", {"train.activation_checkpointing": "full"} if truth(v) else {}),
        "train.activation_checkpointing",
    ),
    "actor.gradient_checkpointing_reentrant": automatic("never reentrant"),
    "actor.freeze_visual_encoder": missing(PICTURES),
    "data.disable_fast_tokenizer": automatic("the model's tokenizer"),
    "actor.aux_loss_coef": missing("no load-balancing loss; nearest: 0", off=(0, 0.0, None)),
    # data
    "data.prompt_dataset": by(_prompts, "data.train"),
    "data.prompt_probs": by(_probs, "data.train"),
    "data.prompt_split": to("data.train_split", text),
    "data.input_key": by(_input_key, "data.prompt_column"),
    "data.label_key": to("data.answer_column", text),
    "data.input_template": by(_template, "data.template"),
    "data.apply_chat_template": to("data.chat", truth),
    "data.max_len": by(_lengths, "data.max_prompt_tokens"),
    "data.prompt_max_len": to("data.max_prompt_tokens", whole),
    "rollout.max_new_tokens": to("rollout.max_response_tokens", lambda v: None if v is None else whole(v)),
    "data.max_samples": by(_max_samples, "data.train_rows"),
    "data.dataloader_num_workers": automatic("rows are tokenised as they are read"),
    "data.image_key": by(
        lambda job, v: (
            KeyVerdict("automatic", {}, "no images")
            if not whole(job.get("data.max_images_per_prompt", 0))
            else refused(PICTURES)
        )
    ),
    "data.max_images_per_prompt": missing(PICTURES),
    "data.pretrain_dataset": missing("no language-modelling loss beside RL", off=(None,)),
    "data.pretrain_*": automatic("only read with pretrain data"),
    "actor.ptx_coef": automatic("only read with pretrain data"),
    "eval.dataset": to("data.eval", text),
    "eval.split": by(
        lambda job, v: KeyVerdict("mapped", {"data.eval_split": str(v)} if job.get("eval.dataset") else {}),
        "data.eval_split",
    ),
    "eval.steps": by(
        lambda job, v: KeyVerdict(
            "mapped",
            {"eval.every": zero_if_off(v)} if job.get("eval.dataset") else {},
            "" if job.get("eval.dataset") else "no data to evaluate on",
        ),
        "eval.every",
    ),
    "eval.temperature": by(
        lambda job, v: KeyVerdict("mapped", {"eval.temperature": number(v)} if job.get("eval.dataset") else {}),
        "eval.temperature",
    ),
    "eval.n_samples_per_prompt": by(
        lambda job, v: KeyVerdict("mapped", {"eval.samples": whole(v)} if job.get("eval.dataset") else {}),
        "eval.samples",
    ),
    # sampling and batches
    "rollout.batch_size": by(_batch, "train.prompts_per_step"),
    "rollout.n_samples_per_prompt": to("rollout.group_size", lambda v: whole(number(v))),
    "rollout.micro_batch_size": automatic(
        "log probabilities are computed in microbatches of tokens; it does not touch generation"
    ),
    "rollout.max_tokens_per_gpu": automatic(MEMORY),
    "rollout.temperature": to("rollout.temperature", number),
    "rollout.top_p": by(_top_p, "rollout.top_p"),
    "train.batch_size": by(_train_batch, "train.samples_per_optimizer_step", note="samples"),
    "train.micro_batch_size": automatic("sequences of a pass: train.tokens_per_microbatch counts tokens"),
    "train.dynamic_batch_enable": automatic("microbatches are always filled by tokens"),
    "train.max_tokens_per_gpu": by(
        lambda job, v: KeyVerdict(
            "mapped",
            {"train.tokens_per_microbatch": whole(v)} if truth(job.get("train.dynamic_batch_enable", False)) else {},
        ),
        "train.tokens_per_microbatch",
    ),
    "train.max_epochs": to("train.passes_per_batch", whole, "passes over a batch, not over the data"),
    "train.num_episodes": to("run.epochs", number, "passes over the prompts"),
    "train.seed": to("seed", whole),
    "train.full_determinism_enable": automatic("a synchronous run on one process repeats bit for bit"),
    "train.async_enable": by(_asynchronous, "rollout.max_staleness"),
    "train.async_queue_size": automatic("part of async_enable"),
    "train.partial_rollout_enable": automatic("weights arrive between two tokens of a response"),
    "train.enable_ema": missing("no moving average of the weights; nearest: leave it out"),
    "train.ema_beta": automatic("only read with enable_ema"),
    # algorithm
    "algo.advantage.estimator": by(_credit, "algorithm.credit"),
    "algo.advantage.no_std_norm": by(_std_norm, "algorithm.credit"),
    "algo.advantage.gamma": to("algorithm.gamma", number),
    "algo.advantage.lambd": _critic_only("algorithm.gae_lambda"),
    "algo.advantage.is_correction_enable": by(_is_correction, "algorithm.correction"),
    "algo.advantage.is_correction_level": by(_is_level, "algorithm.correction"),
    "algo.advantage.is_correction_*": automatic("part of is_correction"),
    "algo.kl.init_coef": by(_kl_coef, "algorithm.kl_reward_coef", "algorithm.kl_loss_coef"),
    "algo.kl.use_loss": by(_kl_loss, "algorithm.kl_loss_coef"),
    "algo.kl.estimator": by(_kl_estimator, "algorithm.kl_estimator"),
    "algo.kl.target": by(_kl_target, "algorithm.kl_target"),
    "algo.kl.horizon": by(_kl_horizon, "algorithm.kl_horizon_samples"),
    "algo.kl.unbiased_gradient": missing(
        "the gradient is the estimator's own; nearest: algorithm.kl_estimator = k2", "algorithm.kl_estimator"
    ),
    "algo.kl.use_estimator_k3": by(
        lambda job, v: KeyVerdict("mapped", {"algorithm.kl_estimator": "k3"} if truth(v) else {}),
        "algorithm.kl_estimator",
    ),
    "algo.dynamic_filtering_enable": to("algorithm.drop_uninformative", truth),
    "algo.dynamic_filtering_range": by(_filter_range, "algorithm.drop_uninformative"),
    "actor.eps_clip": by(_clip, "algorithm.clip_low", "algorithm.clip_high"),
    "actor.eps_clip_low_high": by(_clips, "algorithm.clip_low", "algorithm.clip_high"),
    "actor.dual_clip": to("algorithm.dual_clip", lambda v: None if v is None else number(v)),
    "actor.policy_loss_type": by(_loss_type, "algorithm.ratio"),
    "actor.loss_agg_mode": by(_aggregate, "algorithm.aggregate"),
    "actor.entropy_coef": to("algorithm.entropy_coef", lambda v: None if v is None else number(v)),
    "critic.value_clip": _critic_only("critic.value_clip"),
    "critic.freezing_steps": _critic_only("critic.warmup_updates", zero_if_off),
    "critic.save_value_network": automatic("checkpoints have the critic"),
    "reward.normalize_enable": to("algorithm.normalize_rewards", truth),
    "reward.clip_range": by(_reward_range, "algorithm.reward_clip"),
    "reward.overlong_buffer_len": by(_overlong, "algorithm.overlong_buffer_frac"),
    "reward.overlong_penalty_factor": automatic("part of overlong_buffer_len"),
    "reward.stop_properly_penalty_coef": by(_truncated, "algorithm.truncated_reward_factor"),
    **_optimizer("actor", "train.optimizer"),
    **_optimizer("critic", "critic.optimizer"),
    # folders, loggers
    "ckpt.output_dir": to("run.dir", text),
    "ckpt.path": automatic("checkpoints are in the run's folder"),
    "ckpt.save_steps": to("checkpoint.every", zero_if_off, "-1: only at the end"),
    "ckpt.max_num": to("checkpoint.keep", positive),
    "ckpt.max_mem": automatic("checkpoint.keep"),
    "ckpt.load_enable": automatic(RESUME),
    "ckpt.save_hf": automatic("the final weights are always in hf/"),
    "ckpt.disable_ds": automatic("checkpoints are always whole"),
    "ckpt.best_metric_key": by(
        lambda job, v: KeyVerdict(
            "mapped", {"checkpoint.best": "eval/accuracy"} if v and job.get("eval.dataset") else {}
        ),
        "checkpoint.best",
    ),
    "logger.logging_steps": automatic("every update is logged"),
    "logger.wandb.key": automatic("secrets come from the environment"),
    "logger.wandb.project": by(
        lambda job, v: KeyVerdict("mapped", {"observe.wandb": str(v)} if job.given("logger.wandb.key") else {}),
        "observe.wandb",
    ),
    "logger.wandb.*": automatic(LOGGING),
    "logger.tensorboard_dir": by(_tensorboard, "observe.tensorboard"),
    "use_ms": automatic("name a directory in model.path"),
    "local_rank": automatic("devices are Ray's"),
    "perf": automatic(LOGGING),
}

ALIASES = {
    "pretrain": "actor.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "save_steps": "ckpt.save_steps",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable",
    "best_metric_key": "ckpt.best_metric_key",
    "eval_steps": "eval.steps",
    "logging_steps": "logger.logging_steps",
    "colocate_all_models": "train.colocate_all",
    "colocate_actor_ref": "train.colocate_actor_ref",
    "colocate_critic_reward": "train.colocate_critic_reward",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "enforce_eager": "vllm.enforce_eager",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "vllm_is_correction_type": "algo.advantage.is_correction_type",
    "async_train": "train.async_enable",
    "async_queue_size": "train.async_queue_size",
    "partial_rollout": "train.partial_rollout_enable",
    "zero_stage": "ds.zero_stage",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "deepcompile": "ds.deepcompile",
    "torch_compile": "ds.deepcompile",
    "param_dtype": "ds.param_dtype",
    "bf16": "ds.bf16",
    "enable_ema": "train.enable_ema",
    "ema_beta": "train.ema_beta",
    "zpg": "ds.zpg",
    "adam_offload": "ds.adam_offload",
    "actor_init_on_gpu": "ds.init_on_gpu",
    "attn_implementation": "ds.attn_implementation",
    "flash_attn": "ds.attn_implementation",
    "use_liger_kernel": "ds.use_liger_kernel",
    "grad_accum_dtype": "ds.grad_accum_dtype",
    "overlap_comm": "ds.overlap_comm",
    "disable_fast_tokenizer": "data.disable_fast_tokenizer",
    "dataloader_num_workers": "data.dataloader_num_workers",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "packing_samples": "ds.packing_samples",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "load_in_4bit": "ds.load_in_4bit",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "target_modules": "ds.lora.target_modules",
    "lora_dropout": "ds.lora.dropout",
    "num_episodes": "train.num_episodes",
    "rollout_batch_size": "rollout.batch_size",
    "vllm_generate_batch_size": "rollout.vllm_generate_batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "max_epochs": "train.max_epochs",
    "max_len": "data.max_len",
    "prompt_max_len": "data.prompt_max_len",
    "max_new_tokens": "rollout.max_new_tokens",
    "generate_max_len": "rollout.max_new_tokens",
    "max_samples": "data.max_samples",
    "max_norm": "actor.max_norm",
    "l2": "actor.adam.weight_decay",
    "ptx_coef": "actor.ptx_coef",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "value_clip": "critic.value_clip",
    "lambd": "algo.advantage.lambd",
    "gamma": "algo.advantage.gamma",
    "micro_train_batch_size": "train.micro_batch_size",
    "train_batch_size": "train.batch_size",
    "normalize_reward": "reward.normalize_enable",
    "top_p": "rollout.top_p",
    "temperature": "rollout.temperature",
    "seed": "train.seed",
    "full_determinism": "train.full_determinism_enable",
    "freezing_actor_steps": "critic.freezing_steps",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "save_value_network": "critic.save_value_network",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "lr_scheduler": "actor.lr_scheduler",
    "min_lr_ratio": "actor.min_lr_ratio",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss",
    "use_kl_estimator_k3": "algo.kl.use_estimator_k3",
    "policy_loss_type": "actor.policy_loss_type",
    "aux_loss_coef": "actor.aux_loss_coef",
    "entropy_loss_coef": "actor.entropy_coef",
    "adam_betas": "actor.adam.betas",
    "reward_clip_range": "reward.clip_range",
    "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "stop_properly_penalty_coef": "reward.stop_properly_penalty_coef",
    "ring_attn_size": "ds.ring_attn_size",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "value_head_prefix": "ds.value_head_prefix",
    "ref_reward_offload": "ref.offload",
    "agent_func_path": "train.agent_func_path",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "prompt_split": "data.prompt_split",
    "pretrain_data": "data.pretrain_dataset",
    "pretrain_data_probs": "data.pretrain_probs",
    "pretrain_split": "data.pretrain_split",
    "eval_dataset": "eval.dataset",
    "eval_split": "eval.split",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "input_template": "data.input_template",
    "apply_chat_template": "data.apply_chat_template",
    "image_key": "data.image_key",
    "use_wandb": "logger.wandb.key",
    "wandb_org": "logger.wandb.org",
    "wandb_group": "logger.wandb.group",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "use_tensorboard": "logger.tensorboard_dir",
    **{f"{role}_num_nodes": f"{role}.num_nodes" for role in ("actor", "critic", "ref", "reward")},
    **{f"{role}_num_gpus_per_node": f"{role}.num_gpus_per_node" for role in ("actor", "critic", "ref", "reward")},
    **{
        f"vllm_{name}": f"vllm.{name}"
        for name in (
            "num_engines",
            "tensor_parallel_size",
            "sync_backend",
            "sync_with_ray",
            "enable_sleep",
            "gpu_memory_utilization",
        )
    },
}
ROWS |= {
    "ds.bf16": by(
        lambda job, v: KeyVerdict("mapped", {"run.precision": "bfloat16"} if truth(v) else {}), "run.precision"
    ),
    "ds.init_on_gpu": automatic("weights are read shard by shard"),
}

WRITTEN = (
    "data.input_key",
    "data.max_len",
    "rollout.max_new_tokens",
    "rollout.batch_size",
    "rollout.n_samples_per_prompt",
    "train.batch_size",
    "train.num_episodes",
    "train.seed",
    "algo.advantage.estimator",
    "algo.advantage.lambd",
    "algo.kl.init_coef",
    "algo.kl.estimator",
    "actor.eps_clip",
    "actor.loss_agg_mode",
    "reward.clip_range",
    "actor.adam.lr",
    "actor.lr_warmup_ratio",
    "actor.lr_scheduler",
    "critic.adam.lr",
    "critic.value_clip",
    "critic.lr_warmup_ratio",
    "critic.lr_scheduler",
    "ckpt.save_steps",
    "ds.lora.alpha",
    "eval.temperature",
    "eval.n_samples_per_prompt",
)


def _program(foreign: ForeignRun) -> str | None:
    if "ppo" in foreign.program or "grpo" in foreign.program or "reinforce" in foreign.program:
        return None
    return f"{foreign.program} is not RL of a policy from a reward; stages: [sft] and [reward_model] train these here"


def _devices_of(job: ForeignJob, role: str) -> int:
    return whole(number(job.get(f"{role}.num_nodes", 1))) * whole(number(job.get(f"{role}.num_gpus_per_node", 8)))


def _whole(job: ForeignJob) -> Iterator[tuple[str, KeyVerdict]]:
    if job.get("actor.loss_agg_mode") is None:
        yield "aggregate", KeyVerdict("default", {"algorithm.aggregate": "token_mean"}, "a mean over all tokens")
    if not job.get("ds.param_dtype") and not job.given("ds.bf16"):
        yield "precision", KeyVerdict("default", {"run.precision": "bfloat16"}, "the tool computes in bfloat16")
    if not any(
        job.values.get(key) for key in ("reward.remote_url", "reward.model_name_or_path", "train.agent_func_path")
    ):
        yield "reward", KeyVerdict("hole", {}, "the command names no reward: set reward.components")
    yield "cluster.engines.use", KeyVerdict("placement", {"cluster.engines.use": "vllm"}, "samples are drawn with vLLM")
    yield from _placed(job)


def _placed(job: ForeignJob) -> Iterator[tuple[str, KeyVerdict]]:
    """Pools as the flags place the roles: together, in pairs, or each on its own."""
    actor = _devices_of(job, "actor")
    engines = whole(number(job.get("vllm.num_engines") or 0)) * whole(number(job.get("vllm.tensor_parallel_size", 1)))
    per_node = whole(number(job.get("actor.num_gpus_per_node", 8)))
    uses_reference = number(job.get("algo.kl.init_coef", 0.01)) > 0
    uses_model = bool(job.values.get("reward.model_name_or_path")) and not job.values.get("reward.remote_url")
    if truth(job.get("train.colocate_all", False)) and not truth(job.get("train.async_enable", False)):
        yield from shared.cluster(job, max(1, actor // per_node), per_node)
        return
    pools: dict[str, Any] = {"policy": {"devices": actor, "roles": ["policy"]}}
    if uses_reference:
        if truth(job.get("train.colocate_actor_ref", False)) or truth(job.get("train.colocate_all", False)):
            pools["policy"]["roles"].append("reference")
        else:
            pools["reference"] = {"devices": _devices_of(job, "ref"), "roles": ["reference"]}
    if _uses_critic(job):
        pools["critic"] = {"devices": _devices_of(job, "critic"), "roles": ["critic"]}
    if uses_model:
        if "critic" in pools and truth(job.get("train.colocate_critic_reward", False)):
            pools["critic"]["roles"].append("reward_model")
        else:
            pools["reward"] = {"devices": _devices_of(job, "reward"), "roles": ["reward_model"]}
    if engines:
        pools["rollout"] = {"devices": engines, "roles": ["rollout"]}
    else:
        pools["policy"]["roles"].insert(1, "rollout")
    total = sum(pool["devices"] for pool in pools.values())
    yield from shared.cluster(job, -(-total // per_node), per_node, pools)


def _version(foreign: ForeignRun) -> str | None:
    """Flags had no dots before 0.10.2."""
    return "0.10.1" if any(key.key.replace("-", "_") in ALIASES for key in foreign.keys) else None


DIALECT = Dialect(ROWS, WRITTEN, _program, _whole, ALIASES, _version)
