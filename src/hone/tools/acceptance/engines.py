"""Parts with engines: Hone's own and vLLM on the same requests, vLLM that sleeps, and pictures in vLLM."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from hone.config.cluster import ClusterSection
from hone.config.engine import EngineSection
from hone.data.chat import character_tokenizer
from hone.data.pack import collate
from hone.devices import give_back_memory, module_of
from hone.model.base import CausalModel
from hone.model.fingerprint import weights_fingerprint
from hone.model.hf import TransformersModel
from hone.model.load import save_hf
from hone.plan.kv_cache import CacheRoom
from hone.rollout.engine import Engine, Request, Sampling
from hone.rollout.local import LocalEngine, most_tokens
from hone.rollout.vllm import VllmEngine
from hone.rollout.vllm_args import VllmPlace
from hone.sizes import GIB
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import (
    NO_ACCELERATOR,
    PROMPT,
    RUN_TIMEOUT_S,
    SMALL,
    TINY,
    PartSetting,
    make_trainer,
    random_model,
    random_requests,
    shape_of,
)
from hone.tools.acceptance.usage import DeviceUsage, use_figures, watching
from hone.train.policy import PolicyTrainer
from hone.types import Group, Picture, Prompt
from hone.weights.buckets import Packer, bucket_bytes
from hone.weights.publish import Update
from hone.weights.receive import Receiver

STEP_TIMEOUT_S, PREFILL_TOKENS = 120.0, 16384
WARM_TOKENS, WATCHED_TOKENS, COMPARED_GROUPS = 16, 48, 4


def engines(setting: PartSetting) -> Iterator[Figure]:
    """64 prompts with 8 samples each of 256 to 2,048 tokens, in Hone's engine, and in vLLM where it is installed."""
    prompts, group, shortest, longest = (4, 2, 4, 16) if setting.tiny else (64, 8, 256, 2048)
    shape = SMALL if setting.tiny else shape_of("0.6b")
    dtype = setting.precision
    model = random_model(shape, setting.device, dtype=getattr(torch, dtype))
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
    yield Figure("engines", "gate_gap", gap(trainer, answers.groups[:COMPARED_GROUPS]), case)


def gap(trainer: PolicyTrainer, groups: Sequence[Group]) -> float:
    """Mean difference of an engine's logprobs from those of a trainer with the weights that it has, nats."""
    batch = collate([group.scored({}, (0.0,) * len(group.samples)) for group in groups])
    return float((trainer.logprobs(batch).cpu() - batch.sampler_logprobs_T).abs().mean())


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
    """These requests for samples of at most `tokens` tokens."""
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
        place,
        EngineSection(),
        decode=str,
        eos_ids=(),
        timeout_s=STEP_TIMEOUT_S,
        start_timeout_s=RUN_TIMEOUT_S,
    )


SEEDS = (1, 0)
"""Weights of other seeds than the engine started with, and those that it started with."""


@dataclass(frozen=True, slots=True)
class Slept:
    """One sleep, and what came after it."""

    sleep_s: float
    asleep_bytes: int
    """Of the device, beyond those before the engine started; 0 without one."""
    reload_s: float
    """From the first byte of new weights until it was awake."""
    has_right_weights: bool
    groups: Sequence[Group]
    """Drawn afterwards."""


