"""Thumbnails of the pictures in prompts: samples/thumbnails/DIGEST.jpg, for the report and the live pages of a run.

They are bounded in size and in number, so that a run with large pictures writes a few MiB of them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path

from hone.errors import DataError
from hone.types import Group, Picture

SIDE = 192
"""Longest side of a thumbnail, in pixels."""
QUALITY = 80
"""JPEG quality."""
MAX_NEW = 32
"""Thumbnails made of one step's pictures; groups whose samples differ in reward come first."""
MAX_BYTES = 16 << 20
"""Bytes of all thumbnails of a run."""


class Thumbnails:
    """Writes those of a run; each picture once."""

    def __init__(self, samples_folder: Path) -> None:
        self._folder = samples_folder / "thumbnails"
        self._sizes = {path.stem: path.stat().st_size for path in self._folder.glob("*.jpg")}

    def wanted(self, groups: Iterable[Group]) -> list[Picture]:
        """Pictures of groups that have no thumbnail yet, at most `MAX_NEW`."""
        seen = [group for group in groups if group.prompt.pictures]
        seen.sort(key=lambda group: len(set(group.rewards)) < 2)
        found = {picture.digest: picture for group in seen for picture in group.prompt.pictures}
        return [picture for digest, picture in found.items() if digest not in self._sizes][:MAX_NEW]

    def write(self, pictures: Sequence[Picture]) -> None:
        """For the background thread. One that cannot be read or written is left out: training names it, if it must."""
        from PIL import Image

        for picture in pictures:
            if picture.digest in self._sizes or sum(self._sizes.values()) >= MAX_BYTES:
                continue
            try:
                file = BytesIO()
                Image.fromarray(picture.read(within=SIDE)).save(file, "JPEG", quality=QUALITY)
                self._folder.mkdir(parents=True, exist_ok=True)
                aside = self._folder / f"{picture.digest}.tmp"
                aside.write_bytes(file.getvalue())
                aside.replace(self._folder / f"{picture.digest}.jpg")
            except (DataError, OSError):
                continue
            self._sizes[picture.digest] = len(file.getvalue())


def read_thumbnails(run_folder: Path, digests: Iterable[str], *, most: int) -> dict[str, str]:
    """Digest -> its thumbnail as base64 text, of the first `most` that there are."""
    found: dict[str, str] = {}
    for digest in dict.fromkeys(digests):
        path = run_folder / "samples" / "thumbnails" / f"{digest}.jpg"
        if len(found) < most and path.is_file():
            found[digest] = base64.b64encode(path.read_bytes()).decode()
    return found
