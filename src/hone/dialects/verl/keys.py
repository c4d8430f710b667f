"""Tables of verl's keys. A key that is in no table of its section falls to the section's last pattern."""

from __future__ import annotations

from hone.dialects import shared
from hone.dialects.rows import automatic, by, each, listed, missing, placement, rewritten, table, to, under, when, where
from hone.dialects.shared import ENVIRONMENT, EXPERTS, LOGGING, MEMORY, PIPELINE, PROFILER, RESUME
from hone.dialects.values import number, positive, text, truth, whole, zero_if_off
from hone.dialects.verdict import Dialect, Row, nothing, put, refused
from hone.dialects.verl import rules
from hone.dialects.verl.rules import ACTOR, MODEL, ROLLOUT

_MICROBATCHES = automatic("sequences of a pass: train.tokens_per_microbatch counts tokens")
_NEVER_PADDED = automatic("never padded")
_CHUNKED = automatic("logits are made in chunks")
_PROCESSOR = automatic("the model's own processor; data.max_image_pixels bounds a picture")
_PUBLISHED = automatic("weights are published by the trainer")
_BY_SEED = automatic("each sample's randomness follows `seed`")
_FSDP = placement("the trainer is FSDP2")
_ROUTER = missing(shared.ROUTER, "algorithm.replay_routing", off=(None, "disabled", False))
_MTP = missing("multi-token prediction is not supported")
_DISTILLATION = "distillation from a teacher is not supported"
_TEMPLATE_ARGS = by(rules.template_args, "data.template_args")
_OVERRIDE = by(rules.override, "model.override")

DATA: dict[str, Row] = {
    "train_files": rules.files("data.train"),
    "val_files": rules.files("data.eval"),
    "prompt_key": to("data.prompt_column", text),
    "max_prompt_length": to("data.max_prompt_tokens", whole),
    "max_response_length": to("rollout.max_response_tokens", whole),
    "train_batch_size": by(rules.batch, "train.prompts_per_step", note="prompts"),
    "gen_batch_size": automatic("dropped groups are replaced as they are found"),
    "val_batch_size": automatic("evaluation is batched by the engine"),
    "truncation": by(rules.truncation, "data.too_long"),
    "filter_overlong_prompts": automatic("longer prompts are dropped and counted"),
    **each("filter_overlong_prompts_workers dataloader_num_workers", automatic(shared.AS_READ)),
    "shuffle": shared.shuffled(),
    "validation_shuffle": automatic("evaluation uses every row"),
    "seed": to("seed", whole),
    "train_max_samples": shared.slice_of_rows("data.train_rows"),
    "val_max_samples": shared.slice_of_rows("data.eval_rows"),
    "trust_remote_code": to("model.trust_remote_code", truth),
    "tokenizer": to("model.tokenizer", text),
    **each("return_raw_chat return_raw_input_ids return_full_prompt", automatic("rewards see prompt and messages")),
    "reward_fn_key": automatic("one reward for all rows; data.eval and eval.by report by column"),
    "use_shm": automatic("data is read once"),
    "image_key": shared.pictures(),
    **each("video_key audio_key", missing("prompts have text and pictures; video and sound are not supported")),
    **each("return_multi_modal_inputs image_patch_size mm_processor_kwargs", _PROCESSOR),
    "apply_chat_template_kwargs": _TEMPLATE_ARGS,
    "apply_chat_template_kwargs.*": _TEMPLATE_ARGS,
    "custom_cls.**": rewritten("a data set class: write its rows to JSONL or Parquet and name it", "data.train"),
    "sampler.**": rewritten(
        "a sampler of yours: data.order is source, shuffled, column (easy first, by data.order_column) or pass_rate",
        "data.order",
        "data.order_column",
    ),
    "datagen.**": missing("generated rows: write them to a file", "data.train"),
    **each("tool_config_path function_tool_path", rewritten(ENVIRONMENT, "rollout.environment.use")),
}

