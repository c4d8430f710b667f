"""Picture processors by family: how large a picture is for the model, in tokens and pixels.

The rules are those of the processors of Qwen-VL and InternVL, read from the files beside the model. Not here: where
pictures come from, and their tokens in a prompt (`data/pictures.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hone.data.pictures import Arrangement, BrokenPicture, PictureMarks, keep_pixels, opened, read_pixels
from hone.errors import DataError
from hone.types import Picture

LONGEST_SIDES = 200
"""Largest ratio of a picture's sides, as in Qwen's processor."""
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""PIL's filters, by the numbers that processor files have for them."""


@dataclass(frozen=True)
class PictureProcessor(ABC):
    """How a model's processor sizes and normalises pictures.

    Args:
        side: pixels along a side of a token.
        resample: name of PIL's filter.
    """

    marks: ClassVar[PictureMarks]
    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: str

    @staticmethod
    def of(files: Mapping[str, str], *, most_pixels: int) -> PictureProcessor:
        """From the files beside the model. Raises DataError for another family's processor."""
        kind, keys = known_family(files), _image_keys(files)
        unusual = [name for name in ("do_resize", "do_rescale", "do_normalize") if keys.get(name) is False]
        if unusual:
            raise DataError(f"preprocessor_config.json: {unusual[0]} = false is not supported; set it to true.")
        return kind.read(
            keys,
            _keys_of(files, "preprocessor_config.json") | _keys_of(files, "processor_config.json"),
            most_pixels=most_pixels,
            mean=tuple(keys.get("image_mean", CLIP_MEAN)),
            std=tuple(keys.get("image_std", CLIP_STD)),
            resample=RESAMPLING.get(keys.get("resample", 3), "bicubic"),
        )

    @classmethod
    @abstractmethod
    def read(
        cls, keys: Mapping[str, Any], whole: Mapping[str, Any], *, most_pixels: int, **named: Any
    ) -> PictureProcessor:
        """From the keys of the picture processor and those of the whole processor; `named` are fields of any family.

        Raises DataError for keys that do not fit together.
        """

    @abstractmethod
    def size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens of a picture, as `Picture` counts them.

        Raises BrokenPicture for one that is too long and narrow.
        """

    @abstractmethod
    def arrangement(self, height: int, width: int) -> Arrangement:
        """From a picture of this size to the pixels that the model sees. It can be pickled."""

    def picture(self, source: bytes | Path) -> Picture:
        """A picture without its place in a prompt. Raises BrokenPicture if it cannot be decoded."""
        try:
            content = source if isinstance(source, bytes) else source.read_bytes()
        except OSError as error:
            raise BrokenPicture(f"{source} cannot be read: {error.strerror or error}") from error
        content_hash = hashlib.blake2b(content).digest()
        size, image = opened(content, content_hash)
        rows, columns = self.size(*size)
        arrange = self.arrangement(*size)
        if image is not None:
            pixels = rows * columns * self.side**2
            keep_pixels(image, arrange, content_hash, resample=self.resample, num_bytes=3 * pixels)
        settings = repr((arrange.keywords, self.mean, self.std, self.resample))
        digest = hashlib.blake2b(content_hash + settings.encode(), digest_size=16).hexdigest()
        read = partial(read_pixels, source, arrange, content_hash, resample=self.resample)
        return Picture(digest, 0, rows, columns, self.mean, self.std, read)


@dataclass(frozen=True)
class QwenProcessor(PictureProcessor):
    """Qwen-VL: a picture keeps its shape as far as whole tokens and the bounds allow.

    Args:
        least_pixels, most_pixels: of a picture as the model sees it.
    """

    marks = PictureMarks("<|image_pad|>")
    least_pixels: int
    most_pixels: int

    @classmethod
    def read(
        cls, keys: Mapping[str, Any], whole: Mapping[str, Any], *, most_pixels: int, **named: Any
    ) -> QwenProcessor:
        size = keys.get("size") or {}
        least = keys.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        most = keys.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        side = keys.get("patch_size", 14) * keys.get("merge_size", 2)
        return cls(side=side, least_pixels=least, most_pixels=min(most, most_pixels), **named)

    def size(self, height: int, width: int) -> tuple[int, int]:
        if max(height, width) > LONGEST_SIDES * min(height, width):
            raise BrokenPicture(f"{width} x {height} pixels; the longer side may be {LONGEST_SIDES} times the other")
        rows, columns = round(height / self.side), round(width / self.side)
        pixels = rows * columns * self.side**2
        if pixels > self.most_pixels:
            shrink = math.sqrt(height * width / self.most_pixels) * self.side
            rows, columns = max(1, math.floor(height / shrink)), max(1, math.floor(width / shrink))
        elif pixels < self.least_pixels:
            grow = math.sqrt(self.least_pixels / (height * width)) / self.side
            rows, columns = math.ceil(height * grow), math.ceil(width * grow)
        return rows, columns

    def arrangement(self, height: int, width: int) -> Arrangement:
        rows, columns = self.size(height, width)
        return partial(stretched, size=(columns * self.side, rows * self.side))


@dataclass(frozen=True)
class TileProcessor(PictureProcessor):
    """InternVL: a picture is stretched over a grid of square tiles of nearly its shape; behind more than one tile comes
    the whole picture as one more.

    Args:
        tile: pixels along a side of a tile.
        least_tiles, most_tiles: of a grid.
    """

    marks = PictureMarks("<IMG_CONTEXT>", before="<img>", after="</img>")
    tile: int
    least_tiles: int
    most_tiles: int

    @classmethod
    def read(
        cls, keys: Mapping[str, Any], whole: Mapping[str, Any], *, most_pixels: int, **named: Any
    ) -> TileProcessor:
        size, tokens = keys.get("size") or {"height": 384, "width": 384}, whole.get("image_seq_length", 256)
        tile, tokens_per_side = int(size.get("height", 0)), math.isqrt(tokens)
        if not tile or tile != size.get("width") or tokens_per_side**2 != tokens or tile % tokens_per_side:
            raise DataError(
                f"preprocessor_config.json: tiles of {size} with image_seq_length = {tokens} of processor_config.json "
                "cannot be divided into a square grid of tokens. Fetch both files again."
            )
        room = most_pixels // tile**2  # a grid of more than one tile has the whole picture behind it
        most = min(keys.get("max_patches", 12), max(room - 1, 1))
        least = min(keys.get("min_patches", 1), most)
        return cls(side=tile // tokens_per_side, tile=tile, least_tiles=least, most_tiles=most, **named)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles: the grid whose shape is nearest; of two equally near the larger one if the picture
        has more than half its pixels."""
        best, nearest = (1, 1), math.inf
        for count in range(self.least_tiles, self.most_tiles + 1):
            for columns in range(1, count + 1):
                rows, rest = divmod(count, columns)
                if rest:
                    continue
                distance = abs(width / height - columns / rows)
                if distance < nearest or (distance == nearest and 2 * height * width > self.tile**2 * count):
                    best, nearest = (rows, columns), distance
        return best

    def size(self, height: int, width: int) -> tuple[int, int]:
        count, tokens_per_side = math.prod(self.grid(height, width)), self.tile // self.side
        return (count + (count > 1)) * tokens_per_side, tokens_per_side

    def arrangement(self, height: int, width: int) -> Arrangement:
        return partial(tiled, grid=self.grid(height, width), side=self.tile)


