"""verl's dialect: tables of its sections, here those of data and sampling. A key of none falls to the last pattern."""

from __future__ import annotations

from typing import Any

from hone.dialects import shared
from hone.dialects.rows import automatic, by, each, listed, missing, placement, rewritten, table, to, under, when, where
from hone.dialects.shared import ENVIRONMENT, EXPERTS, LOGGING, MEMORY, PIPELINE, PROFILER
from hone.dialects.values import number, text, truth, whole, zero_if_off
from hone.dialects.verdict import Dialect, ForeignJob, KeyVerdict, Row, nothing, placed, put, refused
from hone.dialects.verl.actor import _MTP, ACTOR_ROWS, MODEL_ROWS, REFERENCE, optimizer, quantised
from hone.dialects.verl.algorithm import ALGORITHM, CRITIC, REWARDS, correction_rows
from hone.dialects.verl.job import ACTOR, MODEL, ROLLOUT, prompts_per_step, uses_critic
from hone.dialects.verl.trainer import OTHERS, TRAINER, program, whole_command

# ---- data


def files(key: str) -> Row:
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        listed = [str(file) for file in (value if isinstance(value, list) else [value]) if file is not None]
        if not listed:
            return nothing("none")
        return put({key: listed[0]}) if len(listed) == 1 else put({key: listed}, "rows of all files, one after another")

    return by(read, key)


def truncation(job: ForeignJob, value: Any) -> KeyVerdict:
    if value not in ("error", "left", "right", "middle"):
        return refused("must be error, left, right or middle")
    if value == "error" or job.get("data.filter_overlong_prompts", False):
        return nothing("longer prompts are dropped and counted before anything is cut")
    if value == "right":
        return refused("cutting the end of a prompt removes the question; nearest: data.too_long: left")
    return put({"data.too_long": value})


def template_args(job: ForeignJob, value: Any) -> KeyVerdict:
    prefix = "data.apply_chat_template_kwargs."
    found = dict(value) if isinstance(value, dict) else {}
    found |= {key.removeprefix(prefix): job.plain(v) for key, v in job.values.items() if key.startswith(prefix)}
    return put({"data.template_args": found} if found else {})


def batch(job: ForeignJob, value: Any) -> KeyVerdict:
    steps = "ppo_mini_batch_size x require_batches x trigger_parameter_sync_step: prompts between two sets of weights"
    return put({"train.prompts_per_step": prompts_per_step(job)}, "prompts, as in verl" if whole(value) else steps)


_PROCESSOR = automatic("the model's own processor; data.max_image_pixels bounds a picture")
_NO_VIDEO = "prompts have text and pictures; a column of video or sound is not read"
_TEMPLATE_ARGS = by(template_args, "data.template_args")

