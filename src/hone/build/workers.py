"""Who holds the policy in the RL stage, where everything is in one process: a trainer and the engine beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import torch

from hone.build.job import Job
from hone.build.memory import trainer_knobs
from hone.build.models import policy_trainer, restored, tell_of_adapter
from hone.build.sampling import embedded_engine
from hone.loop.run import Sleeper
from hone.model.base import CausalModel
from hone.model.lora import merged_copy
from hone.plan.workload import workload_of
from hone.reward.base import Scorer
from hone.reward.transport import Addresses
from hone.rollout.engine import Engine
from hone.train.checkpoint import Loaded as Saved
from hone.train.policy import PolicyTrainer
from hone.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Workers:
    """What the loop drives."""

    trainer: Trainer
    engine: Engine
    weights_are_shared: bool
    """See `PolicyRun.weights_are_shared`."""
    sleepers: tuple[Sleeper, ...] = ()
    """See `PolicyRun.sleepers`."""
    addresses: Addresses = field(default_factory=dict)
    """Of judges that have devices of the cluster."""
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    """What scores, by the names of components, instead of something in this process."""


WorkersOf = Callable[[frozenset[str], Saved | None], AbstractAsyncContextManager[Workers]]
"""Makes them for an attempt at the stage; see `workers_here` for what it takes."""


@asynccontextmanager
async def workers_here(job: Job, needs: frozenset[str], saved: Saved | None) -> AsyncIterator[Workers]:
    """Trainer and engine in this process. In a synchronous run they share the weights and the thread that computes.

    Args:
        needs: what the algorithm needs of a trainer; see `Algorithm.needs`.
        saved: where to go on.
    """
    config, ladder = job.config, job.memory.ladder
    shared = config.rollout.max_staleness == 0

    def assemble() -> tuple[PolicyTrainer, CausalModel]:
        trainer = policy_trainer(job, needs)
        restored(trainer, saved)
        if not shared and job.device.type == "cpu":  # sampling and training at the same time: half the cores each
            torch.set_num_threads(max(1, torch.get_num_threads() // 2))
        return trainer, trainer.model if shared else merged_copy(trainer.model)

    trainer, sampled = await job.computed(assemble, phase="start")
    tell_of_adapter(job, trainer)
    ladder.bind(*trainer_knobs(trainer, config, most_tokens=workload_of(config).step_tokens()))
    engine = embedded_engine(config, job.tokenizer, sampled, job.compute if shared else None, ladder)
    try:
        with job.observer.watching(lambda: engine.cache_use().metrics("engine-0")):
            yield Workers(trainer, engine, weights_are_shared=shared)
    finally:
        await engine.close()
