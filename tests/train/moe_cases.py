"""A mixture of experts in training, alone or on ranks, with routing that is replayed and a loss that balances it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from cases import make_batch, make_groups
from moe_models import moe_model
from sharded_cases import watch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hone.algo.algorithm import Algorithm
from hone.config.algorithm import AlgorithmSection
from hone.config.run import Checkpointing, OptimizerSection
from hone.train.fsdp import ShardedWeights
from hone.train.fsdp_ranks import FsdpRanks
from hone.train.learner import Passes
from hone.train.mesh import make_mesh
from hone.train.policy import PolicyTrainer
from hone.types import Batch

TOKENS = 64


@dataclass(frozen=True)
class Case:
    replays: bool = True
    coef: float = 0.0
    checkpointing: Checkpointing = "none"
    experts: int = 4


@dataclass
class Found:
    """What one process found."""

    logprobs_T: Tensor
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    held: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of this rank's shares of the experts."""


def batch_of(*, replays: bool, count: int = 4) -> Batch:
    """Samples that all have a gradient, with random ones of this number of experts."""
    algorithm = Algorithm(AlgorithmSection())
    batch = make_batch(make_groups(num_groups=4, group_size=3), algorithm)
    advantages_T = torch.linspace(-1, 1, len(batch.token_ids_T)).double() + 0.03
    batch = replace(batch, loss_mask_T=torch.ones_like(batch.loss_mask_T)).with_column("advantages_T", advantages_T)
    if not replays:
        return batch
    generator = np.random.default_rng(0)

    def experts(tokens: int) -> Any:
        """Two of all, in each of two layers."""
        return generator.permuted(np.tile(np.arange(count, dtype=np.int8), (tokens, 2, 1)), axis=-1)[..., :2]

    prompts = tuple(experts(len(prompt)) for prompt in batch.prompts)
    return replace(batch, routing_T=experts(len(batch.token_ids_T)), prompt_routing=prompts)


def trainer_of(case: Case, *, alone: bool) -> PolicyTrainer:
    model = moe_model("qwen3_moe", num_experts=case.experts)
    model.hf.set_experts_implementation("eager")  # PyTorch's grouped product knows no float64
    model.double()
    model.checkpointing = case.checkpointing
    passes = Passes("float64", TOKENS, logprob_chunk_tokens=64, temperature=1.0)
    if not alone:
        passes.ranks = FsdpRanks(make_mesh(torch.device("cpu")))
    return PolicyTrainer(model, passes, optimizer=OptimizerSection(lr=1e-2), total_optimizer_steps=9)


def trained(case: Case, *, alone: bool = False) -> Found:
    """What a trainer measures of a batch, and does in an update of one optimizer step."""
    trainer, batch = trainer_of(case, alone=alone), batch_of(replays=case.replays, count=case.experts)
    gradients: list[dict[str, Tensor]] = []
    watch(trainer, gradients)
    logprobs_T = trainer.logprobs(batch)
    algorithm = Algorithm(AlgorithmSection(load_balancing_coef=case.coef))
    metrics = trainer.update(batch, algorithm, [np.arange(len(batch.length_S))])
    weights = {name: weight.clone() for name, weight in trainer.weights()}
    held = {}
    if isinstance(trainer.held, ShardedWeights):
        held = {n: tuple(p.to_local().shape) for n, p in trainer.held.parameters.items() if ".experts." in n}
    return Found(logprobs_T, metrics, gradients[0], weights, held)


def of_transformers(learner: PolicyTrainer, batch: Batch, samples: list[int]) -> tuple[float, Tensor]:
    """The loss of the class itself and its gradient, of padded rows of distinct samples."""
    starts = (batch.length_S.cumsum(0) - batch.length_S).tolist()
    rows = {}
    for s in samples:
        prompt = batch.prompts[int(batch.prompt_S[s])].tolist()
        own = batch.token_ids_T[starts[s] : starts[s] + int(batch.length_S[s]) - 1].tolist()
        rows[tuple(prompt), tuple(batch.token_ids_T[starts[s] : starts[s] + int(batch.length_S[s])].tolist())] = [
            *prompt,
            *own,
        ]
    ids = [torch.tensor(row) for row in rows.values()]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    model: Any = learner.model
    hf, held = model.hf, learner.held
    loss = hf(pad_sequence(ids, batch_first=True), attention_mask=mask, output_router_logits=True).aux_loss
    held.grad.zero_()
    loss.backward()
    found = held.grad.clone()
    held.grad.zero_()
    return loss.item(), found
