"""Pictures of prompts as judges and reward services are sent them: data URLs, bounded in size, each encoded once; and
what a reward service makes of one."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.runtime.bounded_cache import BoundedCache
from hone.types import Picture

KEPT_BYTES = 64 << 20
"""Encoded pictures that are kept, those used last."""
QUALITY = 92
"""JPEG quality."""


class ShownPictures:
    """Encodes pictures for requests.

    Args:
        side: pixels along the longer side, at most.
    """

    def __init__(self, side: int) -> None:
        self._side = side
        self._kept = BoundedCache[str](KEPT_BYTES, len)

    async def urls(self, pictures: Sequence[Picture]) -> tuple[str, ...]:
        """In their order. Raises DataError for a picture that has changed since prompts were loaded."""
        urls: list[str] = []
        for picture in pictures:
            if (url := self._kept.get(picture.digest)) is None:
                url = await asyncio.to_thread(data_url, picture, self._side)
                self._kept.put(picture.digest, url)
            urls.append(url)
        return tuple(urls)


def data_url(picture: Picture, side: int) -> str:
    """The whole picture in its own shape, as JPEG."""
    from PIL import Image

    file = BytesIO()
    Image.fromarray(picture.read(within=side)).save(file, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def picture_of(url: str) -> Picture:
    """A picture that was sent, in its own size; how many tokens a model makes of it is not known.

    Raises BrokenPicture for anything but a data URL of a picture.
    """
    from PIL import Image

    from hone.data.pictures import BrokenPicture, read_pixels, source_of_picture

    source = source_of_picture(url, Path()) if url.startswith("data:") else None
    if not isinstance(source, bytes):
        raise BrokenPicture("must be a data URL, data:image/...;base64, followed by base64")
    try:
        Image.open(BytesIO(source)).close()  # the header alone: a reward that looks at it decodes it
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BrokenPicture(f"is not a picture that can be decoded: {error}") from error
    content_hash = hashlib.blake2b(source).digest()
    read = partial(read_pixels, source, partial(_as_it_is), content_hash, resample="bicubic")
    return Picture(content_hash[:16].hex(), 0, 0, 0, (0.0,) * 3, (1.0,) * 3, read)


def _as_it_is(image: Any, filter_: Any) -> NDArray[Any]:
    return np.asarray(image)
