"""MindSpeed-RL's YAML: `megatron_training`, `actor_config`, `rl_config`, `generate_config`, and `runtime_env.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hone.dialects import shared
from hone.dialects.foreign import ForeignRun
from hone.dialects.shared import CONVERTED, EXPERTS, LOGGING, MEMORY, PIPELINE, RESUME
from hone.dialects.verdict import (
    Dialect,
    ForeignJob,
    KeyVerdict,
    Row,
    automatic,
    by,
    choice,
    mapped,
    missing,
    names,
    number,
    placement,
    positive,
    refused,
    text,
    to,
    truth,
    whole,
)

_M, _A, _R, _G = "megatron_training", "actor_config", "rl_config", "generate_config"
_VERIFIERS = {
    "acc": {"use": "acc"},
    "base_acc": {"use": "base_acc"},
    "format": {"use": "format"},
    "strict_format": {"use": "strict_format"},
    "step": {"use": "step"},
    "math_verify_reward": {"use": "math"},
    "math_17k_acc": {"use": "math"},
    "acc_for_dapo": {"use": "math"},
}


def _uses_critic(job: ForeignJob) -> bool:
    return job.get(f"{_R}.adv_estimator", "group_norm") == "gae"


def _credit(job: ForeignJob, value: Any) -> KeyVerdict:
    kinds = {"group_norm": "group_norm", "gae": "gae"}
    if value not in kinds:
        return refused("nearest: group_norm or gae")
    return mapped("", algorithm__credit=kinds[value])


def _kl(job: ForeignJob, value: Any) -> KeyVerdict:
    if _uses_critic(job):
        return mapped("KL in the reward", algorithm__kl_reward_coef=number(value))
    return mapped("KL in the loss, with group_norm", algorithm__kl_loss_coef=number(value))


def _estimator(job: ForeignJob, value: Any) -> KeyVerdict:
    kinds = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}
    if number(job.get(f"{_R}.init_kl_coef", 0.01)) == 0:
        return KeyVerdict("automatic", {}, "no KL")
    if value not in kinds or (kinds[value] == "k1" and not _uses_critic(job)):
        return refused("k1 has no gradient on average in a loss; nearest: low_var_kl (k3)")
    return mapped("", algorithm__kl_estimator=kinds[value])


def _verifiers(job: ForeignJob, value: Any) -> KeyVerdict:
    listed = names(value)
    weights = job.get(f"{_R}.verifier_weight", [1.0]) or [1.0]
    unknown = [name for name in listed if name not in _VERIFIERS]
    if unknown:
        return refused(
            f"no verifier {', '.join(unknown)}, which the tool passes over silently; nearest: {', '.join(_VERIFIERS)}"
        )
    if len(weights) != len(listed):
        return refused(f"{len(listed)} verifiers and {len(weights)} verifier_weight")
    components = [
        {**_VERIFIERS[name], **({"weight": number(weight)} if number(weight) != 1 else {})}
        for name, weight in zip(listed, weights, strict=True)
    ]
    return KeyVerdict("mapped", {"reward.components": components}, "judged in a killable process")


def _mini_batch(job: ForeignJob, value: Any) -> KeyVerdict:
    group = whole(job.get(f"{_R}.n_samples_per_prompt", 1))
    prompts = whole(job.get(f"{_M}.global_batch_size", 1))
    return shared.samples_per_step(job, prompts, group, whole(value) * group)


def _prompt_length(job: ForeignJob, value: Any) -> KeyVerdict:
    return mapped("", data__max_prompt_tokens=whole(value))


def _min_lr(job: ForeignJob, value: Any) -> KeyVerdict:
    if str(job.get(f"{_A}.lr_decay_style", "constant")) == "constant":
        return KeyVerdict("automatic", {}, "unused by a constant schedule")
    return mapped(
        "as a fraction of lr", train__optimizer__final_lr_frac=number(value) / number(job.get(f"{_A}.lr", 1e-6))
    )


def _warmup(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict(
        "mapped", {"train.optimizer.warmup_frac": number(value)} if value else {}, "" if value else "none"
    )


def _betas(job: ForeignJob, value: Any) -> KeyVerdict:
    return mapped(
        "",
        train__optimizer__betas=[number(job.get(f"{_A}.adam_beta1", 0.9)), number(job.get(f"{_A}.adam_beta2", 0.95))],
    )


def _cut(key: str, *off: Any) -> Row:
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if value is None or number(value) in off:
            return KeyVerdict("automatic", {}, "off")
        return refused(f"{shared.CUT}{off[0]}")

    return by(read, key)


def _clip(job: ForeignJob, value: Any) -> KeyVerdict:
    if truth(job.get(f"{_R}.clip_higher_enable", False)):
        return KeyVerdict("automatic", {}, "clip_ratio_low and clip_ratio_high win")
    return mapped("", algorithm__clip_low=number(value), algorithm__clip_high=number(value))


def _side(key: str) -> Row:
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if not truth(job.get(f"{_R}.clip_higher_enable", False)):
            return KeyVerdict("automatic", {}, "unused without clip_higher_enable")
        return KeyVerdict("mapped", {key: number(value)})

    return by(read, key)


def _overlong(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return KeyVerdict("automatic", {}, "off")
    limit = number(job.get(f"{_R}.rollout_max_tokens") or job.get(f"{_G}.sampling_config.max_tokens", 512))
    frac = number(job.get(f"{_R}.overlong_buffer", 0)) / limit
    return mapped(
        "tokens to a fraction",
        algorithm__overlong_buffer_frac=frac,
        algorithm__overlong_penalty=number(job.get(f"{_R}.overlong_buffer_penalty_factor", 1.0)),
    )


def _data(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict(
        "hole", {}, f"Megatron's preprocessed data ({value}): name the JSONL or Parquet file that it was made from"
    )


def _width(key: str) -> Row:
    return by(
        lambda job, v: KeyVerdict("placement", {} if v is None or whole(v) <= 1 else {key: whole(v)}),
        key,
        kind="placement",
    )


def _checkpointing(job: ForeignJob, value: Any) -> KeyVerdict:
    kinds = {"full": "full", "selective": "selective", "None": "none"}
    return mapped("", train__activation_checkpointing=kinds[str(value)])


_KERNELS = automatic("kernels are Hone's own")
_LOAD = placement(CONVERTED)

ROWS: dict[str, Row] = {
    "defaults": automatic("a model's shape: Hone reads it from the config.json of model.path"),
    f"{_M}.model": automatic("a model's shape: Hone reads it from the config.json of model.path"),
    f"{_M}.tokenizer_name_or_path": to(
        "model.path", text, "the Hugging Face directory; the Megatron weights were made from it"
    ),
    f"{_M}.tokenizer_type": automatic("the model's tokenizer"),
    f"{_M}.tokenizer_not_use_fast": automatic("the model's tokenizer"),
    f"{_M}.global_batch_size": to("train.prompts_per_step", whole, "prompts"),
    f"{_M}.train_iters": to("run.steps", whole, "policy updates"),
    f"{_M}.seq_length": automatic("the sum of prompt and response"),
    f"{_M}.save_interval": to("checkpoint.every", whole, "policy updates"),
    f"{_M}.data_path": by(_data, "data.train", kind="hole"),
    f"{_M}.dataset_additional_keys": by(
        lambda job, v: (
            mapped("the gold answer", data__answer_column=names(v)[0])
            if names(v)
            else KeyVerdict("automatic", {}, "none")
        ),
        "data.answer_column",
    ),
    f"{_M}.split": missing("evaluation data is data.eval", "data.eval", off=("100,0,0", None)),
    f"{_M}.no_shuffle": by(lambda job, v: mapped("inverted", data__shuffle=not truth(v)), "data.shuffle"),
    f"{_M}.full_shuffle_instruction_dataset": automatic("each epoch is shuffled as a whole"),
    f"{_M}.seed": to("seed", whole),
    f"{_M}.bf16": by(
        lambda job, v: mapped("", run__precision="bfloat16") if truth(v) else KeyVerdict("automatic", {}, "float32"),
        "run.precision",
    ),
    f"{_M}.stage": missing(
        "stages of RL: ray_grpo, ray_dapo, ray_ppo", "stages", off=("ray_grpo", "ray_dapo", "ray_ppo", None)
    ),
    f"{_M}.eval_interval": automatic("data.eval and eval.every"),
    f"{_M}.eval_iters": automatic("evaluation uses every row"),
    f"{_M}.log_interval": automatic(LOGGING),
    f"{_M}.attention_dropout": missing("models train without dropout", off=(0, 0.0)),
    f"{_M}.hidden_dropout": missing("models train without dropout", off=(0, 0.0)),
    f"{_M}.distributed_backend": placement("NCCL on GPUs, gloo on CPUs"),
    f"{_M}.tensor_model_parallel_size": _width("cluster.trainer.tensor_parallel"),
    f"{_M}.context_parallel_size": _width("cluster.trainer.sequence_parallel"),
    f"{_M}.pipeline_model_parallel_size": placement(PIPELINE),
    f"{_M}.moe_*": _KERNELS,
    f"{_M}.moe_aux_loss_coeff": missing("no load-balancing loss; nearest: 0", off=(0, 0.0)),
    f"{_M}.swap_optimizer": by(
        lambda job, v: KeyVerdict("placement", {"cluster.trainer.offload": ["optimizer"]} if truth(v) else {}, MEMORY),
        "cluster.trainer.offload",
        kind="placement",
    ),
    f"{_M}.lora_r": to("lora.rank", positive),
    f"{_M}.lora_alpha": to("lora.alpha", number),
    f"{_M}.lora_target_modules": automatic("all linear layers but the output's"),
    f"{_M}.load": _LOAD,
    f"{_M}.ref_model": _LOAD,
    f"{_M}.save": automatic("run.dir"),
    f"{_M}.dpo_*": missing("preference losses are not supported", off=()),
    f"{_M}.is_pairwise_dataset": missing("preference losses are not supported"),
    f"{_M}.**": _KERNELS,
    f"{_A}.model": automatic("a model's shape: Hone reads it from the config.json of model.path"),
    f"{_A}.lr": to("train.optimizer.lr", number, "written as text there"),
    f"{_A}.lr_decay_style": to(
        "train.optimizer.schedule", choice(constant="constant", linear="linear", cosine="cosine")
    ),
    f"{_A}.min_lr": by(_min_lr, "train.optimizer.final_lr_frac"),
    f"{_A}.lr_warmup_fraction": by(_warmup, "train.optimizer.warmup_frac"),
    f"{_A}.lr_warmup_iters": to("train.optimizer.warmup_steps", positive),
    f"{_A}.weight_decay": to("train.optimizer.weight_decay", number),
    f"{_A}.clip_grad": to("train.optimizer.grad_clip", number),
    f"{_A}.adam_beta1": by(_betas, "train.optimizer.betas"),
    f"{_A}.adam_beta2": by(_betas, "train.optimizer.betas"),
    f"{_A}.adam_eps": to("train.optimizer.eps", number),
    f"{_A}.micro_batch_size": automatic(
        "sequences of a pass: train.tokens_per_microbatch counts tokens, and the loss does not depend on it"
    ),
    f"{_A}.tensor_model_parallel_size": _width("cluster.trainer.tensor_parallel"),
    f"{_A}.context_parallel_size": _width("cluster.trainer.sequence_parallel"),
    f"{_A}.pipeline_model_parallel_size": placement(PIPELINE),
    f"{_A}.num_layer_list": placement(PIPELINE),
    f"{_A}.*virtual*": placement(PIPELINE),
    f"{_A}.noop_layers": placement(PIPELINE),
    f"{_A}.expert_*": placement(EXPERTS),
    f"{_A}.moe_*": placement(EXPERTS),
    f"{_A}.recompute_granularity": by(_checkpointing, "train.activation_checkpointing"),
    f"{_A}.recompute_*": automatic("part of recompute_granularity: all layers"),
    f"{_A}.load": _LOAD,
    f"{_A}.save": to("run.dir", text),
    f"{_A}.finetune": automatic("a run starts from model.path"),
    f"{_A}.no_load_*": automatic(RESUME),
    f"{_A}.no_save_*": automatic("checkpoints are whole"),
    f"{_A}.**": _KERNELS,
    "ref_config.**": placement("of the reference: placement and memory"),
    "reward_config.**": missing(
        "a reward model in Megatron's format: name a Hugging Face directory with `use: reward_model`",
        "reward.components",
        off=(),
    ),
    "critic_config.lr": to("critic.optimizer.lr", number),
    "critic_config.**": placement("of the critic: placement and memory"),
    f"{_R}.adv_estimator": by(_credit, "algorithm.credit"),
    f"{_R}.init_kl_coef": by(_kl, "algorithm.kl_loss_coef", "algorithm.kl_reward_coef"),
    f"{_R}.kl_ctrl_type": missing(
        "adaptive control: set algorithm.kl_target", "algorithm.kl_target", off=("fixed", None)
    ),
    f"{_R}.kl_target": automatic("only read by the adaptive control"),
    f"{_R}.kl_horizon": automatic("only read by the adaptive control"),
    f"{_R}.kl_penalty": by(_estimator, "algorithm.kl_estimator"),
    f"{_R}.gamma": to("algorithm.gamma", number),
    f"{_R}.lam": by(
        lambda job, v: (
            mapped("", algorithm__gae_lambda=number(v))
            if _uses_critic(job)
            else KeyVerdict("automatic", {}, "only read with gae")
        ),
        "algorithm.gae_lambda",
    ),
    f"{_R}.entropy_coeff": to("algorithm.entropy_coef", number),
    f"{_R}.clip_ratio": by(_clip, "algorithm.clip_low", "algorithm.clip_high"),
    f"{_R}.clip_higher_enable": automatic("clip_ratio_low and clip_ratio_high"),
    f"{_R}.clip_ratio_low": _side("algorithm.clip_low"),
    f"{_R}.clip_ratio_high": _side("algorithm.clip_high"),
    f"{_R}.cliprange_value": to("critic.value_clip", number),
    f"{_R}.token_level_loss": by(
        lambda job, v: mapped("", algorithm__aggregate="token_mean" if truth(v) else "sample_mean"),
        "algorithm.aggregate",
    ),
    f"{_R}.mini_batch_size": by(_mini_batch, "train.samples_per_optimizer_step", note="prompts to samples"),
    f"{_R}.n_samples_per_prompt": to("rollout.group_size", whole),
    f"{_R}.max_prompt_length": by(_prompt_length, "data.max_prompt_tokens"),
    f"{_R}.rollout_max_tokens": to("rollout.max_response_tokens", whole),
    f"{_R}.epochs": to("train.passes_per_batch", whole, "passes over a batch"),
    f"{_R}.shuffle_mini_batch": missing(
        "optimizer steps are in the order of sampling", "train.samples_per_optimizer_step"
    ),
    f"{_R}.rule_reward": automatic("verifier_function"),
    f"{_R}.beta": automatic("the weight of rule_reward beside a model: weights of reward.components"),
    f"{_R}.verifier_function": by(_verifiers, "reward.components"),
    f"{_R}.verifier_weight": automatic("weights of reward.components: part of verifier_function"),
    f"{_R}.verifier_parallel": to("reward.workers", whole),
    f"{_R}.verifier_timeout": automatic("reward.components.*.timeout_s"),
    f"{_R}.advantage_whiten": automatic("not read with group_norm"),
    f"{_R}.filter_groups_enable": to("algorithm.drop_uninformative", truth),
    f"{_R}.filter_groups_max_batches": by(
        lambda job, v: (
            mapped("", algorithm__max_dropped_per_kept=number(v))
            if positive(v)
            else KeyVerdict("automatic", {}, "no limit of its own: algorithm.max_dropped_per_kept")
        ),
        "algorithm.max_dropped_per_kept",
    ),
    f"{_R}.filter_groups_*": automatic("groups are compared by their rewards"),
    f"{_R}.overlong_buffer_enable": by(_overlong, "algorithm.overlong_buffer_frac"),
    f"{_R}.overlong_buffer*": automatic("part of overlong_buffer_enable"),
    f"{_R}.use_tensorboard": automatic("TensorBoard files are in the run's folder"),
    f"{_R}.use_wandb": by(
        lambda job, v: (
            mapped("", observe__wandb=str(job.get(f"{_R}.wandb_project") or "mindspeed"))
            if truth(v)
            else KeyVerdict("automatic", {}, "off")
        ),
        "observe.wandb",
    ),
    f"{_R}.wandb_*": automatic(LOGGING),
    f"{_R}.*resource*": by(
        lambda job, v: KeyVerdict("placement", {}, "see the line `devices`"),
        "cluster.devices_per_node",
        kind="placement",
    ),
    f"{_R}.*_resource.**": by(
        lambda job, v: KeyVerdict("placement", {}, "see the line `devices`"),
        "cluster.devices_per_node",
        kind="placement",
    ),
    f"{_R}.use_integrated_worker": placement("all roles on one pool"),
    f"{_R}.colocate_*": placement("cluster.pools"),
    f"{_R}.blocking": automatic("rollout.max_staleness: 0 waits for each update"),
    f"{_R}.async_engine": automatic("requests are asynchronous"),
    f"{_R}.guarantee_order": automatic("results do not depend on the order of arrival"),
    f"{_R}.use_remove_padding": automatic("never padded"),
    f"{_R}.use_dynamic_bsz": automatic("microbatches are always filled by tokens"),
    f"{_R}.max_packing_token_size": to("train.tokens_per_microbatch", whole),
    f"{_R}.dynamic_max_batch_size": automatic(MEMORY),
    f"{_R}.*_token_size*": automatic(MEMORY),
    f"{_R}.*_micro_batch_size": automatic(MEMORY),
    f"{_R}.*_dispatch_size": automatic("batches move as the loop needs them"),
    f"{_R}.num_cpus_for_*": placement("processes share the cores"),
    f"{_R}.zmq_communication": placement("batches move through Ray"),
    f"{_R}.share_backbone": missing("critic and policy have weights of their own", "critic.path"),
    f"{_R}.log_max_throughput": automatic(LOGGING),
    f"{_R}.multi_turn_enable": missing(
        "turns with tools are an environment: set rollout.environment.use", "rollout.environment.use"
    ),
    f"{_R}.tool_config_path": automatic("only read with multi_turn_enable"),
    f"{_R}.max_tool_calls": automatic("only read with multi_turn_enable"),
    f"{_R}.partial_rollout_*": missing(
        "responses are not carried over between updates; nearest: rollout.max_staleness = 1",
        "rollout.max_staleness",
        off=(None, False, 1),
    ),
    f"{_R}.is_multimodal": missing("images in prompts are not supported yet"),
    f"{_G}.sampling_config.max_tokens": to("rollout.max_response_tokens", whole),
    f"{_G}.sampling_config.temperature": to("rollout.temperature", number),
    f"{_G}.sampling_config.top_p": _cut("rollout.top_p", 1, 1.0),
    f"{_G}.sampling_config.top_k": _cut("rollout.top_k", 0, -1),
    f"{_G}.sampling_config.min_p": _cut("rollout.min_p", 0, 0.0),
    f"{_G}.sampling_config.seed": automatic("each sample's randomness follows `seed`"),
    f"{_G}.sampling_config.logprobs": automatic("the sampler's logprobs are always kept"),
    f"{_G}.sampling_config.detokenize": automatic("tokens in, tokens out"),
    f"{_G}.trust_remote_code": to("model.trust_remote_code", truth),
    f"{_G}.infer_tensor_parallel_size": _width("cluster.engines.tensor_parallel_size"),
    f"{_G}.infer_pipeline_parallel_size": placement(PIPELINE),
    f"{_G}.infer_expert_parallel_size": placement(EXPERTS),
    f"{_G}.enable_expert_parallel": placement(EXPERTS),
    f"{_G}.max_num_seqs": to("cluster.engines.max_num_seqs", whole),
    f"{_G}.max_model_len": by(lambda job, v: KeyVerdict("automatic", {}, "the longest prompt and response together")),
    f"{_G}.max_num_batched_tokens": to("cluster.engines.max_num_batched_tokens", whole),
    f"{_G}.dtype": to("cluster.engines.dtype", text),
    f"{_G}.gpu_memory_utilization": to("cluster.engines.gpu_memory_utilization", number),
    f"{_G}.enforce_eager": to("cluster.engines.enforce_eager", truth),
    f"{_G}.enable_prefix_caching": to("cluster.engines.enable_prefix_caching", truth),
    f"{_G}.num_scheduler_steps": automatic("vLLM's own"),
    f"{_G}.offload_train_*": placement("weights, gradients and moments leave the device while engines on it sample"),
    f"{_G}.*": placement("of the engine on NPUs: vLLM samples"),
    f"{_G}.**": placement("of the engine on NPUs: vLLM samples"),
    "env_vars.**": automatic(shared.RUNTIME),
    "working_dir": automatic(shared.RUNTIME),
    "excludes": automatic(shared.RUNTIME),
    "hydra.**": automatic("Hydra's own"),
    "msprobe.**": automatic("trace.json of the run's folder"),
    "profiler_config.**": automatic("trace.json of the run's folder"),
}

WRITTEN = (
    f"{_R}.max_prompt_length",
    f"{_R}.entropy_coeff",
    f"{_R}.init_kl_coef",
    f"{_R}.verifier_function",
    f"{_R}.n_samples_per_prompt",
)


def _program(foreign: ForeignRun) -> str | None:
    stage = next((str(key.value) for key in foreign.keys if key.key == f"{_M}.stage"), "ray_grpo")
    if stage in ("dpo", "sft", "orm", "prm") or stage.endswith(("dpo", "sft")):
        return f"stage {stage} is not RL of a policy from a reward; stages: [sft] fine-tunes here"
    return None


def _whole(job: ForeignJob) -> Iterator[tuple[str, KeyVerdict]]:
    yield "data.chat", KeyVerdict("default", {"data.chat": True}, "prompts were rendered with the model's template")
    yield "data.prompt_column", KeyVerdict("default", {"data.prompt_column": "prompt"}, "name the column of your file")
    if not job.given(f"{_R}.token_level_loss"):
        yield "loss", KeyVerdict("automatic", {}, "a mean per sample, then over samples")
    if not job.given(f"{_M}.data_path"):
        yield "data_path", KeyVerdict("hole", {}, "no data is named")
    devices = job.get(f"{_R}.actor_resource.num_npus")
    if devices is not None:
        count = whole(devices)
        per_node = count if count <= 8 else 8 if count % 16 else 16
        yield from shared.cluster(job, max(1, count // per_node), per_node)
        yield (
            "cluster.engines.use",
            KeyVerdict("placement", {"cluster.engines.use": "vllm"}, "samples are drawn with vLLM"),
        )


DIALECT = Dialect(ROWS, WRITTEN, _program, _whole, {f"{_M}.min-lr": f"{_A}.min_lr"})
