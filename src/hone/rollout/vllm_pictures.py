# pyright: reportMissingImports=false
"""Prompts as vLLM takes them: token ids, and the pictures among them as the input of its vision tower.

vLLM's own processor is passed over: pictures are decoded, sized, cut into patches and normalised by the code that the
trainer uses, and their places are those in the prompt's tokens, so that engine and trainer see the same numbers.

vLLM keeps what its tower made of a picture, and keys and values of prompts, by a hash of each picture. The hash is that
of the picture's content with the number of the load, so neither outlives the weights that made it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BatchFeature

from hone.config.engine import VLLM_SEES
from hone.errors import DataError
from hone.model.load import read_config
from hone.model.towers import TOWERS
from hone.types import Prompt


class VllmPictures:
    """Makes the inputs of prompts for a model in vLLM.

    Args:
        folder: of the model.
        dtype: that its vision tower computes in.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._kind = str(json.loads((folder / "config.json").read_text()).get("model_type"))
        self._dtype, self._tower = dtype, None
        if self._kind in VLLM_SEES:
            self._tower = TOWERS[self._kind](nn.Module(), read_config(folder))

    def read(self, prompt: Prompt) -> Any:
        """A prompt's pictures as vLLM's `MultiModalKwargsItems`; None if it has none. Decodes them.

        Raises DataError where a picture cannot be read any more, or the model in vLLM reads none.
        """
        if not prompt.pictures:
            return None
        if self._tower is None:
            raise DataError(f"prompt {prompt.id} has pictures, but {self._kind} in vLLM reads none. Leave them out.")
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

        named = self._tower.inputs(prompt.pictures)
        pixels = named["pixel_values"].to(self._dtype)  # as vLLM's tower would convert them, in half the memory
        grid = named["image_grid_thw"]
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        content = BatchFeature({"pixel_values": pixels, "image_grid_thw": grid})
        return MultiModalKwargsItems.from_hf_inputs(content, fields)


def vllm_prompt(prompt: Prompt, pictures: Any, load: int) -> Any:
    """What `LLMEngine.add_request` takes for a prompt.

    Args:
        pictures: from `VllmPictures.read`.
        load: number of the weights that are in the engine: caches are kept apart by it.
    """
    from vllm.inputs.engine import mm_input, tokens_input

    ids, salt = prompt.token_ids.tolist(), f"load {load}"
    if pictures is None:
        return tokens_input(ids, cache_salt=salt)
    from vllm.multimodal.inputs import PlaceholderRange

    hashes = [f"{picture.digest} {salt}" for picture in prompt.pictures]
    places = [PlaceholderRange(picture.start, picture.num_tokens) for picture in prompt.pictures]
    return mm_input(ids, pictures, {"image": hashes}, {"image": places}, cache_salt=salt)