def sleeping(setting: PartSetting) -> Iterator[Figure]:
    """An engine that takes turns sleeps twice, and is given other weights, then its first ones."""
    if importlib.util.find_spec("vllm") is None:
        yield Figure("sleeping", "left_out", 1.0, "vllm", "vLLM is not installed")
        return
    if not setting.is_gpu:
        yield Figure("sleeping", "left_out", 1.0, "memory", NO_ACCELERATOR)
    shape = SMALL if setting.tiny else shape_of("0.6b")
    dtype = setting.precision
    prompts, group, tokens = (2, 2, 8) if setting.tiny else (16, 8, 128)
    requests = random_requests(shape["vocab_size"], [tokens] * prompts, group)
    with TemporaryDirectory(prefix="hone-gpu-") as name:
        first = made(shape, 0, dtype, torch.device("cpu"))
        save_hf(Path(name), first.hf_config, first.named_weights())
        place = VllmPlace(
            Path(name), dtype, PROMPT + tokens, max_concurrent=prompts * group, prefill_tokens=4096, takes_turns=True
        )
        slept = asyncio.run(sleeps(setting, place, shape, requests))
    give_back_memory()
    for seed, one in zip(SEEDS, slept, strict=True):
        case = f"{'the first' if seed == 0 else 'other'} weights, {dtype}"
        yield Figure("sleeping", "sleep_s", one.sleep_s, case)
        if setting.is_gpu:
            yield Figure("sleeping", "asleep_gib", one.asleep_bytes / GIB, case)
        yield Figure("sleeping", "reload_s", one.reload_s, case)
        yield Figure("sleeping", "held_versions", float(one.has_right_weights), case)
        difference = gap(make_trainer(made(shape, seed, dtype, setting.device), dtype, setting.budget), one.groups)
        yield Figure("sleeping", "gate_gap", difference, case)


def made(shape: Mapping[str, Any], seed: int, dtype: str, device: torch.device) -> CausalModel:
    """Random weights as they are published."""
    return random_model(shape, device, dtype=getattr(torch, dtype), seed=seed)


def used_bytes(setting: PartSetting) -> int:
    """Memory of the device that all processes use, this one with its context; 0 without one."""
    if not setting.is_gpu:
        return 0
    free, total = module_of(setting.device).mem_get_info()  # begins to use the device where nothing has so far
    return total - free


async def sleeps(
    setting: PartSetting, place: VllmPlace, shape: Mapping[str, Any], requests: Sequence[Request]
) -> list[Slept]:
    """vLLM, which has drawn before its first sleep."""
    before = used_bytes(setting)
    engine, found = await start_vllm(place), list[Slept]()
    try:
        await asyncio.gather(*map(engine.generate, requests))
        for version, seed in enumerate(SEEDS, 1):
            weights = made(shape, seed, setting.precision, torch.device("cpu"))
            started = time.perf_counter()
            await engine.sleep()
            sleep_s, asleep_bytes = time.perf_counter() - started, used_bytes(setting) - before
            started = time.perf_counter()
            held = await loaded(engine, weights, version)
            await engine.wake()
            reload_s = time.perf_counter() - started
            samples = await asyncio.gather(*map(engine.generate, requests))
            found.append(
                Slept(
                    sleep_s,
                    asleep_bytes,
                    reload_s,
                    held == weights_fingerprint(weights.named_weights()),
                    [Group(request.prompt, own) for request, own in zip(requests, samples, strict=True)],
                )
            )
    finally:
        await engine.close()
    return found


async def loaded(engine: VllmEngine, weights: CausalModel, version: int) -> str:
    """Publish weights to an engine of this process, as they come from Ray's object store. Returns the fingerprint of
    what it holds."""
    receiver, update = Receiver(engine, timeout_s=STEP_TIMEOUT_S), Update(f"sleeping {version}", version)
    packer = Packer(bucket_bytes(ClusterSection().bucket_mib), lambda size: torch.empty(size, dtype=torch.uint8))
    await receiver.begin(update)
    for bucket in packer.pack(weights.named_weights()):
        await receiver.load(update.id, 0, bucket.header, bucket.data.numpy())
    return await receiver.commit(update.id, 0, packer.manifest(version))


TEXT = {
    **{name: TINY[name] for name in ("vocab_size", "intermediate_size", "num_hidden_layers")},
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
TOWER = {"depth": 2, "hidden_size": 128, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 128}
ANGLES = {"rope_type": "default", "rope_theta": 1e6}
SEEING: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": {**ANGLES, "mrope_section": [8, 12, 12]}},
        "vision_config": {**TOWER, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "text_config": {
            **TEXT,
            "rope_parameters": {**ANGLES, "mrope_section": [12, 10, 10], "mrope_interleaved": True},
        },
        "vision_config": {**TOWER, "deepstack_visual_indexes": [0]},
    },
}
"""Keys by model type: with positions in sections, and interleaved with features for deeper layers."""
SEEING_MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


