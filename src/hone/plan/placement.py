"""Where the work is done: which devices train, which sample, how models are divided among them.

A run in one process on one device is the placement `local`. The others describe trainers sharded over many devices
(FSDP2) and engines with tensor parallelism (vLLM), taking turns on the same devices or on their own. A run file with
`cluster.backend: ray` has said all of it in its `cluster` section; `placement.key=value` on the command line of
`hone plan` says otherwise, or plans what is in no run file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from hone.config.engine import POLICY_GPU_FRAC, SERVICE_GPU_FRAC, SERVICE_SEQUENCES, SERVICE_STEP_TOKENS, EngineSection
from hone.config.messages import nearest
from hone.config.run import RunConfig, Section, key
from hone.config.topology import Topology, judge_services, reward_models
from hone.errors import ConfigError

PREFIX = "placement."


class EnginePlacement(Section):
    """One engine replica on its devices."""

    tensor_parallel: int = key(1, unit="devices", ge=1)
    """Devices that one replica's weights are divided over."""
    memory_frac: float = key(0.5, unit="fraction of a device's memory", gt=0, le=1)
    """What the engine takes for weights, cache and workspace, of the whole memory of each of its devices."""
    max_batched_tokens: int = key(8192, unit="tokens", ge=1)
    """Tokens that one step of the engine computes; a prompt longer than that is cut into chunks."""
    max_samples: int | None = key(None, unit="sequences", ge=1)
    """Sequences that one replica decodes together; null: `rollout.max_concurrent_samples`."""
    graphs: bool = key(True)
    """Decode with captured graphs: faster, and their memory stays when the engine sleeps."""
    sleep_level: Literal[0, 1, 2] = key(2)
    """What a sleeping engine keeps: 0 all, 1 a copy of its weights on the host, 2 neither weights nor cache."""


class JudgePlacement(Section):
    """A model that scores: a judge that writes, or a reward model that reads."""

    model: str = key(..., min_length=1)
    """Directory, config.json or a known name."""
    writes: bool = key(True)
    """A judge writes its opinion; a reward model only reads."""
    devices: int = key(0, unit="devices", ge=0)
    """Devices of its own; 0: on those of the policy."""
    tensor_parallel: int = key(1, unit="devices", ge=1)
    """Devices that one replica's weights are divided over; replicas = devices // tensor_parallel."""
    memory_frac: float = key(0.3, unit="fraction of a device's memory", gt=0, le=1)
    """As `placement.engine.memory_frac`."""
    prompt_tokens: int = key(4096, unit="tokens", ge=1)
    """Longest thing that it reads."""
    response_tokens: int = key(1024, unit="tokens", ge=1)
    """Longest thing that it writes."""
    max_samples: int = key(64, unit="sequences", ge=1)
    """Sequences that one replica has in work together."""
    max_batched_tokens: int = key(8192, unit="tokens", ge=1)
    """As `placement.engine.max_batched_tokens`."""
    sleeps: bool = key(True)
    """On the policy's devices: gives its memory back while others work."""


class Placement(Section):
    """The whole placement."""

    mode: Literal["auto", "local", "colocated", "separate"] = key("auto")
    """local: one process, one device. colocated: trainer and engines in turn on all devices. separate: devices of
    their own. auto: local on one device, else colocated."""
    engine_devices: int | None = key(None, unit="devices", ge=1)
    """With `separate`: devices that sample; null balances their time with the trainer's. The rest train."""
    critic_devices: int = key(0, unit="devices", ge=0)
    """With `separate`: devices of the critic's own; 0: the critic shares those that train."""
    tensor_parallel: int = key(1, unit="devices", ge=1)
    """Devices that each layer is divided over in training."""
    context_parallel: int = key(1, unit="devices", ge=1)
    """Devices that each sequence is divided over in training."""
    shard: int | None = key(None, unit="devices", ge=1)
    """Devices that weights, gradients and moments are sharded over (FSDP2); null: all that train."""
    checkpointing: Literal["none", "selective", "full"] | None = key(None)
    """Activations to recompute: none, all but the products of matrices, whole layers; null: as the run file says."""
    loss: Literal["chunked", "naive"] = key("chunked")
    """Logits a chunk at a time (`train.logprob_chunk_tokens`), or those of all tokens at once in float32."""
    splits_root: bool = key(False)
    """Embedding and output layer are sharded units of their own, gathered only while they compute."""
    offload_optimizer: bool = key(False)
    """Master weights and moments stay on the host and visit the device for the optimizer step, layer by layer."""
    offload_moments: bool = key(False)
    """Only the moments do so, a part at a time."""
    offload_trainer: bool = key(False)
    """What trains leaves the device while the engine samples (colocated)."""
    offload_reference: bool = key(False)
    """The frozen reference stays on the host and visits the device, layer by layer."""
    engine: EnginePlacement = key(EnginePlacement())
    judge: JudgePlacement | None = key(None)


_CLUSTER_KEYS = {
    "placement.checkpointing": "train.activation_checkpointing",
    "placement.shard": "cluster.trainer.shard",
    "placement.tensor_parallel": "cluster.trainer.tensor_parallel",
    "placement.context_parallel": "cluster.trainer.sequence_parallel",
    "placement.engine": "cluster.engines",
    "placement.engine.tensor_parallel": "cluster.engines.tensor_parallel_size",
    "placement.engine.memory_frac": "cluster.engines.gpu_memory_utilization",
    "placement.engine.max_batched_tokens": "cluster.engines.max_num_batched_tokens",
    "placement.engine.max_samples": "cluster.engines.max_num_seqs",
}


