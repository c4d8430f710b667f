"""Ray backend: attempts at stages on processes that Ray starts (`ray_workers.py`), and the loss of Ray itself."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from hone.assemble.job import Job, first_cause
from hone.assemble.processes import ActorSpec
from hone.assemble.ray_workers import RayWorkers
from hone.assemble.workers import Workers
from hone.cluster.ray import RayCluster, lost, restore_sigterm
from hone.cluster.vitals import VitalsWatch
from hone.errors import ClusterLost, Stopped
from hone.runtime.processes import unless_stopped
from hone.train.checkpoint import SavedCheckpoint
from hone.train.pairs import PairLearner
from hone.train.trainer import Trainer

T = TypeVar("T")

LOOK_S, LOST_LOOKS = 2.0, 5
"""Seconds between checks of Ray, and failed checks in a row after which it is lost: a GCS may be restarted."""
STOP_S = 35.0
"""Ray ends this process itself some 15 s later."""


class RayBackend:
    """The `Backend` of Ray actors on the topology's devices. Each attempt makes a new trainer and reuses healthy
    engines, judges, reward models, and Ray itself. The loss of Ray ends the run with ClusterLost."""

    def __init__(
        self,
        job: Job,
        *,
        find_loss: Callable[[], str | None] = lost,
        look_s: float = LOOK_S,
        stop_s: float = STOP_S,
    ) -> None:
        """
        Args:
            find_loss: says why Ray is lost, or None.
            look_s: between two calls of it.
            stop_s: how long a run whose Ray is lost may take to stop.
        """
        self._job, self._find_loss, self._look_s, self._stop_s = job, find_loss, look_s, stop_s
        self._workers: RayWorkers | None = None
        self._watching: asyncio.Task[None] | None = None
        self._lost: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
        cause = first_cause(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(cause, ClusterLost):
            self._lost = self._lost or str(cause)
        if self._lost is not None and cause is not None:
            raise ClusterLost(self._loss_message()) from error

    @asynccontextmanager
    async def workers(self, needs: frozenset[str], saved: SavedCheckpoint | None) -> AsyncIterator[Workers]:
        """See `Backend.workers`.

        Raises:
            ClusterError: devices or processes that cannot be had. Nothing is left of any then.
            Stopped: the user did not want to wait for them.
        """
        async with self._running(lambda workers: workers.assemble(needs, saved)) as (workers, (trainer, engine)):
            watching = self._job.observer.watching
            try:
                with watching(engine.metrics), watching(trainer.metrics):
                    yield Workers(
                        trainer,
                        engine,
                        weights_are_shared=False,
                        colocated=workers.colocated(engine),
                        addresses=workers.scoring.addresses,
                        scorers=workers.scoring.scorers,
                    )
            finally:
                await engine.close()

    @asynccontextmanager
    async def sft_trainer(self, steps: int, saved: SavedCheckpoint | None) -> AsyncIterator[Trainer]:
        """See `Backend.sft_trainer`; raises what `workers` does."""
        async with self._running(lambda workers: workers.sft_trainer(steps, saved)) as (_, trainer):
            yield trainer

    @asynccontextmanager
    async def pair_learner(self, steps: int, saved: SavedCheckpoint | None) -> AsyncIterator[PairLearner]:
        """See `Backend.pair_learner`; raises what `workers` does."""
        async with self._running(lambda workers: workers.pair_learner(steps, saved)) as (_, trainer):
            yield trainer

    @asynccontextmanager
    async def _running(
        self, begin: Callable[[RayWorkers], Coroutine[Any, Any, T]]
    ) -> AsyncIterator[tuple[RayWorkers, T]]:
        """The run's processes, set up by `begin`; its trainer ends with the context."""
        torch.set_num_threads(1)  # the cores are for the processes
        try:
            workers = await self._workers_with_devices()
            begun = await _unless_stopped(self._job, begin(workers))
        except BaseException:
            await self.close()
            raise
        try:
            silence_s = self._job.config.cluster.heartbeat_timeout_s
            async with VitalsWatch(lambda: workers.processes, silence_s=silence_s, silent=workers.end_silent) as vitals:
                with self._job.observer.watching(vitals.metrics):
                    yield workers, begun
        finally:
            await workers.end_trainer()

    async def close(self) -> None:
        """End all processes. May be called twice."""
        workers, self._workers = self._workers, None
        if self._watching is not None:
            self._watching.cancel()
        if workers is not None:
            await workers.dismiss()
            await asyncio.to_thread(workers.cluster.close)

    async def _workers_with_devices(self) -> RayWorkers:
        """The previous attempt's processes, or new ones where a machine of theirs is gone."""
        if self._workers is not None and not await asyncio.to_thread(self._workers.cluster.is_whole):
            await self.close()
        if self._workers is None:
            job = self._job
            cluster = RayCluster(
                job.config.cluster,
                name=f"hone {job.loaded.name}",
                resource=job.found.resource,
                num_devices=job.topology.num_devices,
                say=job.observer.say,
            )
            loaded = replace(job.loaded, run_file=job.loaded.run_file.absolute())
            spec = ActorSpec(loaded, job.folder.path.absolute(), job.device.type)
            self._workers = RayWorkers(job, cluster, spec)
            await _unless_stopped(job, asyncio.to_thread(cluster.start, job.stop.is_set))
            restore_sigterm()
            self._watching = asyncio.create_task(self._watch(), name="watching Ray")
        return self._workers

    async def _watch(self) -> None:
        """Stop the run when Ray is lost, as a signal does: with a checkpoint, where the trainer's ranks can still write
        one. A run that cannot stop in time ends here."""
        looks, why = 0, None
        while looks < LOST_LOOKS:
            await asyncio.sleep(self._look_s)
            why = await asyncio.to_thread(self._find_loss)
            looks = looks + 1 if why else 0
        self._lost = why
        limit = f"Stopping within {self._stop_s:g} s, with a checkpoint if the trainer still answers."
        self._job.observer.warn(f"{why} {limit}")
        self._job.stop.set()
        deadline = threading.Timer(self._stop_s, self._end_process)  # the event loop may be waiting for Ray
        deadline.daemon = True
        deadline.start()
        try:
            await asyncio.Event().wait()
        finally:
            deadline.cancel()

    def _end_process(self) -> None:
        print(self._loss_message(), file=sys.stderr, flush=True)
        os._exit(ClusterLost.exit_code)

    def _loss_message(self) -> str:
        job = self._job
        return (
            f"{self._lost} Look into Ray's logs and the machine's (out of memory?); `hone train {job.loaded.run_file} "
            f"--resume` continues from the newest checkpoint in {job.folder.checkpoints}."
        )


async def _unless_stopped(job: Job, work: Awaitable[T]) -> T:
    """The result of `work`. Raises Stopped when the user stops the run first."""
    done = await unless_stopped(job.stop, work)
    if done is None:
        job.services.check()  # a judge that is lost stops the run, too
        raise Stopped("stopped before the cluster was ready; nothing was trained")
    return done.result()
