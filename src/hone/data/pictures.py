"""Pictures of prompts: from a column's value to pixels, and their tokens in a prompt.

Pictures are decoded when prompts are loaded, so that a broken one is found then. A process keeps the pixels of those it
used last; of others only where they come from is kept, and they are decoded again when they are used. Not here: how
large the model sees them (`data/picture_processors.py`), and what its vision tower makes of pixels (`model/towers.py`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
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
from hone.runtime.bounded_cache import BoundedCache
from hone.sizes import KEPT_PIXELS_BYTES
from hone.types import Picture

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""What vision-language models have beside weights and tokenizer."""
Arrangement = partial[NDArray[Any]]
"""From a picture of PIL's, and one of its filters, to (height, width, 3) uint8 that the model sees. Its keywords are
all that it depends on."""
_pixels = BoundedCache[NDArray[Any]](KEPT_PIXELS_BYTES, lambda pixels: pixels.nbytes)
_sizes = BoundedCache[tuple[int, int]](1 << 24, lambda _: 256)  # about what an entry takes


class BrokenPicture(Exception):
    """A picture that cannot be read, and why."""


@dataclass(frozen=True)
class PictureMarks:
    """What a family's prompts say for a picture."""

    token: str
    """What the chat template writes for a picture; it stands once for each of its tokens."""
    before: str = ""
    """Tokens around those of a picture that the chat template does not write."""
    after: str = ""


def read_pixels(
    source: bytes | Path, arrange: Arrangement, content_hash: bytes, *, resample: str, within: int | None = None
) -> NDArray[Any]:
    """(height, width, 3) uint8 of a picture, as `arrange` has it; see `Picture.read`.

    Raises DataError if its file is not what it was when prompts were loaded.
    """
    try:
        content = source if isinstance(source, bytes) else source.read_bytes()
        if hashlib.blake2b(content).digest() != content_hash:
            raise BrokenPicture("has changed")
        if within is not None:
            image = decoded(content)
            image.thumbnail((within, within))
            return np.asarray(image)
        key = _key(arrange, content_hash, resample)
        if (pixels := _pixels.get(key)) is None:
            pixels = _arranged(decoded(content), arrange, resample)
            _pixels.put(key, pixels)
        return pixels
    except (OSError, BrokenPicture) as error:
        raise DataError(
            f"picture {source}: could be read when prompts were loaded, and now {error}. Leave the files of a run as "
            "they are."
        ) from error


def opened(content: bytes, content_hash: bytes) -> tuple[tuple[int, int], Any]:
    """Height and width of a picture, and the picture; None instead of it if this process knows its size already.

    Raises BrokenPicture.
    """
    if (size := _sizes.get(content_hash)) is not None:
        return size, None
    image = decoded(content)
    size = image.height, image.width
    _sizes.put(content_hash, size)
    return size, image


def keep_pixels(image: Any, arrange: Arrangement, content_hash: bytes, *, resample: str, num_bytes: int) -> None:
    """Keep a picture that is decoded before it is used, while there is room for `num_bytes` of pixels more."""
    if _pixels.size + num_bytes <= _pixels.most:
        _pixels.put(_key(arrange, content_hash, resample), _arranged(image, arrange, resample))


def _key(arrange: Arrangement, content_hash: bytes, resample: str) -> tuple[Any, ...]:
    return content_hash, arrange.func, *sorted(arrange.keywords.items()), resample


def _arranged(image: Any, arrange: Arrangement, resample: str) -> NDArray[Any]:
    """Read-only, as it may be kept for others."""
    from PIL import Image

    pixels = arrange(image, Image.Resampling[resample.upper()])
    pixels.setflags(write=False)
    return pixels


def decoded(content: bytes) -> Any:
    """A picture in red, green and blue. Raises BrokenPicture."""
    from PIL import Image

    try:
        with Image.open(BytesIO(content)) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BrokenPicture(f"is not a picture that can be decoded: {error}") from error


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


@dataclass(frozen=True)
class PictureTokens:
    """`PictureMarks` as token ids."""

    marks: PictureMarks
    token: int
    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, marks: PictureMarks, vocabulary: Mapping[str, int]) -> PictureTokens:
        """Raises DataError for a vocabulary that misses one."""
        missing = [text for text in (marks.token, marks.before, marks.after) if text and text not in vocabulary]
        if missing:
            raise DataError(
                f"pictures in prompts: the tokenizer has no {missing[0]}. Take the tokenizer of a model whose prompts "
                "may have pictures."
            )
        before, after = (tuple(vocabulary[text] for text in (mark,) if text) for mark in (marks.before, marks.after))
        return cls(marks, vocabulary[marks.token], before, after)


def with_picture_tokens(
    ids: Sequence[int], pictures: Sequence[Picture], tokens: PictureTokens
) -> tuple[list[int], tuple[Picture, ...]]:
    """A rendered prompt's tokens with each picture's token as often as it has tokens, and the pictures in their places.

    Raises:
        BrokenPicture: the prompt has another number of marks than of pictures.
    """
    places = [place for place, token in enumerate(ids) if token == tokens.token]
    if len(places) != len(pictures):
        raise BrokenPicture(
            f"{len(pictures)} pictures, but the rendered prompt has {tokens.marks.token} {len(places)} times; the chat "
            "template writes it for each picture, and text must not"
        )
    whole, placed, done = list[int](), list[Picture](), 0
    for place, picture in zip(places, pictures, strict=True):
        whole += [*ids[done:place], *tokens.before]
        placed.append(replace(picture, start=len(whole)))
        whole += [*[tokens.token] * picture.num_tokens, *tokens.after]
        done = place + 1
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
