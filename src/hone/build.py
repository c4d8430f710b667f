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
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from hone.algo.algorithm import Algorithm
from hone.config.derived import (
    correction,
    critic_steps_total,
    longest_tokens,
    optimizer_steps_total,
    samples_per_update,
    trains_adapter,
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
from hone.model.lora import AdapterOff, add_adapter, merged_copy, save_adapter
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
from hone.train.local import LocalTrainer, refuse_other_base
from hone.train.optim import FlatWeights
from hone.train.pairs import PairTrainer
from hone.types import Progress

T = TypeVar("T")
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

    async def computed(self, work: Callable[[], T]) -> T:
        """Work done on the compute thread. All arithmetic belongs there: see `rollout.worker` for why."""
        return await asyncio.get_running_loop().run_in_executor(self.compute, work)


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
    """Threads, kernel caches, and the device that `run` asks for."""
    # oneDNN keeps a compiled kernel for every shape it meets, and packed token counts hardly ever repeat: without a
    # bound, training in bfloat16 grew by 18 MiB a step.
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "64")
    torch.set_num_threads(config.run.threads or len(os.sched_getaffinity(0)))
    wanted = config.run.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise DataError("run.device = cuda, but torch sees no GPU. Set run.device=cpu, or check the driver.")
    if wanted == "cpu":
        with ThreadPoolExecutor(1) as passing:  # its OpenMP threads end with it
            passing.submit(use_fast_float32_products).result()
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
    model = with_adapter(job.config, starting_model(job, "sft"), "sft")
    trainer = make_trainer(job, model, job.config.sft.optimizer, steps)
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
    shared = config.rollout.max_staleness == 0

    def assemble() -> tuple[LocalTrainer, CausalModel]:
        model = starting_model(job, "rl")
        critic = make_critic(job, model) if "values" in algorithm.needs else None
        model = with_adapter(config, model, "rl")
        reference = make_reference(model) if "ref_logprobs" in algorithm.needs else None
        trainer = make_trainer(job, model, config.train.optimizer, optimizer_steps_total(config), reference, critic)
        restored(trainer, saved)
        if not shared and job.device.type == "cpu":  # sampling and training at the same time: half the cores each
            torch.set_num_threads(max(1, torch.get_num_threads() // 2))
        return trainer, trainer.model if shared else merged_copy(trainer.model)

    trainer, sampled = await job.computed(assemble)
    executor = job.compute if shared else None
    engine = await make_engine(config, job.tokenizer, sampled, job.base_dir, executor)
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
        export_best(job, run)
    finally:
        await engine.close()


async def finish_stage(job: Job, run: SftRun | RewardModelRun | PolicyRun) -> None:
    """Save where the stage ended; when it was not stopped, also its weights as a Hugging Face directory."""
    await run.save()
    if not job.stop.is_set():
        folder = stage_weights(job.folder, job.config, run.progress.stage)
        config, tokenizer = run.trainer.model.hf_config, job.tokenizer.hf
        await job.computed(lambda: save_hf(folder, config, run.trainer.master_weights(), tokenizer))


def export_best(job: Job, run: PolicyRun) -> None:
    """Leave the weights of the step where `checkpoint.best` was highest in hf-best/. The trainer holds them then."""
    step = run.progress.best_step
    if step is None or job.config.checkpoint.best is None or job.stop.is_set():
        return
    saved = job.checkpoints.at("rl", step)
    run.trainer.restore(saved.tensors, saved.rest)
    save_hf(job.folder.hf_best, run.trainer.model.hf_config, run.trainer.master_weights(), job.tokenizer.hf)
    value = f"{job.config.checkpoint.best} = {run.progress.best_value:.4g}"
    job.observer.say(f"best weights: {job.folder.hf_best} ({value}, step {step})")


def starting_model(job: Job, stage: str) -> CausalModel:
    """The float32 model that a stage begins with: what the stage before it left, else the run file's."""
    return model_before(stage, job.loaded, job.folder, job.tokenizer, job.device)


def model_before(
    stage: str, loaded: Loaded, folder: RunFolder, tokenizer: Tokenizer, device: torch.device
) -> CausalModel:
    """As `starting_model`, where no job is running."""
    weights = weights_before(stage, loaded.config, folder)
    if weights is None:
        return named_model(loaded.config, tokenizer, loaded.run_file.parent, device)
    return load_model(weights, dtype=torch.float32, device=device, implementation=loaded.config.model.implementation)


def weights_before(stage: str, config: RunConfig, folder: RunFolder) -> Path | None:
    """Where the stage before this one left its weights; None when there is none before it."""
    stages: tuple[str, ...] = config.stages
    before = stages[: stages.index(stage)]
    return stage_weights(folder, config, before[-1]) if before else None


def with_adapter(config: RunConfig, model: CausalModel, stage: str) -> CausalModel:
    """The model, frozen and with a new adapter in it, if the stage trains one."""
    if trains_adapter(config, stage):
        add_adapter(model, config.lora, seed=config.seed, dtype=getattr(torch, config.run.precision))
    return model


def make_reference(model: CausalModel) -> CausalModel:
    """The policy as it is now, which will not change: beneath its adapter it never does."""
    return AdapterOff(model) if model.adapter else copy.deepcopy(model)


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


def stage_weights(folder: RunFolder, config: RunConfig, stage: str) -> Path:
    """Where a stage leaves its final weights: hf/ for the last one, hf-<stage>/ for one before it."""
    return folder.hf if stage == config.stages[-1] else folder.path / f"hf-{stage}"


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
    trainer = LocalTrainer(
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
    if model.adapter is not None:
        trained = trainer.flat.master.numel()
        job.observer.say(f"training an adapter of {trained:,} parameters; the weights beneath it stay as they are")
    return trainer


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


async def make_engine(
    config: RunConfig, tokenizer: Tokenizer, model: CausalModel, base_dir: Path, executor: Executor | None = None
) -> Engine:
    """The embedded engine, computing on a thread of `executor`; with an environment, one whose samples meet it."""
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
        executor=executor,
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


def export_run(loaded: Loaded, *, to: Path, step: int | None = None, best: bool = False, adapter: bool = False) -> Path:
    """Write the weights of a checkpoint as a Hugging Face directory that must not exist yet.

    Args:
        step: of the RL stage (or of the only stage); None takes the newest whole checkpoint.
        best: take the step where `checkpoint.best` was highest instead.
        adapter: write the adapter alone, in peft's format; else what it was learnt beside, with it merged in.
    """
    if to.exists():
        raise DataError(f"{to} exists. Name a folder that does not; nothing is overwritten.")
    folder = RunFolder.read(loaded.run_dir)
    saved = wanted_checkpoint(loaded.config, folder, step, best=best)
    tokenizer = load_tokenizer(loaded.config.model, loaded.run_file.parent)
    model = model_of(saved, loaded, folder, tokenizer)
    if adapter:
        if not isinstance(model, CausalModel) or model.adapter is None:
            raise DataError(f"{saved.path}: stage {saved.progress.stage} trained every weight: there is no adapter.")
        place = weights_before(saved.progress.stage, loaded.config, folder)
        named = resolve_model(loaded.config.model.path or "", loaded.run_file.parent) if place is None else place
        save_adapter(to, model, str(Path(named).resolve()) if Path(named).is_dir() else str(named))
    else:
        save_hf(to, model.hf_config, ((name, w.float()) for name, w in model.named_weights()), tokenizer.hf)
    return to


def wanted_checkpoint(config: RunConfig, folder: RunFolder, step: int | None, *, best: bool) -> Saved:
    """The checkpoint that was asked for; the newest whole one if none was."""
    checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep)
    if step is not None and best:
        raise DataError("--step and --best exclude each other; choose one.")
    if step is not None:
        return checkpoints.at(config.stages[-1], step)
    saved = checkpoints.newest()
    if saved is None:
        raise DataError(f"{folder.checkpoints}: no checkpoint yet. The run writes one every checkpoint.every updates.")
    if not best:
        return saved
    if saved.progress.best_step is None:
        raise DataError(
            f"{folder.checkpoints}: no step is known as the best. Set checkpoint.best to a metric of evaluation, "
            "such as eval/accuracy, and go on with --resume."
        )
    return checkpoints.at("rl", saved.progress.best_step)


def model_of(saved: Saved, loaded: Loaded, folder: RunFolder, tokenizer: Tokenizer) -> CausalModel | ScalarModel:
    """The model that a checkpoint was taken of, on the CPU, at the precision of its master weights."""
    config, stage, device = loaded.config, saved.progress.stage, torch.device("cpu")
    if trains_adapter(config, stage):
        model = with_adapter(config, model_before(stage, loaded, folder, tokenizer, device), stage)
        refuse_other_base(model, saved.rest)
    else:
        model = named_model(config, tokenizer, loaded.run_file.parent, device)
    if stage == "reward_model":
        model = scalar_model(config, tokenizer, model)
    FlatWeights(model, torch.float32).master.copy_(saved.tensors["master"])
    return model


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
