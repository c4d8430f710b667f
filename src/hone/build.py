"""From a resolved run file to a running job: the only file that names concrete backends.

Each stage is assembled from the same parts: folder, observer, tokenizer, data, model, trainer, and for RL an engine
and rewards. A stage starts from weights on disk (the model of the run file, or what the stage before it exported),
so that a run that is resumed goes on from the same bytes as one that never stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from hone.algo.algorithm import Algorithm
from hone.config.derived import (
    correction,
    critic_steps_total,
    longest_tokens,
    optimizer_steps_total,
    samples_per_update,
)
from hone.config.load import Loaded
from hone.config.report import CheckReport
from hone.config.run import OptimizerSection, RunConfig
from hone.data.chat import Tokenizer, load_tokenizer, resolve_model
from hone.data.pairs import load_pairs
from hone.data.prompts import load_prompts
from hone.errors import DataError, HoneError, Stopped
from hone.loop import preflight
from hone.loop.evaluate import Evaluation, evaluate
from hone.loop.folder import RunFolder
from hone.loop.policy import train_policy
from hone.loop.reward_model import RewardModelRun, train_reward_model
from hone.loop.reward_model import total_steps as pair_steps
from hone.loop.run import PolicyRun
from hone.loop.sft import SftRun, imitation_rows, total_steps, train_sft
from hone.model.base import CausalModel
from hone.model.heads import ScalarModel, load_scalar_model, reward_config
from hone.model.load import init_model, load_model, read_config, save_hf
from hone.observe.observer import Observer
from hone.reward.base import Component, Rewards
from hone.reward.environment import FromEnvironment
from hone.rollout.engine import Engine, Sampling
from hone.rollout.env_pool import EnvironmentPool
from hone.rollout.episodes import EpisodeEngine
from hone.rollout.local import LocalEngine
from hone.train.checkpoint import Checkpoints
from hone.train.checkpoint import Loaded as Saved
from hone.train.critic import Critic
from hone.train.local import LocalTrainer
from hone.train.optim import FlatWeights
from hone.train.pairs import PairTrainer
from hone.types import Progress

Evaluate = Callable[[], Awaitable[dict[str, float]]]


@dataclass
class Job:
    """What all stages of a run share."""

    loaded: Loaded
    folder: RunFolder
    observer: Observer
    tokenizer: Tokenizer
    checkpoints: Checkpoints
    compute: ThreadPoolExecutor
    stop: asyncio.Event
    device: torch.device

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def base_dir(self) -> Path:
        """Where relative paths of the run file start."""
        return self.loaded.run_file.parent


def train(loaded: Loaded, *, resume: bool = False, fresh: bool = False) -> Path:
    """Run every stage of a run file, or go on with it. Returns the run's folder.

    Raises:
        HoneError: what went wrong; its `exit_code` is the process's. The newest checkpoint is then still there.
    """
    config = loaded.config
    device = set_up_arithmetic(config)
    tokenizer = load_tokenizer(config.model, loaded.run_file.parent)
    identity = config.model_dump(mode="json")
    with RunFolder.open(
        loaded.run_dir, run_yaml=loaded.as_yaml(), config=identity, resume=resume, fresh=fresh
    ) as folder:
        checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep)
        saved = checkpoints.newest() if folder.resumed else None
        observer = Observer(
            folder.path,
            config.observe,
            title=loaded.name,
            total_steps=config.run.steps,
            resume_bytes=saved.progress.metrics_bytes if saved else None,
            decode=tokenizer.decode,
        )
        outcome = "failed"
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="compute") as compute:
                job = Job(loaded, folder, observer, tokenizer, checkpoints, compute, asyncio.Event(), device)
                asyncio.run(run_stages(job, saved))
            outcome = "finished"
        except Stopped:
            outcome = "stopped by the user; --resume goes on"
            raise
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        finally:
            observer.close(outcome)
        return folder.path


def set_up_arithmetic(config: RunConfig) -> torch.device:
    """Threads, determinism, and the device that `run` asks for."""
    torch.set_num_threads(config.run.threads or len(os.sched_getaffinity(0)))
    wanted = config.run.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise DataError("run.device = cuda, but torch sees no GPU. Set run.device=cpu, or check the driver.")
    if wanted == "cpu":
        use_fast_float32_products()
    return torch.device(wanted)


def use_fast_float32_products() -> None:
    """Let the CPU library choose faster float32 matrix products, where their error stays that of float32.

    "medium" is up to twice as fast on AVX-512 machines at the same error; elsewhere it may round to bfloat16, so it
    is kept only if a product of this very machine is right to 2e-6.
    """
    torch.set_float32_matmul_precision("medium")
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 256, 256, generator=generator)
    exact = a.double() @ b.double()
    if ((a @ b) - exact).abs().max() > 2e-6 * exact.abs().max():
        torch.set_float32_matmul_precision("highest")


async def run_stages(job: Job, saved: Saved | None) -> None:
    """The stages in order, beginning with the one that `saved` was in."""
    tell_where_it_starts(job, saved)
    with signals_ask_to_stop(job.stop, job.observer):
        stages = job.config.stages
        first = stages.index(saved.progress.stage) if saved else 0  # type: ignore[arg-type]
        for number, stage in enumerate(stages[first:], first):
            runner = {"sft": run_sft, "reward_model": run_reward_model, "rl": run_rl}[stage]
            await runner(job, saved if saved and saved.progress.stage == stage else None)
            if job.stop.is_set():
                raise Stopped(f"stopped; `hone train {job.loaded.run_file} --resume` goes on from the checkpoint")
            if number + 1 == len(stages):
                job.observer.say(f"final weights: {job.folder.hf}")


async def run_sft(job: Job, saved: Saved | None) -> None:
    """Supervised fine-tuning from the run file's model; leaves its weights in `stage_weights(job, "sft")`."""
    rows, report = imitation_rows(job.config, job.tokenizer, job.base_dir)
    job.observer.say(f"imitating {report}")
    steps = total_steps(job.config.sft, len(rows))
    trainer = make_trainer(job, starting_model(job, "sft"), job.config.sft.optimizer, steps)
    progress = restored(trainer, saved) or Progress(stage="sft")
    job.observer.begin("sft", steps)
    run = SftRun(job.config, progress, trainer, job.observer, job.checkpoints, job.compute, job.stop, rows=rows)
    await train_sft(run)
    await finish_stage(job, run)


