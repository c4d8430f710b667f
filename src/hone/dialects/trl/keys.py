"""Tables of TRL's arguments."""

from __future__ import annotations

from functools import partial

from hone.dialects import shared
from hone.dialects.foreign import ForeignRun, defaults_of, known_versions, newest_with, version_key
from hone.dialects.rows import automatic, by, each, missing, placement, rewritten, table, to, when, where
from hone.dialects.shared import LOGGING, MEMORY, RESUME
from hone.dialects.trl import inputs, rules
from hone.dialects.trl.rules import OPTIMIZER
from hone.dialects.values import number, pair, positive, text, truth, whole
from hone.dialects.verdict import Dialect, Row, nothing, put, unknown

_EVALUATES = "data.eval and eval.every"
_BATCHING = automatic("continuous batching, always")
_CHUNKED = automatic("logits are made in chunks")
_HUB = automatic("a command: `hone export --push-to-hub`")
_BEST = automatic("checkpoint.best keeps and exports the best")
_ENVIRONMENT = rewritten(shared.ENVIRONMENT, "rollout.environment.use")
_CONSTRAINED = missing("constrained sampling is not supported")
_adapter = shared.adapter(rules.uses_adapter)

MODEL: dict[str, Row] = {
    **each("model_name_or_path model", to("model.path", text)),
    "model_revision": missing("download the revision and name its directory", "model.path", off=("main", None)),
    "trust_remote_code": to("model.trust_remote_code", truth),
    **each(
        "dtype torch_dtype",
        by(
            lambda job, v: nothing("of the weights: master weights are float32; bf16 says what computes"),
            "run.precision",
        ),
    ),
    "attn_implementation": automatic("attention is Hone's own"),
    "model_init_kwargs": inputs.MODEL_ARGUMENTS,
    "cast_lm_head_to_fp32": automatic("logits are float32"),
    "disable_dropout": automatic("models train without dropout"),
    "router_aux_loss_coef": missing(shared.NO_AUX_LOSS, "algorithm.load_balancing_coef"),
    "chat_template_path": to("model.chat_template", text),
    "chat_template": missing(shared.TEMPLATE_FILE, "model.chat_template"),
    "use_peft": by(
        lambda job, v: put({"lora.rank": whole(job.get("lora_r", 16))}) if truth(v) else nothing("off"), "lora.rank"
    ),
    "lora_r": _adapter("rank", whole),
    "lora_alpha": _adapter("alpha", number),
    "lora_target_modules": _adapter("targets", shared.targets),
    "lora_target_parameters": missing("adapters are of linear layers", "lora.targets"),
    "lora_dropout": automatic("adapters have no dropout: RL's trainer and sampler must agree"),
    **each("lora_task_type task_type", automatic("a causal language model")),
    "bias": missing("biases are not trained with an adapter", "lora.rank"),
    "lora_modules_to_save": missing("adapters only", "lora.targets"),
    "use_rslora": missing("alpha / rank scales the adapter; nearest: lora.alpha = alpha x sqrt(rank)", "lora.alpha"),
    "use_dora": missing("DoRA is not supported; nearest: lora.rank", "lora.rank"),
    **each("load_in_4bit load_in_8bit", missing(shared.QUANTISED, "lora.rank")),
    **each("bnb_4bit_* use_bnb_nested_quant", automatic("only read with load_in_4bit")),
}

DATA: dict[str, Row] = {
    **each("dataset_name train_dataset", inputs.dataset("data.train", "data.train_split")),
    "eval_dataset": inputs.dataset("data.eval", "data.eval_split"),
    "dataset_config": automatic("part of dataset_name"),
    "dataset_train_split": to("data.train_split", text),
    "dataset_test_split": automatic("part of eval_strategy"),
    "dataset_prompt_column": to("data.prompt_column", text),
    "dataset_mixture": rewritten("a mixture of the script's own: name its data sets in data.train", "data.train"),
    "system_prompt": to("data.system", text),
    "dataset_streaming": automatic("rows are read as they are needed"),
    "datasets": by(inputs.mixture, "data.train", "data.train_split", note="rows of all"),
    "shuffle_dataset": shared.shuffled(),
    "max_prompt_length": to("data.max_prompt_tokens", whole),
    "chat_template_kwargs": to(
        "data.template_args", lambda value: value if isinstance(value, dict) and value else None
    ),
    **each("dataloader_* dataset_num_proc", automatic(shared.AS_READ)),
    **each("remove_unused_columns no_remove_unused_columns", automatic("rewards see every column")),
}