_LOSS: dict[str, Row] = {
    "clip_ratio": by(rules.clip, "algorithm.clip_low", "algorithm.clip_high"),
    "clip_ratio_low": rules.side("algorithm.clip_low"),
    "clip_ratio_high": rules.side("algorithm.clip_high"),
    "clip_ratio_c": rules.of_loss(to("algorithm.dual_clip", number), "vanilla", "clip_cov", "dppo_tv"),
    "policy_loss.loss_mode": by(rules.loss, "algorithm.ratio", "algorithm.clip"),
    "policy_loss.clip_cov_*": rules.of_loss(by(rules.clip_cov, "algorithm.clip_cov"), "clip_cov"),
    **each("policy_loss.tau_* tau_pos tau_neg", rules.of_loss(by(rules.taus, "algorithm.sapo_tau"), "sapo")),
    **each(
        "policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef",
        rules.of_loss(by(rules.kl_cov, "algorithm.kl_cov"), "kl_cov"),
    ),
    "policy_loss.dro_beta": automatic("only read by dro"),
    "loss_agg_mode": by(rules.aggregate, "algorithm.aggregate"),
    "loss_scale_factor": missing("fixed_length divides by rollout.max_response_tokens", "algorithm.aggregate"),
    "entropy_coeff": to("algorithm.entropy_coef", number),
    "calculate_entropy": automatic("entropy is always measured"),
    "calculate_sum_pi_squared": automatic("only read by optimal_token_baseline"),
    "use_kl_loss": by(rules.kl_loss, "algorithm.kl_loss_coef"),
    "kl_loss_coef": when(
        where(f"{ACTOR}.use_kl_loss"), "unused without use_kl_loss", to("algorithm.kl_loss_coef", number)
    ),
    "kl_loss_type": when(
        rules.in_loss,
        "unused: no KL in the loss",
        by(lambda job, v: rules.kl_kind(job, v, True), "algorithm.kl_estimator"),
    ),
}
_MEGATRON: dict[str, Row] = {
    "tensor_model_parallel_size": shared.width("cluster.trainer.tensor_parallel"),
    "context_parallel_size": shared.width("cluster.trainer.sequence_parallel"),
    **each("pipeline_model_parallel_size virtual_pipeline_model_parallel_size", placement(PIPELINE)),
    "expert_*": placement(EXPERTS),
    "param_offload": shared.offload("parameters"),
    "optimizer_offload": shared.offload("optimizer"),
    "grad_offload": placement(),
    "*dist_checkpointing*": placement(shared.CONVERTED),
    "override_transformer_config.moe_aux_loss_coeff": missing(shared.NO_AUX_LOSS, "algorithm.load_balancing_coef"),
    "override_transformer_config.moe_z_loss_coeff": missing("no router z-loss; nearest: 0"),
    "**": placement("Megatron's setting: Hone's trainer is FSDP2 with its own kernels"),
}
ACTOR_ROWS: dict[str, Row] = {
    "grad_clip": to("train.optimizer.grad_clip", number),
    "ppo_mini_batch_size": by(
        rules.mini_batch, "train.samples_per_optimizer_step", note="prompts to samples: x rollout.n"
    ),
    **each("ppo_micro_batch_size ppo_micro_batch_size_per_gpu", _MICROBATCHES),
    **each(
        "ppo_infer_micro_batch_size_per_gpu ppo_infer_max_token_len_per_gpu sum_pi_squared_checkpointing",
        automatic(MEMORY),
    ),
    "use_dynamic_bsz": automatic("microbatches are always filled by tokens"),
    "ppo_max_token_len_per_gpu": when(
        where(f"{ACTOR}.use_dynamic_bsz"),
        "unused without use_dynamic_bsz",
        to("train.tokens_per_microbatch", whole, "per device, prompt tokens counted once"),
    ),
    **_LOSS,
    "ppo_epochs": to("train.passes_per_batch", whole),
    "shuffle": automatic(shared.SHUFFLED),
    "data_loader_seed": automatic("order follows `seed`"),
    "use_torch_compile": automatic("kernels of Hone's own; cluster.trainer.compile compiles layers"),
    "strategy": _FSDP,
    **each(
        "ulysses_sequence_parallel_size fsdp_config.ulysses_sequence_parallel_size veomni.ulysses_parallel_size",
        shared.width("cluster.trainer.sequence_parallel"),
    ),
    "fsdp_config.param_offload": shared.offload("parameters"),
    "fsdp_config.optimizer_offload": shared.offload("optimizer"),
    "fsdp_config.fsdp_size": to("cluster.trainer.shard", positive, kind="placement"),
    "fsdp_config.full_determinism": automatic("a synchronous run on one process repeats bit for bit"),
    "fsdp_config.**": placement("of FSDP: placement and memory"),
    **under("megatron", _MEGATRON),
    "veomni.param_offload": shared.offload("parameters"),
    "veomni.optimizer_offload": shared.offload("optimizer"),
    "veomni.router_replay.mode": _ROUTER,
    "veomni.**": placement("of VeOmni: placement and memory"),
    "torchtitan.**": placement("of torchtitan: placement and memory"),
    "engine.**": placement("of the training engine: placement and memory"),
    "router_replay.**": _ROUTER,
    "checkpoint.load_contents": automatic("a resume takes all but what `hone train --resume RUN --without` names"),
    "checkpoint.**": automatic("checkpoints are whole, and written in the background"),
    "profiler.**": automatic(PROFILER),
    **each("entropy_* use_fused_kernels", _CHUNKED),
    **each("use_remove_padding pad_to_length*", _NEVER_PADDED),
    "use_prefix_grouper": automatic("prompts are computed once per group"),
    "load_weight": automatic("weights are loaded"),
    "rollout_n": automatic("rollout.n"),
    "freeze_vision_tower": shared.tower(lambda job: job.given("data.image_key"), rules.has_adapter),
    "self_distillation.**": missing("distillation is not supported", off=()),
    "qat.**": missing(shared.QUANTISED),
}
REFERENCE: dict[str, Row] = {
    **each("fsdp_config.param_offload megatron.param_offload veomni.param_offload", shared.offload("reference")),
    "log_prob_*": automatic(MEMORY),
    "profiler.**": automatic(PROFILER),
    "model.path": missing("the reference is the policy at the start", "model.path"),
    "**": placement("of the reference: placement and memory"),
}

