"""Tables of OpenRLHF's keys: dotted, as since 0.10.2, and the flat names of before as their aliases."""

from __future__ import annotations

from hone.dialects import shared
from hone.dialects.foreign import ForeignRun, known_versions, newest_with, version_key
from hone.dialects.openrlhf import rules
from hone.dialects.rows import automatic, by, each, listed, missing, placement, rewritten, table, to, under, when, where
from hone.dialects.shared import LOGGING, MEMORY, RESUME
from hone.dialects.values import number, pair, positive, text, truth, whole, zero_if_off
from hone.dialects.verdict import Dialect, Row, nothing, put

_PUBLISHED = placement("how weights are published: cluster.transport")
_REQUESTS = automatic("requests are asynchronous")
_adapter = shared.adapter(lambda job: positive(job.get("ds.lora.rank", 0)) is not None)

PLACEMENT: dict[str, Row] = {
    **each("*.num_nodes *.num_gpus_per_node vllm.num_engines", shared.DEVICES),
    **each("train.colocate_actor_ref train.colocate_all", shared.DEVICES),
    "train.colocate_critic_reward": by(rules.second_group, "cluster.pools", kind="placement"),
    "vllm.tensor_parallel_size": shared.width("cluster.engines.tensor_parallel_size"),
    **each("vllm.sync_backend vllm.sync_with_ray", _PUBLISHED),
    "vllm.enable_prefix_caching": shared.engine("enable_prefix_caching", truth),
    "vllm.enforce_eager": shared.engine("enforce_eager", truth),
    "vllm.enable_sleep": automatic("engines on the trainer's devices sleep in turn"),
    "vllm.gpu_memory_utilization": shared.engine("gpu_memory_utilization", number),
    **each("vllm.generate_batch_size rollout.vllm_generate_batch_size rollout_tasks_per_gpu", _REQUESTS),
    "ref.offload": shared.offload("reference"),
    "reward.offload": placement("reward models are offloaded where they take turns"),
}

_FSDP = "FSDP2 shards weights, gradients and moments, as stage 3; cluster.trainer.shard replicates"
DEEPSPEED: dict[str, Row] = {
    "enable_sleep": automatic("the trainer sleeps while engines on its devices work"),
    "zero_stage": placement(_FSDP),
    "zpg": placement("cluster.trainer.shard"),
    "adam_offload": shared.offload("optimizer"),
    "tensor_parallel_size": shared.width("cluster.trainer.tensor_parallel"),
    "ring_attn_size": shared.width("cluster.trainer.sequence_parallel"),
    "ring_attn_head_stride": placement("Ulysses first, and a ring of chunks beyond the key-value heads"),
    "packing_samples": automatic("never padded"),
    "attn_implementation": automatic("attention is Hone's own"),
    "experts_implementation": automatic("Transformers' own"),
    "use_liger_kernel": automatic("Hone's kernels"),
    "grad_accum_dtype": automatic("gradients are accumulated in float32"),
    "overlap_comm": automatic("communication overlaps computation"),
    "deepcompile": automatic("cluster.trainer.compile compiles layers"),
    "use_universal_ckpt": automatic("checkpoints are independent of the number of devices"),
    "param_dtype": table({"bf16": "bfloat16"}, "run.precision", nearest="bf16"),
    "bf16": shared.bfloat16(),
    "init_on_gpu": automatic("weights are read shard by shard"),
    "disable_trace_cache": automatic("of DeepSpeed"),
    "load_in_4bit": missing(shared.QUANTISED, "lora.rank"),
    "lora.rank": to("lora.rank", positive),
    "lora.alpha": _adapter("alpha", number),
    "lora.target_modules": _adapter("targets", shared.targets),
    "lora.dropout": missing("adapters have no dropout", "lora.rank"),
    "value_head_prefix": automatic("the value head is found by its shape"),
}

ACTOR: dict[str, Row] = {
    "model_name_or_path": to("model.path", text),
    "gradient_checkpointing_enable": shared.checkpointing(),
    "gradient_checkpointing_reentrant": automatic("never reentrant"),
    "freeze_visual_encoder": shared.tower(
        lambda job: whole(job.get("data.max_images_per_prompt", 0)), lambda job: job.get("ds.lora.rank", 0)
    ),
    "aux_loss_coef": missing(shared.NO_AUX_LOSS, "algorithm.load_balancing_coef"),
    "ptx_coef": automatic("only read with pretrain data"),
    "eps_clip": by(rules.clip, "algorithm.clip_low", "algorithm.clip_high"),
    "eps_clip_low_high": by(rules.clips, "algorithm.clip_low", "algorithm.clip_high"),
    "dual_clip": to("algorithm.dual_clip", number),
    "policy_loss_type": rules.loss,
    "loss_agg_mode": when(
        where("actor.policy_loss_type", "ppo", other="ppo"),
        "gspo averages per sample",
        table({"token-mean": "token_mean", "seq-mean-token-mean": "sample_mean"}, "algorithm.aggregate"),
    ),
    "entropy_coef": to("algorithm.entropy_coef", number),
}

