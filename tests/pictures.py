"""Pictures of noise, prompts that have some, and Transformers' own forward pass of such a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_zoo import OTHERS
from PIL import Image
from torch import Tensor

from hone.data.chat import character_tokenizer
from hone.model.hf import TransformersModel
from hone.model.load import init_model, save_hf
from hone.model.towers import TOWERS
from hone.types import Picture, Prompt

MARK = 40
"""Token id that stands at a picture's tokens."""
SEEING = tuple(TOWERS)


HEADS_OF_32 = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""Which vLLM's attention on a CPU needs."""
FOR_VLLM: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"vision_config": {"embed_dim": 64, "num_heads": 2, "hidden_size": 64}},
    "qwen2_5_vl": {
        "vision_config": {"hidden_size": 64, "num_heads": 2, "out_hidden_size": 64, "fullatt_block_indexes": [1]}
    },
    "qwen3_vl": {"vision_config": {"hidden_size": 64, "num_heads": 2, "out_hidden_size": 64}},
}
"""Sizes of families, instead of those in `OTHERS`."""


def for_vllm(model_type: str) -> dict[str, Any]:
    """Keys of a tiny model that vLLM's CPU build can run."""
    angles = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    if model_type == "qwen3_vl":
        angles |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    sizes = {**HEADS_OF_32, "rope_parameters": angles, "max_position_embeddings": 128}
    text = {**OTHERS[model_type]["text_config"], **sizes}
    tower = {**OTHERS[model_type]["vision_config"], **FOR_VLLM[model_type]["vision_config"]}
    return {**OTHERS[model_type], "text_config": text, "vision_config": tower}


def seeing_model(model_type: str, *, seed: int = 0, sizes: Mapping[str, Any] | None = None) -> TransformersModel:
    """A tiny one with weights so large that pictures matter."""
    keys = {"model_type": model_type, **(sizes or OTHERS[model_type])}
    keys |= {"image_token_id": MARK, "vision_start_token_id": 41}
    keys.setdefault("tie_word_embeddings", False)  # a tied embedding as large as other matrices would predict itself
    model = init_model(keys, vocab_size=None, seed=seed, dtype=torch.float32, device="cpu")
    assert isinstance(model, TransformersModel)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.hf.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0.0, weight[0].numel() ** -0.5, generator=generator)
    model.hf.get_input_embeddings().weight.data.normal_(0.0, 1.0, generator=generator)
    return model


def noise(seed: int, rows: int, columns: int, side: int, *, resample: str = "") -> np.ndarray:
    generator = np.random.default_rng([seed, len(resample)])
    return generator.integers(0, 256, (rows * side, columns * side, 3), dtype=np.uint8)


def picture(model: TransformersModel, seed: int, rows: int, columns: int, start: int = 0) -> Picture:
    """One of rows x columns tokens; of a family with tiles, one of rows tiles."""
    assert model.vision is not None
    if not model.vision.tower.has_grid_positions:
        rows, columns = 2 * rows, 2
    read = partial(noise, seed, rows, columns, model.vision.tower.side)
    return Picture(f"{seed} {rows} {columns}", start, rows, columns, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25), read)


def prompt_with(pictures: Sequence[Picture], *, index: int = 0, mark: int = MARK) -> Prompt:
    """Words, each picture between two marks, and words."""
    ids, placed = [3, 1, 4 + index], list[Picture]()
    for number, own in enumerate(pictures):
        ids += [41, *[mark] * own.num_tokens, mark + 2, 5 + number]
        at = len(ids) - own.num_tokens - 2
        placed.append(Picture(own.digest, at, own.rows, own.columns, own.mean, own.std, own.read))
    return Prompt(str(index), index, "", np.array([*ids, 9, 2]), pictures=tuple(placed))


def forward(model: TransformersModel, prompt: Prompt, response: Sequence[int]) -> Tensor:
    """(len(response),) logprobs of Transformers' whole model on one sample, as its own processor would feed it."""
    ids = torch.tensor([[*prompt.token_ids.tolist(), *map(int, response)]])
    assert model.vision is not None
    named = model.vision.tower.whole_inputs(prompt.pictures, ids.shape[1])
    logits = model.hf(ids, use_cache=False, **named).logits[0, len(prompt.token_ids) - 1 : -1].log_softmax(-1)
    return logits.gather(1, ids[0, len(prompt.token_ids) :, None])[:, 0]


TEMPLATE = """{%- for message in messages -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}={%- endif -%}"""
MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789=?"
PIXELS = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 64}
TILE_MARKS = ["<img>", "<IMG_CONTEXT>", "</img>"]
TILE_TEMPLATE = TEMPLATE.replace("".join(MARKS), TILE_MARKS[1])


def save_seeing_model(
    folder: Path, model_type: str = "qwen2_5_vl", *, seed: int = 0, sizes: Mapping[str, Any] | None = None
) -> None:
    """A tiny model of the family as its repository has it, with a tokenizer of characters and picture marks."""
    is_tiled = model_type == "internvl"
    marks = TILE_MARKS if is_tiled else MARKS
    tokenizer = character_tokenizer(LETTERS)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = TILE_TEMPLATE if is_tiled else TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = dict(zip(("vision_start_token_id", "image_token_id", "vision_end_token_id"), (41, 42, 43), strict=True))
    assert tokenizer.convert_tokens_to_ids(marks) == list(ids.values())
    model = seeing_model(model_type, seed=seed, sizes=sizes)
    config = type(model.hf_config).from_dict({**model.hf_config.to_dict(), **ids})
    save_hf(folder / "weights", config, model.named_weights())
    for file in (folder / "weights").iterdir():
        file.rename(folder / file.name)
    (folder / "weights").rmdir()
    tower: Any = config.vision_config
    processor = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": tower.patch_size, **PIXELS}
    if is_tiled:
        side = tower.image_size[0]
        processor = {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": side, "width": side}}
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": config.image_seq_length}))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def save_picture(file: Path, seed: int, width: int, height: int) -> None:
    Image.fromarray(noise(seed, height, width, 1)).save(file)
