"""MindSpeed-RL's YAML: `megatron_training`, `actor_config`, `rl_config`, `generate_config`, and `runtime_env.yaml`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hone.dialects import shared
from hone.dialects.foreign import ForeignRun
from hone.dialects.rows import automatic, by, each, listed, missing, placement, rewritten, table, to, under, when, where
from hone.dialects.shared import CONVERTED, ENVIRONMENT, EXPERTS, LOGGING, MEMORY, PIPELINE, RESUME
from hone.dialects.values import names, number, positive, text, truth, whole
from hone.dialects.verdict import Dialect, ForeignJob, KeyVerdict, Row, default, nothing, put, refused, unknown

_M, _A, _R, _G = "megatron_training", "actor_config", "rl_config", "generate_config"
VERIFIERS = {
    "acc": "acc",
    "base_acc": "base_acc",
    "format": "format",
    "strict_format": "strict_format",
    "step": "step",
    "math_verify_reward": "math",
    "math_17k_acc": "math",
    "acc_for_dapo": "math_dapo",
    "acc_for_ppo": "math",
}
ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}

# ---- rules

_uses_critic = where(f"{_R}.adv_estimator", "gae", other="group_norm")
_is_dapo = where(f"{_M}.stage", "ray_dapo")
_has_two_bounds = where(f"{_R}.clip_higher_enable")


def _kl(job: ForeignJob, value: Any) -> KeyVerdict:
    if _is_dapo(job):
        return nothing("ray_dapo has no KL, in the loss or in the reward")
    if _uses_critic(job):
        if job.get(f"{_R}.use_kl_in_reward") is False:
            return put({"algorithm.kl_reward_coef": 0.0}, "use_kl_in_reward is false")
        return put({"algorithm.kl_reward_coef": number(value)}, "KL in the reward")
    return put({"algorithm.kl_loss_coef": number(value)}, "KL in the loss, with group_norm")


def _estimator(job: ForeignJob, value: Any) -> KeyVerdict:
    if _is_dapo(job) or number(job.get(f"{_R}.init_kl_coef", 0.01)) == 0:
        return nothing("no KL")
    kind = ESTIMATORS.get(value)
    if kind is None or (kind == "k1" and not _uses_critic(job)):
        return refused(shared.NO_K1)
    return put({"algorithm.kl_estimator": kind})


def _verifiers(job: ForeignJob, value: Any) -> KeyVerdict:
    unknown_ = [name for name in names(value) if name not in VERIFIERS]
    if unknown_:
        known = ", ".join(VERIFIERS)
        return refused(f"no verifier {', '.join(unknown_)}, which the tool passes over silently; nearest: {known}")
    components: list[dict[str, Any]] = []
    for name in names(value):
        is_second = any(component["use"] == VERIFIERS[name] for component in components)
        components.append({"use": VERIFIERS[name]} | ({"name": name} if is_second else {}))
    weights = job.get(f"{_R}.verifier_weight", [1.0]) or [1.0]
    return shared.weighted(components, weights, "judged in a killable process")


def _mini_batch(job: ForeignJob, value: Any) -> KeyVerdict:
    group = whole(job.get(f"{_R}.n_samples_per_prompt", 1))
    return shared.samples_per_step(whole(job.get(f"{_M}.global_batch_size", 1)), group, whole(value) * group)


def _recompute(job: ForeignJob, value: Any) -> KeyVerdict:
    """`block` recomputes the first layers, of which there may be none; `uniform` all, some of them together."""
    kinds = {"full": "full", "selective": "selective", "None": "none"}
    if str(value) not in kinds:
        return refused(f"must be one of {', '.join(kinds)}")
    first = positive(job.get(f"{_A}.recompute_num_layers"))
    is_some = str(value) == "full" and str(job.get(f"{_A}.recompute_method")) == "block" and first
    return put({"train.activation_checkpointing": first if is_some else kinds[str(value)]})


def _clip(job: ForeignJob, value: Any) -> KeyVerdict:
    if _has_two_bounds(job):
        return nothing("clip_ratio_low and clip_ratio_high win")
    return put(shared.both_bounds(value))


def _overlong(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return nothing("off")
    limit = job.get(f"{_R}.rollout_max_tokens") or job.get(f"{_G}.sampling_config.max_tokens", 512)
    penalty = job.get(f"{_R}.overlong_buffer_penalty_factor", 1.0)
    return shared.overlong(job.get(f"{_R}.overlong_buffer", 0), limit, penalty)


def _answers(job: ForeignJob, value: Any) -> KeyVerdict:
    """The column of answers among those that the tool carries along; others are the tokenised prompt's."""
    columns = names(value)
    found = "labels" if "labels" in columns else next((name for name in columns if name not in _TOKENISED), None)
    return (
        put({"data.answer_column": found}, "the gold answer") if found else nothing("columns of the tokenised prompt")
    )


