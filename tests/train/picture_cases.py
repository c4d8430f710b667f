"""What a trainer does with prompts that have pictures, as numbers to compare: alone and on the ranks of a mesh."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from cases import algorithm_of
from pictures import picture, prompt_with, seeing_model
from sharded_cases import watch
from torch import Tensor

from hone.config.run import Checkpointing, LoraSection, OptimizerSection
from hone.data.pack import collate
from hone.model.lora import add_adapter
from hone.sizes import PATCHES_PER_PASS
from hone.train.fsdp_ranks import FsdpRanks
from hone.train.learner import Passes
from hone.train.mesh import make_mesh
from hone.train.policy import PolicyTrainer
from hone.types import Group, Sample, VersionSpan


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and which prompts have pictures."""

    model_type: str = "qwen2_5_vl"
    learns: bool = True
    pictures: tuple[int, ...] = (0, 1, 3, 0)
    """Of each prompt."""
    patches_per_pass: int = PATCHES_PER_PASS
    checkpointing: Checkpointing = "none"
    lora: bool = False
    mesh: dict[str, int] = field(default_factory=dict)
    updates: int = 2


@dataclass
class Seen:
    """What one rank found."""

    logprobs_T: Tensor
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    num_computed: int
    """Pictures that went through the tower."""


def seen(case: Case, *, alone: bool = False) -> Seen:
    """Measures logprobs, and updates; on this rank or, where `alone`, in this process only."""
    model = seeing_model(case.model_type)
    groups = groups_of(model, case.pictures)
    if case.learns:
        model.requires_grad_(True)
    if case.lora:
        add_adapter(model, LoraSection(rank=2), seed=1, dtype=torch.float32)
    model.checkpointing = case.checkpointing
    assert model.vision is not None
    model.vision.patches_per_pass = case.patches_per_pass
    passes = Passes("float32", tokens_per_microbatch=60, logprob_chunk_tokens=64, temperature=1.0)
    if not alone:
        passes.ranks = FsdpRanks(make_mesh(torch.device("cpu"), **case.mesh))
    trainer = PolicyTrainer(model, passes, optimizer=OptimizerSection(lr=1e-3), total_optimizer_steps=10)
    algorithm = algorithm_of("dr_grpo")
    batch, _ = algorithm.assign(collate(groups))
    gradients: list[dict[str, Tensor]] = []
    watch(trainer, gradients)
    every = [np.arange(len(batch.length_S))]
    logprobs_T = trainer.logprobs(batch)
    for _ in range(case.updates):
        trainer.update(batch, algorithm, every)
    weights = {name: weight.clone() for name, weight in trainer.weights()}
    return Seen(logprobs_T, gradients, weights, model.vision.num_computed)


def groups_of(model, pictures) -> list[Group]:
    """Four samples of each prompt, with rewards that differ."""
    chance, groups = np.random.default_rng(0), []
    for index, count in enumerate(pictures):
        own = [picture(model, 10 * index + number, 1 + number, 2) for number in range(count)]
        prompt = prompt_with(own, index=index)
        samples = tuple(
            Sample(
                prompt_id=prompt.id,
                index=g,
                token_ids=chance.integers(0, 40, 4, np.int32),
                sampler_logprobs=-np.ones(4, np.float32),
                versions=(VersionSpan(0, 4),),
                finish_reason="stop",
                text="",
            )
            for g in range(4)
        )
        groups.append(Group(prompt, samples).scored({}, (1.0, 0.0, 0.5, 0.0)))
    return groups
