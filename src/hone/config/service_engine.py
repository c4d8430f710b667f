"""`services.NAME.engine`: how the model of a service with `policy` is held and batched, and whether that comes out.

The keys are those that practice with generative reward models has (verl's); the number of replicas is derived. It is
turned into a vLLM server where the program `vllm` can be found, else into `hone serve policy`, which has no use for
most of them and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import ValidationError, model_validator

from hone.config.breach import Breach
from hone.config.run import RunConfig, ServiceSection
from hone.config.section import Section, key
from hone.config.topology import judge_services, judges_pool

ROLE_TOKENS = 32
"""What a chat template writes around one message of the user, at most."""
MAX_SHARED_FRAC = 0.9
"""Of a GPU's memory that engines on it may take together."""
HONES_OWN = frozenset({"use", "max_num_seqs", "micro_batch_size_per_gpu", "max_model_len"})
"""What `hone serve policy` heeds: how many samples are drawn at one time; its context is the model's."""


class ServiceEngine(Section):
    """Settings of one engine, or of equal ones that share the requests."""

    use: Literal["auto", "hone", "vllm"] = key("auto")
    """auto: vLLM if it is installed here, else Hone's own engine."""
    tensor_model_parallel_size: int = key(1, unit="GPUs", ge=1)
    """GPUs that one replica's weights are divided over; replicas = GPUs of the service // this."""
    micro_batch_size_per_gpu: int | None = key(None, unit="sequences", ge=1)
    """Sequences that a replica computes together, for each of its GPUs; null: `max_num_seqs` alone bounds them."""
    max_num_seqs: int = key(64, unit="sequences", ge=1)
    """Sequences that a replica computes together."""
    max_num_batched_tokens: int = key(8192, unit="tokens", ge=1)
    """Tokens of one step of a replica."""
    gpu_memory_utilization: float = key(0.9, unit="fraction of a GPU's memory", gt=0, le=1)
    """What a replica takes of each of its GPUs: weights, cache and workspace."""
    max_model_len: int | None = key(None, unit="tokens", ge=1)
    """Longest prompt with its answer; null: the model's own."""
    enable_chunked_prefill: bool = key(True)
    """Long prompts are computed in parts of `max_num_batched_tokens`."""
    enable_prefix_caching: bool = key(True)
    """What prompts begin with in common is computed once."""
    enforce_eager: bool = key(False)
    """No CUDA graphs: slower, and less memory."""
    disable_log_stats: bool = key(False)
    """No figures of the engine: then the judge's lines have none of its cache either."""
    skip_tokenizer_init: Literal[False] = key(False)
    """Chat is rendered by the engine, which needs its tokenizer."""

    @model_validator(mode="after")
    def _batches_hold_what_they_must(self) -> Self:
        batch, length = self.max_num_batched_tokens, self.max_model_len
        if not self.enable_chunked_prefill and (length is None or batch < length):
            got = f"{batch} < {length}" if length else f"{batch}, and max_model_len is not set"
            raise ValueError(
                "without enable_chunked_prefill a prompt is computed at one time, so that max_num_batched_tokens must "
                f"be at least max_model_len (got {got}). Nearest: {length or 'set max_model_len'}"
            )
        if batch < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens = {batch} < max_num_seqs = {self.max_num_seqs}: each sequence needs a token "
                "of a step"
            )
        return self

    @property
    def sequences(self) -> int:
        """Sequences that a replica computes together, both bounds heeded."""
        per_gpu = self.micro_batch_size_per_gpu
        bound = self.max_num_seqs if per_gpu is None else per_gpu * self.tensor_model_parallel_size
        return min(self.max_num_seqs, bound)

    def replicas(self, service: ServiceSection) -> int:
        """GPUs // tensor_model_parallel_size; 1 on a service without GPUs."""
        return max(1, len(service.devices) // self.tensor_model_parallel_size)

    def unused_by_hone(self) -> list[str]:
        """Keys that are set, and that Hone's own engine has no use for."""
        return sorted(self.model_fields_set - HONES_OWN)

    def vllm_words(self, service: ServiceSection) -> list[str]:
        """What follows `vllm serve MODEL` on its command line."""
        words = ["--tensor-parallel-size", self.tensor_model_parallel_size]
        if self.replicas(service) > 1:
            words += ["--data-parallel-size", self.replicas(service)]
        words += ["--max-num-seqs", self.sequences, "--max-num-batched-tokens", self.max_num_batched_tokens]
        words += ["--gpu-memory-utilization", self.gpu_memory_utilization]
        if self.max_model_len is not None:
            words += ["--max-model-len", self.max_model_len]
        words += [_switch("enable-chunked-prefill", self.enable_chunked_prefill)]
        words += [_switch("enable-prefix-caching", self.enable_prefix_caching)]
        words += ["--enforce-eager"] * self.enforce_eager + ["--disable-log-stats"] * self.disable_log_stats
        return [str(word) for word in words]


def engine_of(service: ServiceSection) -> ServiceEngine | None:
    """Its engine's settings; None without any. Raises ValidationError, which the rules below tell before."""
    return ServiceEngine.model_validate(dict(service.engine)) if service.engine else None


def engines_of(config: RunConfig) -> Iterator[tuple[str, ServiceEngine]]:
    """Of the services whose settings are right; what is wrong with the others is told by its own rule."""
    for name, service in config.services.items():
        try:
            engine = engine_of(service)
        except ValidationError:
            continue
        if engine is not None:
            yield name, engine


def _switch(name: str, is_on: bool) -> str:
    return f"--{name}" if is_on else f"--no-{name}"


# ---- rules


def engines_fit_their_services(config: RunConfig) -> Iterator[Breach]:
    """Known keys, sums within an engine, and GPUs that its replicas divide."""
    for name, service in config.services.items():
        where = f"services.{name}.engine"
        if service.engine and service.policy is None:
            yield Breach((where, f"services.{name}.policy"), "is for a service with `policy`. Leave it out")
        try:
            engine = engine_of(service)
        except ValidationError as error:
            for found in error.errors():
                said = found["msg"].removeprefix("Value error, ")
                got = f" (got {found['input']!r})" if found["loc"] else ""
                yield Breach((where,), "".join(f"{part}: " for part in found["loc"]) + said + got)
            continue
        if engine is None:
            continue
        gpus, size = len(service.devices), engine.tensor_model_parallel_size
        if name in judge_services(config) and judges_pool(config):
            continue  # its GPUs are the pool's, whose rules are in `scoring_rules.py` and `division_rules.py`
        if max(1, gpus) % size:
            nearest = max(size, gpus - gpus % size)
            yield Breach(
                (where, f"services.{name}.devices"),
                f"tensor_model_parallel_size = {size} must divide the service's GPUs (got {gpus}). Nearest: give it "
                f"{nearest} GPUs",
            )
        if engine.use == "hone" and (gpus > 1 or size > 1):
            yield Breach(
                (where, f"services.{name}.devices"),
                f"use: hone is an engine on one device (got {gpus} GPUs). Give it one, or use vLLM",
            )


def engines_share_memory(config: RunConfig) -> Iterator[Breach]:
    """Engines on the same GPU take at most 0.9 of it together."""
    shares: dict[int, list[tuple[str, float]]] = {}
    for name, engine in engines_of(config):
        for number in config.services[name].devices:
            shares.setdefault(number, []).append((name, engine.gpu_memory_utilization))
    told: set[tuple[str, ...]] = set()
    for number, found in shares.items():
        names, total = tuple(name for name, _ in found), sum(share for _, share in found)
        if len(found) > 1 and total > MAX_SHARED_FRAC + 1e-9 and names not in told:
            told.add(names)
            terms = " + ".join(f"{name} {share:g}" for name, share in found)
            yield Breach(
                tuple(f"services.{name}.engine" for name in names),
                f"gpu_memory_utilization on GPU {number}: {terms} = {total:g} > {MAX_SHARED_FRAC:g}. Lower them, or "
                "give each service GPUs of its own",
            )


def judges_fit_their_engines(config: RunConfig) -> Iterator[Breach]:
    """What a judge is asked, and what it may answer, has room in the context of the engine that it names."""
    engines = dict(engines_of(config))
    for number, component in enumerate(config.reward.components):
        engine = engines.get(str(component.args.get("service"))) if component.use == "judge" else None
        if engine is None or engine.max_model_len is None:
            continue
        prompt, answer, length = (component.args.get(k) for k in ("prompt_length", "response_length", "max_model_len"))
        keys = (f"reward.components.{number}.args", f"services.{component.args['service']}.engine")
        if isinstance(length, int) and length > engine.max_model_len:
            yield Breach(keys, f"max_model_len = {length} > its engine's max_model_len {engine.max_model_len}")
        elif isinstance(prompt, int) and isinstance(answer, int):
            total = prompt + answer + ROLE_TOKENS
            if total > engine.max_model_len:
                yield Breach(
                    keys,
                    f"prompt_length {prompt} + response_length {answer} + {ROLE_TOKENS} for the chat template = "
                    f"{total} tokens > its engine's max_model_len {engine.max_model_len}",
                )


ENGINE_RULES: tuple[Any, ...] = (engines_fit_their_services, engines_share_memory, judges_fit_their_engines)