SAMPLING: dict[str, Row] = {
    "max_completion_length": to("rollout.max_response_tokens", whole),
    "num_generations": to("rollout.group_size", whole),
    "num_generations_eval": when(rules.evaluates, "no data to evaluate on", to("eval.samples", whole)),
    "temperature": to("rollout.temperature", number),
    "top_p": shared.cut("rollout.top_p", 1),
    "top_k": shared.cut("rollout.top_k", 0, -1),
    "min_p": shared.cut("rollout.min_p", 0),
    "repetition_penalty": missing("samples must be of the policy's own distribution; nearest: 1", off=(1, None)),
    "generation_kwargs": by(rules.generation, "rollout.stop"),
    "use_vllm": by(rules.vllm, "cluster.engines.use", kind="placement"),
    "vllm_mode": placement("cluster.pools: together by default, or `rollout` on a pool of its own"),
    "vllm_gpu_memory_utilization": rules.engine("gpu_memory_utilization", number),
    "vllm_tensor_parallel_size": rules.engine("tensor_parallel_size"),
    **each("vllm_max_model_length vllm_max_model_len", rules.engine("max_model_len")),
    **each("vllm_structured_outputs_regex vllm_guided_decoding_regex", _CONSTRAINED),
    **each("vllm_device vllm_dtype", placement("of vLLM's engine: Hone starts its engines itself")),
    "vllm_*": placement("of vLLM's server: Hone starts its engines itself"),
    **each("use_transformers_* transformers_continuous_batching_config", _BATCHING),
    "cache_implementation": automatic("Hone's own cache"),
    "ds3_gather_for_generation": automatic("weights are published to the engine"),
    **each("environment_factory rollout_func tools", _ENVIRONMENT),
    "max_tool_calling_iterations": automatic("rollout.environment.max_turns, where there are turns"),
    "max_staleness": to("rollout.max_staleness", whole, "policy updates"),
    "max_inflight_tasks": automatic("rollout.max_concurrent_samples"),
    "queue_maxsize": automatic("rollout.max_staleness bounds it"),
    "weight_sync_steps": missing("weights are published after every update", off=(1, None)),
}

_PART = by(rules.batch_part, "train.prompts_per_step")
BATCH: dict[str, Row] = {
    "per_device_train_batch_size": by(
        rules.batch, "train.prompts_per_step", note="samples of all devices / num_generations"
    ),
    **each("gradient_accumulation_steps generation_batch_size", _PART),
    "steps_per_generation": by(rules.batch_part, "train.samples_per_optimizer_step"),
    "num_processes": by(rules.batch_part, "cluster.devices_per_node"),
    "num_iterations": to("train.passes_per_batch", whole),
    "per_device_eval_batch_size": automatic("evaluation is batched by the engine"),
    "auto_find_batch_size": automatic("out of memory, the ladder lowers what changes no result"),
    "max_steps": by(rules.max_steps, "run.steps"),
    "num_train_epochs": by(rules.epochs, "run.epochs"),
    "average_tokens_across_devices": automatic("losses are normalised over the whole optimizer step"),
}

_NORMALISED = missing(
    "RLOO's advantages are not normalised; nearest: algorithm.credit = group_mean_whitened", "algorithm.credit"
)
_OF_CORRECTION = by(lambda job, v: nothing("part of vllm_importance_sampling_correction"), "algorithm.correction")
_adaptive = partial(when, where("use_adaptive_entropy"), "only read by use_adaptive_entropy")
_TAUS = shared.several("algorithm.sapo_tau", ("sapo_temperature_pos", 1.0), ("sapo_temperature_neg", 1.05))
_SAPO = when(where("loss_type", "sapo", other="dapo"), "only read by sapo", _TAUS)
ALGORITHM: dict[str, Row] = {
    "beta": by(rules.beta, "algorithm.kl_loss_coef"),
    "epsilon": when(
        rules.is_bounded, "not read by this loss", by(rules.epsilon, "algorithm.clip_low", "algorithm.clip_high")
    ),
    "epsilon_high": when(rules.is_bounded, "not read by this loss", to("algorithm.clip_high", number)),
    "delta": to("algorithm.dual_clip", number),
    "loss_type": by(rules.loss, "algorithm.aggregate", "algorithm.clip"),
    "scale_rewards": by(rules.scale, "algorithm.credit"),
    "normalize_advantages": _NORMALISED,
    "importance_sampling_level": table({"token": None, "sequence": "sequence"}, "algorithm.ratio"),
    **each("sapo_temperature_pos sapo_temperature_neg", _SAPO),
    "vespo_*": automatic("only read by vespo"),
    "mask_truncated_completions": to("algorithm.mask_truncated", lambda value: truth(value) or None),
    "top_entropy_quantile": to("algorithm.top_entropy_frac", number),
    "entropy_coef": to("algorithm.entropy_coef", number),
    "use_adaptive_entropy": by(rules.adaptive_entropy, "algorithm.entropy_target"),
    "entropy_target": _adaptive(to("algorithm.entropy_target", number)),
    "entropy_coef_delta": _adaptive(to("algorithm.entropy_coef_step", number, "per update, not per optimizer step")),
    "entropy_coef_max": _adaptive(to("algorithm.entropy_coef_max", number)),
    "entropy_coef_min": _adaptive(missing("the smallest coefficient is 0", off=(0, None))),
    "sync_ref_model": by(rules.reference, "algorithm.reference_refresh_every"),
    **each("ref_model_sync_steps ref_model_mixup_alpha", automatic("part of sync_ref_model")),
    "use_bias_correction_kl": when(
        lambda job: number(job.get("beta", 0.0)) > 0 and not rules.is_rloo(job),
        "unused: no KL in the loss",
        to("algorithm.kl_estimator", lambda value: "weighted_k3" if truth(value) else None, "k3 times the ratio"),
    ),
    "off_policy_mask_threshold": missing(
        "masks by divergence; nearest: algorithm.correction = icepop", "algorithm.correction"
    ),
    "vllm_importance_sampling_correction": by(rules.correction, "algorithm.correction"),
    "vllm_importance_sampling_*": _OF_CORRECTION,
}

