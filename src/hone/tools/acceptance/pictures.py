"""The part with pictures in vLLM: a random vision-language model against the trainer's logprobs."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from hone.config.engine import EngineSection
from hone.data.chat import character_tokenizer
from hone.data.pack import collate
from hone.devices import devices_here
from hone.model.hf import TransformersModel
from hone.model.load import init_model, save_hf
from hone.rollout.engine import Request, Sampling
from hone.rollout.vllm import VllmEngine
from hone.rollout.vllm_args import VllmPlace
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import RUN_TIMEOUT_S, TINY, PartSetting, make_trainer
from hone.types import Group, Picture, Prompt

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
        yield from _compared(setting, kind)


def _compared(setting: PartSetting, kind: str) -> Iterator[Figure]:
    precision = "bfloat16" if setting.is_gpu and devices_here("auto").bfloat16 else "float32"
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
        groups = asyncio.run(seen_by_vllm(place, seeing_prompts(model)))
        batch = collate([group.scored({}, (0.0,) * len(group.samples)) for group in groups])
        gaps_T = (trainer.logprobs(batch).cpu() - batch.sampler_logprobs_T).abs()
        lengths = [sum(len(sample.token_ids) for sample in group.samples) for group in groups]
        for group, gaps in zip(groups, gaps_T.split(lengths), strict=True):
            case = f"{kind}, {len(group.prompt.pictures)} pictures, vllm, {precision}"
            yield Figure("pictures", "gate_gap", float(gaps.mean()), case)


def saved_seeing_model(folder: Path, kind: str, device: torch.device) -> TransformersModel:
    """A random vision-language model, and its directory with what vLLM reads beside the weights."""
    tokenizer = character_tokenizer("0123456789")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SEEING_MARKS)})
    ids = [tokenizer.convert_tokens_to_ids(mark) for mark in SEEING_MARKS]
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    keys = {"model_type": kind, "tie_word_embeddings": False, **SEEING[kind], **dict(zip(names, ids, strict=True))}
    model = init_model(keys, vocab_size=None, seed=0, dtype=torch.float32, device=device)
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
    engine = await VllmEngine.start(
        place, EngineSection(), decode=str, eos_ids=(), timeout_s=120.0, start_timeout_s=RUN_TIMEOUT_S
    )
    sampling = Sampling(16, 1.0, top_k=0, top_p=1.0, min_p=0.0, stop=(), stop_token_ids=())
    requests = [Request(prompt, 4, sampling, seed=0, stream="train") for prompt in prompts]
    try:
        samples = await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()
    return [Group(prompt, own) for prompt, own in zip(prompts, samples, strict=True)]
