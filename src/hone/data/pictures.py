"""Pictures of prompts: from a column's value to pixels in the size that the model sees, and to their number of tokens.

The rules are those of the Qwen-VL processors, read from the files beside the model. Pictures are decoded when prompts
are loaded, so that a broken one is found then, and again when they are used; only where they come from is kept. Not
here: what the vision tower makes of pixels (`model/vision.py`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from numpy.typing import NDArray

from hone.errors import DataError
from hone.types import Picture

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""What vision-language models have beside weights and tokenizer."""
PICTURE_TOKEN = "<|image_pad|>"
"""What the chat templates of Qwen-VL models write for a picture; it stands once for each of its tokens."""
LONGEST_SIDES = 200
"""Largest ratio of a picture's sides, as in Qwen's processor."""
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""PIL's filters, by the numbers that processor files have for them."""


class BrokenPicture(Exception):
    """A picture that cannot be read, and why."""


@dataclass(frozen=True)
class PictureProcessor:
    """How a model's processor sizes and normalises pictures.

    Args:
        side: pixels along a side of a token.
        least_pixels, most_pixels: of a picture as the model sees it.
    """

    side: int
    least_pixels: int
    most_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: str

    @classmethod
    def of(cls, files: Mapping[str, str], *, most_pixels: int) -> PictureProcessor:
        """From the files beside the model. Raises DataError for another family's processor."""
        keys = _image_keys(files)
        kind = str(keys.get("image_processor_type", ""))
        if not kind.startswith("Qwen2VLImageProcessor"):
            found = f"the model's processor is {kind}" if kind else "the model has no preprocessor_config.json"
            raise DataError(
                f"pictures in prompts: {found}; those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL (Qwen2VLImageProcessor) "
                "are read. Take one of these models, or leave the pictures out."
            )
        unusual = [name for name in ("do_resize", "do_rescale", "do_normalize") if keys.get(name) is False]
        if unusual:
            raise DataError(f"preprocessor_config.json: {unusual[0]} = false is not supported; set it to true.")
        size = keys.get("size") or {}
        least = keys.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        most = keys.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        return cls(
            side=keys.get("patch_size", 14) * keys.get("merge_size", 2),
            least_pixels=least,
            most_pixels=min(most, most_pixels),
            mean=tuple(keys.get("image_mean", CLIP_MEAN)),
            std=tuple(keys.get("image_std", CLIP_STD)),
            resample=RESAMPLING.get(keys.get("resample", 3), "bicubic"),
        )

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens of a picture: its shape is kept as far as whole tokens and the bounds allow.

        Raises BrokenPicture for one that is too long and narrow.
        """
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

    def picture(self, source: bytes | Path) -> Picture:
        """A picture without its place in a prompt. Raises BrokenPicture if it cannot be decoded."""
        try:
            content = source if isinstance(source, bytes) else source.read_bytes()
        except OSError as error:
            raise BrokenPicture(f"{source} cannot be read: {error.strerror or error}") from error
        image = _decoded(content)
        rows, columns = self.size(image.height, image.width)
        size = columns * self.side, rows * self.side
        settings = repr((size, self.mean, self.std, self.resample))
        content_hash = hashlib.blake2b(content).digest()
        digest = hashlib.blake2b(content_hash + settings.encode(), digest_size=16).hexdigest()
        read = partial(read_pixels, source, size, content_hash, resample=self.resample)
        return Picture(digest, 0, rows, columns, self.mean, self.std, read)


def read_pixels(source: bytes | Path, size: tuple[int, int], content_hash: bytes, *, resample: str) -> NDArray[Any]:
    """(height, width, 3) uint8 of a picture, resized to (width, height).

    Raises DataError if its file is not what it was when prompts were loaded.
    """
    from PIL import Image

    try:
        content = source if isinstance(source, bytes) else source.read_bytes()
        if hashlib.blake2b(content).digest() != content_hash:
            raise BrokenPicture("has changed")
        image = _decoded(content)
    except (OSError, BrokenPicture) as error:
        raise DataError(
            f"picture {source}: could be read when prompts were loaded, and now {error}. Leave the files of a run as "
            "they are."
        ) from error
    return np.asarray(image.resize(size, Image.Resampling[resample.upper()]))


def _decoded(content: bytes) -> Any:
    """A picture in red, green and blue. Raises BrokenPicture."""
    from PIL import Image

    try:
        with Image.open(BytesIO(content)) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BrokenPicture(f"is no picture that can be decoded: {error}") from error


def source_of_picture(value: Any, root: Path) -> bytes | Path:
    """Where a value of a column or a part of a message says that a picture is.

    Args:
        value: a path, a data URL, bytes, {"bytes": ..., "path": ...} as Hugging Face datasets have it, or a picture
            of PIL's.
        root: folder that paths start from; one outside of it is refused.
    Raises:
        BrokenPicture: anything else, a URL among it.
    """
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if (convert := getattr(value, "convert", None)) is not None:  # PIL's, which is not imported here
        file = BytesIO()
        convert("RGB").save(file, "PNG")
        return file.getvalue()
    if not isinstance(value, str):
        raise BrokenPicture(f"got {type(value).__name__}; must be a path, a data URL or bytes")
    if value.startswith("data:"):
        head, _, encoded = value.partition(",")
        try:
            return base64.b64decode(encoded if head.endswith(";base64") else "?", validate=True)
        except binascii.Error as error:
            raise BrokenPicture("a data URL must be data:image/...;base64, followed by base64") from error
    if "://" in value and not value.startswith("file://"):
        raise BrokenPicture(f"{value[:80]} is a URL; nothing is fetched. Download it and give its path")
    path = (root / Path(value.removeprefix("file://")).expanduser()).resolve()
    if not path.is_relative_to(root.resolve()):
        raise BrokenPicture(f"{value} is outside of {root}; data.image_root names the folder of pictures")
    return path


def with_picture_tokens(
    ids: Sequence[int], pictures: Sequence[Picture], token_id: int
) -> tuple[list[int], tuple[Picture, ...]]:
    """A rendered prompt's tokens with each picture's token as often as it has tokens, and the pictures in their places.

    Raises:
        BrokenPicture: the prompt has another number of marks than of pictures.
    """
    marks = [place for place, token in enumerate(ids) if token == token_id]
    if len(marks) != len(pictures):
        raise BrokenPicture(
            f"{len(pictures)} pictures, but the rendered prompt has {PICTURE_TOKEN} {len(marks)} times; the chat "
            "template writes it for each picture, and text must not"
        )
    whole, placed, done = list[int](), list[Picture](), 0
    for mark, picture in zip(marks, pictures, strict=True):
        whole += ids[done:mark]
        placed.append(replace(picture, start=len(whole)))
        whole += [token_id] * picture.num_tokens
        done = mark + 1
    return [*whole, *ids[done:]], tuple(placed)


def processor_files(place: str, *, offline: bool) -> Mapping[str, str]:
    """Names and contents of a model's processor files; none for a model that reads text alone.

    Args:
        place: a directory, or a hub name.
        offline: look into the cache alone, for a hub name.
    """
    found: dict[str, str] = {}
    for name in PROCESSOR_FILES:
        file = Path(place) / name
        if not Path(place).is_dir():
            try:
                file = Path(hf_hub_download(place, name, local_files_only=offline))
            except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
                continue
        if file.is_file():
            found[name] = file.read_text(encoding="utf-8")
    return found


def _image_keys(files: Mapping[str, str]) -> dict[str, Any]:
    """What describes the image processor: a file of its own, or a part of the whole processor's."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if name in files:
            try:
                keys = json.loads(files[name])
                keys = keys.get("image_processor", keys)
            except (json.JSONDecodeError, AttributeError) as error:
                raise DataError(f"{name} beside the model: not a JSON object ({error}). Fetch it again.") from error
            if keys.get("image_processor_type"):
                return keys
    return {}
