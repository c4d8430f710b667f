"""Trainers of models that are made without memory and filled, and the same of whole ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from cases import ARCHITECTURE, VOCAB

from hone.config.run import LoraSection, OptimizerSection
from hone.errors import HoneError
from hone.memory.gauges import HostGauge
from hone.model.base import CausalModel
from hone.model.heads import ScalarModel
from hone.model.load import init_model, load_model
from hone.model.lora import AdapterOff, add_adapter
from hone.sizes import MIB
from hone.train.critic import Critic
from hone.train.fsdp_ranks import FsdpRanks
from hone.train.learner import Passes
from hone.train.mesh import make_mesh
from hone.train.policy import PolicyTrainer
from hone.train.ranks import ALONE, Ranks
from hone.train.roles import Reference, Roles
from hone.train.tensor_files import Share


@dataclass(frozen=True)
class Case:
    """A model, and who trains what beside it."""

    implementation: Literal["hone", "transformers"] = "hone"
    folder: Path | None = None
    """None: random weights."""
    keys: Mapping[str, object] = field(default_factory=dict)
    precision: Literal["float32", "bfloat16"] = "float32"
    lora: bool = False
    critic: bool = False
    offload: tuple[str, ...] = ()
    mesh: Mapping[str, int] = field(default_factory=dict)


def model_of(case: Case, device: str) -> CausalModel:
    if case.folder is not None:
        return load_model(case.folder, dtype=torch.float32, device=device, implementation=case.implementation)
    return init_model(
        {**ARCHITECTURE, **case.keys},
        vocab_size=VOCAB,
        seed=3,
        dtype=torch.float32,
        device=device,
        implementation=case.implementation,
    )


def trainer_of(case: Case, device: str, *, alone: bool = False) -> Roles:
    ranks: Ranks = ALONE if alone else FsdpRanks(make_mesh(torch.device("cpu"), **case.mesh), offload=case.offload)
    model = model_of(case, device)
    passes = Passes(case.precision, 99, logprob_chunk_tokens=64, temperature=1.0, ranks=ranks)
    common = {"optimizer": OptimizerSection(), "total_optimizer_steps": 1}
    critic = Critic(ScalarModel(copy.deepcopy(model)), passes, value_clip=None, **common) if case.critic else None
    if case.lora:
        add_adapter(model, LoraSection(rank=2), seed=1, dtype=getattr(torch, case.precision))
    reference = AdapterOff(model) if case.lora else copy.deepcopy(model)
    policy = PolicyTrainer(model, passes, **common)
    return Roles(policy=policy, critic=critic, reference=Reference(reference, passes))


def differences(case: Case) -> list[str]:
    """What is not the same, to the bit, in a trainer that was filled and in one of whole models."""
    filled, whole = trainer_of(case, "meta"), trainer_of(case, "cpu")
    ours, theirs = contents_of(filled), contents_of(whole)
    assert set(ours) == set(theirs)
    assert filled.policy.model.contents is None
    found = [name for name, share in ours.items() if not same(share, theirs[name])]
    found += ["base"] if case.lora and filled.policy.model.adapter.base != whole.policy.model.adapter.base else []
    return found


def contents_of(trainer: Roles) -> dict[str, Share]:
    model, ranks = trainer.policy.model, trainer.policy.passes.ranks
    of_policy = {**trainer.state()[0], **{f"policy/{n}": t for n, t in ranks.tensors(model).items()}}
    beside = {} if model.adapter else ranks.tensors(trainer.reference.model)
    of_buffers = {f"buffer/{name}": buffer for name, buffer in model.named_buffers()}
    every = {**of_policy, **{f"reference/{name}": tensor for name, tensor in beside.items()}, **of_buffers}
    return {name: Share.of(tensor) for name, tensor in every.items()}


def same(ours: Share, theirs: Share) -> bool:
    return (
        ours.offset == theirs.offset
        and ours.tensor.dtype == theirs.tensor.dtype
        and torch.equal(ours.tensor, theirs.tensor)
    )


def refusal(case: Case) -> str:
    """What a rank says whose model cannot be filled."""
    try:
        trainer_of(case, "meta")
    except HoneError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def peak_growth_mib(case: Case, device: str) -> float:
    """By how much the memory of this rank grew at most while its trainer was made."""
    trainer_of(Case(case.implementation), device)  # what the first one loads of libraries is none of it
    gauge = HostGauge(0)
    gauge.give_back()
    gauge.reset()
    before = gauge.peak_bytes()
    trainer_of(case, device)
    return (gauge.peak_bytes() - before) / MIB
