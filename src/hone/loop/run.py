"""State of a running stage, shared by the loops."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hone.algo.algorithm import Algorithm
from hone.config.run import RunConfig
from hone.data.pack import Shape
from hone.data.prompts import PromptStream
from hone.errors import DataError, HoneError, RewardError
from hone.loop.answers import Answers
from hone.loop.gate import CANARY_PROMPTS, Canary
from hone.loop.summaries import pass_rate
from hone.loop.utilisation import Utilisation
from hone.memory.guard import UNGUARDED, Guard
from hone.observe.events import versions_of
from hone.observe.observer import Observer
from hone.observe.recorder import TokenFigures
from hone.reward.rewards import Rewards
from hone.rollout.engine import Engine, Sampling
from hone.train.checkpoint import Checkpoints
from hone.train.pairs import PairLearner
from hone.train.tensor_files import Snapshot
from hone.train.trainer import Trainer
from hone.types import Batch, Group, Progress

T = TypeVar("T")
AnyTrainer = TypeVar("AnyTrainer", bound=Trainer | PairLearner)
PIECE = 1 << 18
"""Tokens that are converted to float64 at a time, about: few enough for the processor's cache."""


class Offloadable(Protocol):
    """A component that can release and reclaim its device memory: an engine, a judge, a reward model."""

    async def sleep(self) -> None:
        """Release it; nothing may be in flight."""
        ...

    async def wake(self) -> None:
        """Reclaim it, and be ready."""
        ...


@dataclass
class Stage(Generic[AnyTrainer]):
    """State of any stage: settings, progress, trainer, observer, checkpoints and compute thread."""

    config: RunConfig
    progress: Progress
    trainer: AnyTrainer
    observer: Observer
    checkpoints: Checkpoints
    compute: Executor
    """One thread for arithmetic, so that the event loop stays free for rewards, signals and deadlines."""
    stop: asyncio.Event
    """Set by the first SIGINT or SIGTERM."""
    guard: Guard = field(default=UNGUARDED, kw_only=True)
    """The memory guard."""
    writing: asyncio.Task[None] | None = field(default=None, init=False)
    """The checkpoint that is being written in the background."""

    def in_compute_thread(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self.compute, work, *args)

    async def save(self) -> None:
        """Write a checkpoint of the current state, after the previous one if that is still being written.

        A trainer of other processes copies its state; the copy is written in the background.
        """
        await self.saved()
        self.observer.event("saving", step=self.progress.step)
        with self.observer.work("trainer", "checkpoint"):
            self.progress.position = self.observer.position()
            progress = copy.deepcopy(self.progress)

            def save() -> Snapshot | None:
                with self.guard.phase("checkpoint"):
                    snapshot = self.trainer.snapshot()
                    if not snapshot.is_live:
                        return snapshot
                    self.checkpoints.save(progress, snapshot)
                    return None

            left = await self.in_compute_thread(self.guard.attempt, save)
        if left is None:
            self.observer.event("saved", step=progress.step)
        else:
            self.writing = asyncio.create_task(self._write(progress, left))

    async def _write(self, progress: Progress, snapshot: Snapshot) -> None:
        with self.observer.during("disk", "checkpoint"):
            await asyncio.to_thread(self.checkpoints.save, progress, snapshot)
        self.observer.event("saved", step=progress.step)

    async def saved(self) -> None:
        """Wait until the last checkpoint is on the disk. Raises the error that prevented it."""
        writing, self.writing = self.writing, None
        if writing is not None:
            await writing

    async def settle(self) -> None:
        """Before the writer is shut down, for any reason: wait for it, and report if it failed."""
        try:
            await self.saved()
        except HoneError as error:
            self.observer.warn(str(error))


