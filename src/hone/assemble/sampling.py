"""Engine, rewards and evaluation of an RL stage, or of `hone eval`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from hone.assemble.job import Job
from hone.assemble.memory import engine_knobs
from hone.config.run import RunConfig
from hone.data.chat import Tokenizer
from hone.data.prompts import PromptStream, load_prompts, seen_frac
from hone.devices import is_accelerator
from hone.loop.evaluate import evaluate
from hone.memory.gauges import capacity_of
from hone.memory.guard import UNGUARDED
from hone.memory.ladder import Ladder
from hone.model.base import CausalModel
from hone.model.decoder import Decoder
from hone.plan.kv_cache import cache_room
from hone.plan.workload import share_of, workload_of
from hone.reward.aggregate import FromEnvironment
from hone.reward.http import Addresses
from hone.reward.rewards import Component, Rewards, Scorer
from hone.rollout.engine import Engine, Sampling
from hone.rollout.env_pool import EnvironmentPool
from hone.rollout.episodes import EpisodeEngine
from hone.rollout.local import LocalEngine, counted, refuse_to_compile


async def make_engine(config: RunConfig, tokenizer: Tokenizer, model: CausalModel, base_dir: Path) -> Engine:
    """The embedded engine on a thread of its own; with an environment, one whose samples meet it."""
    return await with_environment(config, tokenizer, base_dir, embedded_engine(config, tokenizer, model))


def embedded_engine(
    config: RunConfig,
    tokenizer: Tokenizer,
    model: CausalModel,
    executor: Executor | None = None,
    ladder: Ladder | None = None,
    *,
    among: tuple[int, int] = (1, 1),
) -> LocalEngine:
    """Hone's own engine; arguments as in `make_engine`.

    Args:
        among: engines that share the run's samples, and devices that share this machine's memory if it computes.
    """
    if config.rollout.compile:
        refuse_to_compile(model)
        assert isinstance(model, Decoder)
        model.compile_inference()
    device = model.output_weight.device
    replicas, devices_each = among
    memory = ladder.limit_bytes if ladder is not None else capacity_of(device)
    room = cache_room(
        config,
        share_of(workload_of(config), replicas),
        counted(model),
        bytes_each=model.output_weight.element_size(),
        memory_bytes=memory if is_accelerator(device) else memory // devices_each,
        shares_prompts=isinstance(model, Decoder),
    )
    engine = LocalEngine(
        model,
        room=room,
        decode=tokenizer.decode,
        eos_ids=tokenizer.eos_ids,
        max_concurrent=config.rollout.max_concurrent_samples,
        timeout_s=config.rollout.timeout_s,
        executor=executor,
        prefill_tokens=config.rollout.prefill_tokens,
        guard=ladder or UNGUARDED,
        records_routing=config.algorithm.replay_routing and "rl" in config.stages,
        enforce_eager=bool(config.cluster.engines.enforce_eager),
    )
    if ladder is not None:
        ladder.bind(*engine_knobs(engine, config))
    return engine


async def with_environment(config: RunConfig, tokenizer: Tokenizer, base_dir: Path, engine: Engine) -> Engine:
    """An engine whose samples meet the run file's environment; the engine itself where there is none."""
    settings = config.rollout.environment
    if settings.use is None:
        return engine
    environments = EnvironmentPool(settings, base_dir)
    await environments.start()
    return EpisodeEngine(
        engine,
        environments,
        encode=tokenizer.encode_observation,
        max_turns=settings.max_turns,
        in_step=config.rollout.max_staleness == 0,
    )


def make_rewards(
    config: RunConfig,
    base_dir: Path,
    *,
    window_samples: int,
    services: Addresses = MappingProxyType({}),
    elsewhere: Mapping[str, Scorer] = MappingProxyType({}),
) -> Rewards:
    """The run file's rewards, and the environment's own; arguments as of `Rewards.from_config`."""
    has_environment = config.rollout.environment.use is not None
    extra = [Component("environment", 1.0, FromEnvironment())] if has_environment else []
    return Rewards.from_config(
        config.reward,
        base_dir,
        window_samples=window_samples,
        extra=extra,
        services=services,
        elsewhere=elsewhere,
    )


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


def evaluation_sampling(config: RunConfig) -> Sampling:
    """How evaluation samples: as `eval` says, and where it says nothing as `rollout`."""
    sampling = sampling_of(config, temperature=config.eval.temperature)
    top_k = sampling.top_k if config.eval.top_k is None else config.eval.top_k
    return replace(sampling, top_k=top_k, top_p=sampling.top_p if config.eval.top_p is None else config.eval.top_p)


def held_out_evaluation(
    job: Job, engine: Engine, rewards: Rewards, train: PromptStream
) -> Callable[[], Awaitable[dict[str, float]]] | None:
    """A function that evaluates the live policy, or None when the run file names no data for it.

    Args:
        train: what the policy learns from; evaluations say how many of their prompts are among it.
    """
    config = job.config
    if config.data.eval is None:
        return None
    stream = load_prompts(config.data, job.tokenizer, job.base_dir, seed=config.seed, part="eval", cache=job.data_cache)
    job.observer.say(f"evaluating on {stream.report}")
    prompts, seen = tuple(stream.rows()), seen_frac(stream.rows(), train.rows())
    sampling = evaluation_sampling(config)

    async def run() -> dict[str, float]:
        found = await evaluate(engine, rewards, prompts, sampling, config.eval, seed=config.seed)
        return {**found.metrics, "eval/seen_frac": seen}

    return run
