"""Trainer and engine of a stage: the `Backend` protocol, and the backend of one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch

from hone.assemble.job import Job
from hone.assemble.memory import pair_knobs, trainer_knobs
from hone.assemble.models import pair_trainer, report_adapter, restore, rl_roles, roles_of_needs, sft_trainer
from hone.assemble.sampling import embedded_engine
from hone.loop.run import Offloadable
from hone.model.base import CausalModel
from hone.model.lora import merged_copy
from hone.plan.workload import workload_of
from hone.reward.http import Addresses
from hone.reward.rewards import Scorer
from hone.rollout.engine import Engine
from hone.train.checkpoint import SavedCheckpoint
from hone.train.pairs import PairLearner
from hone.train.roles import Roles
from hone.train.trainer import Checkpointable, Trainer

L = TypeVar("L", bound=Checkpointable)


@dataclass(frozen=True, slots=True)
class Workers:
    """What the loop drives."""

    trainer: Trainer
    engine: Engine
    weights_are_shared: bool
    """See `PolicyRun.weights_are_shared`."""
    colocated: tuple[Offloadable, ...] = ()
    """See `PolicyRun.colocated`."""
    addresses: Addresses = field(default_factory=dict)
    """Addresses of judges on devices of the cluster."""
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    """Scorers in other processes, by the names of their components."""


class Backend(Protocol):
    """Creates trainer and engines for one attempt of a stage and tears them down afterwards."""

    def workers(self, needs: frozenset[str], saved: SavedCheckpoint | None) -> AbstractAsyncContextManager[Workers]:
        """Trainer and engine of an RL stage.

        Args:
            needs: what the algorithm needs of a trainer; see `Algorithm.needs`.
            saved: the checkpoint to resume from.
        """
        ...

    def sft_trainer(self, steps: int, saved: SavedCheckpoint | None) -> AbstractAsyncContextManager[Trainer]:
        """Trainer of a supervised stage of `steps` optimizer steps."""
        ...

    def pair_learner(self, steps: int, saved: SavedCheckpoint | None) -> AbstractAsyncContextManager[PairLearner]:
        """Trainer of a reward-model stage of `steps` optimizer steps."""
        ...


class LocalBackend:
    """The `Backend` of one process."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def workers(self, needs: frozenset[str], saved: SavedCheckpoint | None) -> AbstractAsyncContextManager[Workers]:
        """See `Backend.workers`."""
        return local_workers(self._job, needs, saved)

    @asynccontextmanager
    async def sft_trainer(self, steps: int, saved: SavedCheckpoint | None) -> AsyncIterator[Trainer]:
        """See `Backend.sft_trainer`."""
        trainer = await self._begun(partial(sft_trainer, self._job, steps=steps), saved)
        report_adapter(self._job, trainer.policy)
        self._job.memory.ladder.bind(*trainer_knobs(trainer, self._job.config))
        yield trainer

    @asynccontextmanager
    async def pair_learner(self, steps: int, saved: SavedCheckpoint | None) -> AsyncIterator[PairLearner]:
        """See `Backend.pair_learner`."""
        trainer = await self._begun(partial(pair_trainer, self._job, steps=steps), saved)
        self._job.memory.ladder.bind(*pair_knobs(trainer, self._job.config))
        yield trainer

    async def _begun(self, make: Callable[[], L], saved: SavedCheckpoint | None) -> L:
        def begun() -> L:
            trainer = make()
            restore(trainer, saved)
            return trainer

        return await self._job.computed(begun, phase="start")


@asynccontextmanager
async def local_workers(job: Job, needs: frozenset[str], saved: SavedCheckpoint | None) -> AsyncIterator[Workers]:
    """Trainer and engine in this process. In a synchronous run they share the weights and the thread that computes."""
    config, ladder = job.config, job.memory.ladder
    shared = config.rollout.max_staleness == 0

    def assemble() -> tuple[Roles, CausalModel]:
        trainer = rl_roles(job, held=roles_of_needs(needs))
        restore(trainer, saved)
        if not shared and job.device.type == "cpu":  # sampling and training at the same time: half the cores each
            torch.set_num_threads(max(1, torch.get_num_threads() // 2))
        model = trainer.policy.model
        return trainer, model if shared else merged_copy(model)

    trainer, sampled = await job.computed(assemble, phase="start")
    report_adapter(job, trainer.policy)
    ladder.bind(*trainer_knobs(trainer, config, most_tokens=workload_of(config).step_tokens()))
    engine = embedded_engine(config, job.tokenizer, sampled, job.compute if shared else None, ladder)
    try:
        with job.observer.watching(lambda: engine.cache_use().metrics("engine-0")):
            yield Workers(trainer, engine, weights_are_shared=shared)
    finally:
        await engine.close()