OFFLOADS = {
    "placement.offload_optimizer": "parameters",
    "placement.offload_moments": "optimizer",
    "placement.offload_reference": "reference",
}
"""What `cluster.trainer.offload` calls what a key of the placement leaves on the host."""


def cluster_key(key: str) -> str:
    """The key of the run file that says the same as one of the placement; itself where none does."""
    return _CLUSTER_KEYS.get(key, key)


def placement_key(key: str) -> str:
    """The other way round."""
    return next((ours for ours, theirs in _CLUSTER_KEYS.items() if theirs == key), key)


def placement_of(config: RunConfig, topology: Topology, given: Placement) -> Placement:
    """What a run file's `cluster` section says, where the command line says nothing else.

    Args:
        topology: of the run file.
        given: by the command line.
    """
    cluster, trainer = config.cluster, config.cluster.trainer
    args = cluster.engines
    engine = _engine(cluster.engines, config.rollout.prefill_tokens)
    said: dict[str, Any] = {
        "mode": "colocated" if topology.colocated else "separate",
        "tensor_parallel": trainer.tensor_parallel,
        "context_parallel": trainer.sequence_parallel,
        "shard": trainer.shard and trainer.shard * trainer.tensor_parallel,
        "offload_optimizer": "parameters" in trainer.offload,
        "offload_moments": "optimizer" in trainer.offload,
        "offload_reference": "reference" in trainer.offload,
        "engine": engine | {"graphs": not args.enforce_eager, "sleep_level": args.sleep_level},
    }
    if topology.judges:
        said["judge"] = _judge(config)
    elif topology.reward_models:
        said["judge"] = {"model": str(reward_models(config)[0].args.get("path")), "writes": False}
    merged = said | given.model_dump(exclude_unset=True)
    merged["engine"] = said["engine"] | given.engine.model_dump(exclude_unset=True)
    if given.judge is not None:
        merged["judge"] = said.get("judge", {}) | given.judge.model_dump(exclude_unset=True)
    return Placement.model_validate(merged)


def sizes_given(placement: Placement) -> bool:
    """Whether a placement says itself how many devices who has, so that the pools of a run file are not looked at."""
    judge = placement.judge.model_fields_set if placement.judge else set()
    return bool(placement.model_fields_set & {"mode", "engine_devices", "critic_devices"} or judge & {"devices"})


def _engine(args: EngineSection, prefill_tokens: int) -> dict[str, Any]:
    samples = {"max_samples": args.max_num_seqs} if args.max_num_seqs is not None else {}
    return samples | {
        "tensor_parallel": args.tensor_parallel_size,
        "memory_frac": args.gpu_memory_utilization or POLICY_GPU_FRAC,
        "max_batched_tokens": args.max_num_batched_tokens or max(prefill_tokens, args.max_num_seqs or 0),
    }


def _judge(config: RunConfig) -> dict[str, Any]:
    """The judge's engine, and the lengths that the reward which asks it allows."""
    (service,) = judge_services(config)
    asked = next(one.args for one in config.reward.components if one.args.get("service") == service)
    lengths = {"prompt_tokens": "prompt_length", "response_tokens": "response_length"}
    said = {ours: asked[theirs] for ours, theirs in lengths.items() if isinstance(asked.get(theirs), int)}
    engine = config.services[service].engine or EngineSection()
    return said | {
        "model": config.services[service].policy,
        "tensor_parallel": engine.tensor_parallel_size,
        "memory_frac": engine.gpu_memory_utilization or SERVICE_GPU_FRAC,
        "max_batched_tokens": engine.max_num_batched_tokens or SERVICE_STEP_TOKENS,
        "max_samples": engine.max_num_seqs or SERVICE_SEQUENCES,
    }


def is_placement(word: str) -> bool:
    """Whether a `key=value` of the command line is about the placement."""
    return word.startswith(PREFIX)


def placement_from(settings: Sequence[str]) -> Placement:
    """The placement that `placement.key=value` settings describe, each value as YAML would read it.

    Raises:
        ConfigError: with every setting that is wrong.
    """
    tree: dict[str, Any] = {}
    problems: list[str] = []
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            problems.append(f"command line  {setting}: write it as {path}=VALUE")
            continue
        *parents, name = path.removeprefix(PREFIX).split(".")
        here = tree
        for parent in parents:
            here = here.setdefault(parent, {})
        here[name] = _value(text)
    try:
        placement = Placement.model_validate(tree)
    except ValidationError as error:
        problems += [_problem(details) for details in error.errors(include_url=False)]
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return placement


def _value(text: str) -> Any:
    words: Mapping[str, Any] = {"true": True, "false": False, "null": None, "": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _problem(details: Any) -> str:
    path = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        close = nearest(path, placement_keys())
        hint = f" Did you mean {PREFIX}{close}?" if close else f" There are: {', '.join(placement_keys())}."
        return f"command line  {PREFIX}{path}: unknown key.{hint}"
    return f"command line  {PREFIX}{path}: {details['msg'].lower()} (got {details['input']!r})"


def placement_keys() -> list[str]:
    """Every key, dotted, without the prefix."""
    keys: list[str] = []
    for name in Placement.model_fields:
        parts = {"engine": EnginePlacement, "judge": JudgePlacement}.get(name)
        keys += [f"{name}.{inner}" for inner in parts.model_fields] if parts else [name]
    return keys
