"""`hone train`: the stages of a run file in order, each assembled from its parts.

A stage starts from weights on disk (the model of the run file, or what the stage before it exported), so that a run
that is resumed continues from the same bytes as one that never stopped. A stage whose trainer lost a process starts
again from its newest checkpoint, as `--resume` would: a loss arrives as a ClusterError. Lost engines are restarted by
the router; after the loss of this process itself the user resumes.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from hone.assemble.inputs import changed_inputs, input_hashes, provenance
from hone.assemble.job import (
    Job,
    LiveAlarms,
    asks_to_stop,
    first_cause,
    in_new_loop,
    located,
    set_up_arithmetic,
)
from hone.assemble.memory import RunMemory, exhausted
from hone.assemble.models import tokenizer_of
from hone.assemble.services import claim_devices, devices_found, unseen_notes
from hone.assemble.stage_runs import learn_preferences_once, optimise_once, sft_once
from hone.assemble.workers import Backend, LocalBackend
from hone.cluster.ray import environment_for_ray
from hone.config.derived import unused_services
from hone.config.load import Loaded
from hone.config.run import StageName
from hone.config.topology import judge_services, topology_lines
from hone.data.chat import Tokenizer
from hone.data.prompts import load_prompts
from hone.errors import ClusterError, DataError, PlacementError, RunFolderError, Stopped, StoppedByAlarm
from hone.memory.rungs import Change, RestartWithLess
from hone.observe.observer import Observer, OnMetrics
from hone.reward.resolve import picture_of_responses
from hone.run.folder import RunFolder, identity_of
from hone.run.refusals import refused_by_tokenizer, starting_architecture
from hone.run.trial import try_model
from hone.runtime.backoff import Restarts
from hone.runtime.processes import environment_restored, unless_stopped
from hone.services.gpus import settled_on, topology_on
from hone.services.supervisor import Services
from hone.train.checkpoint import Checkpoints, SavedCheckpoint

Attempt = Callable[[SavedCheckpoint | None, Callable[[], None]], Awaitable[None]]
"""Runs the stage from a checkpoint, or from its beginning, to its end; calls its second argument when all processes
are ready. When it fails it leaves nothing behind that it could not use again."""


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
    if config.cluster.backend == "ray" and find_spec("ray") is None:
        raise PlacementError("cluster.backend = ray: Ray is not installed. Get it with hone-rl's extra `ray`.")
    topology = topology_on(config, found)
    is_local = topology.backend == "local"
    split = claim_devices(config)
    own = set_up_arithmetic(
        config.run if is_local else config.run.model_copy(update={"device": "cpu", "fused_kernels": False})
    )
    device = own if is_local else torch.device(found.device_type)
    tokenizer = tokenizer_of(loaded)
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
        saved = continued_from(
            folder, checkpoints, identity["inputs"], without=without, accept_changed_inputs=accept_changed_inputs
        )
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
        with end_recorded(observer), ThreadPoolExecutor(1, thread_name_prefix="compute") as compute:
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
        return folder.path


def continued_from(
    folder: RunFolder,
    checkpoints: Checkpoints,
    inputs: Mapping[str, str],
    *,
    without: Collection[str],
    accept_changed_inputs: bool,
) -> SavedCheckpoint | None:
    """The newest checkpoint of a resumed run, less what it continues `without`; notes of the folder say what differs.

    Raises:
        RunFolderError: inputs are others than it was trained with, and that is not accepted.
    """
    saved = checkpoints.newest() if folder.resumed else None
    if saved is None:
        return None
    saved = saved.without_optimizer() if "optimizer" in without else saved
    folder.notes += [f"continues without the {what} state of {saved.path.name}" for what in without]
    changes = changed_inputs(saved.run["inputs"], inputs)
    if changes and not accept_changed_inputs:
        raise RunFolderError(
            f"{folder.path}: inputs of the run differ from those that {saved.path.name} was trained with:\n"
            + "\n".join(f"  {change}" for change in changes)
            + "\nRestore them, start a new run with --fresh or run.dir=..., or continue with the new ones: "
            "--accept-changed-inputs."
        )
    folder.notes += checkpoints.forget_incomplete_best(saved.progress)
    folder.notes += [f"continues with another input than before: {change}" for change in changes]
    return saved


@contextmanager
def end_recorded(observer: Observer) -> Iterator[None]:
    """Closes the observer with how the run ended; raises what went wrong as Hone's error where it has one."""
    outcome = "failed"
    try:
        yield
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
    if job.folder.moved_aside is not None:
        job.observer.say(f"the run that was here is now in {job.folder.moved_aside}")
    for note in job.folder.notes:
        job.observer.warn(note)
    if saved is not None:
        for torn in saved.skipped:
            job.observer.warn(f"checkpoint skipped: {torn}")
        job.observer.say(f"resuming from {saved.path} ({saved.progress.stage} step {saved.progress.step})")
    elif job.folder.resumed:
        job.observer.say("no checkpoint yet: starting from the beginning")
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
            raise job.alarms.stopped(job.folder.resume_hint())
        if number + 1 == len(stages):
            job.observer.say(f"final weights: {job.folder.hf}")


