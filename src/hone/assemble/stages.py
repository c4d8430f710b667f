"""`hone train`: the stages of a run file in order, each assembled from its parts.

A stage starts from weights on disk (the model of the run file, or what the stage before it exported), so that a run
that is resumed continues from the same bytes as one that never stopped.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from hone.algo.algorithm import Algorithm
from hone.assemble.alarms import LiveAlarms
from hone.assemble.inputs import changed_inputs, input_hashes, refuse_changed_inputs
from hone.assemble.job import (
    Job,
    asks_to_stop,
    first_cause,
    in_new_loop,
    located,
    set_up_arithmetic,
    tell_where_it_starts,
)
from hone.assemble.memory import RunMemory, exhausted
from hone.assemble.models import stage_weights
from hone.assemble.sampling import held_out_evaluation, make_rewards, sampling_of, with_environment
from hone.assemble.services import claim_devices, devices_found, placed, unseen_notes
from hone.assemble.workers import Backend, LocalBackend, Workers
from hone.cluster.ray import environment_for_ray
from hone.config.derived import component_name, correction, longest_tokens, samples_per_update, unused_services
from hone.config.load import Loaded
from hone.config.run import Stage
from hone.config.topology import judge_services, topology_lines
from hone.data.chat import Tokenizer, load_tokenizer
from hone.data.pairs import load_pairs
from hone.data.prompts import PromptStream, load_prompts
from hone.errors import DataError, Stopped, StoppedByAlarm
from hone.loop.answers import Answers
from hone.loop.policy import train_policy
from hone.loop.reward_model import RewardModelRun, train_reward_model
from hone.loop.reward_model import total_steps as pair_steps
from hone.loop.run import PolicyRun
from hone.loop.sft import SftRun, imitation_order, imitation_rows, total_steps, train_sft
from hone.loop.supervisor import run_with_restarts
from hone.loop.utilisation import Utilisation
from hone.memory.ladder import Predict
from hone.model.load import hf_folder
from hone.observe.observer import Observer, OnMetrics
from hone.reward.resolve import picture_of_responses
from hone.rollout.router import Router
from hone.run.check_rewards import gold_response, has_answers, is_decided_by_answer, token_ids
from hone.run.folder import RunFolder, identity_of
from hone.run.provenance import provenance
from hone.run.trial import refused_by_tokenizer, starting_architecture, try_model
from hone.runtime.backoff import Restarts
from hone.runtime.processes import environment_restored
from hone.services.gpus import settled_on
from hone.services.supervisor import Services
from hone.train.checkpoint import Checkpoints, SavedCheckpoint
from hone.types import Progress, Prompt

R = TypeVar("R", SftRun, RewardModelRun)


def train(
    loaded: Loaded,
    *,
    resume: bool = False,
    fresh: bool = False,
    accept_changed_inputs: bool = False,
    without: Collection[str] = (),
    callbacks: Sequence[OnMetrics] = (),
    interrupted: threading.Event | None = None,
) -> Path:
    """Run or resume every stage of a run file. Returns the run's folder.

    Args:
        accept_changed_inputs: resume also where data, tokenizer, model, the user's code or Hone are others than the
            checkpoint was trained with.
        without: what a resumed run does not take from the checkpoint: `optimizer`, whose moments then start at zero,
            and `random`, so that `seed` may be another one; weights, steps and the schedule continue.
        callbacks: called with each line of metrics.
        interrupted: set by another thread, which asks the run to stop.
    Raises:
        HoneError: what went wrong; its `exit_code` is the process's. The newest checkpoint is then still there.
    """
    found = devices_found(loaded.config)
    loaded, choices = settled_on(loaded, found)
    config = loaded.config
    topology = placed(config, found)
    is_local = topology.backend == "local"
    split = claim_devices(config)
    own = set_up_arithmetic(
        config.run if is_local else config.run.model_copy(update={"device": "cpu", "fused_kernels": False})
    )
    device = own if is_local else torch.device(found.device_type)
    tokenizer = load_tokenizer(config.model, loaded.run_file.parent, config.data.template_args)
    refuse_untrainable(loaded, tokenizer)
    loaded = with_length(loaded, tokenizer)
    config = loaded.config
    settings = config.model_dump(mode="json")
    own_env = config.cluster.env if is_local else {}
    with (
        environment_restored(*own_env),
        RunFolder.open(
            loaded.run_dir,
            run_file=loaded.run_file,
            run_yaml=loaded.as_yaml(),
            config=settings,
            resume=resume,
            fresh=fresh,
            may_differ=("seed",) if "random" in without else (),
        ) as folder,
    ):
        os.environ.update(own_env)
        identity = identity_of(loaded.run_file, settings) | {"inputs": input_hashes(loaded, tokenizer)}
        checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep, identity)
        saved = checkpoints.newest() if folder.resumed else None
        saved = saved.without_optimizer() if saved and "optimizer" in without else saved
        if saved:
            folder.notes += [f"continues without the {what} state of {saved.path.name}" for what in without]
        changes = changed_inputs(saved.run["inputs"], identity["inputs"]) if saved else []
        if saved and not accept_changed_inputs:
            refuse_changed_inputs(folder.path, changes, checkpoint=saved.path)
        folder.notes += checkpoints.forget_torn_best(saved.progress) if saved else []
        folder.notes += [f"continues with another input than before: {change}" for change in changes]
        observer = Observer(
            folder.path,
            config.observe,
            title=loaded.name,
            group=config.run.group,
            tags=config.run.tags,
            total_steps=config.run.steps,
            resume=saved.progress.position if saved else None,
            decode=tokenizer.decode,
            picture=picture_of_responses(config.reward.components),
            callbacks=callbacks,
            metadata={"config": settings, "inputs": identity["inputs"], **provenance(loaded.run_file.parent)},
        )
        outcome = "failed"
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="compute") as compute:
                stop = asyncio.Event()
                services = Services.from_config(
                    loaded,
                    split,
                    folder=folder.path,
                    logs=folder.logs,
                    without=judge_services(config) if topology.judges else (),
                    say=observer.say,
                    relay=observer.relay,
                    stop=stop,
                )
                memory = RunMemory(loaded, folder, observer, own)
                observer.watch(checkpoints.disk_metrics)
                alarms = LiveAlarms(
                    settings,
                    observer,
                    saved=saved.progress.alarms if saved else {},
                    stop_on=config.observe.stop_on,
                    stop=stop,
                )
                job = Job(
                    loaded,
                    folder,
                    observer,
                    tokenizer,
                    checkpoints,
                    compute,
                    stop,
                    device,
                    found,
                    services,
                    memory,
                    topology,
                    alarms,
                )
                placement = [] if is_local else topology_lines(topology)
                unused = [f"services.{name}: no reward names it in its args" for name in unused_services(config)]
                notes = (*map(str, choices), *unseen_notes(config, device), *placement)
                for note in (*notes, *split.notes, *unused):
                    observer.say(note)
                try:
                    with located(loaded):
                        in_new_loop(run_stages(job, saved, interrupted))
                finally:
                    memory.report()
            outcome = "finished"
        except StoppedByAlarm as stopped:
            outcome = str(stopped).partition(":")[0]
            raise
        except Stopped:
            outcome = "stopped by the user"
            raise
        except BaseExceptionGroup as group:
            cause = first_cause(group)
            raise (exhausted(cause) or cause) from group
        except (MemoryError, RuntimeError, OSError) as error:
            if failure := exhausted(error):
                raise failure from error
            raise
        finally:
            error = sys.exception() if outcome == "failed" else None
            observer.close(outcome, f"{type(error).__name__}: {error}" if error else "")
        return folder.path


def refuse_untrainable(loaded: Loaded, tokenizer: Tokenizer) -> None:
    """Raises DataError for a model whose class engine or trainer cannot run, as `hone check` reports it."""
    config = loaded.config
    architecture = starting_architecture(config.model, loaded.run_file.parent, vocab_size=tokenizer.vocab_size)
    refused = refused_by_tokenizer(architecture, tokenizer) or in_new_loop(try_model(config, architecture)).refused
    if refused:
        raise DataError(loaded.located(refused))


async def run_stages(job: Job, saved: SavedCheckpoint | None, interrupted: threading.Event | None) -> None:
    """The stages in order, beginning with the one that `saved` was in. Services run from before to after them, and so
    do a cluster's processes."""
    tell_where_it_starts(job, saved)
    with asks_to_stop(job.stop, job.observer, interrupted):
        async with job.services, backend_of(job) as backend:
            await run_stages_on(job, backend, saved)


