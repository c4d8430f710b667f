"""Inputs of a plan: the run file, its topology, architectures, workload, and the largest microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hone.config.engine import REWARD_MODEL_BATCH_TOKENS
from hone.config.run import RunConfig
from hone.config.section import Section
from hone.config.topology import Topology, judge_services, judges_pool, topology_of
from hone.plan.activations import ForwardKind, Pass
from hone.plan.architecture import Architecture
from hone.plan.families import architecture_from
from hone.plan.hardware import Hardware
from hone.plan.known_models import named_architecture, policy_config
from hone.plan.kv_cache import CacheRoom, cache_room
from hone.plan.local import ScoringModel
from hone.plan.workload import Workload, share_of
from hone.sizes import OWN_FAMILIES


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a plan follows from, resolved."""

    config: RunConfig
    hardware: Hardware
    topology: Topology
    architecture: Architecture
    critic: Architecture | None
    judges: Mapping[str, Architecture]
    """By service: those on devices of the cluster, or on GPUs of their own."""
    reward_models: tuple[ScoringModel, ...]
    workload: Workload
    folder: Path
    """Where relative paths of the run file start."""

    @property
    def is_local(self) -> bool:
        """One process on one device."""
        return self.topology.backend == "local"

    @property
    def tower_learns(self) -> bool:
        """Whether a vision tower would be trained."""
        return "vision" not in self.config.model.freeze and not self.config.lora.rank

    @property
    def picture_pixels(self) -> int:
        """Of the largest picture of a prompt; 0: prompts have none."""
        return self.config.data.max_image_pixels if self.config.data.image_columns else 0


def resolve(config: RunConfig, hardware: Hardware, workload: Workload, folder: Path) -> Inputs:
    """Look up the topology and every architecture."""
    architecture = architecture_from(
        policy_config(config.model, folder), source="model.init" if config.model.init else f"{config.model.path}"
    )
    topology = topology_of(config, hardware.per_node)
    critic = None
    if workload.has_critic:
        named = config.critic.path
        body = architecture if named is None else named_architecture(named, folder, key="critic.path")
        critic = replace(body, tied=True)  # one number per token in place of logits; its head is too small to count
    rewards = [
        ScoringModel(
            name=str(component.args["path"]),
            architecture=named_architecture(str(component.args["path"]), folder, key="reward_model"),
            batch_tokens=component.args.get("batch_tokens", REWARD_MODEL_BATCH_TOKENS),
        )
        for component in config.reward.components
        if component.use == "reward_model" and "path" in component.args
        if hardware.kind == "cpu" or component.args.get("device") != "cpu"
    ]
    judges = {
        name: named_architecture(str(config.services[name].policy), folder, key=f"services.{name}.policy")
        for name in judge_services(config)
        if judges_pool(config) or config.services[name].devices
    }
    return Inputs(
        config=config,
        hardware=hardware,
        topology=topology,
        architecture=architecture,
        critic=critic,
        judges=judges,
        reward_models=tuple(rewards),
        workload=workload,
        folder=folder,
    )


def implementation_of(inputs: Inputs) -> ForwardKind:
    """Which code runs the policy."""
    wanted = inputs.config.model.implementation
    return automatic_implementation(inputs.architecture) if wanted == "auto" else wanted


def automatic_implementation(architecture: Architecture) -> ForwardKind:
    """Which code runs a model where no key says it."""
    return "hone" if architecture.model_type in OWN_FAMILIES else "transformers"


def is_cuda(inputs: Inputs) -> bool:
    """Whether the devices are GPUs of NVIDIA or AMD."""
    return inputs.hardware.names[0] == "cuda"


def has_graphs(inputs: Inputs) -> bool:
    """Whether Hone's own engine decodes by CUDA graphs."""
    return is_cuda(inputs) and implementation_of(inputs) == "hone" and not inputs.config.cluster.engines.enforce_eager


def bytes_each(inputs: Inputs) -> int:
    """Bytes of a number that trainers compute with."""
    return 2 if inputs.config.run.compute_dtype == "bfloat16" else 4


def microbatch_tokens(inputs: Inputs, *, ranks: int = 1) -> int:
    """Tokens of the largest microbatch, each prompt once, on one of `ranks` devices that divide the samples."""
    workload, budget = inputs.workload, inputs.config.train.tokens_per_microbatch
    tokens = min(budget, max(-(-workload.step_tokens() // ranks), workload.lengths.longest))
    return -(-tokens // inputs.topology.trainer.sequence_parallel)


def microbatch(inputs: Inputs, *, ranks: int = 1) -> Pass:
    """The largest microbatch of the policy on one of `ranks` devices that divide the samples among them."""
    workload, train, trainer = inputs.workload, inputs.config.train, inputs.topology.trainer
    lengths, tokens = workload.lengths, microbatch_tokens(inputs, ranks=ranks)
    responses = workload.group * lengths.max_response
    share = responses / (lengths.max_prompt + responses)
    response_tokens = max(1, round(tokens * share))
    implementation = implementation_of(inputs)
    rows = None
    if implementation == "transformers":
        rows = "padded" if inputs.architecture.why_rows else "one"
    if rows == "padded":  # `model/hf.py` computes whole samples, each with its prompt, in a row
        tokens = -(-response_tokens // lengths.max_response) * (lengths.longest - 1)
    return Pass(
        architecture=inputs.architecture,
        implementation=implementation,
        bytes_each=bytes_each(inputs),
        tokens=tokens,
        response_tokens=response_tokens,
        longest=lengths.longest,
        checkpointing=train.activation_checkpointing,
        chunk_tokens=train.logprob_chunk_tokens,
        entropy_gradient=workload.has_entropy_gradient,
        tensor_parallel=trainer.tensor_parallel,
        sequence_parallel=trainer.sequence_parallel,
        rows=rows,
        prompt=lengths.max_prompt,
        on_cuda=is_cuda(inputs),
        fused=is_cuda(inputs) if (fused := inputs.config.run.fused_kernels) is None else fused,
    )


def room_of(inputs: Inputs, replicas: int = 1) -> CacheRoom:
    """Of the cache of Hone's own engine, where `replicas` engines share what is sampled."""
    return cache_room(
        inputs.config,
        share_of(inputs.workload, replicas),
        inputs.architecture,
        bytes_each=bytes_each(inputs),
        memory_bytes=inputs.hardware.memory_bytes,
        shares_prompts=implementation_of(inputs) == "hone",
    )


Settings = Mapping[str, Any]
"""Values by dotted key."""


def value_of(config: RunConfig, key: str) -> Any:
    """The value of a key."""
    here: Any = config
    for part in key.split("."):
        here = here[part] if isinstance(here, Mapping) else getattr(here, part)
    return here


def plain(value: Any) -> Any:
    """A value as JSON and YAML have it."""
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return value.model_dump(mode="json") if isinstance(value, Section) else value


def changed(inputs: Inputs, settings: Settings) -> Inputs:
    """The same inputs with other settings; only keys that the algorithm does not depend on."""
    config = inputs.config
    for key, value in settings.items():
        config = with_value(config, key.split("."), value)
    if any(key.startswith(("cluster.", "services.")) for key in settings):
        return replace(inputs, config=config, topology=topology_of(config, inputs.hardware.per_node))
    return replace(inputs, config=config)


def with_value(section: Any, path: Sequence[str], value: Any) -> Any:
    """A section of the configuration with another value at a path below it."""
    first, *rest = path
    is_open = isinstance(section, Mapping)
    inner = with_value(section[first] if is_open else getattr(section, first), rest, value) if rest else value
    return {**section, first: inner} if is_open else section.model_copy(update={first: inner})
