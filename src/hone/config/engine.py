"""Inference engine settings: one section, in vLLM's words, for the policy's engines and for the models of services.

`cluster.engines` and `services.NAME.engine` both are this section; `ENGINES` registers what the policy's engines can
be. What another key of the run file decides already, or what Hone needs to be one way, is no key: `ELSEWHERE` names the
key to use instead. Without vLLM and without torch, so that `hone check` knows every key; `rollout/vllm_args.py` and
`services/launch.py` turn the section into vLLM's arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, Self

from hone.config.section import Section, key
from hone.errors import ConfigError
from hone.sizes import DTYPE_BYTES, FP8_BYTES

_FIXED = "is set by Hone, which relies on it"
ELSEWHERE = {
    "model": "is model.path, or the service's policy",
    "tokenizer": "is model.tokenizer; the policy's engines get token ids and return token ids",
    "trust_remote_code": "is model.trust_remote_code",
    "tensor_model_parallel_size": "is tensor_parallel_size",
    "pipeline_parallel_size": "is not supported: a replica is divided by tensor_parallel_size alone",
    "data_parallel_size": "is not needed: replicas = devices // tensor_parallel_size",
    "micro_batch_size": "is not needed: vLLM forms batches at every step, of at most max_num_seqs sequences",
    "micro_batch_size_per_gpu": "is max_num_seqs, which counts the sequences of one replica on all its devices",
    "prompt_length": "is data.max_prompt_tokens; of a judge, in the reward's args",
    "response_length": "is rollout.max_response_tokens; of a judge, in the reward's args",
    "max_tokens": "is rollout.max_response_tokens; of a judge, response_length in the reward's args",
    "temperature": "is rollout.temperature; of a judge, in the reward's args",
    "top_k": "is rollout.top_k; of a judge, in the reward's args",
    "top_p": "is rollout.top_p; of a judge, in the reward's args",
    "min_p": "is rollout.min_p",
    "stop": "is rollout.stop",
    "n": "is rollout.group_size; of a judge, votes in the reward's args",
    "seed": "is seed; each sample's own seed is derived from it",
    "swap_space": "no longer exists: vLLM recomputes what it preempted. Lower max_num_seqs if that happens often",
    "use_cudagraph": "is enforce_eager, inverted",
    "enable_sleep_mode": f"{_FIXED}: on wherever engines and trainer take turns on a GPU",
    "logprobs_mode": f"{_FIXED}: logprobs are of the distribution that was sampled from",
    "skip_tokenizer_init": f"{_FIXED}: the policy's engines have no tokenizer, a service's render chat with theirs",
    "worker_extension_cls": f"{_FIXED}: it loads new weights",
    "async_scheduling": f"{_FIXED}: on where vLLM can; what is in flight is taken before weights change",
    "speculative_config": "is not supported: the draft model would not follow the policy",
    "enable_lora": "is lora.publish = adapter; else an adapter is published merged into the weights",
    "quantization": "is not supported: the trainer's weights are published as they are",
}
"""Arguments of vLLM and of other tools that are not keys of the section -> why, and what to use."""

TOKEN_VARIABLE = "HONE_SERVICE_TOKEN"
"""Has the token of the run's services, in the environment of each."""
POLICY_GPU_FRAC, SERVICE_GPU_FRAC = 0.5, 0.9
"""`gpu_memory_utilization` where it is null."""
SERVICE_SEQUENCES, SERVICE_STEP_TOKENS = 64, 8192
"""`max_num_seqs` and `max_num_batched_tokens` of a service where they are null."""
JUDGE_ANSWER_TOKENS, REWARD_MODEL_BATCH_TOKENS = 2048, 16384
"""`response_length` of a reward `judge` and `batch_tokens` of a reward `reward_model`, where their args name none."""
MAX_SHARED_FRAC = 0.9
"""Of a GPU's memory that the engines on it may take together."""
LEAST_TEMPERATURE = 0.01
"""vLLM samples with this temperature where a lower one is asked for."""
ROLE_TOKENS = 32
"""Most tokens that a chat template writes around one message of the user."""