CRITIC: dict[str, Row] = {
    "model_name_or_path": to("critic.path", text),
    "value_clip": to("critic.value_clip", number),
    "freezing_steps": to("critic.warmup_updates", zero_if_off),
}

REWARD: dict[str, Row] = {
    "model_name_or_path": by(rules.reward_model, "reward.components"),
    "remote_url": by(rules.reward_url, "reward.components"),
    "normalize_enable": by(rules.normalized, "reward.components"),
    "clip_range": to("algorithm.reward_clip", pair),
    "overlong_buffer_len": by(rules.overlong, "algorithm.overlong_buffer_frac"),
    "overlong_penalty_factor": automatic("part of overlong_buffer_len"),
    "stop_properly_penalty_coef": by(rules.truncated, "algorithm.truncated_reward_factor"),
}

DATA: dict[str, Row] = {
    "disable_fast_tokenizer": automatic("the model's tokenizer"),
    "prompt_dataset": by(rules.prompts, "data.train"),
    "prompt_probs": by(rules.weights, "data.train"),
    "prompt_split": to("data.train_split", text),
    "input_key": to("data.prompt_column", text),
    "label_key": to("data.answer_column", text),
    "input_template": by(rules.template, "data.template"),
    "apply_chat_template": to("data.chat", truth),
    "max_len": by(rules.lengths, "data.max_prompt_tokens"),
    "prompt_max_len": to("data.max_prompt_tokens", whole),
    "max_samples": to(
        "data.train_rows", lambda value: None if whole(value) >= 10_000_000 else f"0:{whole(value)}", "a slice"
    ),
    "dataloader_num_workers": automatic(shared.AS_READ),
    "image_key": when(lambda job: whole(job.get("data.max_images_per_prompt", 0)), "no images", shared.pictures()),
    "max_images_per_prompt": automatic("a prompt has the pictures of its row"),
    "pretrain_dataset": missing("no language-modelling loss beside RL"),
    "pretrain_*": automatic("only read with pretrain data"),
}

_NO_EVAL = "no data to evaluate on"
EVAL: dict[str, Row] = {
    "dataset": to("data.eval", text),
    "split": when(rules.evaluates, _NO_EVAL, to("data.eval_split", text)),
    "steps": when(rules.evaluates, _NO_EVAL, to("eval.every", zero_if_off)),
    "temperature": when(rules.evaluates, _NO_EVAL, to("eval.temperature", number)),
    "n_samples_per_prompt": when(rules.evaluates, _NO_EVAL, to("eval.samples", whole)),
}

ROLLOUT: dict[str, Row] = {
    "batch_size": to("train.prompts_per_step", whole, "prompts"),
    "n_samples_per_prompt": to("rollout.group_size", whole),
    "micro_batch_size": automatic(
        "log probabilities are computed in microbatches of tokens; it does not touch generation"
    ),
    "max_tokens_per_gpu": automatic(MEMORY),
    "max_new_tokens": to("rollout.max_response_tokens", whole),
    "temperature": to("rollout.temperature", number),
    "top_p": shared.cut("rollout.top_p", 1),
}

TRAIN: dict[str, Row] = {
    "agent_func_path": rewritten(shared.ENVIRONMENT, "rollout.environment.use"),
    "batch_size": by(rules.train_batch, "train.samples_per_optimizer_step", note="samples"),
    "micro_batch_size": automatic("sequences of a pass: train.tokens_per_microbatch counts tokens"),
    "dynamic_batch_enable": automatic("microbatches are always filled by tokens"),
    "max_tokens_per_gpu": when(
        where("train.dynamic_batch_enable"),
        "unused without dynamic_batch_enable",
        to("train.tokens_per_microbatch", whole),
    ),
    "max_epochs": to("train.passes_per_batch", whole, "passes over a batch, not over the data"),
    "num_episodes": to("run.epochs", number, "passes over the prompts"),
    "seed": to("seed", whole),
    "full_determinism_enable": automatic("a synchronous run on one process repeats bit for bit"),
    "async_enable": by(rules.asynchronous, "rollout.max_staleness"),
    "async_queue_size": automatic("part of async_enable"),
    "partial_rollout_enable": automatic("weights arrive between two tokens of a response"),
    "enable_ema": missing("no moving average of the weights; nearest: leave it out"),
    "ema_beta": automatic("only read with enable_ema"),
}