def _in_kind(job: ForeignJob, value: Any) -> KeyVerdict:
    if truth(value) == bool(_uses_critic(job)):
        return nothing("KL in the reward" if truth(value) else "KL in the loss, with group_norm")
    return nothing("no KL: init_kl_coef") if truth(value) is False else refused("KL in the loss, with group_norm")


def _data(job: ForeignJob, value: Any) -> KeyVerdict:
    paths = names(value)
    if paths and all(re.search(r"\.(jsonl?|csv|parquet)(\.gz)?$", path) for path in paths):
        return put({"data.train": paths[0] if len(paths) == 1 else paths})
    return unknown("Megatron's preprocessed data: name the JSONL or Parquet file of preprocess_data's --input")


def _program(foreign: ForeignRun) -> str | None:
    stage = next((str(key.value) for key in foreign.keys if key.key == f"{_M}.stage"), "ray_grpo")
    if stage in ("dpo", "sft", "orm", "prm") or stage.endswith(("dpo", "sft")):
        return f"stage {stage} is not RL of a policy from a reward; stages: [sft] fine-tunes here"
    return None


def _whole(job: ForeignJob) -> Iterator[tuple[str, KeyVerdict]]:
    yield "correction", shared.NO_CORRECTION
    yield "data.chat", default({"data.chat": True}, "prompts were rendered with the model's template")
    yield "data.prompt_column", default({"data.prompt_column": "prompt"}, "name the column of your file")
    if not job.given(f"{_R}.token_level_loss"):
        size = whole(job.get(f"{_A}.micro_batch_size", 1))
        together = "tokens as fit" if truth(job.get(f"{_R}.use_dynamic_bsz", False)) else f"{size} samples"
        why = f"there a mean over the tokens of a microbatch, of {together}; here per sample, then over samples"
        yield "loss", nothing("a mean per sample, then over samples" if together == "1 samples" else why)
    if not job.given(f"{_M}.data_path"):
        yield f"{_M}.data_path", unknown("no data is named")
    if job.given(f"{_R}.actor_resource.num_npus"):
        yield "cluster.engines.use", shared.VLLM
        count = whole(job.get(f"{_R}.actor_resource.num_npus"))
        per_node = count if count <= 8 else 8 if count % 16 else 16
        yield from shared.cluster(max(1, count // per_node), per_node)


def _optimizer(prefix: str, ours: str) -> dict[str, Row]:
    """Rows of the optimizer of the actor or the critic."""

    def decays(job: ForeignJob) -> bool:
        return str(job.get(f"{prefix}.lr_decay_style", "constant")) != "constant"

    betas = shared.several(f"{ours}.betas", (f"{prefix}.adam_beta1", 0.9), (f"{prefix}.adam_beta2", 0.999))
    return {
        "lr": to(f"{ours}.lr", number, "written as text there"),
        "lr_decay_style": table({"constant": "constant", "linear": "linear", "cosine": "cosine"}, f"{ours}.schedule"),
        "min_lr": when(decays, shared.CONSTANT, shared.floor(f"{prefix}.lr", f"{ours}.final_lr_frac")),
        "lr_warmup_fraction": to(f"{ours}.warmup_frac", lambda value: number(value) or None),
        "lr_warmup_iters": to(f"{ours}.warmup_steps", positive),
        "weight_decay": to(f"{ours}.weight_decay", number),
        "clip_grad": to(f"{ours}.grad_clip", number),
        **each("adam_beta1 adam_beta2", betas),
        "adam_eps": to(f"{ours}.eps", number),
    }


# ---- tables

_C = "critic_config"
_TOKENISED = ("input_ids", "input_ids_length", "attention_mask", "position_ids", "pixel_values", "image_grid_thw")
_KERNELS = automatic("kernels are Hone's own")
_LOAD = placement(CONVERTED)
_SHAPE = automatic("a model's shape: Hone reads it from the config.json of model.path")
_NO_DROPOUT = missing("models train without dropout")
_TURNS = automatic("only read with multi_turn_enable")
_REWARD_MODEL = "a reward model in Megatron's format: name a Hugging Face directory with `use: reward_model`"
_CARRIED = "responses are not carried over between updates; nearest: rollout.max_staleness = 1"

MEGATRON: dict[str, Row] = {
    "model": _SHAPE,
    "tokenizer_name_or_path": to(
        "model.path", text, "the Hugging Face directory; the Megatron weights were made from it"
    ),
    **each("tokenizer_type tokenizer_not_use_fast", automatic("the model's tokenizer")),
    "global_batch_size": to("train.prompts_per_step", whole, "prompts"),
    "train_iters": to("run.steps", whole, "policy updates"),
    "seq_length": automatic("the sum of prompt and response"),
    "save_interval": to("checkpoint.every", whole, "policy updates"),
    "data_path": by(_data, "data.train", kind="hole"),
    "dataset_additional_keys": by(_answers, "data.answer_column"),
    "split": missing("evaluation data is data.eval", "data.eval", off=("100,0,0", None)),
    "no_shuffle": shared.shuffled(off=True),
    "full_shuffle_instruction_dataset": automatic("each epoch is shuffled as a whole"),
    "seed": to("seed", whole),
    "bf16": shared.bfloat16(),
    "stage": missing(
        "stages of RL: ray_grpo, ray_dapo, ray_ppo", "stages", off=("ray_grpo", "ray_dapo", "ray_ppo", None)
    ),
    "eval_interval": automatic("data.eval and eval.every"),
    "eval_iters": automatic("evaluation uses every row"),
    "log_interval": automatic(LOGGING),
    **each("attention_dropout hidden_dropout", _NO_DROPOUT),
    "distributed_backend": placement("NCCL on GPUs, gloo on CPUs"),
    "moe_aux_loss_coeff": missing(shared.NO_AUX_LOSS, "algorithm.load_balancing_coef"),
    "swap_optimizer": shared.offload("optimizer"),
    "lora_r": to("lora.rank", positive),
    "lora_alpha": to("lora.alpha", number),
    "lora_target_modules": automatic("all linear layers but the output's"),
    "save": automatic("run.dir"),
    "dpo_*": missing("preference losses are not supported", off=()),
    "is_pairwise_dataset": missing("preference losses are not supported"),
}

ACTOR: dict[str, Row] = {
    "model": _SHAPE,
    **_optimizer(_A, "train.optimizer"),
    "micro_batch_size": automatic(
        "sequences of a pass: train.tokens_per_microbatch counts tokens, and the loss does not depend on it"
    ),
    **each("num_layer_list *virtual* noop_layers", placement(PIPELINE)),
    **each("expert_* moe_*", placement(EXPERTS)),
    "recompute_granularity": by(_recompute, "train.activation_checkpointing"),
    **each(
        "recompute_method recompute_num_layers",
        automatic("with recompute_granularity: full: the first recompute_num_layers layers (block), or all (uniform)"),
    ),
    "recompute_*": automatic("part of recompute_granularity"),
    "save": shared.folder(),
    "finetune": automatic("a run starts from model.path"),
    "no_load_*": automatic(RESUME),
    "no_save_*": automatic("checkpoints are whole"),
}

_BOTH: dict[str, Row] = {
    "tensor_model_parallel_size": shared.width("cluster.trainer.tensor_parallel"),
    "context_parallel_size": shared.width("cluster.trainer.sequence_parallel"),
    "pipeline_model_parallel_size": placement(PIPELINE),
    **each("load ref_model", _LOAD),
    **each("moe_* **", _KERNELS),
}

RL: dict[str, Row] = {
    "adv_estimator": table({"group_norm": "group_norm", "gae": "gae"}, "algorithm.credit"),
    "init_kl_coef": by(_kl, "algorithm.kl_loss_coef", "algorithm.kl_reward_coef"),
    "kl_ctrl_type": missing("adaptive control: set algorithm.kl_target", "algorithm.kl_target", off=("fixed", None)),
    **each("kl_target kl_horizon", automatic("only read by the adaptive control")),
    "kl_penalty": by(_estimator, "algorithm.kl_estimator"),
    "gamma": to("algorithm.gamma", number),
    "lam": when(_uses_critic, "only read with gae", to("algorithm.gae_lambda", number)),
    "entropy_coeff": to("algorithm.entropy_coef", number),
    "clip_ratio": by(_clip, "algorithm.clip_low", "algorithm.clip_high"),
    "clip_higher_enable": automatic("clip_ratio_low and clip_ratio_high"),
    "clip_ratio_low": when(_has_two_bounds, "unused without clip_higher_enable", to("algorithm.clip_low", number)),
    "clip_ratio_high": when(_has_two_bounds, "unused without clip_higher_enable", to("algorithm.clip_high", number)),
    "cliprange_value": to("critic.value_clip", number),
    "token_level_loss": to("algorithm.aggregate", lambda value: "token_mean" if truth(value) else "sample_mean"),
    "mini_batch_size": by(_mini_batch, "train.samples_per_optimizer_step", note="prompts to samples"),
    "n_samples_per_prompt": to("rollout.group_size", whole),
    "max_prompt_length": to("data.max_prompt_tokens", whole),
    "rollout_max_tokens": to("rollout.max_response_tokens", whole),
    "epochs": to("train.passes_per_batch", whole, "passes over a batch"),
    "shuffle_mini_batch": automatic(shared.SHUFFLED),
    "rule_reward": automatic("verifier_function"),
    "beta": automatic("the weight of rule_reward beside a model: weights of reward.components"),
    "verifier_function": by(_verifiers, "reward.components"),
    "verifier_weight": automatic("weights of reward.components: part of verifier_function"),
    "verifier_parallel": to("reward.workers", whole),
    "verifier_timeout": automatic("reward.components.*.timeout_s"),
    "advantage_whiten": automatic("not read with group_norm"),
    "filter_groups_enable": to("algorithm.drop_uninformative", truth),
    "filter_groups_max_batches": to("algorithm.max_dropped_per_kept", positive),
    "filter_groups_*": automatic("groups are compared by their rewards"),
    "overlong_buffer_enable": by(_overlong, "algorithm.overlong_buffer_frac"),
    "overlong_buffer*": automatic("part of overlong_buffer_enable"),
    "use_tensorboard": automatic("TensorBoard files are in the run's folder"),
    "use_wandb": by(
        lambda job, v: shared.loggers(
            ["wandb"] if truth(v) else [], lambda: job.get(f"{_R}.wandb_project") or "mindspeed"
        ),
        "observe.wandb",
    ),
    "wandb_exp_name": shared.run_name(),
    "wandb_*": automatic(LOGGING),
    **each("*resource* *_resource.**", shared.DEVICES),
    "use_integrated_worker": placement("all roles on one pool"),
    "colocate_*": placement("cluster.pools"),
    "blocking": automatic("rollout.max_staleness: 0 waits for each update"),
    "async_engine": automatic("requests are asynchronous"),
    "guarantee_order": automatic("results do not depend on the order of arrival"),
    "use_remove_padding": automatic("never padded"),
    "use_dynamic_bsz": automatic("microbatches are always filled by tokens"),
    "max_packing_token_size": to(
        "train.tokens_per_microbatch", lambda value: whole(value[0] if isinstance(value, list) else value)
    ),
    **each("dynamic_max_batch_size *_token_size* *_micro_batch_size", automatic(MEMORY)),
    "*_dispatch_size": automatic("batches move as the loop needs them"),
    "num_cpus_for_*": placement("processes share the cores"),
    "zmq_communication": placement("batches move through Ray"),
    "share_backbone": when(
        lambda job: positive(job.get(f"{_M}.lora_r")) is None,
        "the reference is the policy without its adapter",
        missing("critic and policy have weights of their own", "critic.path"),
    ),
    "use_kl_in_reward": by(_in_kind, "algorithm.kl_reward_coef"),
    "use_dp_batch_balance": automatic("samples are divided over ranks by tokens"),
    "runtime_env_path": automatic(shared.RUNTIME),
    **each("enable_sharding_validate tp_split_expert", automatic("weights are published tensor by tensor")),
    **each("num_samples_per_step experience_count", automatic("batches move as the loop needs them")),
    "log_max_throughput": automatic(LOGGING),
    "multi_turn_enable": rewritten(ENVIRONMENT, "rollout.environment.use"),
    **each("tool_* max_tool_* max_parallel_calls max_total_response_length", _TURNS),
    "partial_rollout_*": missing(_CARRIED, "rollout.max_staleness", off=(None, False, 1)),
    "is_multimodal": rewritten("which column has the pictures: name it", "data.image_columns"),
}

GENERATE: dict[str, Row] = {
    "sampling_config.max_tokens": to("rollout.max_response_tokens", whole),
    "sampling_config.temperature": to("rollout.temperature", number),
    "sampling_config.top_p": shared.cut("rollout.top_p", 1),
    "sampling_config.top_k": shared.cut("rollout.top_k", 0, -1),
    "sampling_config.min_p": shared.cut("rollout.min_p", 0),
    "sampling_config.seed": automatic("each sample's randomness follows `seed`"),
    "sampling_config.logprobs": automatic("the sampler's logprobs are always kept"),
    "sampling_config.detokenize": automatic("tokens in, tokens out"),
    "trust_remote_code": to("model.trust_remote_code", truth),
    "infer_tensor_parallel_size": shared.width("cluster.engines.tensor_parallel_size"),
    "infer_pipeline_parallel_size": placement(PIPELINE),
    **each("infer_expert_parallel_size enable_expert_parallel", placement(EXPERTS)),
    "max_num_seqs": shared.engine("max_num_seqs"),
    "max_model_len": automatic("the longest prompt and response together"),
    "max_num_batched_tokens": shared.engine("max_num_batched_tokens"),
    "dtype": shared.engine("dtype", text),
    "gpu_memory_utilization": shared.engine("gpu_memory_utilization", number),
    "enforce_eager": shared.engine("enforce_eager", truth),
    "enable_prefix_caching": shared.engine("enable_prefix_caching", truth),
    "num_scheduler_steps": automatic("vLLM's own"),
    "offload_train_*": placement("weights, gradients and moments leave the device while engines on it sample"),
    **each("* **", placement("of the engine on NPUs: vLLM samples")),
}

ROWS: dict[str, Row] = {
    **each("defaults model", _SHAPE),
    **under(_M, _BOTH | MEGATRON),
    **under(_A, _BOTH | ACTOR),
    "ref_config.**": placement("of the reference: placement and memory"),
    "reward_config.**": when(
        lambda job: any(key.startswith(f"{_R}.reward_resource") for key in job.values),
        "not read without rl_config.reward_resource",
        missing(_REWARD_MODEL, "reward.components", off=()),
    ),
    **shared.critic_rows(_uses_critic, under(_C, _optimizer(_C, "critic.optimizer"))),
    f"{_C}.**": placement("of the critic: placement and memory"),
    **under(_R, RL),
    **under(_G, GENERATE),
    **each("env_vars.** working_dir excludes", automatic(shared.RUNTIME)),
    "hydra.**": automatic("Hydra's own"),
    **each("msprobe.** profiler_config.**", automatic("trace.json of the run's folder")),
}
WRITTEN = listed(
    {
        _R: "max_prompt_length entropy_coeff init_kl_coef kl_penalty verifier_function n_samples_per_prompt",
        _A: "adam_beta2 weight_decay lr_decay_style",
        _C: "adam_beta2 weight_decay lr_decay_style",
    }
)

DIALECT = Dialect(ROWS, WRITTEN, _program, _whole, {f"{_M}.min-lr": f"{_A}.min_lr"})