class EngineSection(Section):
    elsewhere: ClassVar[Mapping[str, str]] = ELSEWHERE

    use: str = key("auto", min_length=1)
    """hone: Hone's own engine, whole on one device. vllm: vLLM (an extra). Or one that an installed package registers.
    auto: vLLM where it is installed, for the policy on a cluster with GPUs, for a service anywhere; else hone."""
    tensor_parallel_size: int = key(1, unit="devices", ge=1)
    """Devices that one replica's weights are divided over; replicas = devices of the pool or service // this."""
    gpu_memory_utilization: float | None = key(None, unit="fraction of a device's memory", gt=0, le=1)
    """What a replica takes of each of its devices: weights, cache and workspace; null: 0.5, for a service 0.9."""
    max_num_seqs: int | None = key(None, unit="sequences", ge=1)
    """Sequences decoded together; null: `rollout.max_concurrent_samples`, for a service 64."""
    max_num_batched_tokens: int | None = key(None, unit="tokens", ge=1)
    """Tokens computed in one step, of prompts and responses; null: `rollout.prefill_tokens`, or more where needed; for
    a service 8192."""
    max_model_len: int | None = key(None, unit="tokens", ge=2)
    """Longest prompt + response; null: `data.max_prompt_tokens` + `rollout.max_response_tokens`; for a service the
    model's own."""
    enable_chunked_prefill: bool | None = key(None)
    """Long prompts are computed in chunks, beside sequences that are being decoded; null: on a GPU and for a service.
    On a CPU vLLM cannot do it for samples with a seed, and all of the policy's have one."""
    enable_prefix_caching: bool = key(True)
    """What prompts begin with in common is computed once, in whole blocks."""
    block_size: int | None = key(None, unit="tokens", ge=1)
    """Tokens in a block of the cache, the unit that samples share; null: vLLM's choice on a GPU, 32 on a CPU."""
    enforce_eager: bool | None = key(None)
    """Neither compile nor capture CUDA graphs: slower, less memory; null: on a CPU, where it starts sooner. Of Hone's
    own engine: no CUDA graphs; `rollout.compile` compiles."""
    max_cudagraph_capture_size: int | None = key(None, unit="sequences", ge=1)
    """Largest batch that a CUDA graph is captured for; null: vLLM's choice."""
    disable_log_stats: bool | None = key(None)
    """No statistics; null: for the policy's engines. A judge's log lines take its cache's figures from them."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto")
    """Type of the weights and of matrix products; auto: `run.precision`, for a service the model's own."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = key("auto")
    """Type of cached keys and values; fp8 holds twice as many, and moves the logprobs."""
    kv_cache_memory_bytes: int | None = key(None, unit="bytes", ge=1)
    """Size of the cache; null: on a GPU what `gpu_memory_utilization` leaves, on a CPU what `max_num_seqs` whole
    sequences take, within `gpu_memory_utilization`."""
    cpu_offload_gb: float = key(0.0, unit="GiB", ge=0)
    """Weights of each GPU that are kept on the host and read from there in every step."""
    attention_backend: str | None = key(None)
    """Such as FLASH_ATTN or FLASHINFER; null: vLLM's choice."""
    disable_custom_all_reduce: bool = key(False)
    """Use NCCL's all-reduce between tensor-parallel ranks."""
    distributed_executor_backend: Literal["mp", "ray"] = key("mp")
    """What starts tensor-parallel ranks: processes beside the engine, or Ray."""
    sleep_level: Literal[1, 2] = key(2)
    """While asleep the policy's weights are on the host (1), or discarded because new ones are published before waking
    (2)."""

    args: dict[str, Any] = key({})
    """Settings of an engine that an installed package registers."""

    @property
    def kind(self) -> EngineKind:
        """What `use` names. Raises ConfigError where nothing of that name is registered."""
        name = self.name
        if name in ENGINES:
            return ENGINES[name]
        registered = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
        if name not in registered:
            known = ", ".join([*ENGINES, *registered])
            raise ConfigError([f"cluster.engines.use: no engine is called {name!r}. Engines: {known}"])
        try:
            return registered[name].load()
        except ImportError as error:
            raise ConfigError([f"cluster.engines.use: engine {name} cannot be imported: {error}"]) from error

    @property
    def name(self) -> str:
        """`use`; what is still `auto` is Hone's own."""
        return "hone" if self.use == "auto" else self.use

    def vision_problem(self, model_type: str) -> str:
        """Why this engine does not sample from a model with a vision tower; "" if it does."""
        known = self.kind.vision_models
        if known is None or model_type in known:
            return ""
        names = f"{', '.join(sorted(known))} alone" if known else "none"
        return (
            f"cluster.engines.use = {self.name}: {model_type} has a vision tower, and of such models the engine "
            f"computes the trainer's logprobs for {names}. Set cluster.engines.use=hone."
        )

    def changed(self) -> list[str]:
        """Names of the keys, `use` aside, that do not have their default."""
        return [name for name, value in self if name != "use" and value != type(self).model_fields[name].default]

    def for_policy(self, *, longest: int, max_concurrent: int, prefill_tokens: int, on_gpu: bool) -> Self:
        """The section of vLLM with the policy, with what its null keys stand for.

        Args:
            longest: tokens of one prompt and its response.
            max_concurrent: `rollout.max_concurrent_samples`.
            prefill_tokens: `rollout.prefill_tokens`.
        """
        sequences, max_len = self.max_num_seqs or max_concurrent, self.max_model_len or longest
        in_pieces = on_gpu if self.enable_chunked_prefill is None else self.enable_chunked_prefill
        least = sequences if in_pieces else max(sequences, max_len)
        settled = {
            "max_num_seqs": sequences,
            "max_model_len": max_len,
            "enable_chunked_prefill": in_pieces,
            "max_num_batched_tokens": self.max_num_batched_tokens or max(prefill_tokens, least),
            "gpu_memory_utilization": self.gpu_memory_utilization or POLICY_GPU_FRAC,
            "enforce_eager": not on_gpu if self.enforce_eager is None else self.enforce_eager,
            "disable_log_stats": self.disable_log_stats is not False,
        }
        return self.model_copy(update=settled)

    def for_service(self) -> Self:
        """The section of a service's vLLM, with what its null keys stand for; what stays null is vLLM's choice."""
        settled = {
            "max_num_seqs": self.max_num_seqs or SERVICE_SEQUENCES,
            "max_num_batched_tokens": self.max_num_batched_tokens or SERVICE_STEP_TOKENS,
            "gpu_memory_utilization": self.gpu_memory_utilization or SERVICE_GPU_FRAC,
            "enable_chunked_prefill": self.enable_chunked_prefill is not False,
        }
        return self.model_copy(update=settled)

    def bytes_each(self, automatic: int) -> tuple[int, int]:
        """Bytes of a weight, and of a number in the cache.

        Args:
            automatic: of a weight where `dtype` is auto.
        """
        weight = automatic if self.dtype == "auto" else DTYPE_BYTES[self.dtype]
        return weight, weight if self.kv_cache_dtype == "auto" else FP8_BYTES

    def command_words(self, replicas: int) -> list[str]:
        """What follows `vllm serve MODEL` on the command line of a service with `replicas` replicas."""
        settled = self.for_service()
        words: dict[str, Any] = {
            "tensor_parallel_size": self.tensor_parallel_size,
            **({"data_parallel_size": replicas} if replicas > 1 else {}),
            "max_num_seqs": settled.max_num_seqs,
            "max_num_batched_tokens": settled.max_num_batched_tokens,
            "gpu_memory_utilization": settled.gpu_memory_utilization,
            "enable_chunked_prefill": settled.enable_chunked_prefill,
            "enable_prefix_caching": self.enable_prefix_caching,
        }
        words |= {name: getattr(self, name) for name in self.changed() if name not in ("sleep_level", "args")}
        found: list[str] = []
        for name, value in ((name.replace("_", "-"), value) for name, value in words.items()):
            if not isinstance(value, bool):
                found += [f"--{name}", str(value)]
            elif value:
                found.append(f"--{name}")
            elif not name.startswith("disable"):  # vLLM has no --no-disable-log-stats
                found.append(f"--no-{name}")
        return found


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine that the policy can be sampled with."""

    start: str
    """`module:function` that starts one in the calling process: `async (hone.assemble.processes.ActorContext) ->
    hone.rollout.engine.Engine`."""
    keys: frozenset[str] = frozenset()
    """Keys of `EngineSection` that it uses, `use` and `args` aside."""
    args: type[Section] | None = None
    """Settings that it has besides; None: none."""
    rules: str = ""
    """`module:RULES`: functions of a RunConfig that yield breaches; "" is none."""
    memory: Literal["own", "share", "none"] = "own"
    """What `hone plan` counts on each of its devices: weights and a cache as of Hone's own engine; a share of it,
    `gpu_memory_utilization`; or nothing, for a client of a server elsewhere."""
    vision_models: frozenset[str] | None = frozenset()
    """Model types with a vision tower that it samples from as the trainer computes them; None: all that Hone trains."""
    takes_adapters: bool = False
    """An adapter alone can be published to it (`lora.publish`)."""
    records_routing: bool = False
    """Its samples have the experts that their tokens were sent to, where `algorithm.replay_routing` asks for it."""
    needs_folder: bool = False
    """It starts from a Hugging Face directory (`ActorContext.model_folder`)."""


VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM makes room for."""
VLLM_VISION_MODELS = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""Model types with a vision tower that vLLM samples from, with pictures or without: those whose logprobs were seen to
be the trainer's (tests/rollout/test_vllm_pictures.py)."""


def vllm_rank(rank: int) -> int:
    """The rank that vLLM makes room for, for an adapter of this one."""
    return next(most for most in VLLM_RANKS if most >= rank)


ENTRY_POINTS = "hone.rollout.engine"
"""Group of the entry points by which packages register engines: name -> `module:EngineKind instance`."""
ENGINES = {
    "hone": EngineKind(
        "hone.assemble.processes:start_own",
        keys=frozenset({"enforce_eager"}),
        vision_models=None,
        records_routing=True,
    ),
    "vllm": EngineKind(
        "hone.assemble.vllm:start_vllm",
        keys=frozenset(EngineSection.model_fields) - {"use", "args"},
        rules="hone.config.rules.engines:VLLM_RULES",
        memory="share",
        vision_models=VLLM_VISION_MODELS,
        takes_adapters=True,
        records_routing=True,
        needs_folder=True,
    ),
}