_TURNS = rewritten(ENVIRONMENT, "rollout.environment.use")
ROLLOUT_ROWS: dict[str, Row] = {
    "n": to("rollout.group_size", whole),
    "name": by(rules.engine_name, "cluster.engines.use", kind="placement"),
    "temperature": to("rollout.temperature", number),
    "top_k": shared.cut("rollout.top_k", 0, -1),
    "top_p": shared.cut("rollout.top_p", 1),
    "do_sample": missing("groups need samples that differ: leave it true", off=(True, None)),
    "mode": automatic("requests are always asynchronous"),
    "dtype": table(
        {name: name for name in ("bfloat16", "float16", "float32", "auto")} | {"bf16": "bfloat16", "None": None},
        "cluster.engines.dtype",
    ),
    "gpu_memory_utilization": shared.engine("gpu_memory_utilization", number),
    "tensor_model_parallel_size": by(rules.engine_width, "cluster.engines.tensor_parallel_size", kind="placement"),
    "data_parallel_size": placement("replicas = devices // tensor_parallel_size"),
    "pipeline_model_parallel_size": placement(PIPELINE),
    "expert_parallel_size": placement(EXPERTS),
    **{key: shared.engine(key) for key in ("max_num_batched_tokens", "max_num_seqs", "max_model_len")},
    **{
        key: shared.engine(key, truth)
        for key in ("enforce_eager", "enable_chunked_prefill", "enable_prefix_caching", "disable_log_stats")
    },
    "cudagraph_capture_sizes": automatic("vLLM chooses; max_cudagraph_capture_size bounds it"),
    "free_cache_engine": automatic("engines on the trainer's devices free their memory in turn"),
    "multi_stage_wake_up": automatic("engines wake in stages"),
    **each("load_format use_shm", _PUBLISHED),
    "layered_summon": automatic("weights are gathered tensor by tensor"),
    "ignore_eos": missing("responses end with the end-of-text token"),
    "prompt_length": automatic("data.max_prompt_length"),
    "response_length": automatic("data.max_response_length"),
    **each("seed full_determinism", _BY_SEED),
    "calculate_log_probs": automatic("the sampler's logprobs are always kept"),
    "logprobs_mode": automatic("logprobs are of the distribution that was sampled from"),
    "log_prob_*": automatic(MEMORY),
    "scheduling_policy": automatic("first come, first served"),
    "skip_tokenizer_init": automatic("the policy's engines get token ids"),
    "over_sample_rate": missing("no more samples than asked for are drawn"),
    "repetition_penalty": missing("samples must be of the policy's own distribution; nearest: 1", off=(1, None)),
    **each("quantization quantization_config_file", missing(shared.AS_THEY_ARE)),
    "val_kwargs.n": by(rules.evaluation_samples, "eval.samples"),
    **each("val_kwargs.temperature val_kwargs.do_sample", by(rules.evaluation_temperature, "eval.temperature")),
    "val_kwargs.top_p": when(rules.samples_evaluation, "greedy evaluation", to("eval.top_p", number)),
    "val_kwargs.top_k": when(rules.samples_evaluation, "greedy evaluation", to("eval.top_k", zero_if_off)),
    "engine_kwargs.vllm.max_model_len": shared.engine("max_model_len"),
    "engine_kwargs.vllm.**": placement("of vLLM: speed and memory; keys of cluster.engines are in docs/vllm.md"),
    "engine_kwargs.**": placement("of another engine: vLLM samples here"),
    "limit_images": automatic("a prompt has the pictures of its row"),
    "multi_turn.enable": _TURNS,
    **each("multi_turn.tool_config_path multi_turn.interaction_config_path agent.**", _TURNS),
    "multi_turn.**": when(
        where(f"{ROLLOUT}.multi_turn.enable"),
        "only read with multi_turn.enable",
        rewritten(ENVIRONMENT, "rollout.environment.use", off=()),
    ),
    "agent.num_workers": automatic("requests are asynchronous"),
    "agent.default_agent_loop": rewritten(ENVIRONMENT, "rollout.environment.use", off=("single_turn_agent", None)),
    "trace.**": automatic("samples/ has every response"),
    "profiler.**": automatic(PROFILER),
    "prometheus.**": automatic("metrics of a service: `hone serve`; a run's are in metrics.jsonl"),
    "enable_rollout_routing_replay": _ROUTER,
    "moe_load_balance_metrics_interval": automatic(LOGGING),
    **each(
        "checkpoint_engine.update_weights_bucket_megabytes update_weights_bucket_megabytes",
        to("cluster.bucket_mib", number, kind="placement"),
    ),
    "checkpoint_engine.**": placement("how weights are published: cluster.transport"),
    **each("nnodes n_gpus_per_node n_nodes", shared.DEVICES),
    "disaggregation.**": placement("prefill and decoding are on the same engine"),
    "mtp.**": _MTP,
    "qat.**": missing("quantised sampling is not supported"),
}