async def run_stage(job: Job, backend: Backend, stage: StageName, saved: SavedCheckpoint | None) -> None:
    """One stage, from its beginning or from a checkpoint of it; again from the newest when its trainer is lost."""
    once = {"sft": sft_once, "reward_model": learn_preferences_once, "rl": optimise_once}[stage]

    def newest() -> SavedCheckpoint | None:
        found = job.checkpoints.newest()
        if saved and found and found.path == saved.path:
            return saved
        return found if found and found.progress.stage == stage else None

    await run_with_restarts(
        partial(once, job, backend),
        saved,
        newest=newest,
        adopt=job.memory.ladder.adopt,
        observer=job.observer,
        restarts=Restarts(job.config.cluster.restarts),
        stop=job.stop,
    )


async def run_with_restarts(
    attempt: Attempt,
    saved: SavedCheckpoint | None,
    *,
    newest: Callable[[], SavedCheckpoint | None],
    adopt: Callable[[Sequence[Change]], object],
    observer: Observer,
    restarts: Restarts,
    stop: asyncio.Event,
) -> None:
    """Run a stage to its end, restarting its trainer within the bound.

    Args:
        saved: the stage's checkpoint to begin with; None begins it.
        newest: reads the newest whole checkpoint of the stage; None when there is none yet.
        adopt: gets the setting that a trainer starts again with when memory ran out.
        observer: its records are taken back to that checkpoint.
        restarts: their bound.
        stop: set when the run is to stop.
    Raises:
        ClusterError: a process was lost once too often, or before all were ready for the first time.
    """
    was_ready = False

    def ready() -> None:
        nonlocal was_ready
        was_ready = True

    first = saved.progress.position if saved else observer.position()
    while True:
        try:
            await attempt(saved, ready)
            return
        except (ClusterError, BaseExceptionGroup) as error:
            lost = lost_process(error)
            if lost is None or not was_ready:
                raise
            observer.event("trainer_down", why=str(lost))
            if isinstance(lost, RestartWithLess):
                adopt([lost.change])
            wait_s = restarts.next_wait_s()
            if wait_s is None:
                bound = f"cluster.restarts = {restarts.bound}"
                raise ClusterError(f"{lost} Started again {restarts.count} times within an hour ({bound}).") from error
        saved = newest()
        where = f"step {saved.progress.step}" if saved else "the beginning of the stage: no checkpoint was written yet"
        count = f"{restarts.count} of {restarts.bound} an hour"
        observer.warn(f"{lost} Started again in {wait_s:g} s from {where} ({count})")
        observer.rewind(saved.progress.position if saved else first)
        await unless_stopped(stop, asyncio.sleep(wait_s))
        if stop.is_set():  # perhaps as the wait ended
            return


def lost_process(error: BaseException) -> ClusterError | None:
    """The loss of a process among simultaneous errors; None where a restart would not help."""
    if isinstance(error, BaseExceptionGroup):
        return next((lost for inner in error.exceptions if (lost := lost_process(inner)) is not None), None)
    return error if isinstance(error, ClusterError) and not isinstance(error, PlacementError) else None


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