REWARDS: dict[str, Row] = {
    "reward_funcs": by(inputs.rewards, "reward.components"),
    "reward_model_name_or_path": to(
        "reward.components", lambda value: [{"use": "reward_model", "args": {"path": str(value)}}]
    ),
    "reward_weights": automatic("weights of reward.components: part of reward_funcs"),
    "multi_objective_aggregation": table(
        {"sum_then_normalize": None, "normalize_then_sum": "gdpo", "None": None}, "algorithm.credit"
    ),
    "reward_clip_range": to(
        "algorithm.reward_clip", lambda value: pair(value if isinstance(value, list) else [-value, value])
    ),
    "total_episodes": missing("samples of the whole run: set run.steps", "run.steps"),
    "token_level_kl": automatic("KL in the reward is per token; its sum is the sample's"),
    **each(
        "whiten_rewards normalize_reward", missing("set algorithm.normalize_rewards", "algorithm.normalize_rewards")
    ),
    "normalize_advantage": _NORMALISED,
    "missing_eos_penalty": missing(
        "a fixed penalty; nearest: algorithm.truncated_reward_factor = 0", "algorithm.truncated_reward_factor"
    ),
    **each("stop_token stop_token_id", automatic("responses end with the end-of-text token")),
}

TRAINER: dict[str, Row] = {
    "learning_rate": to(f"{OPTIMIZER}.lr", number),
    "lr_scheduler_type": by(rules.schedule, f"{OPTIMIZER}.schedule"),
    "lr_scheduler_kwargs": automatic("part of lr_scheduler_type"),
    "warmup_steps": by(rules.warmup, f"{OPTIMIZER}.warmup_steps"),
    "warmup_ratio": by(rules.warmup_ratio, f"{OPTIMIZER}.warmup_frac"),
    "weight_decay": to(f"{OPTIMIZER}.weight_decay", number),
    **each("adam_beta1 adam_beta2", shared.several(f"{OPTIMIZER}.betas", ("adam_beta1", 0.9), ("adam_beta2", 0.999))),
    "adam_epsilon": to(f"{OPTIMIZER}.eps", number),
    "max_grad_norm": to(f"{OPTIMIZER}.grad_clip", number),
    "optim": by(rules.optimizer, f"{OPTIMIZER}.lr"),
    "optim_args": missing("the optimizer is AdamW", f"{OPTIMIZER}.lr"),
    "bf16": by(rules.precision, "run.precision"),
    "fp16": missing("nearest: bf16", "run.precision"),
    "tf32": automatic("matrix products follow run.precision"),
    "gradient_checkpointing": shared.checkpointing(),
    "gradient_checkpointing_kwargs": automatic("never reentrant"),
    **each("use_liger_kernel use_liger_loss liger_kernel_config", _CHUNKED),
    "pad_to_multiple_of": automatic("never padded"),
    "torch_compile*": automatic("cluster.trainer.compile compiles layers"),
    **each("torch_empty_cache_steps activation_offloading local_rollout_forward_batch_size", automatic(MEMORY)),
    "neftune_noise_alpha": missing("no noise in embeddings"),
    "label_smoothing_factor": missing("no labels to smooth"),
    "ddp_*": placement("of the launcher"),
    **each("deepspeed fsdp*", placement("the trainer is FSDP2: cluster.trainer")),
    **each("accelerate_config config_file", placement("cluster.devices_per_node")),
    "config": by(rules.configuration, kind="hole"),
    "env": automatic(shared.RUNTIME),
    "accelerator_config": placement("of the launcher"),
    "parallelism_config": placement("cluster.trainer"),
    "GRPOConfig": Row("hole", (), lambda job, value: unknown(rules.OF_COMMAND), rules.OF_COMMAND),
    "use_cpu": to("run.device", lambda value: "cpu" if truth(value) else None),
    "local_rank": automatic("of the launcher: `hone train` starts its processes itself"),
}

