"""verl's `actor_rollout_ref.rollout`: sampling, engines and evaluation."""

from __future__ import annotations

from typing import Any

from hone.dialects import shared
from hone.dialects.rows import automatic, by, each, missing, placement, rewritten, table, to, when, where
from hone.dialects.shared import ENVIRONMENT, EXPERTS, LOGGING, MEMORY, PIPELINE, PROFILER
from hone.dialects.values import number, truth, whole, zero_if_off
from hone.dialects.verdict import ForeignJob, KeyVerdict, Row, nothing, placed, put
from hone.dialects.verl.actor import _MTP, quantised
from hone.dialects.verl.job import ROLLOUT


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


def evaluation_samples(job: ForeignJob, value: Any) -> KeyVerdict:
    return (
        put({"eval.samples": whole(value)}) if samples_evaluation(job) else nothing("greedy samples are all the same")
    )


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
    "val_kwargs.n": by(evaluation_samples, "eval.samples"),
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