async def run_reward_model(job: Job, saved: Saved | None) -> None:
    """Learning from preferences, from the run file's model or from what the SFT stage left."""
    config, tokenizer = job.config, job.tokenizer
    longest = longest_tokens(config)
    pairs, report = load_pairs(config.data, config.rm, tokenizer, job.base_dir, max_tokens=longest)
    held_out, other = load_pairs(config.data, config.rm, tokenizer, job.base_dir, max_tokens=longest, part="eval")
    job.observer.say(f"pairs to learn from: {report}; held out: {other}")
    steps = pair_steps(config.rm, len(pairs))
    trainer = PairTrainer(
        scalar_model(config, tokenizer, starting_model(job, "reward_model")),
        optimizer=config.train.optimizer,
        total_optimizer_steps=steps,
        tokens_per_microbatch=config.train.tokens_per_microbatch,
        precision=config.run.precision,
    )
    progress = restored(trainer, saved) or Progress(stage="reward_model")
    job.observer.begin("reward_model", steps)
    run = RewardModelRun(
        config,
        progress,
        trainer,
        job.observer,
        job.checkpoints,
        job.compute,
        job.stop,
        pairs=pairs,
        held_out=held_out,
    )
    await train_reward_model(run)
    await finish_stage(job, run)


def scalar_model(config: RunConfig, tokenizer: Tokenizer, body: CausalModel) -> ScalarModel:
    """A reward model on a policy's body, described so that Transformers loads it as a sequence classifier."""
    # Transformers scores the last token that is no padding, so the end of a response must not look like padding.
    pad_id = None if tokenizer.pad_id in tokenizer.eos_ids else tokenizer.pad_id
    body.checkpoint_layers = config.train.activation_checkpointing
    model = ScalarModel(body)
    model.hf_config = reward_config(model.hf_config, pad_id=pad_id, form="chat" if config.data.chat else "text")
    return model


