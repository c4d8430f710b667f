"""Arguments of vLLM from a run file's engine settings. Pure: neither torch nor vllm is imported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
from packaging.requirements import Requirement

from hone.config.engine import LEAST_TEMPERATURE, VLLM_VISION_MODELS, EngineSection, vllm_rank
from hone.config.run import LoraSection
from hone.errors import EngineError
from hone.plan.engine import refuse_states
from hone.plan.families import architecture_from
from hone.sizes import DTYPE_BYTES

if TYPE_CHECKING:
    from hone.rollout.engine import Sampling

CPU_BLOCK_TOKENS = 32
"""The smallest that vLLM's attention on a CPU takes. Its own choice of 128 lets short prompts share nothing."""
PLAIN_ROTARY = {"custom_ops": ["-rotary_embedding"]}
"""vLLM's CPU kernel for rotary positions (0.32) miscomputes them for a part of a head, as latent attention (DeepSeek)
has it; without the kernel PyTorch computes them."""
FLOAT32_HEAD = {"head_dtype": "float32"}
"""Logits in float32 from weights of 16 bits, as the trainer has them: rounded to bfloat16 they alone differ by 0.015
nats on average. vLLM takes it from the model's configuration (0.32: with an adapter too; no quantised output layer)."""
WORKER_EXTENSION, WEIGHT_TRANSFER = "hone.weights.vllm_worker.Extension", "hone"
"""Class that vLLM loads into its workers, and the backend for new weights that its module registers."""
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # several processes share the cores; a bound thread waits
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # steps are made here, so that it is known which weights made them
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
ROUTING_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Of an engine that records routing, which vLLM's second model runner alone does; without Triton vLLM would choose its
first one."""


def check_version(installed: str) -> None:
    """Raises EngineError when this version of vLLM is not among those that Hone was tested with."""
    requirements = map(Requirement, requires("hone-rl") or ())
    supported = next((one.specifier for one in requirements if one.name == "vllm"), None)  # of the extra `vllm`
    if supported is None:
        raise EngineError("this installation of hone-rl knows no extra `vllm`. Install it again.")
    if not supported.contains(installed, prereleases=True):
        raise EngineError(
            f"vLLM {installed} is installed, and Hone works with {supported}: new weights go in through parts of vLLM "
            "that change between versions. Install hone-rl[vllm], or set cluster.engines.use = hone."
        )


@dataclass(frozen=True, slots=True)
class VllmPlace:
    """What the rest of the run file says about an engine: its model and its lengths."""

    folder: Path
    """A Hugging Face directory: config.json and safetensors."""
    precision: Literal["float32", "bfloat16"]
    longest_tokens: int
    """Of one prompt and its response."""
    max_concurrent: int
    """Sequences decoded together, at most."""
    prefill_tokens: int
    takes_turns: bool = False
    """Whether others use the engine's memory between `sleep` and `wake`."""
    trust_remote_code: bool = False
    adapter: LoraSection | None = None
    """Of a policy whose adapter is published alone."""
    records_routing: bool = False
    """Whether samples have the experts that their tokens were sent to."""
    picture_pixels: tuple[int, int] | None = None
    """Of the smallest and the largest picture, as the model sees it; None: as its processor's files say."""


def engine_arguments(settings: EngineSection, place: VllmPlace, *, on_gpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`. Raises EngineError for what this device cannot do."""
    if settings.enable_chunked_prefill and not on_gpu:
        raise EngineError(
            "enable_chunked_prefill = true: on a CPU vLLM cannot compute a prompt in pieces when its sample has a "
            "seed, and all have one. Leave it out."
        )
    settings = settings.for_policy(
        longest=place.longest_tokens,
        max_concurrent=place.max_concurrent,
        prefill_tokens=place.prefill_tokens,
        on_gpu=on_gpu,
    )
    dtype = place.precision if settings.dtype == "auto" else settings.dtype
    arguments = settings.model_dump(
        exclude={"use", "args", "sleep_level", "distributed_executor_backend"}, exclude_none=True
    ) | {
        "model": str(place.folder),
        "dtype": dtype,
        "trust_remote_code": place.trust_remote_code,
        "enable_sleep_mode": on_gpu and place.takes_turns,
        "enable_return_routed_experts": place.records_routing,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the model's own would change temperature and truncation
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": WEIGHT_TRANSFER},
    }
    if dtype != "float32":
        arguments["hf_overrides"] = FLOAT32_HEAD
    if place.records_routing:  # records are read as far as they have come, which nothing in flight may change
        arguments["async_scheduling"] = False
    if place.adapter is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": vllm_rank(place.adapter.rank)}
    file = place.folder / "config.json"
    keys = json.loads(file.read_text()) if file.is_file() else {}  # vLLM says it if there is none
    if keys.get("model_type") in VLLM_VISION_MODELS:
        arguments |= _for_pictures(place, on_gpu=on_gpu)
    if not on_gpu:
        arguments.setdefault("block_size", CPU_BLOCK_TOKENS)
        if "qk_rope_head_dim" in keys:
            arguments["compilation_config"] = PLAIN_ROTARY
    if settings.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = settings.distributed_executor_backend
    if not on_gpu and settings.kv_cache_memory_bytes is None:
        arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(settings, place)
    return arguments


def _for_pictures(place: VllmPlace, *, on_gpu: bool) -> dict[str, Any]:
    """For a model with a vision tower. Its pictures come from `vllm_pictures`; vLLM's own processor only says how large
    they may be, for which vLLM reserves memory."""
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": False,  # vLLM 0.32 makes no processor without a tokenizer
        "limit_mm_per_prompt": {"video": 0},
        "mm_processor_cache_gb": 0,  # of what its processor made
        "mm_device_do_normalize": False,  # patches come normalised
        "skip_mm_profiling": not on_gpu,
    }
    if place.picture_pixels is not None:
        least, most = place.picture_pixels
        arguments["mm_processor_kwargs"] = {"size": {"shortest_edge": least, "longest_edge": most}}
    return arguments


def _cpu_cache_bytes(settings: EngineSection, place: VllmPlace) -> int:
    """What all sequences take at their longest, within `gpu_memory_utilization` of this machine's memory.

    Args:
        settings: see `EngineSection.for_policy`.
    """
    architecture = architecture_from(json.loads((place.folder / "config.json").read_text()), source=str(place.folder))
    refuse_states(architecture)
    sequences, longest, share = settings.max_num_seqs, settings.max_model_len, settings.gpu_memory_utilization
    assert sequences and longest and share
    _, each = settings.bytes_each(DTYPE_BYTES[place.precision])
    per_token = architecture.kv_bytes_per_token(bytes_each=each, tensor_parallel=settings.tensor_parallel_size)
    block = settings.block_size or CPU_BLOCK_TOKENS
    tokens = (sequences * -(-longest // block) + 1) * block  # vLLM keeps a block for itself
    return min(tokens * per_token, int(share * psutil.virtual_memory().total))


def check_sampling(sampling: Sampling) -> None:
    """Raises EngineError where vLLM would draw from another distribution than Hone's own engine."""
    if sampling.temperature == 0:
        return
    if sampling.top_p < 1 and sampling.min_p > 0:
        raise EngineError(
            f"top_p = {sampling.top_p} with min_p = {sampling.min_p}: vLLM applies min_p before top_p, Hone after it, "
            "which is another distribution. Use one of them."
        )
    if sampling.temperature < LEAST_TEMPERATURE:
        raise EngineError(
            f"temperature {sampling.temperature:g}: vLLM would sample with {LEAST_TEMPERATURE}. Use 0 for greedy."
        )