_NO_KL = "no KL"
_TARGET = "only read with a target"
ALGORITHM: dict[str, Row] = {
    "advantage.estimator": table(rules.CREDITS, "algorithm.credit", nearest=", ".join(rules.CREDITS.values())),
    "advantage.no_std_norm": by(rules.std_norm, "algorithm.credit"),
    "advantage.gamma": to("algorithm.gamma", number),
    "advantage.lambd": when(rules.uses_critic, shared.NO_CRITIC, to("algorithm.gae_lambda", number)),
    "advantage.is_correction_enable": by(rules.correction, "algorithm.correction"),
    "advantage.is_correction_level": by(rules.correction_level, "algorithm.correction"),
    "advantage.use_icepop": by(rules.icepop, "algorithm.correction"),
    "advantage.is_correction_*": automatic("part of is_correction"),
    "kl.init_coef": by(rules.kl_coef, "algorithm.kl_reward_coef", "algorithm.kl_loss_coef"),
    "kl.use_loss": by(
        lambda job, v: nothing("KL in the loss" if truth(v) else "KL in the reward"), "algorithm.kl_loss_coef"
    ),
    "kl.estimator": when(rules.has_kl, _NO_KL, by(rules.kl_estimator, "algorithm.kl_estimator")),
    "kl.target": when(
        rules.has_kl, _NO_KL, to("algorithm.kl_target", number, "per token, as there: 6.0 turns the control off")
    ),
    "kl.horizon": when(
        lambda job: job.get("algo.kl.target") is not None,
        _TARGET,
        to("algorithm.kl_horizon_samples", whole, "samples"),
    ),
    "kl.unbiased_gradient": missing(
        "the gradient is the estimator's own; nearest: algorithm.kl_estimator = k2", "algorithm.kl_estimator"
    ),
    "kl.use_estimator_k3": to("algorithm.kl_estimator", lambda value: "k3" if truth(value) else None),
    "dynamic_filtering_enable": to("algorithm.drop_uninformative", truth),
    "dynamic_filtering_range": when(
        where("algo.dynamic_filtering_enable"),
        "only read by dynamic filtering",
        by(rules.filter_range, "algorithm.drop_uninformative"),
    ),
}

FILES: dict[str, Row] = {
    "ckpt.output_dir": shared.folder(),
    "ckpt.path": automatic("checkpoints are in the run's folder"),
    "ckpt.save_steps": shared.every("checkpoint.every", "only at the end"),
    "ckpt.max_num": to("checkpoint.keep", positive),
    "ckpt.max_mem": automatic("checkpoint.keep"),
    "ckpt.load_enable": automatic(RESUME),
    "ckpt.save_hf": automatic("the final weights are always in hf/"),
    "ckpt.disable_ds": automatic("checkpoints are always whole"),
    "ckpt.best_metric_key": when(
        rules.evaluates, _NO_EVAL, to("checkpoint.best", lambda value: "eval/accuracy" if value else None)
    ),
    "critic.save_value_network": automatic("checkpoints have the critic"),
    "logger.logging_steps": automatic("every update is logged"),
    "logger.wandb.key": automatic("secrets come from the environment"),
    "logger.wandb.project": by(
        lambda job, v: put({"observe.wandb": str(v)}) if rules.logs(job) else nothing("only with use_wandb"),
        "observe.wandb",
    ),
    "logger.wandb.run_name": shared.run_name(),
    "logger.wandb.group": to("run.group", text),
    "logger.wandb.*": automatic(LOGGING),
    "logger.tensorboard_dir": by(
        lambda job, v: nothing("TensorBoard files are in the run's folder"), "observe.tensorboard"
    ),
    "use_ms": automatic("name a directory in model.path"),
    "local_rank": automatic("devices are Ray's"),
    "perf": automatic(LOGGING),
}

ROWS: dict[str, Row] = {
    **PLACEMENT,
    **under("ds", DEEPSPEED),
    **under("actor", ACTOR),
    **rules.optimizer("actor", "train.optimizer"),
    **shared.critic_rows(rules.uses_critic, under("critic", CRITIC) | rules.optimizer("critic", "critic.optimizer")),
    **under("reward", REWARD),
    **under("data", DATA),
    **under("eval", EVAL),
    **under("rollout", ROLLOUT),
    **under("train", TRAIN),
    **under("algo", ALGORITHM),
    **FILES,
}