def pictures(setting: PartSetting) -> Iterator[Figure]:
    """Prompts with 0, 1 and 3 pictures in vLLM, against the trainer's logprobs of the same samples."""
    if importlib.util.find_spec("vllm") is None:
        yield Figure("pictures", "left_out", 1.0, note="vLLM is not installed")
        return
    for kind in SEEING:
        yield from pictures_of(setting, kind)


def pictures_of(setting: PartSetting, kind: str) -> Iterator[Figure]:
    """Of one model type."""
    precision = setting.precision
    with TemporaryDirectory(prefix="hone-gpu-") as name:
        model = saved_seeing_model(Path(name), kind, setting.device)
        trainer = make_trainer(model, precision, 4096)
        place = VllmPlace(
            Path(name),
            precision,
            longest_tokens=1024,
            max_concurrent=64,
            prefill_tokens=4096,
            picture_pixels=(28 * 28, 28 * 28 * 256),
        )
        for group in asyncio.run(seen_by_vllm(place, seeing_prompts(model))):
            case = f"{kind}, {len(group.prompt.pictures)} pictures, vllm, {precision}"
            yield Figure("pictures", "gate_gap", gap(trainer, [group]), case)


def saved_seeing_model(folder: Path, kind: str, device: torch.device) -> TransformersModel:
    """A random vision-language model, and its directory with what vLLM reads beside the weights."""
    tokenizer = character_tokenizer("0123456789")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SEEING_MARKS)})
    ids = [tokenizer.convert_tokens_to_ids(mark) for mark in SEEING_MARKS]
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    keys = {"model_type": kind, "tie_word_embeddings": False, **SEEING[kind], **dict(zip(names, ids, strict=True))}
    model = random_model(keys, device)
    assert isinstance(model, TransformersModel)
    for _, weight in model.named_weights():
        if weight.dim() > 1:  # so large that a picture changes what comes next
            weight.normal_(0.0, weight[0].numel() ** -0.5)
    processor = {"preprocessor_config.json": json.dumps({"image_processor_type": "Qwen2VLImageProcessor"})}
    save_hf(folder, model.hf_config, model.named_weights(), tokenizer, eos_ids=(), processor=processor)
    return model


def seeing_prompts(model: TransformersModel) -> list[Prompt]:
    """With 0, 1 and 3 pictures of noise of different sizes."""
    assert model.vision is not None
    keys: Any = model.hf_config
    found, side = [], model.vision.tower.side
    for index, sizes in enumerate(([], [(4, 6)], [(2, 3), (8, 5), (1, 7)])):
        ids, placed = [1, 2, 3 + index], list[Picture]()
        for rows, columns in sizes:
            read = partial(noise, rows * side, columns * side)
            start, digest = len(ids) + 1, f"noise {rows} {columns}"
            placed.append(Picture(digest, start, rows, columns, (0.5,) * 3, (0.25,) * 3, read))
            ids += [keys.vision_start_token_id, *[keys.image_token_id] * rows * columns, keys.vision_end_token_id]
        found.append(Prompt(str(index), index, "", np.array([*ids, 4, 5], np.int32), pictures=tuple(placed)))
    return found


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng([height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)


async def seen_by_vllm(place: VllmPlace, prompts: Sequence[Prompt]) -> list[Group]:
    """A group of vLLM's samples of each prompt."""
    engine = await start_vllm(place)
    sampling = Sampling(16, 1.0, top_k=0, top_p=1.0, min_p=0.0, stop=(), stop_token_ids=())
    requests = [Request(prompt, 4, sampling, seed=0, stream="train") for prompt in prompts]
    try:
        samples = await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()
    return [Group(prompt, own) for prompt, own in zip(prompts, samples, strict=True)]
