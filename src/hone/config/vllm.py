"""vLLM's knobs, as `cluster.engines.args` gives them: names are vLLM's own, values are checked.

What another key of the run file decides already, or what Hone needs to be one way, is no knob: `ELSEWHERE` says where
to look. Without vLLM and without torch, so that `hone check` knows them; how they reach vLLM is `rollout/vllm.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError

from hone.config.messages import nearest, show
from hone.config.section import Section, key
from hone.errors import ConfigError


class VllmSettings(Section):
    max_num_seqs: int | None = key(None, unit="sequences", ge=1)
    """Sequences decoded together; null: `rollout.max_concurrent_samples`."""
    max_num_batched_tokens: int | None = key(None, unit="tokens", ge=1)
    """Tokens computed in one step, of prompts and responses; null: `rollout.prefill_tokens`, or more where needed."""
    max_model_len: int | None = key(None, unit="tokens", ge=2)
    """Longest prompt + response; null: `data.max_prompt_tokens` + `rollout.max_response_tokens`."""
    enable_chunked_prefill: bool | None = key(None)
    """Long prompts are computed in pieces, beside sequences that are being decoded; null: on a GPU. On a CPU vLLM
    cannot do it for samples with a seed, and all have one."""
    enable_prefix_caching: bool = key(True)
    """A prompt is computed once for all its samples, in whole blocks."""
    block_size: int | None = key(None, unit="tokens", ge=1)
    """Tokens in a block of the cache, which is what samples share; null: vLLM's choice on a GPU, 32 on a CPU."""
    enforce_eager: bool | None = key(None)
    """Neither compile nor capture CUDA graphs; null: on a CPU, where it starts sooner."""
    max_cudagraph_capture_size: int | None = key(None, unit="sequences", ge=1)
    """Largest batch that a CUDA graph is captured for; null: vLLM's choice."""
    disable_log_stats: bool = key(True)
    """No statistics line in the log every 10 seconds."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto")
    """What weights are held in and multiplied; auto: `run.precision`."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = key("auto")
    """What keys and values are held in; fp8 makes room for twice as many, and moves the logprobs."""
    kv_cache_memory_bytes: int | None = key(None, unit="bytes", ge=1)
    """Size of the cache; null: on a GPU what `memory_frac` leaves, on a CPU what `max_num_seqs` whole sequences take,
    within `memory_frac`."""
    cpu_offload_gb: float = key(0.0, unit="GiB", ge=0)
    """Weights of each GPU that are kept on the host and read from there in every step."""
    attention_backend: str | None = key(None)
    """Such as FLASH_ATTN or FLASHINFER; null: vLLM's choice."""
    disable_custom_all_reduce: bool = key(False)
    """Use NCCL's all-reduce between tensor-parallel ranks."""
    distributed_executor_backend: Literal["mp", "ray"] = key("mp")
    """What starts tensor-parallel ranks: processes beside the engine, or Ray."""
    sleep_level: Literal[1, 2] = key(2)
    """While asleep weights are on the host (1), or thrown away because new ones are published before waking (2)."""

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> VllmSettings:
        """The settings that a run file gives. Raises ConfigError with every problem."""
        if problems := settings_problems(args):
            raise ConfigError([f"{name}: {message}" for name, message in problems.items()])
        return cls.model_validate(args)


_FIXED = "is set by Hone, which relies on it"
ELSEWHERE = {
    "model": "is model.path",
    "tokenizer": "is model.tokenizer; the engine gets token ids and gives token ids",
    "trust_remote_code": "is model.trust_remote_code",
    "tensor_parallel_size": "is tensor_parallel, beside args",
    "gpu_memory_utilization": "is memory_frac, beside args",
    "pipeline_parallel_size": "is not supported: a replica is divided by tensor_parallel alone",
    "data_parallel_size": "is not needed: replicas = devices of the pool // tensor_parallel",
    "micro_batch_size": "is not needed: vLLM forms batches at every step, of at most max_num_seqs sequences",
    "prompt_length": "is data.max_prompt_tokens",
    "response_length": "is rollout.max_response_tokens",
    "max_tokens": "is rollout.max_response_tokens",
    "temperature": "is rollout.temperature",
    "top_k": "is rollout.top_k",
    "top_p": "is rollout.top_p",
    "min_p": "is rollout.min_p",
    "stop": "is rollout.stop",
    "n": "is rollout.group_size",
    "seed": "is seed; every sample has one of its own, made from it",
    "swap_space": "is no more: vLLM computes again what it had to drop. Lower max_num_seqs if it does so often",
    "use_cudagraph": "is enforce_eager, the other way round",
    "enable_sleep_mode": f"{_FIXED}: on wherever engines and trainer take turns on a GPU",
    "logprobs_mode": f"{_FIXED}: logprobs are of the distribution really sampled from",
    "skip_tokenizer_init": _FIXED,
    "worker_extension_cls": f"{_FIXED}: new weights come in through it",
    "async_scheduling": f"{_FIXED}: off, so that it is known which weights sampled a token",
    "speculative_config": "is not supported: the draft model would not follow the policy",
    "enable_lora": "is not needed: an adapter is published merged into the weights",
    "quantization": "is not supported: the trainer's weights are published as they are",
}
"""vLLM's arguments, and other tools' words, that are not knobs here; and why."""


def settings_problems(args: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with `args`, by the name of each argument that cannot be used."""
    problems = {name: _unknown(name) for name in args if name not in VllmSettings.model_fields}
    known = {name: value for name, value in args.items() if name in VllmSettings.model_fields}
    try:
        VllmSettings.model_validate(known)
    except ValidationError as error:
        for found in error.errors():
            message = found["msg"].removeprefix("Input should be ")
            problems.setdefault(str(found["loc"][0]), f"must be {message} (got {show(found['input'])})")
    return problems


def _unknown(name: str) -> str:
    if said := ELSEWHERE.get(name):
        return f"{said}. Leave it out here"
    if close := nearest(name, [*VllmSettings.model_fields, *ELSEWHERE]):
        cure = f"{close} {ELSEWHERE[close]}" if close in ELSEWHERE else f"Did you mean {close}?"
        return f"is no argument of vLLM that Hone knows. {cure}"
    return f"is no argument of vLLM that Hone knows. There are: {', '.join(VllmSettings.model_fields)}"