SAME_NAMES = {
    "ckpt": "save_steps",
    "train": "colocate_actor_ref colocate_critic_reward enable_ema ema_beta num_episodes max_epochs async_queue_size "
    "agent_func_path seed",
    "ds": "zero_stage deepcompile param_dtype bf16 zpg adam_offload attn_implementation use_liger_kernel "
    "grad_accum_dtype overlap_comm packing_samples load_in_4bit ring_attn_size value_head_prefix disable_trace_cache",
    "data": "disable_fast_tokenizer dataloader_num_workers max_len prompt_max_len max_samples prompt_split "
    "pretrain_split input_key label_key input_template apply_chat_template image_key max_images_per_prompt",
    "rollout": "max_new_tokens vllm_generate_batch_size top_p temperature n_samples_per_prompt",
    "actor": "max_norm ptx_coef eps_clip eps_clip_low_high dual_clip lr_warmup_ratio lr_scheduler min_lr_ratio "
    "policy_loss_type aux_loss_coef freeze_visual_encoder",
    "critic": "value_clip save_value_network",
    "reward": "overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef",
    "vllm": "enable_prefix_caching enforce_eager",
    "algo.advantage": "lambd gamma",
}
"""Flat names that became the last part of a dotted one."""
RENAMED = {
    "pretrain": "actor.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "use_ds_universal_ckpt": "ds.use_universal_ckpt",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable",
    "best_metric_key": "ckpt.best_metric_key",
    "logging_steps": "logger.logging_steps",
    "colocate_all_models": "train.colocate_all",
    **dict.fromkeys(("enable_vllm_is_correction", "vllm_enable_is_correction"), "algo.advantage.is_correction_enable"),
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "use_icepop": "algo.advantage.use_icepop",
    "vllm_is_correction_type": "algo.advantage.is_correction_type",
    "async_train": "train.async_enable",
    "partial_rollout": "train.partial_rollout_enable",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "torch_compile": "ds.deepcompile",
    "actor_init_on_gpu": "ds.init_on_gpu",
    "flash_attn": "ds.attn_implementation",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "lora_dropout": "ds.lora.dropout",
    "target_modules": "ds.lora.target_modules",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "rollout_batch_size": "rollout.batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "generate_max_len": "rollout.max_new_tokens",
    "l2": "actor.adam.weight_decay",
    "adam_betas": "actor.adam.betas",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "entropy_loss_coef": "actor.entropy_coef",
    "normalize_reward": "reward.normalize_enable",
    "reward_clip_range": "reward.clip_range",
    "full_determinism": "train.full_determinism_enable",
    "freezing_actor_steps": "critic.freezing_steps",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss",
    "use_kl_estimator_k3": "algo.kl.use_estimator_k3",
    "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "ref_reward_offload": "ref.offload",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "pretrain_data": "data.pretrain_dataset",
    "pretrain_data_probs": "data.pretrain_probs",
    **{f"eval_{name}": f"eval.{name}" for name in ("dataset", "split", "steps", "temperature", "n_samples_per_prompt")},
    "use_wandb": "logger.wandb.key",
    **{f"wandb_{name}": f"logger.wandb.{name}" for name in ("org", "group", "project", "run_name")},
    "use_tensorboard": "logger.tensorboard_dir",
    **{
        f"{role}_{name}": f"{role}.{name}"
        for role in ("actor", "critic", "ref", "reward")
        for name in ("num_nodes", "num_gpus_per_node")
    },
    **{
        f"vllm_{name}": f"vllm.{name}"
        for name in ("num_engines", "tensor_parallel_size", "sync_backend", "sync_with_ray", "enable_sleep")
    },
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
}
ALIASES = {name: f"{section}.{name}" for section, listed in SAME_NAMES.items() for name in listed.split()} | RENAMED

WRITTEN = listed(
    {
        "data": "input_key max_len",
        "rollout": "max_new_tokens batch_size n_samples_per_prompt",
        "train": "batch_size num_episodes seed",
        "algo": "advantage.estimator advantage.lambd kl.init_coef kl.estimator",
        "reward": "clip_range",
        "actor": "eps_clip loss_agg_mode adam.lr lr_warmup_ratio lr_scheduler",
        "critic": "adam.lr value_clip lr_warmup_ratio lr_scheduler",
        "ckpt": "save_steps",
        "logger": "wandb.project",
        "ds": "lora.alpha",
        "eval": "temperature n_samples_per_prompt",
    }
)


def _version(foreign: ForeignRun) -> str | None:
    """Flags had no dots before 0.10.2; of those versions, the newest that has all flags that any of them had."""
    names = [ALIASES[name] for key in foreign.keys if (name := key.key.replace("-", "_")) in ALIASES]
    if not names:
        return None
    older = [version for version in known_versions("openrlhf") if version_key(version) < (0, 10, 2)]
    return newest_with(foreign, names, older) or older[-1]


DIALECT = Dialect(ROWS, WRITTEN, rules.program, rules.whole_command, ALIASES, _version)
