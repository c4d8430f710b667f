"""The part with engines alone: Hone's own and vLLM draw the same requests, in speed and against the trainer."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from hone.config.engine import EngineSection
from hone.data.pack import collate
from hone.devices import devices_here, give_back_memory
from hone.model.base import CausalModel
from hone.model.load import init_model, save_hf
from hone.plan.kv_cache import CacheRoom
from hone.rollout.engine import Engine, Request
from hone.rollout.local import LocalEngine, most_tokens
from hone.rollout.vllm import VllmEngine
from hone.rollout.vllm_args import VllmPlace
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import (
    NO_ACCELERATOR,
    PROMPT,
    RUN_TIMEOUT_S,
    SMALL,
    PartSetting,
    make_trainer,
    random_requests,
    shape_of,
)
from hone.tools.acceptance.usage import DeviceUsage, use_figures, watching
from hone.train.policy import PolicyTrainer
from hone.types import Group

STEP_TIMEOUT_S, PREFILL_TOKENS = 120.0, 16384
WARM_TOKENS, WATCHED_TOKENS, COMPARED_GROUPS = 16, 48, 4


def engines(setting: PartSetting) -> Iterator[Figure]:
    """64 prompts with 8 samples each of 256 to 2,048 tokens, in Hone's engine, and in vLLM where it is installed."""
    prompts, group, shortest, longest = (4, 2, 4, 16) if setting.tiny else (64, 8, 256, 2048)
    shape = SMALL if setting.tiny else shape_of("0.6b")
    dtype = "bfloat16" if setting.is_gpu and devices_here("auto").bfloat16 else "float32"
    model = init_model(shape, vocab_size=None, seed=0, dtype=getattr(torch, dtype), device=setting.device)
    lengths = np.linspace(shortest, longest, prompts, dtype=int).tolist()
    requests = random_requests(model.vocab_size, lengths, group)
    what = f"{prompts} prompts x {group}, {shortest} to {longest} tokens, {dtype}"
    with TemporaryDirectory(prefix="hone-gpu-") as name:
        save_hf(Path(name), model.hf_config, model.named_weights())
        own = asyncio.run(drawn_by(partial(start_own, model, requests), requests, setting))
        give_back_memory()
        trainer = make_trainer(model, dtype, setting.budget)
        yield from figures_of("hone", what, own, trainer)
        if not setting.is_gpu:
            yield Figure("engines", "left_out", 1.0, "kernels and waiting", NO_ACCELERATOR)
        if importlib.util.find_spec("vllm") is None:
            yield Figure("engines", "left_out", 1.0, "vllm", "vLLM is not installed")
            return
        place = VllmPlace(
            Path(name), dtype, PROMPT + longest, max_concurrent=prompts * group, prefill_tokens=PREFILL_TOKENS
        )
        theirs = asyncio.run(drawn_by(partial(start_vllm, place), requests, setting))
        yield from figures_of("vllm", what, theirs, trainer)
        yield Figure("engines", "engine_ratio", own.tokens_per_s / theirs.tokens_per_s, what)


@dataclass(frozen=True, slots=True)
class EngineAnswers:
    """What an engine made of all requests."""

    groups: Sequence[Group]
    seconds: float
    use: DeviceUsage | None
    """Of the device, by short samples; None without one."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [len(sample.token_ids) for group in self.groups for sample in group.samples]

    @property
    def tokens_per_s(self) -> float:
        return sum(self.lengths) / self.seconds


def figures_of(use: str, what: str, answers: EngineAnswers, trainer: PolicyTrainer) -> Iterator[Figure]:
    """An engine's speed, and how far its logprobs are from the trainer's with some of its samples."""
    case = f"{use}, {what}"
    yield Figure("engines", "engine_tokens_per_s", answers.tokens_per_s, case)
    yield Figure("engines", "engine_step_ms", 1000 * answers.seconds / max(answers.lengths), case)
    if answers.use is not None:
        yield from use_figures("engines", answers.use, f"{use}, samples of {WATCHED_TOKENS} tokens")
    compared = answers.groups[:COMPARED_GROUPS]
    batch = collate([group.scored({}, (0.0,) * len(group.samples)) for group in compared])
    gap = (trainer.logprobs(batch).cpu() - batch.sampler_logprobs_T).abs().mean()
    yield Figure("engines", "gate_gap", float(gap), case)


async def drawn_by(
    start: Callable[[], Awaitable[Engine]], requests: Sequence[Request], setting: PartSetting
) -> EngineAnswers:
    """A new engine answers all requests, sent at once, after short ones for the same prompts."""
    engine, use = await start(), None
    try:
        await asyncio.gather(*map(engine.generate, shortened(requests, WARM_TOKENS)))
        started = time.perf_counter()
        samples = await asyncio.gather(*map(engine.generate, requests))
        seconds = time.perf_counter() - started
        if setting.is_gpu:
            with watching() as use:
                await asyncio.gather(*map(engine.generate, shortened(requests, WATCHED_TOKENS)))
    finally:
        await engine.close()
    groups = [Group(request.prompt, own) for request, own in zip(requests, samples, strict=True)]
    return EngineAnswers(groups, seconds, use)


def shortened(requests: Sequence[Request], tokens: int) -> list[Request]:
    """The same for samples of so many tokens."""
    return [replace(one, sampling=replace(one.sampling, max_tokens=tokens)) for one in requests]


async def start_own(model: CausalModel, requests: Sequence[Request]) -> LocalEngine:
    """Hone's engine with room for the requests, within the share of the device that a run gives its cache."""
    samples = sum(request.num_samples for request in requests)
    longest = max(request.sampling.max_tokens for request in requests)
    return LocalEngine(
        model,
        decode=str,
        eos_ids=(),
        max_concurrent=samples,
        timeout_s=STEP_TIMEOUT_S,
        room=CacheRoom(PROMPT, longest, len(requests), samples, most_tokens(model, samples)),
        prefill_tokens=PREFILL_TOKENS,
    )


async def start_vllm(place: VllmPlace) -> VllmEngine:
    """vLLM with the share of the device that a run gives it."""
    return await VllmEngine.start(
        place, EngineSection(), decode=str, eos_ids=(), timeout_s=STEP_TIMEOUT_S, start_timeout_s=RUN_TIMEOUT_S
    )