_adapter = shared.adapter(rules.has_adapter)
MODEL_ROWS: dict[str, Row] = {
    "path": to("model.path", text),
    "tokenizer_path": to("model.tokenizer", text),
    "hf_config_path": missing("the config is the one beside the weights", "model.path"),
    "trust_remote_code": to("model.trust_remote_code", truth),
    "enable_gradient_checkpointing": shared.checkpointing(),
    "enable_activation_offload": placement("activations are recomputed: train.activation_checkpointing"),
    **each("lora_rank lora.rank", to("lora.rank", positive)),
    **each("lora_alpha lora.alpha", _adapter("alpha", number)),
    **each("target_modules lora.target_modules", _adapter("targets", shared.targets)),
    **each("exclude_modules lora.exclude_modules", missing("name the layers to adapt in lora.targets", "lora.targets")),
    **each("lora_adapter_path lora.adapter_path", _adapter("start", text)),
    "lora.dropout": missing("adapters have no dropout"),
    "lora.**": automatic("adapters start as in the paper, and are published merged"),
    "use_*": automatic("Hone's kernels: never padded, logits in chunks"),
    "fused_kernel_options.**": _CHUNKED,
    "tiled_mlp.**": placement(),
    "custom_chat_template": missing("write the template to a file and set model.chat_template", "model.chat_template"),
    "external_lib": missing("install the package; set model.implementation = transformers", "model.implementation"),
    "override_config.attn_implementation": automatic("attention is Hone's own"),
    **each("override_config override_config.**", _OVERRIDE),
    "mtp.**": _MTP,
}