async def run_rl(job: Job, saved: Saved | None) -> None:
    """The policy loop, from the run file's model or from what the SFT stage left."""
    config = job.config
    prompts = load_prompts(config.data, job.tokenizer, job.base_dir, seed=config.seed)
    job.observer.say(f"training on {prompts.report}")
    progress = saved.progress if saved else Progress(stage="rl")
    algorithm = Algorithm(
        config.algorithm,
        max_response_tokens=config.rollout.max_response_tokens,
        correction=correction(config),
        control=progress.control,
    )
    model = starting_model(job, "rl")
    reference = copy.deepcopy(model) if "ref_logprobs" in algorithm.needs else None
    critic = make_critic(job, model) if "values" in algorithm.needs else None
    trainer = make_trainer(job, model, config.train.optimizer, optimizer_steps_total(config), reference, critic)
    restored(trainer, saved)
    shared = config.rollout.max_staleness == 0
    sampled = trainer.model if shared else copy.deepcopy(trainer.model)
    engine = await make_engine(config, job.tokenizer, sampled, job.base_dir)
    rewards = make_rewards(config, job.base_dir, window_samples=20 * samples_per_update(config))
    evaluation = held_out_evaluation(job, engine, rewards)
    job.observer.begin("rl", config.run.steps)
    run = PolicyRun(
        config,
        progress,
        trainer,
        job.observer,
        job.checkpoints,
        job.compute,
        job.stop,
        prompts=prompts,
        engine=engine,
        rewards=rewards,
        algorithm=algorithm,
        sampling=sampling_of(config),
        eos_ids=frozenset(job.tokenizer.eos_ids),
        weights_are_shared=shared,
        evaluate=evaluation,
        gate_passed=False,
    )
    try:
        async with rewards:
            await train_policy(run)
        await finish_stage(job, run)
    finally:
        await engine.close()


async def finish_stage(job: Job, run: SftRun | RewardModelRun | PolicyRun) -> None:
    """Save where the stage ended; when it was not stopped, also its weights as a Hugging Face directory."""
    await run.save()
    if not job.stop.is_set():
        folder = stage_weights(job, run.progress.stage)
        model = run.trainer.model
        save_hf(folder, model.hf_config, run.trainer.master_weights(), job.tokenizer.hf)


def starting_model(job: Job, stage: str) -> CausalModel:
    """The float32 model that a stage begins with: what the stage before it left, else the run file's."""
    stages: tuple[str, ...] = job.config.stages
    before = stages[: stages.index(stage)]
    if not before:
        return named_model(job.config, job.tokenizer, job.base_dir, job.device)
    weights = stage_weights(job, before[-1])
    return load_model(weights, dtype=torch.float32, device=job.device, implementation=job.config.model.implementation)


def named_model(config: RunConfig, tokenizer: Tokenizer, base_dir: Path, device: torch.device) -> CausalModel:
    """The float32 model of the run file: from `model.path`, or `model.init` with the seed's random weights."""
    model = config.model
    dtype, implementation = torch.float32, model.implementation
    if model.init is not None:
        return init_model(
            model.init,
            vocab_size=tokenizer.vocab_size,
            seed=config.seed,
            dtype=dtype,
            device=device,
            implementation=implementation,
        )
    return load_model(
        resolve_model(model.path or "", base_dir),
        dtype=dtype,
        device=device,
        implementation=implementation,
        trust_remote_code=model.trust_remote_code,
    )


def stage_weights(job: Job, stage: str) -> Path:
    """Where a stage leaves its final weights: hf/ for the last one, hf-<stage>/ for one before it."""
    return job.folder.hf if stage == job.config.stages[-1] else job.folder.path / f"hf-{stage}"


def make_trainer(
    job: Job,
    model: CausalModel,
    optimizer: OptimizerSection,
    steps: int,
    reference: CausalModel | None = None,
    critic: Critic | None = None,
) -> LocalTrainer:
    """The trainer of one stage; what is only of RL is neutral for imitation."""
    config, train = job.config, job.config.train
    model.checkpoint_layers = train.activation_checkpointing
    return LocalTrainer(
        model,
        optimizer=optimizer,
        total_optimizer_steps=steps,
        temperature=config.rollout.temperature,
        tokens_per_microbatch=train.tokens_per_microbatch,
        logprob_chunk_tokens=train.logprob_chunk_tokens,
        precision=config.run.precision,
        reference=reference,
        samples_per_optimizer_step=train.samples_per_optimizer_step,
        passes_per_batch=train.passes_per_batch,
        seed=config.seed,
        critic=critic,
        critic_warmup_updates=config.critic.warmup_updates if critic else 0,
        reference_refresh_every=config.algorithm.reference_refresh_every if reference else 0,
    )


