"""The part on vLLM that sleeps while others use its memory: weights are thrown away, and come again before it wakes."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hone.config.cluster import ClusterSection
from hone.config.engine import EngineSection
from hone.data.pack import collate
from hone.devices import devices_here, give_back_memory, used_and_total_bytes
from hone.memory.gauges import GIB
from hone.model.base import CausalModel
from hone.model.fingerprint import weights_fingerprint
from hone.model.load import init_model, save_hf
from hone.rollout.engine import Request
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
from hone.types import Group
from hone.weights.buckets import Packer, bucket_bytes
from hone.weights.publish import Update
from hone.weights.receive import Receiver

TIMEOUT_S, SEEDS = 120.0, (1, 0)
"""Weights of other seeds than the engine started with, and those that it started with."""


@dataclass(frozen=True, slots=True)
class Slept:
    """One sleep, and what came after it."""

    sleep_s: float
    asleep_bytes: int | None
    """Of the device, beyond those before the engine started; None without one."""
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
    dtype = "bfloat16" if setting.is_gpu and devices_here("auto").bfloat16 else "float32"
    prompts, group, tokens = (2, 2, 8) if setting.tiny else (16, 8, 128)
    requests = random_requests(shape["vocab_size"], [tokens] * prompts, group)
    with TemporaryDirectory(prefix="hone-gpu-") as name:
        first = made(shape, 0, dtype, torch.device("cpu"))
        save_hf(Path(name), first.hf_config, first.named_weights())
        place = VllmPlace(
            Path(name), dtype, PROMPT + tokens, max_concurrent=prompts * group, prefill_tokens=4096, takes_turns=True
        )
        slept = asyncio.run(sleeps(place, shape, dtype, requests))
    give_back_memory()
    for seed, one in zip(SEEDS, slept, strict=True):
        case = f"{'the first' if seed == 0 else 'other'} weights, {dtype}"
        yield from figures_of(one, case)
        yield Figure("sleeping", "gate_gap", gap(setting, shape, seed, dtype, one.groups), case)


def made(shape: Mapping[str, Any], seed: int, dtype: str, device: torch.device) -> CausalModel:
    """Random weights as they are published."""
    return init_model(shape, vocab_size=None, seed=seed, dtype=getattr(torch, dtype), device=device)


def figures_of(slept: Slept, case: str) -> Iterator[Figure]:
    """Of one sleep."""
    yield Figure("sleeping", "sleep_s", slept.sleep_s, case)
    if slept.asleep_bytes is not None:
        yield Figure("sleeping", "asleep_gib", slept.asleep_bytes / GIB, case)
    yield Figure("sleeping", "reload_s", slept.reload_s, case)
    yield Figure("sleeping", "held_versions", float(slept.has_right_weights), case)


def gap(setting: PartSetting, shape: Mapping[str, Any], seed: int, dtype: str, groups: Sequence[Group]) -> float:
    """Mean difference of the engine's logprobs from those of a trainer with the weights that it was given."""
    trainer = make_trainer(made(shape, seed, dtype, setting.device), dtype, setting.budget)
    batch = collate([group.scored({}, (0.0,) * len(group.samples)) for group in groups])
    return float((trainer.logprobs(batch).cpu() - batch.sampler_logprobs_T).abs().mean())


async def sleeps(place: VllmPlace, shape: Mapping[str, Any], dtype: str, requests: Sequence[Request]) -> list[Slept]:
    """vLLM, which has drawn before its first sleep."""
    before = used_bytes()
    engine = await VllmEngine.start(
        place,
        EngineSection(sleep_level=2),
        decode=str,
        eos_ids=(),
        timeout_s=TIMEOUT_S,
        start_timeout_s=RUN_TIMEOUT_S,
    )
    found = list[Slept]()
    try:
        await asyncio.gather(*map(engine.generate, requests))
        for version, seed in enumerate(SEEDS, 1):
            weights = made(shape, seed, dtype, torch.device("cpu"))
            started = time.perf_counter()
            await engine.sleep()
            sleep_s, asleep = time.perf_counter() - started, used_bytes()
            started = time.perf_counter()
            held = await loaded(engine, weights, version)
            await engine.wake()
            reload_s = time.perf_counter() - started
            samples = await asyncio.gather(*map(engine.generate, requests))
            found.append(
                Slept(
                    sleep_s,
                    None if asleep is None or before is None else asleep - before,
                    reload_s,
                    held == weights_fingerprint(weights.named_weights()),
                    [Group(request.prompt, own) for request, own in zip(requests, samples, strict=True)],
                )
            )
    finally:
        await engine.close()
    return found


def used_bytes() -> int | None:
    """Memory of the device that is in use, by whomever."""
    found = used_and_total_bytes()
    return None if found is None else found[0]


async def loaded(engine: VllmEngine, weights: CausalModel, version: int) -> str:
    """Publish weights to an engine of this process, as they come from Ray's object store. Returns the fingerprint of
    what it holds."""
    receiver, update = Receiver(engine, timeout_s=TIMEOUT_S), Update(f"sleeping {version}", version)
    packer = Packer(bucket_bytes(ClusterSection().bucket_mib), lambda size: torch.empty(size, dtype=torch.uint8))
    await receiver.begin(update)
    for bucket in packer.pack(weights.named_weights()):
        await receiver.load(update.id, 0, bucket.header, bucket.data.numpy())
    return await receiver.commit(update.id, 0, packer.manifest(version))