def with_length(loaded: Loaded, tokenizer: Tokenizer) -> Loaded:
    """The run with `run.steps` as `run.epochs` gives them: kept prompts x epochs / prompts per step, rounded up.

    Raises:
        DataError: the prompts cannot be read.
    """
    config = loaded.config
    if config.run.epochs is None or "rl" not in config.stages:
        return loaded
    prompts = load_prompts(config.data, tokenizer, loaded.run_file.parent, seed=config.seed)
    steps = math.ceil(config.run.epochs * len(prompts) / config.train.prompts_per_step)
    run = config.run.model_copy(update={"steps": steps})
    return replace(loaded, config=config.model_copy(update={"run": run}))


async def run_stages_on(job: Job, backend: Backend, saved: SavedCheckpoint | None) -> None:
    stages = job.config.stages
    first = stages.index(saved.progress.stage) if saved else 0  # type: ignore[arg-type]
    for number, stage in enumerate(stages[first:], first):
        await run_stage(job, backend, stage, saved if saved and saved.progress.stage == stage else None)
        if job.stop.is_set():
            job.services.check()
            raise job.alarms.stopped(job.folder.how_to_go_on())
        if number + 1 == len(stages):
            job.observer.say(f"final weights: {job.folder.hf}")


async def run_stage(job: Job, backend: Backend, stage: Stage, saved: SavedCheckpoint | None) -> None:
    """One stage, from its beginning or from a checkpoint of it; again from the newest when its trainer is lost."""
    once = {"sft": imitate_once, "reward_model": learn_preferences_once, "rl": optimise_once}[stage]

    def newest() -> SavedCheckpoint | None:
        found = job.checkpoints.newest()
        if saved and found and found.path == saved.path:
            return saved
        return found if found and found.progress.stage == stage else None

    await run_with_restarts(
        partial(once, job, backend),
        saved,
        newest=newest,
        observer=job.observer,
        restarts=Restarts(job.config.cluster.restarts),
        stop=job.stop,
    )