def make_critic(job: Job, policy: CausalModel) -> Critic:
    """A critic that starts from `critic.path`, or from a copy of the policy.

    Raises:
        DataError: a model with other tokens than the policy's, whose ids it is given.
    """
    config = job.config
    if config.critic.path is None:
        model = ScalarModel(copy.deepcopy(policy))
    else:
        model = critic_from(resolve_model(config.critic.path, job.base_dir), config, job.device)
    if model.body.vocab_size != policy.vocab_size:
        raise DataError(
            f"critic.path = {config.critic.path}: a vocabulary of {model.body.vocab_size} tokens, the policy's has "
            f"{policy.vocab_size}. The critic reads the policy's token ids: take a model with the same tokenizer."
        )
    model.body.checkpoint_layers = config.train.activation_checkpointing
    return Critic(
        model,
        optimizer=config.critic.optimizer,
        total_optimizer_steps=critic_steps_total(config),
        precision=config.run.precision,
        tokens_per_microbatch=config.train.tokens_per_microbatch,
        value_clip=config.critic.value_clip,
    )


def critic_from(place: str, config: RunConfig, device: torch.device) -> ScalarModel:
    """A reward model with its head, or a language model with a new one."""
    folder = Path(place)
    classes = (read_config(folder).architectures or []) if folder.is_dir() else []
    if any(name.endswith("ForSequenceClassification") for name in classes):
        return load_scalar_model(folder, dtype=torch.float32, device=device)
    body = load_model(
        place,
        dtype=torch.float32,
        device=device,
        implementation=config.model.implementation,
        trust_remote_code=config.model.trust_remote_code,
    )
    return ScalarModel(body)


def restored(trainer: LocalTrainer | PairTrainer, saved: Saved | None) -> Progress | None:
    """Put a checkpoint into the trainer; where it was taken, or None without one."""
    if saved is None:
        return None
    trainer.restore(saved.tensors, saved.rest)
    return saved.progress


async def make_engine(config: RunConfig, tokenizer: Tokenizer, model: CausalModel, base_dir: Path) -> Engine:
    """The embedded engine; with an environment, one whose samples meet it."""
    settings = config.rollout.environment
    environments = EnvironmentPool(settings, base_dir)
    if settings.use is not None:
        await environments.start()
    engine = LocalEngine(
        model,
        decode=tokenizer.decode,
        eos_ids=tokenizer.eos_ids,
        max_concurrent=config.rollout.max_concurrent_samples,
        timeout_s=config.rollout.timeout_s,
    )
    if settings.use is None:
        return engine
    return EpisodeEngine(
        engine,
        environments,
        encode=tokenizer.encode_observation,
        max_turns=settings.max_turns,
        in_step=config.rollout.max_staleness == 0,
    )


def make_rewards(config: RunConfig, base_dir: Path, *, window_samples: int) -> Rewards:
    """The run file's rewards, and the environment's own."""
    has_environment = config.rollout.environment.use is not None
    extra = [Component("environment", 1.0, FromEnvironment())] if has_environment else []
    return Rewards.from_config(config.reward, base_dir, window_samples=window_samples, extra=extra)


def sampling_of(config: RunConfig, *, temperature: float | None = None) -> Sampling:
    """How the run file samples, at another temperature if one is given."""
    rollout = config.rollout
    return Sampling(
        max_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature if temperature is None else temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
    )


def held_out_evaluation(job: Job, engine: Engine, rewards: Rewards) -> Evaluate | None:
    """A function that evaluates the live policy, or None when the run file names no data for it."""
    config = job.config
    if config.data.eval is None:
        return None
    prompts = load_prompts(config.data, job.tokenizer, job.base_dir, seed=config.seed, part="eval")
    job.observer.say(f"evaluating on {prompts.report}")
    sampling = sampling_of(config, temperature=config.eval.temperature)

    async def run() -> dict[str, float]:
        found = await evaluate(engine, rewards, prompts.rows(), sampling, config.eval, seed=config.seed)
        return dict(found.metrics)

    return run


