"""One attempt at a stage: what it learns from, its run, and the weights that it leaves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from hone.algo.algorithm import Algorithm
from hone.assemble.job import Job
from hone.assemble.models import stage_weights
from hone.assemble.sampling import held_out_evaluation, make_rewards, sampling_of, with_environment
from hone.assemble.workers import Backend, Workers
from hone.config.derived import component_name, correction, longest_tokens, samples_per_update
from hone.config.run import StageName
from hone.data.order import RowOrder
from hone.data.pairs import load_pairs
from hone.data.prompts import PromptStream, load_prompts
from hone.loop.answers import Answers
from hone.loop.policy import train_policy
from hone.loop.run import PolicyRun
from hone.loop.supervised import (
    RewardModelRun,
    SftRun,
    preference_steps,
    sft_rows,
    sft_steps,
    train_reward_model,
    train_sft,
)
from hone.loop.utilisation import Utilisation
from hone.memory.ladder import Predict
from hone.model.load import hf_folder
from hone.reward.rewards import Rewards
from hone.rollout.engine import Engine
from hone.rollout.episodes import EpisodeEngine
from hone.rollout.router import Router
from hone.run.check_rewards import gold_response, has_answers, is_decided_by_answer, token_ids
from hone.runtime.processes import spared_collector
from hone.train.checkpoint import SavedCheckpoint
from hone.types import Progress, Prompt

R = TypeVar("R", SftRun, RewardModelRun)


async def sft_once(job: Job, backend: Backend, saved: SavedCheckpoint | None, ready: Callable[[], None]) -> None:
    """Supervised fine-tuning from the run file's model; leaves its weights in `stage_weights`. Calls `ready` when the
    trainer is there."""
    rows = sft_rows(job.config, job.tokenizer, job.base_dir, job.data_cache)
    job.observer.say(f"fine-tuning on {rows.report}")
    steps = sft_steps(job.config.sft, len(rows))
    progress = begin_stage(job, "sft", saved)
    async with backend.sft_trainer(steps, saved) as trainer:
        ready()
        job.observer.begin("sft", steps)
        if job.config.sft.data is not None:
            order = RowOrder(rows.sources, seed=job.config.seed)
        else:
            order = rows.order(job.config.data, seed=job.config.seed, in_rl=False)
        run = SftRun(job.config, progress, trainer, *job.stage_parts, rows=rows, order=order, guard=job.guard)
        await run_to_end(job, run, train_sft)


async def learn_preferences_once(
    job: Job, backend: Backend, saved: SavedCheckpoint | None, ready: Callable[[], None]
) -> None:
    """Learning from preferences, from the run file's model or from what the SFT stage left. `ready`: as before."""
    config, tokenizer = job.config, job.tokenizer
    longest = longest_tokens(config)
    load = partial(load_pairs, config.data, config.rm, tokenizer, job.base_dir, max_tokens=longest)
    pairs, held_out = (load(part=part, cache=job.data_cache) for part in ("train", "eval"))
    job.observer.say(f"pairs to learn from: {pairs.report}; held out: {held_out.report}")
    steps = preference_steps(config.rm, len(pairs))
    progress = begin_stage(job, "reward_model", saved)
    async with backend.pair_learner(steps, saved) as trainer:
        ready()
        job.observer.begin("reward_model", steps)
        order, kept = pairs.order(config.data, seed=config.seed, in_rl=False), held_out[:]
        run = RewardModelRun(
            config, progress, trainer, *job.stage_parts, pairs=pairs, order=order, held_out=kept, guard=job.guard
        )
        await run_to_end(job, run, train_reward_model)


async def optimise_once(job: Job, backend: Backend, saved: SavedCheckpoint | None, ready: Callable[[], None]) -> None:
    """The policy loop, from the run file's model or from what the SFT stage left. Calls `ready` when trainer and engine
    are there."""
    config = job.config
    prompts = load_prompts(config.data, job.tokenizer, job.base_dir, seed=config.seed, cache=job.data_cache)
    job.observer.say(f"training on {prompts.report}")
    progress = begin_stage(job, "rl", saved, job.memory.predict)
    prompts.order.restore(progress.order)
    algorithm = Algorithm(
        config.algorithm,
        max_response_tokens=config.rollout.max_response_tokens,
        correction=correction(config),
        control=progress.control,
        weights={component_name(c): c.weight for c in config.reward.components if c.weight},
    )
    async with backend.workers(algorithm.needs, saved) as workers:
        ready()
        await job.services.ready()
        if not job.stop.is_set():
            await optimise_policy(job, progress, prompts, algorithm, workers)


