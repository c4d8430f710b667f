"""Everything that a plan follows from, looked up: architectures, workload, placement, and the largest microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hone.config.run import RunConfig
from hone.config.topology import Topology
from hone.plan import activations
from hone.plan.activations import Checkpointing, Implementation, Pass
from hone.plan.architecture import Architecture
from hone.plan.hardware import Hardware
from hone.plan.placement import Placement, cluster_key
from hone.plan.presets import find_architecture, named_architecture
from hone.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a plan follows from, resolved."""

    config: RunConfig
    hardware: Hardware
    placement: Placement
    """`mode` is not auto any more."""
    architecture: Architecture
    critic: Architecture | None
    judge: Architecture | None
    reward_models: tuple[tuple[str, Architecture], ...]
    workload: Workload
    topology: Topology | None = None
    """The pools of the run file's `cluster` section; None where `placement` alone says who works where."""


def resolve(
    config: RunConfig,
    hardware: Hardware,
    placement: Placement,
    workload: Workload,
    folder: Path,
    topology: Topology | None = None,
) -> Inputs:
    """Look up every architecture, and decide what `auto` means."""
    architecture = find_architecture(config.model, folder)
    critic = None
    if workload.has_critic:
        named = config.critic.path
        critic = (architecture if named is None else named_architecture(named, folder, key="critic.path")).as_critic()
    if placement.mode == "auto":
        placement = placement.model_copy(update={"mode": "local" if hardware.devices == 1 else "colocated"})
    rewards = [
        (str(component.args["path"]), named_architecture(str(component.args["path"]), folder, key="reward_model"))
        for component in config.reward.components
        if component.use == "reward_model" and "path" in component.args
    ]
    scorer = placement.judge
    return Inputs(
        config=config,
        hardware=hardware,
        placement=placement,
        architecture=architecture,
        critic=critic,
        judge=None if scorer is None else named_architecture(scorer.model, folder, key="placement.judge.model"),
        reward_models=tuple(rewards),
        workload=workload,
        topology=topology,
    )


def implementation_of(inputs: Inputs) -> Implementation:
    """Which code runs the policy."""
    wanted = inputs.config.model.implementation
    if wanted != "auto":
        return wanted
    return "hone" if inputs.architecture.model_type in activations.OWN_FAMILIES else "transformers"


def key_in(inputs: Inputs, key: str) -> str:
    """What a key of the placement is called where the run file's `cluster` section is what is planned."""
    return cluster_key(key) if inputs.topology is not None else key


def bytes_each(inputs: Inputs) -> int:
    """Bytes of a number that trainers compute with. Placements in words alone are of mixed precision."""
    is_wide = inputs.placement.mode == "local" or inputs.topology is not None
    return 4 if is_wide and inputs.config.run.precision == "float32" else 2


def checkpointing_of(inputs: Inputs) -> Checkpointing:
    if inputs.placement.checkpointing is not None:
        return inputs.placement.checkpointing
    return inputs.config.train.activation_checkpointing


def microbatch_tokens(inputs: Inputs, *, ranks: int = 1) -> int:
    """Tokens of the largest microbatch, each prompt once, on one of `ranks` devices that divide the samples."""
    workload, budget = inputs.workload, inputs.config.train.tokens_per_microbatch
    tokens = min(budget, max(-(-workload.step_tokens() // ranks), workload.lengths.longest))
    return -(-tokens // inputs.placement.context_parallel)


def microbatch(inputs: Inputs, *, ranks: int = 1, bytes_each: int = 2) -> Pass:
    """The largest microbatch of the policy on one of `ranks` devices that divide the samples among them."""
    workload, train, placement = inputs.workload, inputs.config.train, inputs.placement
    lengths, tokens = workload.lengths, microbatch_tokens(inputs, ranks=ranks)
    responses = workload.group * lengths.max_response
    share = responses / (lengths.max_prompt + responses)
    response_tokens = max(1, round(tokens * share))
    implementation = implementation_of(inputs)
    padded = implementation == "transformers" and placement.mode == "local"
    if padded:  # `model/hf.py` computes whole samples, each with its prompt, in a row
        tokens = -(-response_tokens // lengths.max_response) * (lengths.longest - 1)
    return Pass(
        architecture=inputs.architecture,
        implementation=implementation,
        bytes_each=bytes_each,
        tokens=tokens,
        response_tokens=response_tokens,
        longest=lengths.longest,
        checkpointing=checkpointing_of(inputs),
        loss=placement.loss,
        chunk_tokens=train.logprob_chunk_tokens,
        entropy_gradient=workload.has_entropy_gradient,
        tensor_parallel=placement.tensor_parallel,
        sequence_parallel=placement.context_parallel,
        copies_keys=padded and inputs.architecture.latent is None,
    )
