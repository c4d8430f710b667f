"""Vision towers by family: from pictures to what Transformers' class takes, its pass, and features of each picture.

Not here: which pictures go through it, and when (`model/vision.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hone.errors import DataError
from hone.types import Picture


@dataclass(frozen=True)
class PictureFeatures:
    """What a vision tower makes of one picture with n tokens."""

    embedded: Tensor
    """(n, h) instead of the tokens' embeddings."""
    deeper: tuple[Tensor, ...] = ()
    """(n, h) each, to be added behind the first layers (Qwen3-VL)."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.embedded, *self.deeper))


class VisionTower(ABC):
    """A family's vision tower.

    Args:
        model: Transformers' module that has the tower and the language model.
    """

    has_grid_positions: bool
    """Whether a picture's tokens have positions in time, height and width; else they count as text does."""
    patch: int
    """Pixels along a side of a patch."""
    merge: int
    """Patches along a side of a token."""

    def __init__(self, model: nn.Module, config: PreTrainedConfig) -> None:
        self._model = (model,)  # in a tuple: its parameters belong to the model that has this

    @property
    def patches_per_token(self) -> int:
        return self.merge**2

    @property
    def side(self) -> int:
        """Pixels along a side of a token."""
        return self.merge * self.patch

    @abstractmethod
    def parts(self) -> tuple[nn.Module, ...]:
        """The modules that pictures go through."""

    @abstractmethod
    def sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of tokens of the smallest picture, and of one that is not square."""

    @abstractmethod
    def inputs(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        """Arguments of the class's `get_image_features`."""

    @abstractmethod
    def split(self, out: Any, pictures: Sequence[Picture]) -> list[PictureFeatures]:
        """Each picture's part of what `get_image_features` returns."""

    def whole_inputs(self, pictures: Sequence[Picture], num_tokens: int) -> dict[str, Tensor]:
        """What the whole class takes besides (1, num_tokens) token ids, for a sequence with these pictures."""
        return self.inputs(pictures) if pictures else {}

    def weights(self) -> Iterator[nn.Parameter]:
        for part in self.parts():
            yield from part.parameters()

    def features(self, pictures: Sequence[Picture]) -> list[PictureFeatures]:
        model: Any = self._model[0]
        device = next(self.weights()).device
        named = {name: tensor.to(device) for name, tensor in self.inputs(pictures).items()}
        return self.split(model.get_image_features(**named, return_dict=True), pictures)

    def black(self) -> Picture:
        rows, columns = self.sizes()[0]
        read = partial(np.zeros, (rows * self.side, columns * self.side, 3), np.uint8)
        return Picture("black", 0, rows, columns, (0.0,) * 3, (1.0,) * 3, read)

    def normalised(self, picture: Picture) -> np.ndarray:
        """(height, width, 3) float32. Raises DataError for a picture that its processor sized for another model."""
        rgb = picture.read()
        size = picture.rows * self.side, picture.columns * self.side
        if rgb.shape != (*size, 3):
            raise DataError(
                f"picture {picture.digest[:12]}: {rgb.shape[1]} x {rgb.shape[0]} pixels, but the model's vision tower "
                f"takes {size[1]} x {size[0]} for its {picture.num_tokens} tokens. preprocessor_config.json beside the "
                "model does not fit its config.json; fetch both again."
            )
        mean, std = (np.asarray(values, np.float32) for values in (picture.mean, picture.std))
        return (rgb.astype(np.float32) / 255 - mean) / std


class QwenTower(VisionTower):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: pictures of any whole number of tokens, as a list of patches."""

    has_grid_positions = True

    def __init__(self, model: nn.Module, config: PreTrainedConfig) -> None:
        super().__init__(model, config)
        keys: Any = config
        self.patch, self.merge = keys.vision_config.patch_size, keys.vision_config.spatial_merge_size
        self._frames = keys.vision_config.temporal_patch_size

    def parts(self) -> tuple[nn.Module, ...]:
        model: Any = self._model[0]
        return (model.visual,)

    def sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (1, 1), (2, 3)

    def inputs(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        patches = np.concatenate([self.patches(picture) for picture in pictures])
        grid = [[1, p.rows * self.merge, p.columns * self.merge] for p in pictures]
        return {"pixel_values": torch.from_numpy(patches), "image_grid_thw": torch.tensor(grid)}

    def split(self, out: Any, pictures: Sequence[Picture]) -> list[PictureFeatures]:
        layers = getattr(out, "deepstack_features", None) or []
        return [
            PictureFeatures(embedded, tuple(layer[number] for layer in layers))
            for number, embedded in enumerate(out.pooler_output)
        ]

    def whole_inputs(self, pictures: Sequence[Picture], num_tokens: int) -> dict[str, Tensor]:
        if not pictures:
            return {}
        types = torch.zeros(1, num_tokens, dtype=torch.int32)
        for picture in pictures:
            types[0, picture.start : picture.start + picture.num_tokens] = 1
        return {**self.inputs(pictures), "mm_token_type_ids": types}

    def patches(self, picture: Picture) -> np.ndarray:
        """(patches, 3 * frames * patch * patch) float32: squares of `merge` x `merge` patches together, the one frame
        repeated."""
        image, patch, merge = self.normalised(picture), self.patch, self.merge
        shape = picture.rows, merge, patch, picture.columns, merge, patch, 3
        squares = image.reshape(shape).transpose(0, 3, 1, 4, 6, 2, 5)
        frames = np.broadcast_to(squares[:, :, :, :, :, None], (*squares.shape[:5], self._frames, patch, patch))
        return frames.reshape(picture.num_tokens * merge**2, -1)


class TileTower(VisionTower):
    """InternVL: square tiles of one size, one below the other in `Picture.read`, each a picture to the tower."""

    has_grid_positions = False

    def __init__(self, model: nn.Module, config: PreTrainedConfig) -> None:
        super().__init__(model, config)
        keys: Any = config
        self.patch, self.merge = keys.vision_config.patch_size[0], round(1 / keys.downsample_ratio)
        self._tile: int = keys.vision_config.image_size[0]

    def parts(self) -> tuple[nn.Module, ...]:
        model: Any = self._model[0]
        return model.vision_tower, model.multi_modal_projector

    def sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        tokens = self._tile // self.side
        return (tokens, tokens), (3 * tokens, tokens)

    def inputs(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        tiles = [self.normalised(picture).reshape(-1, self._tile, self._tile, 3) for picture in pictures]
        return {"pixel_values": torch.from_numpy(np.concatenate(tiles).transpose(0, 3, 1, 2).copy())}

    def split(self, out: Any, pictures: Sequence[Picture]) -> list[PictureFeatures]:
        parts = out.pooler_output.flatten(0, 1).split([picture.num_tokens for picture in pictures])
        return [PictureFeatures(part) for part in parts]


TOWERS: dict[str, type[VisionTower]] = {
    "qwen2_vl": QwenTower,
    "qwen2_5_vl": QwenTower,
    "qwen3_vl": QwenTower,
    "internvl": TileTower,
}
"""By model type: those whose prompts may have pictures."""