async def optimise_policy(
    job: Job, progress: Progress, prompts: PromptStream, algorithm: Algorithm, workers: Workers
) -> None:
    """The policy loop, and what it leaves."""
    config = job.config
    engine = await with_environment(config, job.tokenizer, job.base_dir, workers.engine)
    window = 20 * samples_per_update(config)
    rewards = make_rewards(
        config,
        job.base_dir,
        window_samples=window,
        services={**job.services.addresses, **workers.addresses},
        elsewhere=workers.scorers,
    )
    evaluation = held_out_evaluation(job, engine, rewards, prompts)
    job.observer.begin("rl", config.run.steps)
    run = PolicyRun(
        config,
        progress,
        workers.trainer,
        *job.stage_parts,
        prompts=prompts,
        engine=engine,
        rewards=rewards,
        algorithm=algorithm,
        sampling=sampling_of(config),
        eos_ids=frozenset(job.tokenizer.eos_ids),
        weights_are_shared=workers.weights_are_shared,
        colocated=workers.colocated,
        replicas=workers.engine.up if isinstance(workers.engine, Router) else None,
        evaluate=evaluation,
        answers=answers_of(job),
        utilisation=Utilisation.here(config, job.topology, job.device, job.base_dir),
        gate_passed=not config.gate.enabled,
        guard=job.guard,
    )
    try:
        async with rewards:
            with spared_collector(), job.observer.watching(lambda: memory_of_user_code(rewards, engine)):
                await train_policy(run)
        await finish_stage(job, run)
        export_best(job, run)
    finally:
        await run.settle()
        await engine.close()
        services = job.services.summary()
        job.observer.say(f"rewards: {rewards.summary()}{f'; services: {services}' if services else ''}")


def memory_of_user_code(rewards: Rewards, engine: Engine) -> dict[str, float]:
    """Memory of the processes that the user's rewards and environments run in."""
    environments = engine.memory_metrics() if isinstance(engine, EpisodeEngine) else {}
    return rewards.memory_metrics() | environments


def answers_of(job: Job) -> Answers | None:
    """The answers in the data as responses, where there are any."""
    config, tokenizer = job.config, job.tokenizer
    if not has_answers(config):
        return None
    gold = gold_response(config.reward.components)

    def encode(prompts: Sequence[Prompt]) -> list[Sequence[int]]:
        texts = [gold(prompt.answer) for prompt in prompts]
        tokens, unwritable = token_ids(tokenizer, texts)
        return [() if text in unwritable else tokens[text] for text in texts]

    text = gold if is_decided_by_answer(config) else None
    return Answers(encode, tokenizer.vocab_size, text, config.rollout.max_response_tokens)


def begin_stage(job: Job, stage: StageName, saved: SavedCheckpoint | None, predict: Predict | None = None) -> Progress:
    """Where a stage starts: at its first step, or where `saved` was taken. From here its memory is watched over."""
    progress = saved.progress if saved else Progress(stage=stage)
    job.memory.ladder.begin(progress, predict)
    return progress


async def run_to_end(job: Job, run: R, train: Callable[[R], Awaitable[None]]) -> None:
    """A supervised stage: what it learns, and what it leaves."""
    try:
        await train(run)
        await finish_stage(job, run)
    finally:
        await run.settle()


async def finish_stage(job: Job, run: SftRun | RewardModelRun | PolicyRun) -> None:
    """Save where the stage ended; when it was not stopped, also its weights as a Hugging Face directory."""
    await run.save()
    await run.saved()
    if not job.stop.is_set():
        if isinstance(run, PolicyRun):
            await run.offload_others()  # rank 0 gathers weights on a device that an engine may have
        folder = stage_weights(job.folder, job.config, run.progress.stage)
        await job.computed(lambda: save_weights(job, run, folder), phase="checkpoint")


def save_weights(job: Job, run: SftRun | RewardModelRun | PolicyRun, folder: Path) -> None:
    """What a run trains as a Hugging Face directory; a policy with what ends its responses."""
    eos_ids = () if run.progress.stage == "reward_model" else job.tokenizer.eos_ids
    dtype = getattr(torch, job.config.checkpoint.export_precision)
    tokenizer, config = job.tokenizer, run.trainer.hf_config
    with hf_folder(folder, config, tokenizer.hf, dtype=dtype, eos_ids=eos_ids, processor=tokenizer.processor) as aside:
        run.trainer.write_weights(aside, dtype)


def export_best(job: Job, run: PolicyRun) -> None:
    """Leave the weights of the step where `checkpoint.best` was highest in hf-best/. The trainer holds them then."""
    step = run.progress.best_step
    if step is None or job.config.checkpoint.best is None or job.stop.is_set():
        return
    saved = job.checkpoints.at("rl", step)
    run.trainer.restore(saved.tensors, saved.rest)
    save_weights(job, run, job.folder.hf_best)
    value = f"{job.config.checkpoint.best} = {run.progress.best_value:.4g}"
    job.observer.say(f"best weights: {job.folder.hf_best} ({value}, step {step})")
