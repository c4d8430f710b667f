"""What a trainer does with a batch, as numbers to compare: the same code alone and on the ranks of a mesh."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from cases import VOCAB, algorithm_of, make_batch, make_groups, make_model
from moe_models import moe_model
from torch import Tensor

from hone.config.run import Checkpointing, LoraSection, OptimizerSection
from hone.model.heads import ScalarModel
from hone.model.lora import AdapterOff, add_adapter
from hone.train.critic import Critic
from hone.train.fsdp import ShardedWeights
from hone.train.fsdp_ranks import FsdpRanks
from hone.train.learner import Learner, Passes
from hone.train.mesh import make_mesh
from hone.train.policy import PolicyTrainer
from hone.train.roles import Reference, Roles

CONSTANT = "constant"


@dataclass(frozen=True)
class Case:
    """A trainer and what it is given."""

    algorithm: str = "grpo"
    implementation: Literal["hone", "transformers"] = "hone"
    vocab_size: int = VOCAB
    experts: tuple[str, Mapping[str, int]] | None = None
    """A mixture of experts instead: its architecture, and what differs from the sizes of `moe_models`."""
    precision: Literal["float32", "bfloat16", "float64"] = "float64"
    tokens_per_microbatch: int = 30
    updates: int = 1
    samples_per_optimizer_step: int | None = None
    lora: bool = False
    moved: bool = True
    """Whether the batch brings old and reference logprobs."""
    num_groups: int = 5
    poisoned_updates: tuple[int, ...] = ()
    """Updates whose batch has an infinite advantage."""
    samples_with_advantage: int | None = None
    """How many, from the first; None: all."""
    checkpointing: Checkpointing = "none"
    compile: bool = False
    mesh: Mapping[str, int] = field(default_factory=dict)
    offload: tuple[str, ...] = ()
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Found:
    """What one rank found."""

    logprobs_T: Tensor
    reference_T: Tensor | None
    values_T: Tensor | None
    metrics: list[dict[str, float]]
    gradients: list[dict[str, Tensor]]
    critic_gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    trained: dict[str, Tensor]
    """The adapter's factors; empty without one."""
    master: dict[str, Tensor]
    dtypes: set[torch.dtype]
    """Of the weights as published."""


def trained(case: Case, *, alone: bool = False) -> Found:
    """Builds the trainer, measures logprobs, and updates; on this rank or, where `alone`, in this process only."""
    algorithm = algorithm_of(case.algorithm)
    trainer = alone_or_sharded(case, algorithm.needs, alone=alone)
    batch = make_batch(make_groups(num_groups=case.num_groups), algorithm, moved=case.moved)
    found = Found(trainer.logprobs(batch), None, None, [], [], [], {}, {}, {}, set())
    if trainer.reference is not None:
        found.reference_T = trainer.logprobs(batch, reference=True)
    if trainer.critic is not None:
        found.values_T = trainer.values(batch)
        batch = batch.with_column("value_T", found.values_T)
    watch(trainer.policy, found.gradients)
    if trainer.critic is not None:
        watch(trainer.critic, found.critic_gradients)
    for number in range(case.updates):
        advantages_T = batch.columns["advantages_T"].clone()
        if case.samples_with_advantage is not None:
            advantages_T[int(batch.length_S[: case.samples_with_advantage].sum()) :] = 0
        if number in case.poisoned_updates:
            advantages_T[0] = torch.inf
        found.metrics.append(trainer.update(batch.with_column("advantages_T", advantages_T), algorithm))
    found.dtypes = {weight.dtype for _, weight in trainer.weights()}
    found.weights = {name: weight.double() for name, weight in trainer.weights()}
    if case.lora:
        found.trained = {name: weight.double() for name, weight in trainer.policy.held.named_trained()}
    found.master = {name: weight.clone() for name, weight in trainer.master_weights()}
    return found


def alone_or_sharded(case: Case, needs: frozenset[str], *, alone: bool) -> Roles:
    """The trainer of a case."""
    dtype = torch.promote_types(getattr(torch, case.precision), torch.float32)
    if case.experts:
        architecture, sizes = case.experts
        model = moe_model(architecture, experts_implementation="eager", **sizes)  # grouped products take few sizes
        model.to(dtype)
    else:
        model = make_model(dtype=dtype, implementation=case.implementation, vocab_size=case.vocab_size)
    model.checkpointing = "none" if alone else case.checkpointing
    if case.implementation == "transformers":  # weights that are no parameters, as some classes' routers have them
        model.hf.register_buffer(CONSTANT, torch.ones(3, dtype=dtype))
    passes = Passes(case.precision, case.tokens_per_microbatch, logprob_chunk_tokens=64, temperature=0.8)
    if not alone:
        mesh = make_mesh(torch.device("cpu"), **case.mesh)
        passes.ranks = FsdpRanks(mesh, offload=case.offload, compile=case.compile)
    critic = None
    if "values" in needs:
        body = copy.deepcopy(model)
        head = ScalarModel(body)
        with torch.no_grad():
            head.score.weight.copy_(torch.linspace(-1, 1, head.score.weight.numel()).view_as(head.score.weight))
        critic = Critic(head, passes, optimizer=OptimizerSection(lr=3e-3), total_optimizer_steps=10, value_clip=0.2)
    if case.lora:
        add_adapter(model, LoraSection(rank=2), seed=1, dtype=getattr(torch, case.precision))
        with torch.no_grad():
            for name in model.adapter.names:
                model.adapter.factors(name)[1].fill_(0.01)
    reference = None
    if "reference" in needs or "ref_logprobs" in needs:
        reference = AdapterOff(model) if case.lora else copy.deepcopy(model)
    optimizer = OptimizerSection(**{"lr": 1e-2, "weight_decay": 0.1, **case.optimizer})
    policy = PolicyTrainer(model, passes, optimizer=optimizer, total_optimizer_steps=10)
    return Roles(
        policy=policy,
        critic=critic,
        reference=Reference(reference, passes) if reference else None,
        samples_per_optimizer_step=case.samples_per_optimizer_step,
        **case.options,
    )


def watch(learner: Learner, gradients: list[dict[str, Tensor]]) -> None:
    """From now on keep each gradient that the optimizer is given, whole, by parameter."""
    step = learner.optimizer.step

    def watched(*agree):
        gradients.append(dict(whole_gradients(learner)))
        return step(*agree)

    learner.optimizer.step = watched


def whole_gradients(learner: Learner):
    """The gradients of what is trained, by the names that checkpoints have."""
    if isinstance(learner.held, ShardedWeights):
        parameters = learner.held.trained.items()
        whole = {name: p.grad.full_tensor().clone() for name, p in parameters if p.grad is not None}
        places = learner.held.trained_places.items()
        yield from ((name, place.of(whole[place.parameter])) for name, place in places if place.parameter in whole)
    else:
        flat = learner.held
        yield from ((name, gradient.clone()) for name, gradient in flat.split(flat.grad).items())