PROCESSORS: dict[str, type[PictureProcessor]] = {
    "Qwen2VLImageProcessor": QwenProcessor,
    "GotOcr2ImageProcessor": TileProcessor,
}
"""By the start of `image_processor_type`."""


def family_of(files: Mapping[str, str]) -> type[PictureProcessor] | None:
    """Of the processor that files beside a model describe; None: none, or another family's."""
    name = str(_image_keys(files).get("image_processor_type", ""))
    return next((kind for start, kind in PROCESSORS.items() if name.startswith(start)), None)


def known_family(files: Mapping[str, str]) -> type[PictureProcessor]:
    """Like `family_of`. Raises DataError where that is None."""
    if (kind := family_of(files)) is not None:
        return kind
    name = _image_keys(files).get("image_processor_type")
    found = f"the model's processor is {name}" if name else "the model has no preprocessor_config.json"
    raise DataError(
        f"pictures in prompts: {found}; those of Qwen2-VL, Qwen2.5-VL, Qwen3-VL (Qwen2VLImageProcessor) and InternVL "
        "(GotOcr2ImageProcessor) are read. Take one of these models, or leave the pictures out."
    )


def stretched(image: Any, filter_: Any, *, size: tuple[int, int]) -> NDArray[Any]:
    """A picture of PIL's in (width, height)."""
    return np.asarray(image.resize(size, filter_))


def tiled(image: Any, filter_: Any, *, grid: tuple[int, int], side: int) -> NDArray[Any]:
    """(tiles * side, side, 3): tiles of a picture one below the other, row by row, the whole picture as the last."""
    rows, columns = grid
    whole = stretched(image, filter_, size=(columns * side, rows * side))
    tiles = whole.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, 3)
    if rows * columns == 1:
        return tiles
    return np.concatenate([tiles, stretched(image, filter_, size=(side, side))])


def _image_keys(files: Mapping[str, str]) -> dict[str, Any]:
    """What describes the image processor: a file of its own, or a part of the whole processor's."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        keys = _keys_of(files, name)
        keys = keys.get("image_processor", keys)
        if keys.get("image_processor_type"):
            return keys
    return {}


def _keys_of(files: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        keys = json.loads(files.get(name, "{}"))
    except json.JSONDecodeError as error:
        raise DataError(f"{name} beside the model: malformed JSON ({error}). Fetch it again.") from error
    if not isinstance(keys, dict) or not isinstance(keys.get("image_processor", {}), dict):
        raise DataError(f"{name} beside the model: not a JSON object. Fetch it again.")
    return keys
