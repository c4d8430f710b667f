"""Pictures of prompts as a judge is sent them: data URLs, bounded in size, each encoded once."""

from __future__ import annotations

import asyncio
import base64
from collections import OrderedDict
from collections.abc import Sequence
from io import BytesIO

from hone.types import Picture

KEPT_BYTES = 64 << 20
"""Encoded pictures that are kept, those used last."""
QUALITY = 92
"""Of JPEG."""


class ShownPictures:
    """Encodes pictures for requests.

    Args:
        side: pixels along the longer side, at most.
    """

    def __init__(self, side: int) -> None:
        self._side = side
        self._kept: OrderedDict[str, str] = OrderedDict()

    async def urls(self, pictures: Sequence[Picture]) -> tuple[str, ...]:
        """In their order. Raises DataError for a picture that has changed since prompts were loaded."""
        return tuple([await self._url(picture) for picture in pictures])

    async def _url(self, picture: Picture) -> str:
        if picture.digest not in self._kept:
            self._kept[picture.digest] = await asyncio.to_thread(data_url, picture, self._side)
        self._kept.move_to_end(picture.digest)
        url = self._kept[picture.digest]
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return url


def data_url(picture: Picture, side: int) -> str:
    """The whole picture in its own shape, as JPEG."""
    from PIL import Image

    file = BytesIO()
    Image.fromarray(picture.read(within=side)).save(file, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