def check_run(loaded: Loaded) -> CheckReport:
    """Everything that `hone check` looks at beyond the configuration."""
    return asyncio.run(preflight.check(loaded))


def evaluate_run(loaded: Loaded, *, model: Path | None = None) -> Evaluation:
    """Sample and score the evaluation data with the run's final weights, or with those in a directory.

    Raises:
        DataError: no evaluation data, or no weights yet.
    """
    config, base_dir = loaded.config, loaded.run_file.parent
    device = set_up_arithmetic(config)
    weights = model or RunFolder(loaded.run_dir).hf
    if not weights.is_dir():
        raise DataError(
            f"{weights}: no weights to evaluate. Train first, export a checkpoint there with `hone export`, "
            "or name a model directory with --model."
        )
    tokenizer = load_tokenizer(config.model, base_dir)
    prompts = load_prompts(config.data, tokenizer, base_dir, seed=config.seed, part="eval")
    dtype = getattr(torch, config.run.precision)
    policy = load_model(weights, dtype=dtype, device=device, implementation=config.model.implementation)
    sampling = sampling_of(config, temperature=config.eval.temperature)

    async def run() -> Evaluation:
        engine = await make_engine(config, tokenizer, policy, base_dir)
        try:
            async with make_rewards(config, base_dir, window_samples=len(prompts)) as rewards:
                return await evaluate(engine, rewards, prompts.rows(), sampling, config.eval, seed=config.seed)
        finally:
            await engine.close()

    try:
        return asyncio.run(run())
    except BaseExceptionGroup as group:
        raise first_cause(group) from group


def export_run(loaded: Loaded, *, to: Path, step: int | None = None) -> Path:
    """Write the weights of a checkpoint as a Hugging Face directory that must not exist yet.

    Args:
        step: of the RL stage (or of the only stage); None takes the newest whole checkpoint.
    """
    if to.exists():
        raise DataError(f"{to} exists. Name a folder that does not; nothing is overwritten.")
    config, base_dir = loaded.config, loaded.run_file.parent
    folder = RunFolder.read(loaded.run_dir)
    checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep)
    saved = checkpoints.newest() if step is None else checkpoints.at(config.stages[-1], step)
    if saved is None:
        raise DataError(f"{folder.checkpoints}: no checkpoint yet. The run writes one every checkpoint.every updates.")
    tokenizer = load_tokenizer(config.model, base_dir)
    model = named_model(config, tokenizer, base_dir, torch.device("cpu"))
    if saved.progress.stage == "reward_model":
        model = scalar_model(config, tokenizer, model)
    FlatWeights(model, torch.float32).master.copy_(saved.tensors["master"])
    save_hf(to, model.hf_config, model.named_weights(), tokenizer.hf)
    return to


def tell_where_it_starts(job: Job, saved: Saved | None) -> None:
    """What a person wants to know of a start: moved folders, skipped checkpoints, where it goes on."""
    if job.folder.moved_aside is not None:
        job.observer.say(f"the run that was here is now in {job.folder.moved_aside}")
    if saved is not None:
        for torn in saved.skipped:
            job.observer.warn(f"checkpoint skipped: {torn}")
        job.observer.say(f"resuming from {saved.path} ({saved.progress.stage} step {saved.progress.step})")
    elif job.folder.resumed:
        job.observer.say("no checkpoint yet: starting from the beginning")


@contextlib.contextmanager
def signals_ask_to_stop(stop: asyncio.Event, observer: Observer) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks for a clean end, a second one ends the process at once."""

    def handle() -> None:
        if stop.is_set():
            os._exit(Stopped.exit_code)
        observer.say("stopping: the step in flight is finished or dropped, then a checkpoint; again to exit at once")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def first_cause(group: BaseExceptionGroup) -> BaseException:
    """The failure to show of several that happened together: one of ours if there is any."""
    pending: list[BaseException] = [group]
    leaves: list[BaseException] = []
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, HoneError)), leaves[0])