DATA: dict[str, Row] = {
    "train_files": files("data.train"),
    "val_files": files("data.eval"),
    "prompt_key": to("data.prompt_column", text),
    "max_prompt_length": to("data.max_prompt_tokens", whole),
    "max_response_length": to("rollout.max_response_tokens", whole),
    "train_batch_size": by(batch, "train.prompts_per_step", note="prompts"),
    "gen_batch_size": automatic("dropped groups are replaced as they are found"),
    "val_batch_size": automatic("evaluation is batched by the engine"),
    "truncation": by(truncation, "data.too_long"),
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
    "continuous_token.**": automatic("turns of a conversation keep the tokens that were sampled"),
    "image_key": shared.pictures(),
    "video_key": missing(_NO_VIDEO, off=("videos", None)),
    "audio_key": missing(_NO_VIDEO, off=("audios", None)),
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


# ---- sampling, engines and evaluation


def samples_evaluation(job: ForeignJob) -> bool:
    """Whether evaluation is sampled: agent loops, all there is since 0.7, do not read do_sample."""
    is_sampled = truth(job.get(f"{ROLLOUT}.val_kwargs.do_sample", False)) or job.get(f"{ROLLOUT}.mode") == "async"
    return is_sampled and number(job.get(f"{ROLLOUT}.val_kwargs.temperature", 0) or 0) > 0


def engine_width(job: ForeignJob, value: Any) -> KeyVerdict:
    wide, per_node = whole(value), job.get("trainer.n_gpus_per_node", 8)
    fits = min(wide, whole(per_node)) if isinstance(per_node, int) else wide
    note = "" if fits == wide else f"{wide} is more than a machine has, and layers are divided within one"
    return placed({"cluster.engines.tensor_parallel_size": fits} if fits > 1 else {}, note)


def engine_name(job: ForeignJob, value: Any) -> KeyVerdict:
    note = "" if value == "vllm" else f"{value} is not here: vLLM samples, with the same sampling settings"
    return placed({"cluster.engines.use": "vllm"}, note)


def evaluation_temperature(job: ForeignJob, value: Any) -> KeyVerdict:
    if not samples_evaluation(job):
        why = "do_sample is false" if number(job.get(f"{ROLLOUT}.val_kwargs.temperature", 0) or 0) else "temperature 0"
        return put({"eval.temperature": 0.0}, f"greedy: {why}")
    return put({"eval.temperature": number(job.get(f"{ROLLOUT}.val_kwargs.temperature"))})


_PUBLISHED = automatic("weights are published by the trainer")
_BY_SEED = automatic("each sample's randomness follows `seed`")
_SKIPPED = missing("samples of an earlier run in place of new ones, for debugging; nearest: leave it out")
_TURNS = rewritten(ENVIRONMENT, "rollout.environment.use")

ROLLOUT_ROWS: dict[str, Row] = {
    "n": to("rollout.group_size", whole),
    "name": by(engine_name, "cluster.engines.use", kind="placement"),
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
    "tensor_model_parallel_size": by(engine_width, "cluster.engines.tensor_parallel_size", kind="placement"),
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
    "val_kwargs.n": by(
        lambda job, v: (
            put({"eval.samples": whole(v)}) if samples_evaluation(job) else nothing("greedy samples are all the same")
        ),
        "eval.samples",
    ),
    **each("val_kwargs.temperature val_kwargs.do_sample", by(evaluation_temperature, "eval.temperature")),
    "val_kwargs.top_p": when(samples_evaluation, "greedy evaluation", to("eval.top_p", number)),
    "val_kwargs.top_k": when(samples_evaluation, "greedy evaluation", to("eval.top_k", zero_if_off)),
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
    "enable_rollout_routing_replay": automatic(shared.ROUTER),
    "moe_load_balance_metrics_interval": automatic(LOGGING),
    **each(
        "checkpoint_engine.update_weights_bucket_megabytes update_weights_bucket_megabytes",
        to("cluster.bucket_mib", number, kind="placement"),
    ),
    "checkpoint_engine.**": placement("how weights are published: cluster.transport"),
    **each("nnodes n_gpus_per_node n_nodes", shared.DEVICES),
    "disaggregation.**": placement("prefill and decoding are on the same engine"),
    **_MTP,
    **quantised(ROLLOUT, "quantised sampling is not supported"),
    "layer_name_map.**": automatic("weights are published by their names"),
    "use_fire_sampling": missing("a first token at another temperature; nearest: rollout.temperature"),
    **each("skip_rollout skip.enable", _SKIPPED),
    **each("skip_* skip.**", automatic("only read by skipping")),
    "router_config_path": placement("requests are divided over engines by their load"),
    "standalone_gpu_memory_utilization": placement("cluster.engines.gpu_memory_utilization is of all engines"),
}


# ---- all of them

ROWS: dict[str, Row] = {
    **under("data", DATA),
    **under(ACTOR, ACTOR_ROWS),
    **optimizer(f"{ACTOR}.optim", "train.optimizer"),
    **under("actor_rollout_ref.ref", REFERENCE),
    **under(ROLLOUT, ROLLOUT_ROWS),
    **under(MODEL, MODEL_ROWS),
    **REWARDS,
    **shared.critic_rows(uses_critic, under("critic", CRITIC) | optimizer("critic.optim", "critic.optimizer")),
    **under("algorithm", ALGORITHM),
    **correction_rows("algorithm", "algorithm.rollout_is"),
    **correction_rows("algorithm.rollout_correction", "algorithm.rollout_correction.rollout_is"),
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
        "algorithm": "adv_estimator lam use_kl_in_reward kl_penalty rollout_correction.rollout_is "
        "rollout_correction.bypass_mode",
        ACTOR: "use_kl_loss kl_loss_type policy_loss.loss_mode clip_ratio_low clip_ratio_high clip_ratio_c "
        "loss_agg_mode entropy_coeff ppo_mini_batch_size optim.lr optim.weight_decay optim.betas grad_clip "
        "freeze_vision_tower",
        MODEL: "lora_alpha",
        "critic": "cliprange_value optim.lr optim.weight_decay optim.betas",
        "trainer": "total_epochs save_freq val_before_train",
    }
)

DIALECT = Dialect(ROWS, WRITTEN, program, whole_command, ALIASES)