@dataclass
class PolicyRun(Stage[Trainer]):
    """An RL stage."""

    prompts: PromptStream
    engine: Engine
    rewards: Rewards
    algorithm: Algorithm
    sampling: Sampling
    eos_ids: frozenset[int]
    weights_are_shared: bool
    """The engine samples from the trainer's own tensors, so publishing moves no bytes."""
    evaluate: Callable[[], Awaitable[dict[str, float]]] | None
    gate_passed: bool
    """Whether the first-step gate has compared sampler and trainer in this process, or is disabled."""
    colocated: tuple[Offloadable, ...] = ()
    """Colocated engines, judges and reward models, offloaded while the trainer runs."""
    replicas: Callable[[], Mapping[str, Engine]] | None = None
    """The engines behind `engine` by name, each of which is sent weights; None where that is one in this process."""
    answers: Answers | None = None
    """Gold answers of the data, where it has any."""
    utilisation: Utilisation | None = None
    """Measures updates on devices whose peak is known; None: it is not, or others train in the same call."""
    canary: Canary = field(default_factory=Canary)
    """Compares replicas with the trainer after some publishes."""
    dropped: list[Group] = field(default_factory=list)
    """Groups of the step in flight that will not be trained on; recorded with the others."""

    async def save(self) -> None:
        self.progress.order = self.prompts.order.state(self.progress.next_prompt)
        await super().save()

    def measure_pass_rates(self, groups: Sequence[Group]) -> None:
        """Record for the order of the data how many samples of each prompt were right; prompts without scores keep
        their rate."""
        rates = ((group.prompt.index, pass_rate([group], self.config.eval.threshold)) for group in groups)
        self.prompts.order.measure((index, rate) for index, rate in rates if not math.isnan(rate))

    async def offload_others(self) -> None:
        """Offload the components colocated with the trainer, until the next `publish`. Nothing may be in flight."""
        for other in self.colocated:
            await other.sleep()

    async def publish(self) -> None:
        """Make the trainer's weights live in the engine, as version `progress.step`, and wake colocated replicas."""
        weights = None if self.weights_are_shared else self.trainer.weights()
        await self.engine.load(weights, self.progress.step)
        for other in self.colocated:
            await other.wake()
        self.observer.event("published", version=self.progress.step)
        if self.replicas is not None and due(self.progress.step, self.config.cluster.canary_every):
            prompts = tuple(self.prompts.rows()[:CANARY_PROMPTS])
            self.canary.version = self.progress.step
            await self.canary.sample(self.config, self.replicas(), prompts, self.sampling)

    def is_best_so_far(self, metrics: Mapping[str, float]) -> bool:
        """Whether these are the best evaluation metrics by `checkpoint.best`; if so, `progress` remembers the step."""
        name, progress = self.config.checkpoint.best, self.progress
        if name is None:
            return False
        if name not in metrics:
            raise DataError(f"checkpoint.best = {name}: evaluation measures only {', '.join(sorted(metrics))}.")
        value = metrics[name]
        if progress.best_metric != name:  # the run was resumed with another one
            progress.best_metric, progress.best_step, progress.best_value = name, None, None
        if math.isnan(value) or (progress.best_value is not None and value <= progress.best_value):
            return False
        progress.best_step, progress.best_value = progress.step, value
        return True

    def keeps(self, group: Group) -> bool:
        """Whether a scored group is trained on; a dropped one is kept for the record."""
        informative = not self.config.algorithm.drop_uninformative or self.algorithm.informative(group.rewards)
        if informative and self.rewards.enough(group):
            self.observer.event("group_finished", prompts=[group.prompt.index], versions=versions_of(group.samples))
            return True
        self.observer.event("group_dropped", prompts=[group.prompt.index])
        self.dropped.append(group)
        return False

    def log_trained(self, groups: Sequence[Group]) -> None:
        """Record which groups the update that was just counted was made of."""
        oldest = min((versions[0] for group in groups if (versions := versions_of(group.samples))), default=None)
        prompts = [group.prompt.index for group in groups]
        self.observer.event("trained", step=self.progress.step, prompts=prompts, oldest=oldest)

    def record(self, kept: Sequence[Group], dropped: Sequence[Group], batch: Batch) -> None:
        """Record the samples of a step: trained groups with their advantages, then dropped ones."""
        advantage_T, length_S = batch.columns["advantages_T"].cpu().numpy(), batch.length_S.cpu().numpy()
        sums, start = [], 0
        for lengths in np.array_split(length_S, 1 + len(advantage_T) // PIECE):
            end = start + int(lengths.sum())
            sums.append(_of_samples(np.add, advantage_T[start:end].astype(np.float64), lengths))
            start = end
        advantages = iter((np.concatenate(sums) / np.maximum(length_S, 1)).tolist())  # means; 0 without tokens
        per_group = [[next(advantages) for _ in group.samples] for group in kept]
        step = self.progress.step + 1  # of the update that they make, as its metrics are logged
        self.observer.record("rl", step, kept, per_group, partial(token_figures, batch))
        if dropped:
            self.observer.record("rl", step, dropped, None)

    def log_step(self, metrics: dict[str, float], *, seconds: float) -> None:
        """Log one finished update with its throughput."""
        samples = self.config.train.prompts_per_step * self.config.rollout.group_size
        written = metrics["rollout/response_tokens_mean"] - metrics.get("rollout/tool_tokens_mean", 0.0)
        metrics |= {
            "time/step_s": seconds,
            "rollout/samples_per_s": samples / seconds,
            "rollout/tokens_per_s": written * samples / seconds,
        }
        self.observer.log("rl", self.progress.step, metrics)

    def check_drops(self, dropped: int) -> None:
        """Raises RewardError when a step drops more groups than `max_dropped_per_kept` allows."""
        bound = self.config.algorithm.max_dropped_per_kept * self.config.train.prompts_per_step
        if dropped > bound:
            raise RewardError(
                f"step {self.progress.step}: {dropped} groups were dropped for "
                f"{self.config.train.prompts_per_step} needed (bound: {bound:g}). Rewards that are equal within almost "
                "every group, or samples that cannot be scored, leave nothing to learn from: check the reward and the "
                "difficulty of the prompts, or raise algorithm.max_dropped_per_kept."
            )


def token_figures(batch: Batch, prompts: Sequence[int]) -> list[TokenFigures]:
    """What is known of the tokens of each sample of these prompts: advantages where they differ within the sample, and
    mismatch and entropy where the trainer computed them (columns `trainer_logprobs_T` and `policy_entropy_T`, NaN for
    other samples)."""
    shape = Shape.of(batch)
    samples = np.flatnonzero(np.isin(shape.prompt_S, prompts))
    length_S, tokens = shape.length_S[samples], shape.tokens_of(samples)

    def chosen(value_T: Tensor) -> NDArray[np.float32]:
        return value_T.float().cpu().numpy()[tokens]

    has_loss_T = chosen(batch.loss_mask_T) > 0
    advantage_T = np.where(has_loss_T, chosen(batch.columns["advantages_T"]), np.nan)
    highest_S, lowest_S = (_of_samples(reduce, advantage_T, length_S) for reduce in (np.fmax, np.fmin))
    advantages = _cut(advantage_T, length_S, highest_S > lowest_S)  # NaN, without a token with a loss, is not above NaN

    def known(name: str, of: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> list[NDArray[Any] | None]:
        if (column_T := batch.columns.get(name)) is None:
            return [None] * len(samples)
        value_T = of(chosen(column_T))
        is_known_T = has_loss_T & np.isfinite(value_T)
        num_known_S = _of_samples(np.add, is_known_T.astype(np.float64), length_S)
        return _cut(np.where(is_known_T, value_T, np.nan), length_S, num_known_S > 0)

    mismatches = known("trainer_logprobs_T", lambda trainer_T: chosen(batch.sampler_logprobs_T) - trainer_T)
    entropies = known("policy_entropy_T", lambda entropy_T: entropy_T)
    return [TokenFigures(*of_one) for of_one in zip(advantages, mismatches, entropies, strict=True)]


def _of_samples(reduce: np.ufunc, value_T: NDArray[Any], length_S: NDArray[np.int64]) -> NDArray[Any]:
    """(S,) each sample's tokens reduced to one number; 0 for a sample without tokens."""
    found_S = np.zeros(len(length_S), value_T.dtype)
    has_tokens_S = length_S > 0
    start_S = length_S.cumsum() - length_S
    if has_tokens_S.any():
        found_S[has_tokens_S] = reduce.reduceat(value_T, start_S[has_tokens_S])
    return found_S


def _cut(value_T: NDArray[Any], length_S: NDArray[np.int64], chosen_S: NDArray[np.bool_]) -> list[NDArray[Any] | None]:
    """The tokens of each chosen sample; None for others."""
    ends = length_S.cumsum().tolist()
    pieces = zip(chosen_S.tolist(), length_S.tolist(), ends, strict=True)
    return [value_T[end - length : end] if is_chosen else None for is_chosen, length, end in pieces]


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def now() -> float:
    return time.perf_counter()
