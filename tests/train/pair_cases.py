"""A reward model's trainer on pairs, as numbers to compare: the same code alone and on the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from cases import make_model, make_passes
from sharded_cases import watch
from torch import Tensor

from hone.config.run import OptimizerSection
from hone.data.pairs import PreferencePair
from hone.model.heads import ScalarModel
from hone.train.fsdp_ranks import FsdpRanks
from hone.train.mesh import make_mesh
from hone.train.pairs import Measured, PairTrainer
from hone.train.ranks import ALONE

PAIRS = (
    PreferencePair((5, 6, 7, 8), (5, 6, 9), 0.0),
    PreferencePair((3, 4), (3, 4, 10, 11), 0.5),  # one is the beginning of the other
    PreferencePair((4, 5, 6), (6, 7), 1.0),  # nothing shared
    PreferencePair((5, 6, 1), (5, 6, 2), 0.0),
    PreferencePair((12,), (11,), 2.0),
)


@dataclass(frozen=True)
class Case:
    """A trainer and what it is given."""

    updates: int = 2
    num_pairs: int = len(PAIRS)
    implementation: Literal["hone", "transformers"] = "hone"
    tokens_per_microbatch: int = 1000
    mesh: Mapping[str, int] = field(default_factory=dict)
    offload: tuple[str, ...] = ()


@dataclass
class Found:
    """What one rank found."""

    metrics: list[dict[str, float]]
    gradients: list[dict[str, Tensor]]
    measured: Measured
    master: dict[str, Tensor]


def make_trainer(tokens_per_microbatch=1000, *, implementation="hone", ranks=ALONE, **options) -> PairTrainer:
    """`options` are of the optimizer."""
    model = ScalarModel(make_model(implementation=implementation))
    with torch.no_grad():  # a head of zeros would know nothing of the body
        model.score.weight.copy_(torch.linspace(-1, 1, model.score.weight.numel()).reshape(1, -1))
    return PairTrainer(
        model,
        make_passes(tokens_per_microbatch=tokens_per_microbatch, ranks=ranks),
        optimizer=OptimizerSection(lr=1e-2, grad_clip=0, **options),
        total_optimizer_steps=4,
    )


def learnt(case: Case, *, alone: bool = False) -> Found:
    """Builds the trainer, updates, and measures; on this rank or, where `alone`, in this process only."""
    ranks = ALONE if alone else FsdpRanks(make_mesh(torch.device("cpu"), **case.mesh), offload=case.offload)
    trainer = make_trainer(case.tokens_per_microbatch, implementation=case.implementation, ranks=ranks)
    gradients: list[dict[str, Tensor]] = []
    watch(trainer, gradients)
    metrics = [trainer.update(PAIRS[: case.num_pairs]) for _ in range(case.updates)]
    master = {name: weight.clone() for name, weight in trainer.master_weights()}
    return Found(metrics, gradients, trainer.measure(PAIRS), master)