_MANAGERS = (None, "naive", "dapo", "batch", "prime", "rate_limited")
_MANAGER = missing("the weighted sum of reward.components", "reward.components", off=_MANAGERS)
_SANDBOX = missing("code is run by `use: code`, in a sandbox of Hone's own or a remote one", "reward.components")
_PART_OF_OVERLONG = automatic("part of overlong_buffer's `enable`")
_PART_OF_MODEL = automatic("part of reward_model.enable")
_JUDGE: dict[str, Row] = {
    "tensor_model_parallel_size": rules.of_judge("tensor_parallel_size"),
    "gpu_memory_utilization": rules.of_judge("gpu_memory_utilization", number),
    **{key: rules.of_judge(key) for key in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")},
    **{key: rules.of_judge(key, truth) for key in ("enable_chunked_prefill", "enable_prefix_caching", "enforce_eager")},
    **each("prompt_length response_length", _PART_OF_MODEL),
}
REWARDS: dict[str, Row] = {
    **under("reward_model.rollout", _JUDGE),
    **under("reward_model", _JUDGE),
    **each("reward_model.sampling_config.** reward_model.data_processor_config.**", _PART_OF_MODEL),
    **{f"{prefix}.path": by(rules.reward_function, "reward.components") for prefix in rules.REWARD_FUNCTIONS},
    **{f"{prefix}.**": automatic("part of custom_reward_function.path") for prefix in rules.REWARD_FUNCTIONS},
    **{f"{prefix}.enable": by(rules.reward_model, "reward.components") for prefix in rules.REWARD_MODELS},
    **each("reward.reward_manager.name reward_model.reward_manager reward_manager.name", _MANAGER),
    "reward.reward_manager.source": missing(
        "name your function in reward.components", "reward.components", off=("register", None)
    ),
    "reward.num_workers": to("reward.workers", whole),
    **{f"{prefix}.enable": rules.overlong(prefix) for prefix in rules.OVERLONG},
    **{f"{prefix}.*": _PART_OF_OVERLONG for prefix in rules.OVERLONG},
    **each(
        "reward.reward_kwargs.max_resp_len reward_model.reward_kwargs.max_resp_len",
        automatic("rollout.max_response_tokens"),
    ),
    **each("reward.sandbox_fusion.url reward_model.sandbox_fusion.**", _SANDBOX),
    "reward.sandbox_fusion.**": automatic("part of sandbox_fusion.url"),
    **each("reward.reward_model.model_path reward_model.model.**", _PART_OF_MODEL),
    "reward.reward_model.**": placement("of the reward model's engine: `services` and their `engine`"),
    "reward_model.**": placement("of the reward model: placement and memory"),
}

CRITIC: dict[str, Row] = {
    "model.path": by(
        lambda job, v: put({} if v in (None, job.get(f"{MODEL}.path")) else {"critic.path": str(v)}), "critic.path"
    ),
    "cliprange_value": to("critic.value_clip", number),
    "grad_clip": to("critic.optimizer.grad_clip", number),
    "ppo_epochs": by(
        lambda job, v: (
            nothing("as many as the policy's")
            if v == job.get(f"{ACTOR}.ppo_epochs", 1)
            else refused("the critic makes as many passes as the policy")
        ),
        "train.passes_per_batch",
    ),
    "ppo_mini_batch_size": by(
        lambda job, v: (
            nothing("as the policy's")
            if v == job.get(f"{ACTOR}.ppo_mini_batch_size", 256)
            else refused("the critic makes as many optimizer steps as the policy")
        ),
        "train.samples_per_optimizer_step",
    ),
    "loss_agg_mode": automatic("the critic's loss is a mean over tokens"),
    "enable": automatic("follows from adv_estimator"),
    "**": placement("of the critic: placement and memory"),
}

_FILTERS = where("algorithm.filter_groups.enable")
_BOUND = "algorithm.correction"
ALGORITHM: dict[str, Row] = {
    "adv_estimator": by(rules.credit, "algorithm.credit"),
    "norm_adv_by_std_in_grpo": by(lambda job, v: nothing("part of adv_estimator"), "algorithm.credit"),
    "gamma": to("algorithm.gamma", number),
    "lam": when(rules.uses_critic, shared.NO_CRITIC, to("algorithm.gae_lambda", number)),
    "use_kl_in_reward": by(rules.kl_reward, "algorithm.kl_reward_coef"),
    "kl_penalty": when(
        rules.in_reward,
        "unused: no KL in the reward",
        by(lambda job, v: rules.kl_kind(job, v, False), "algorithm.kl_estimator"),
    ),
    "kl_ctrl.kl_coef": when(
        rules.in_reward,
        "KL in the reward, unused without use_kl_in_reward",
        to("algorithm.kl_reward_coef", number, "KL in the reward, not in the loss"),
    ),
    "kl_ctrl.type": table({"fixed": None, "adaptive": None}, "algorithm.kl_target"),
    "kl_ctrl.target_kl": rules.adaptive(to("algorithm.kl_target", number)),
    "kl_ctrl.horizon": rules.adaptive(to("algorithm.kl_horizon_samples", whole)),
    "filter_groups.enable": to("algorithm.drop_uninformative", truth),
    "filter_groups.metric": by(rules.groups_metric, "algorithm.drop_uninformative"),
    "filter_groups.max_num_gen_batches": when(
        _FILTERS,
        "only read with filter_groups.enable",
        to("algorithm.max_dropped_per_kept", positive, "batches to groups dropped per group kept"),
    ),
    "filter_groups.**": automatic("dropped groups are replaced as they are found"),
    "use_pf_ppo": missing("PF-PPO's resampling is not supported"),
    "pf_ppo.**": automatic("only read with use_pf_ppo"),
    "rollout_is_level": automatic("part of rollout_is"),
    "rollout_correction.bypass_mode": to("algorithm.old_logprobs", lambda value: "sampler" if truth(value) else None),
    "rollout_correction.rollout_rs": by(rules.rejection, "algorithm.rejection", "algorithm.rejection_high"),
    "gdpo_*": rewritten("parts of the score: give each a component of its own, with its weight", "reward.components"),
    "rollout_correction.rollout_rs_threshold*": automatic("part of rollout_rs"),
    "rollout_correction.loss_type": missing("the ratio's loss", "algorithm.ratio", off=("ppo_clip", None)),
    "rollout_correction.rollout_is_batch_normalize": missing("weights are not normalised over the batch", _BOUND),
    "rollout_correction": missing("set its keys one by one", _BOUND),
}

TRAINER: dict[str, Row] = {
    "total_training_steps": to("run.steps", positive),
    "total_epochs": by(rules.epochs, "run.epochs"),
    **each("nnodes n_gpus_per_node", shared.DEVICES),
    "device": placement("GPUs where torch finds them"),
    "logger": by(rules.logger, "observe.wandb", "observe.tensorboard"),
    "project_name": by(lambda job, v: nothing("the project of trainer.logger's wandb"), "observe.wandb"),
    "experiment_name": shared.run_name(),
    "default_local_dir": by(rules.folder, "run.dir"),
    "default_hdfs_dir": missing("copy checkpoints from the run's folder", "run.dir"),
    "save_freq": to("checkpoint.every", zero_if_off, "-1: only at the end"),
    "test_freq": to("eval.every", zero_if_off, "-1: only before and after"),
    "val_before_train": to("eval.before_training", truth),
    "val_only": missing("a command: `hone eval`"),
    "critic_warmup": when(rules.uses_critic, shared.NO_CRITIC, to("critic.warmup_updates", zero_if_off)),
    "max_actor_ckpt_to_keep": to("checkpoint.keep", positive),
    "max_critic_ckpt_to_keep": automatic("critic and policy are in one checkpoint"),
    **each("resume_mode resume_from_path del_local_ckpt_after_load", automatic(RESUME)),
    "balance_batch": automatic("samples are divided over ranks by tokens"),
    "seed": to("seed", whole),
    "log_val_generations": to("observe.tracker_samples", positive, "of training, at each update"),
    "log_*": automatic(LOGGING),
    **each("rollout_data_dir validation_data_dir", automatic("samples/ of the run's folder")),
    **each("use_v1 use_legacy_worker_impl", automatic("verl's own trainer versions")),
    "v1.trainer_mode": by(rules.trainer_mode, "rollout.max_staleness"),
    "v1.sampler.max_off_policy_*": automatic(
        "samples are at most rollout.max_staleness updates old, which is stricter"
    ),
    "v1.**": automatic("samples above rollout.max_staleness are never made"),
    "esi_redundant_time": automatic("SIGTERM saves a checkpoint"),
    "ray_wait_register_center_timeout": automatic("cluster.start_timeout_s"),
    **each("npu_profile.** profile_* profiler.**", automatic(PROFILER)),
    "checkpoint_callback_class": missing("read checkpoints from the run's folder"),
}

OTHERS: dict[str, Row] = {
    "actor_rollout_ref.hybrid_engine": by(rules.hybrid, kind="placement"),
    **each("actor_rollout_ref.nccl_timeout actor_rollout_ref.*.nccl_timeout", automatic("cluster.call_timeout_s")),
    **each("rollout.nnodes rollout.n_gpus_per_node", shared.DEVICES),
    "rollout.total_rollout_steps": by(rules.total_rollouts, "run.steps", note="prompts to policy updates"),
    "rollout.total_epochs": by(rules.epochs, "run.epochs"),
    "rollout.test_freq": to("eval.every", zero_if_off),
    "async_training.staleness_threshold": by(rules.staleness, "rollout.max_staleness"),
    "async_training.**": automatic("samples are used at most rollout.max_staleness updates late"),
    "global_profiler.**": automatic(PROFILER),
    **each("ray_kwargs.** ray_init.**", automatic(shared.RUNTIME)),
    "transfer_queue.**": automatic("batches move as the loop needs them"),
    **each("model_engine actor@* actor@actor_rollout_ref.actor", _FSDP),
    "distillation.enabled": missing(_DISTILLATION),
    "distillation.**": when(
        where("distillation.enabled"), "only read with distillation.enabled", missing(_DISTILLATION, off=())
    ),
    **each("--config-name --config-path", by(rules.own_config, kind="hole")),
    **each("hydra.** --config-dir", automatic("Hydra's own")),
}

ROWS: dict[str, Row] = {
    **under("data", DATA),
    **under(ACTOR, ACTOR_ROWS),
    **rules.optimizer(f"{ACTOR}.optim", "train.optimizer"),
    **under("actor_rollout_ref.ref", REFERENCE),
    **under(ROLLOUT, ROLLOUT_ROWS),
    **under(MODEL, MODEL_ROWS),
    **REWARDS,
    **shared.critic_rows(
        rules.uses_critic, under("critic", CRITIC) | rules.optimizer("critic.optim", "critic.optimizer")
    ),
    **under("algorithm", ALGORITHM),
    **rules.correction_rows("algorithm", "algorithm.rollout_is"),
    **rules.correction_rows("algorithm.rollout_correction", "algorithm.rollout_correction.rollout_is"),
    **under("trainer", TRAINER),
    **OTHERS,
}

ALIASES = {
    "custom_reward_function.overlong_buffer_cfg": "reward_model.overlong_buffer_cfg",
    f"{ROLLOUT}.max_tokens": "data.max_response_length",
}

WRITTEN = listed(
    {
        "data": "prompt_key max_prompt_length max_response_length train_batch_size",
        ROLLOUT: "n temperature val_kwargs.do_sample name",
        "algorithm": "adv_estimator lam use_kl_in_reward kl_penalty rollout_correction.rollout_is",
        ACTOR: "use_kl_loss kl_loss_type policy_loss.loss_mode clip_ratio_low clip_ratio_high clip_ratio_c "
        "loss_agg_mode entropy_coeff ppo_mini_batch_size optim.lr optim.weight_decay optim.betas grad_clip "
        "freeze_vision_tower",
        MODEL: "lora_alpha",
        "critic": "cliprange_value optim.lr optim.weight_decay optim.betas",
        "trainer": "total_epochs save_freq val_before_train",
    }
)

DIALECT = Dialect(ROWS, WRITTEN, rules.program, rules.whole_command, ALIASES)