async def imitate_once(job: Job, backend: Backend, saved: SavedCheckpoint | None, ready: Callable[[], None]) -> None:
    """Supervised fine-tuning from the run file's model; leaves its weights in `stage_weights`. Calls `ready` when the
    trainer is there."""
    rows = imitation_rows(job.config, job.tokenizer, job.base_dir, job.data_cache)
    job.observer.say(f"imitating {rows.report}")
    steps = total_steps(job.config.sft, len(rows))
    progress = begin_stage(job, "sft", saved)
    async with backend.imitator(steps, saved) as trainer:
        ready()
        job.observer.begin("sft", steps)
        order = imitation_order(job.config, rows)
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
    steps = pair_steps(config.rm, len(pairs))
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


@asynccontextmanager
async def backend_of(job: Job) -> AsyncIterator[Backend]:
    """The backend that `cluster.backend` names."""
    if job.config.cluster.backend != "ray":
        yield LocalBackend(job)
        return
    with environment_for_ray():
        from hone.assemble.cluster import RayBackend  # Ray is an extra

    async with RayBackend(job) as backend:
        yield backend


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
    evaluation = held_out_evaluation(job, engine, rewards)
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
            await train_policy(run)
        await finish_stage(job, run)
        export_best(job, run)
    finally:
        await run.settle()
        await engine.close()
        services = job.services.summary()
        job.observer.say(f"rewards: {rewards.summary()}{f'; services: {services}' if services else ''}")


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


def begin_stage(job: Job, stage: Stage, saved: SavedCheckpoint | None, predict: Predict | None = None) -> Progress:
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
