"""Policy optimisation: prompts -> groups -> advantages -> one policy update, until `run.steps` are made.

One loop serves synchronous and asynchronous runs. A group holds a permit from the moment its generation starts
until weights trained on it are live in the engines; there are (max_staleness + 1) * prompts_per_step permits, so
no token is trained more than `max_staleness` updates after the policy that sampled it (argument in buffer.py).
0 is plain on-policy training. There is no second loop for a second mode.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hone.algo.kl import k3
from hone.data.pack import collate, first_prompts, score_columns
from hone.errors import EngineError
from hone.loop.buffer import GroupBuffer
from hone.loop.gate import check_first_step
from hone.loop.run import PolicyRun, due, now
from hone.loop.summaries import staleness_shares, summarize
from hone.reward.aggregate import component_metrics
from hone.rollout.engine import Request
from hone.runtime.processes import unless_stopped
from hone.train.trainer import Trainer
from hone.types import Batch, Group, Prompt

MEASURED_FIRST, MEASURED_EVERY, MEASURED_SHARE = 10, 10, 16
"""Updates whose `Movement` is measured, and the share of their prompts, as 1 in N."""

GROUPS_AT_ONCE = 32
"""Groups that start or are freed in one pass of the event loop, which blocks everything else meanwhile."""


@dataclass(frozen=True, slots=True)
class Movement:
    """How far an update moves the policy: KL between the policies before and after it, on a few of its prompts.

    Measured apart from the loss, since with one optimizer step per update the policy ratio is 1 and says nothing. Costs
    two passes without gradient over a sixteenth of the batch, in the first updates and in every tenth.
    """

    trainer: Trainer
    batch: Batch
    before_T: Tensor
    """(T,) logprobs of the batch's tokens before the update."""
    entropy_T: Tensor
    """(T,) entropies there, for the record."""

    @classmethod
    def begin(cls, trainer: Trainer, batch: Batch) -> Movement:
        """Before the update: keep the logprobs and entropies of the first prompts' samples."""
        few = first_prompts(batch, max(1, len(batch.prompts) // MEASURED_SHARE))
        return cls(trainer, few, *trainer.logprobs_and_entropies(few))

    def end(self) -> dict[str, float]:
        """After the update: `train/update_kl`, the k3 estimate of KL(before || after) in nats per token."""
        mask_T = self.batch.loss_mask_T.to(self.before_T)
        if not mask_T.any():
            return {}
        kl_T = k3(self.before_T - self.trainer.logprobs(self.batch))
        return {"train/update_kl": float((kl_T * mask_T).sum() / mask_T.sum())}


@dataclass(frozen=True, slots=True)
class Finished:
    """A scored group, and when its last token was sampled: which separates generating from scoring."""

    group: Group
    generated_at: float


async def train_policy(run: PolicyRun) -> None:
    """Make policy updates until `run.steps` are made or a stop is asked for. The caller saves the end."""
    progress, prompts_per_step = run.progress, run.config.train.prompts_per_step
    max_staleness = run.config.rollout.max_staleness
    permits = (max_staleness + 1) * prompts_per_step
    buffer: GroupBuffer[Finished] = GroupBuffer(permits)
    run.observer.event("started", step=progress.step, permits=permits, max_staleness=max_staleness)
    run.rewards.expect(progress.reward_fingerprints)
    await run.publish()
    if await evaluate_if_due(run) and progress.step < run.config.run.steps:
        await run.save()

    async with asyncio.TaskGroup() as tasks:  # a failure in any background task surfaces here
        producer = tasks.create_task(produce(run, buffer, tasks))
        logging_s = 0.0
        while progress.step < run.config.run.steps and not run.stop.is_set():
            started = now()
            took = await unless_stopped(run.stop, buffer.take(prompts_per_step, on_drop=run.check_drops))
            if took is None:
                break
            finished, taken = took.result(), now()
            generated = min(taken, max(started, *(f.generated_at for f in finished)))
            depths = buffer.depths()
            metrics = await update(run, [f.group for f in finished])
            progress.step += 1
            progress.next_prompt = finished[-1].group.prompt.index + 1
            progress.reward_fingerprints = run.rewards.fingerprints()
            run.log_trained([f.group for f in finished])
            await forget(finished)
            with run.observer.work("trainer", "publish"):
                await run.publish()
            metrics |= depths | {"time/generate_s": generated - started, "time/reward_s": taken - generated}
            ended = now()
            run.log_step(metrics, seconds=ended - started + logging_s)
            run.guard.tune()
            logging_s = now() - ended  # counts as part of the next step; evaluations and checkpoints of none
            # Before the next groups start: what is decoded together decides the last bits.
            is_best = await evaluate_if_due(run)
            buffer.release(prompts_per_step)  # only now may generation run ahead again
            step = run.progress.step
            is_due = is_best or due(step, run.config.checkpoint.every)
            if is_due and step < run.config.run.steps:  # the end of a stage is always saved
                await run.save()
        producer.cancel()
        buffer.cancel()


async def produce(run: PolicyRun, buffer: GroupBuffer[Finished], tasks: asyncio.TaskGroup) -> None:
    """Start one task per prompt, as fast as permits allow, in the order of the data."""
    prompts = run.prompts.starting_at(run.progress.next_prompt)
    for count in itertools.count(1):
        await buffer.reserve()  # before the next prompt is chosen, which may depend on the pass rates of this moment
        buffer.add(tasks.create_task(generate_and_score(run, next(prompts))))
        if count % GROUPS_AT_ONCE == 0:  # engines still wait for all: each pass of the event loop brings more
            await asyncio.sleep(0)


async def forget(finished: list[Finished]) -> None:
    """Free the groups of an update before the next ones come, a few groups at a time: for millions of tokens that
    takes longer than the event loop may stand still."""
    while finished:
        del finished[-GROUPS_AT_ONCE:]
        await asyncio.sleep(0)


async def generate_and_score(run: PolicyRun, prompt: Prompt) -> Finished | None:
    """Sample a group and score it. None: the group has no signal, and its permit is returned."""
    config = run.config
    run.observer.event("group_started", prompts=[prompt.index])
    request = Request(prompt, config.rollout.group_size, run.sampling, config.seed, "train")
    if "greedy_reward" in run.algorithm.needs:
        greedy = Request(prompt, 1, replace(run.sampling, temperature=0.0), config.seed, "train")
        finished, baseline = await asyncio.gather(sample_and_score(run, request), sample_and_score(run, greedy))
        generated_at = max(finished.generated_at, baseline.generated_at)
        finished = Finished(replace(finished.group, greedy=baseline.group), generated_at)
    else:
        finished = await sample_and_score(run, request)
    return finished if run.keeps(finished.group) else None


async def sample_and_score(run: PolicyRun, request: Request) -> Finished:
    """One request's samples with their scores, begun for each sample as it finishes where the rewards allow it."""
    timeout_s = run.config.rollout.timeout_s
    async with run.rewards.begin(request.prompt) as scoring:
        try:
            with run.observer.during("engine", "generate"):
                async with asyncio.timeout(timeout_s):
                    samples = await run.engine.generate(request, scoring.on_sample)
        except TimeoutError as error:
            raise EngineError(
                f"prompt {request.prompt.id}: no group of {request.num_samples} samples within rollout.timeout_s = "
                f"{timeout_s:g} s. Raise it, or lower rollout.max_response_tokens or group_size."
            ) from error
        generated_at = now()
        return Finished(await scoring.finish(samples), generated_at)


async def update(run: PolicyRun, groups: Sequence[Group]) -> dict[str, float]:
    """One policy update, possibly of several optimizer steps, on `prompts_per_step` groups."""
    run.observer.event("training", step=run.progress.step + 1)
    dropped, run.dropped = run.dropped, []
    run.measure_pass_rates([*groups, *dropped])
    metrics = run.rewards.http_metrics()
    if run.progress.step == 0 and run.answers is not None:
        prompts, threshold = [group.prompt for group in groups], run.config.eval.threshold
        metrics |= await run.answers.judged(run.rewards, prompts, threshold=threshold)
    with run.observer.work("trainer", "train"):
        await run.offload_others()  # until the weights are published; what follows has the devices to itself
        batch, learned = await run.in_compute_thread(collate_and_learn, run, groups)
    recorded = run.in_compute_thread(measure_and_record, run, groups, dropped, batch)
    del batch  # the thread frees it, for the same reason as in `forget`
    return await recorded | metrics | learned


def collate_and_learn(run: PolicyRun, groups: Sequence[Group]) -> tuple[Batch, dict[str, float]]:
    """The part of an update that runs on the compute thread."""
    batch, agreement = collate_and_check(run, groups)
    batch, learned = learn(run, batch)
    return batch, agreement | learned


def measure_and_record(
    run: PolicyRun, groups: Sequence[Group], dropped: Sequence[Group], batch: Batch
) -> dict[str, float]:
    """Metrics of the samples of an update, which are recorded. Of millions of tokens that takes longer than the event
    loop may stand still."""
    version = run.progress.step
    metrics = summarize(groups, dropped, version=version, threshold=run.config.eval.threshold)
    metrics |= staleness_shares(groups, version=version, most=run.config.rollout.max_staleness)
    run.record(groups, dropped, batch)
    return metrics | component_metrics(groups, run.rewards.weights)


def collate_and_check(run: PolicyRun, groups: Sequence[Group]) -> tuple[Batch, dict[str, float]]:
    """The batch of an update, before which sampler and trainer are compared: on the first batch of a process, and on
    what the replicas sampled of some versions."""
    batch = collate(groups)
    if "scores" in run.algorithm.needs:
        batch = replace(batch, columns={**batch.columns, **score_columns(groups)})
    metrics = run.canary.compare(run.config, run.trainer.logprobs, run.observer.warn)
    if run.progress.step == 0 and run.answers is not None:
        metrics |= run.answers.surprise(run.trainer, groups)
    if run.gate_passed:
        return batch, metrics
    agreement = check_first_step(
        run.config,
        run.trainer,
        run.engine,
        groups,
        batch,
        step=run.progress.step,
        sampling=run.sampling,
        eos_ids=run.eos_ids,
        needs=run.algorithm.needs,
        warn=run.observer.warn,
    )
    run.gate_passed = True
    run.canary.expected_gap = agreement["gate/logprob_gap"]
    if run.progress.step == 0:  # a resumed run logs what the uninterrupted one would
        metrics |= agreement
    return batch, metrics


def learn(run: PolicyRun, batch: Batch) -> tuple[Batch, dict[str, float]]:
    """The arithmetic of an update: what the row needs, credit, then the optimizer steps."""
    trainer, algorithm = run.trainer, run.algorithm
    batch = replace(batch, columns={**batch.columns, **trainer.measure(batch, algorithm.needs)})
    batch, metrics = algorithm.assign(batch)
    step = run.progress.step
    is_measured = step < MEASURED_FIRST or (step + 1) % MEASURED_EVERY == 0
    movement = Movement.begin(run.trainer, batch) if is_measured else None
    started = now()
    metrics |= trainer.update(batch, algorithm)
    if run.utilisation is not None and (tokens := metrics["train/tokens"]):
        metrics["train/mfu"] = run.utilisation.reached(batch, tokens, now() - started)
    metrics |= movement.end() if movement else {}
    batch = with_trainer_columns(batch, movement)
    more, alarm = algorithm.after_update(batch, metrics)
    if alarm is not None:
        run.observer.warn(alarm)
    return batch, metrics | more


def with_trainer_columns(batch: Batch, movement: Movement | None) -> Batch:
    """The batch with what this update computed of the policy before it, for the record; NaN where it did not.

    Entropies are of the samples that the movement is measured on, logprobs of those too, or of all samples if the
    algorithm needed them.
    """
    if movement is not None:
        batch = batch.with_column("policy_entropy_T", _of_the_first(movement.entropy_T, batch))
    if (old_T := batch.columns.get("old_logprobs_T")) is not None:
        return batch.with_column("trainer_logprobs_T", old_T)
    if movement is not None:
        return batch.with_column("trainer_logprobs_T", _of_the_first(movement.before_T, batch))
    return batch


def _of_the_first(value_T: Tensor, batch: Batch) -> Tensor:
    """(T,) of a batch: values of its first tokens, and NaN for the others."""
    known_T = torch.full_like(batch.sampler_logprobs_T, math.nan)
    known_T[: len(value_T)] = value_T.to(known_T)
    return known_T


async def evaluate_if_due(run: PolicyRun) -> bool:
    """Log held-out metrics of the live policy: before the first update (`eval.before_training`), after the last, and
    every `eval.every`.

    Returns whether it is the best so far by `checkpoint.best`.
    """
    step, last = run.progress.step, run.config.run.steps
    is_first = step == 0 and run.config.eval.before_training
    is_due = is_first or step == last or (step > 0 and due(step, run.config.eval.every))
    if run.evaluate is None or not is_due or run.progress.evaluated_step == step:
        return False
    run.observer.event("evaluating", step=step)
    with run.observer.work("engine", "evaluate"):
        evaluated = await unless_stopped(run.stop, run.evaluate())
        metrics = None if evaluated is None else evaluated.result()
    run.observer.event("evaluated", step=step)
    if metrics is None:
        return False
    run.progress.evaluated_step = step
    run.observer.log("rl", step, metrics)
    return run.is_best_so_far(metrics)
