"""The two fonts that posters are drawn with, shipped beside this file so that every machine draws the same pixels.

DejaVu Sans has the Latin, Greek and Cyrillic scripts; what it lacks is taken from Droid Sans Fallback, which has
Chinese, Japanese and Korean. A character that neither has is drawn as DejaVu's empty box. One weight only.
"""

from __future__ import annotations

import hashlib
import io
from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

FOLDER = Path(__file__).parent / "fonts"
SHA256 = {
    "DejaVuSans.ttf": "abdc775b21b1bc470d50c97e790d276f2054b7504e56e5bd3e64f48d68582322",
    "DroidSansFallback.ttf": "56d3edfb377a8bc3c4b77f4476405c770173c0e31221ad7c77d0a8e1f3039a3e",
}
"""In order of preference. Another file would give other pixels, and so other rewards."""
FACES = tuple(SHA256)
_ABSENT = "\uffff"
"""A code point that no font has."""
_MEASURE_PX = 256
"""Advances are measured at this size, where rounding to whole pixels costs 0.2 % at most, and scaled."""


@lru_cache(maxsize=512)
def font(face: int, size_px: int) -> ImageFont.FreeTypeFont:
    """A face at a size. Pillow's own layout: the other one depends on what the machine has installed."""
    return ImageFont.truetype(io.BytesIO(_file(face)), size_px, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=65536)
def face_of(character: str) -> int:
    """The first face that has a character; 0 when none has."""
    return next((face for face in range(len(FACES)) if _mask(face, character) != _mask(face, _ABSENT)), 0)


@lru_cache(maxsize=65536)
def advance(character: str) -> float:
    """How far a character moves the pen, as a fraction of the font's size."""
    return font(face_of(character), _MEASURE_PX).getlength(character) / _MEASURE_PX


@lru_cache(maxsize=len(FACES))
def _file(face: int) -> bytes:
    """Raises RuntimeError when the file is not the one that this version was made with."""
    path = FOLDER / FACES[face]
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256[FACES[face]]:
        raise RuntimeError(f"{path} is not the font this version of Hone ships; install it again")
    return data


@lru_cache(maxsize=4096)
def _mask(face: int, character: str) -> bytes:
    return bytes(font(face, 16).getmask(character))  # type: ignore[arg-type]  # Pillow's stubs lack its buffer