FILES: dict[str, Row] = {
    "output_dir": shared.folder(),
    "run_name": shared.run_name(),
    "seed": to("seed", whole),
    "data_seed": automatic("order follows `seed`"),
    "full_determinism": automatic("a synchronous run on one process repeats bit for bit"),
    "save_steps": by(rules.save_steps, "checkpoint.every"),
    "save_strategy": by(rules.save_strategy, "checkpoint.every"),
    "save_total_limit": to("checkpoint.keep", positive),
    "save_*": automatic("checkpoints are whole, as safetensors"),
    **each("load_best_model_at_end metric_for_best_model greater_is_better", _BEST),
    "eval_steps": when(rules.evaluates, "no data to evaluate on", by(rules.eval_steps, "eval.every")),
    "eval_strategy": by(rules.eval_strategy, "data.eval", "eval.every"),
    "eval_on_start": automatic("evaluated before the first update where data.eval is set"),
    **each("eval_* do_eval", automatic(_EVALUATES)),
    "overwrite_output_dir": automatic("a run has a new folder, or is resumed"),
    **each("callbacks benchmarks", automatic("of the script's own callbacks")),
    "do_train": automatic("`hone train`"),
    "report_to": by(rules.reports, "observe.wandb"),
    "project": automatic("the project of report_to"),
    "log_completions": by(rules.completions, "observe.tracker_samples"),
    **each("num_completions_to_print num_sample_generations", automatic("part of log_completions")),
    "exp_name": automatic("run_name"),
    **each("trackio_* log_* logging_* wandb_* include_num_input_tokens_seen skip_memory_metrics", automatic(LOGGING)),
    "disable_tqdm": automatic("observe.console"),
    **each("push_to_hub hub_*", _HUB),
    "resume_from_checkpoint": automatic(RESUME),
    "ignore_data_skip": automatic("a resumed run continues in the data exactly"),
}

ROWS: dict[str, Row] = {**MODEL, **DATA, **SAMPLING, **BATCH, **ALGORITHM, **REWARDS, **TRAINER, **FILES}
WRITTEN = (
    *("max_prompt_length", "max_completion_length", "num_generations", "temperature", "per_device_train_batch_size"),
    *("num_train_epochs", "learning_rate", "lr_scheduler_type", "adam_beta2", "beta", "epsilon", "loss_type"),
    "use_bias_correction_kl",
    *("scale_rewards", "vllm_importance_sampling_correction", "save_steps", "seed", "gradient_checkpointing", "bf16"),
)

OLDER_RLOO = {
    "rloo_k": "num_generations",
    "num_ppo_epochs": "num_iterations",
    "num_mini_batches": "steps_per_generation",
    "response_length": "max_completion_length",
    "kl_coef": "beta",
    "cliprange": "epsilon",
    "reward_model_path": "reward_model_name_or_path",
}
"""Names of RLOO's arguments before 0.22, which renamed them so itself."""
NEGATED = ("gradient_checkpointing", "bf16", "shuffle_dataset", "vllm_importance_sampling_correction")
"""Arguments that are on by default, which `--no_...` turns off."""
ALIASES = OLDER_RLOO | {f"no_{name}": name for name in NEGATED} | {"async_num_generations": "num_generations"}


def _version(foreign: ForeignRun) -> str | None:
    """The newest version that has those arguments that were removed later: other defaults have changed since."""
    written = {key.key.replace("-", "_") for key in foreign.keys}
    versions = known_versions("trl")
    removed = {ALIASES.get(name, name) for name in written} - defaults_of(foreign, versions[-1]).keys()
    removed.discard("reward_model_name_or_path")  # of the trainer's arguments once, of the script's since
    if written & OLDER_RLOO.keys():
        versions = tuple(version for version in versions if version_key(version) < (0, 22))
        return newest_with(foreign, removed, versions) or versions[-1]
    return newest_with(foreign, removed, versions)


DIALECT = Dialect(ROWS, WRITTEN, rules.program, rules.whole_command, ALIASES, _version)
