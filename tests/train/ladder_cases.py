"""Ranks of which one runs out of memory, for gangs: what each one is left with."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from cases import algorithm_of, make_batch, make_groups
from measuring import FakeGauge
from sharded_cases import Case, alone_or_sharded
from test_ladder_training import LOWEST_TOKENS, Failing
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hone.memory.gauges import Meter
from hone.memory.rungs import CHUNK, RECOMPUTE, TOKENS, Change, Knob, RestartWithLess
from hone.train.agreement import Collectives, SharedLadder
from hone.types import Progress

TIMEOUT_S = 30.0
CLIMBS_TOGETHER = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="FSDP2 can give up a pass that has begun since torch 2.13"
)


@dataclass
class Outcome:
    """Of one rank."""

    weights: dict[str, Tensor]
    optimizer_steps: int
    settings: dict[str, object]
    changes: list[tuple[str, str, object]]
    redone: int
    allocations: int
    failed_in: str | None
    error: str = ""
    restart: Change | None = None
    """The change that all ranks are to be started again with."""


def trained_with_failure(case: Case, rank: int | None, fails_at: int | None, *, inside: bool = False) -> Outcome:
    """Two updates and their passes without gradients, while allocation `fails_at` of rank `rank` fails.

    Args:
        rank: None: of all.
        inside: collective `fails_at` fails instead, in the middle.
    """
    algorithm = algorithm_of(case.algorithm)
    trainer = alone_or_sharded(case, algorithm.needs, alone=False)
    passes = trainer.policy.passes
    mesh = passes.ranks.mesh
    ladder = SharedLadder(
        Meter(FakeGauge()),
        mesh.collectives,
        passes.ranks.reset,
        timeout_s=TIMEOUT_S,
        settings={TOKENS: case.tokens_per_microbatch, CHUNK: 64, RECOMPUTE: "none"},
    )
    ladder.begin(Progress())
    ladder.bind(
        Knob(TOKENS, lambda value: setattr(passes, "tokens_per_microbatch", value), lowest=LOWEST_TOKENS),
        Knob(CHUNK, lambda value: setattr(passes, "logprob_chunk_tokens", value), lowest=4),
        Knob(RECOMPUTE, lambda value: setattr(trainer.policy.model, "checkpointing", value)),
    )
    passes.guard = ladder
    is_me = rank is None or dist.get_rank() == rank
    failing = Failing(ladder, fails_at if is_me and not inside else None)
    if inside:
        fail_inside(mesh.collectives, fails_at)
    error, restart = "", None
    try:
        with failing:
            for seed in range(2):
                batch = make_batch(make_groups(seed, num_groups=case.num_groups), algorithm, moved=False)
                if trainer.reference is not None:
                    batch = batch.with_column("ref_logprobs_T", trainer.logprobs(batch, reference=True))
                trainer.update(batch, algorithm)
    except RestartWithLess as one:
        error, restart = str(one), one.change
    weights = {} if error else {name: weight.clone() for name, weight in trainer.master_weights()}
    return Outcome(
        weights,
        trainer.policy.optimizer.step_count,
        dict(ladder.settings),
        [(change.phase, change.key, change.new) for change in ladder.changes],
        ladder.redone,
        failing.count,
        failing.failed_in,
        error,
        restart,
    )


def fail_inside(collectives: Collectives, number: int) -> None:
    """The collective of this number runs out of memory in the middle."""
    run, made = collectives.run, []

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def counted(collective):
        made.append(1)
        return run(out_of_memory if len(made) == number else collective)

    collectives.run = counted
