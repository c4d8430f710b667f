"""Rendering of posters, deterministic to the byte, and visibility of their texts.

Flat fills, placeholders for missing pictures, and text in the fonts shipped here; no effects, no rotation. Reward and
report use the same picture: a text is as visible as it is there. Not a browser, which would take seconds and a network.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw

from hone_poster.fonts import advance, font
from hone_poster.parse import Color, Poster, PosterLayer
from hone_poster.typeset import MAX_TYPESET, GlyphRun, TextBlock, typeset

MIN_CONTRAST = 1.5
"""WCAG contrast ratio below which a text cannot be seen."""
LEGIBLE_FRAC = 0.01
"""Font size, as a fraction of the canvas's long side, below which a text fades out of sight."""
FULL_INK = 0.95
"""Of the most that drawing a text changed a pixel: from here on a pixel is a glyph's, not the edge of one."""
RIM_PX = 2
OPAQUE = 0.9
"""Opacity from which a box hides what is under it."""
MAX_PICTURE_PIXELS = 40_000_000
"""Larger picture files are not opened."""
MAX_CHARACTERS_DRAWN = 20_000
"""Of one poster; the rest counts as not fitting."""
PICTURES = frozenset({"image", "logo", "photo", "picture", "icon", "illustration"})
SHAPES = frozenset({"shape", "underlay", "rectangle", "button", "decoration"})

_WHITE: Color = (255, 255, 255)
_BLACK: Color = (17, 17, 17)
_SHAPE_FILL: Color = (217, 217, 217)
_PLACEHOLDER_FILL: Color = (203, 213, 225)
_PLACEHOLDER_LINE: Color = (148, 163, 184)

Box = tuple[int, int, int, int]
"""Left, top, right, bottom, in pixels drawn."""


@dataclass(frozen=True, slots=True)
class TextFacts:
    """One text of a poster as drawn; all numbers but the contrast are in [0, 1]."""

    layer: int
    """Index into the poster's layers."""
    visible: float
    """Inside the canvas x not covered x seen against its ground x fits its box x large enough to read."""
    contrast: float
    """WCAG 2 ratio of its glyphs to what is around them in the finished picture, 1 to 21."""
    gradient: float
    """Mean steepness of what is under the text; 1 is black against white at every pixel."""
    size: float
    """Of its font, as a fraction of the canvas's long side; 0 when nothing of it was drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class Rendering:
    """The picture of a poster, and its texts in the order of its layers."""

    image: Image.Image
    texts: tuple[TextFacts, ...]
    shown: tuple[float, ...]
    """Of each layer's box the share that is inside the canvas and under no opaque box drawn later."""
    pictured: NDArray[np.bool_]
    """Where a picture lies on top whose colours are not known."""

    def png(self) -> bytes:
        """The picture as a PNG file."""
        target = io.BytesIO()
        self.image.save(target, "PNG")
        return target.getvalue()


def render(
    poster: Poster, long_side_px: int, *, images: Mapping[str, str] | None = None, image_root: Path | None = None
) -> Rendering:
    """Draw a poster.

    Args:
        long_side_px: length of the picture's longer side; the canvas is scaled to it.
        images: the ground truth's: what file a layer's `image_id` stands for.
        image_root: the only folder that picture files are read from; None: pictures are drawn as placeholders.
    """
    return _Drawing(poster, long_side_px, images or {}, image_root).render()


class _Drawing:
    """A picture while it is drawn."""

    def __init__(self, poster: Poster, long_side_px: int, images: Mapping[str, str], image_root: Path | None) -> None:
        self.poster, self.images, self.image_root = poster, images, image_root
        self.scale = long_side_px / max(poster.width, poster.height)
        self.width = max(1, round(poster.width * self.scale))
        self.height = max(1, round(poster.height * self.scale))
        self.image = Image.new("RGB", (self.width, self.height), _WHITE)
        self.characters_left = MAX_CHARACTERS_DRAWN
        self.pictured = np.zeros((self.height, self.width), bool)

    def render(self) -> Rendering:
        drawn: list[tuple[int, TextBlock, _Under, Image.Image]] = []
        for number, layer in enumerate(self.poster.layers):
            self.box(layer)
            if layer.text.strip():
                room = min(MAX_TYPESET, self.characters_left)
                block = typeset(layer, self.scale, padded=fill_of(layer) is not None, max_characters=room)
                self.characters_left -= min(len(layer.text), self.characters_left)
                under = self.look_under(layer, block)
                before = self.image.crop(self.around(block))
                self.text(layer, block, under)
                glyphs = ImageChops.difference(before, self.image.crop(self.around(block))).convert("L")
                drawn.append((number, block, under, glyphs))
        hidden, shown = self.covered([(number, block) for number, block, _, _ in drawn])
        texts = []
        for (number, block, under, glyphs), covered in zip(drawn, hidden, strict=True):
            contrast = self.contrast(block, glyphs)
            visible = self.visible(block, contrast, under.pictured, covered)
            size = block.size / max(self.width, self.height)
            texts.append(TextFacts(number, visible, contrast, under.gradient, size))
        return Rendering(self.image, tuple(texts), tuple(shown), self.pictured)

    def clip(self, box: Sequence[float]) -> Box:
        """A box in whole pixels of the picture; may be empty."""
        left, top, right, bottom = box
        return (
            min(self.width, max(0, round(left))),
            min(self.height, max(0, round(top))),
            min(self.width, max(0, round(right))),
            min(self.height, max(0, round(bottom))),
        )

    def layer_box(self, layer: PosterLayer) -> Box:
        return self.clip(corners_of(layer, self.scale))

    def box(self, layer: PosterLayer) -> None:
        """Fill a layer's box, or draw its picture."""
        left, top, right, bottom = box = self.layer_box(layer)
        if right <= left or bottom <= top or layer.opacity == 0:
            return
        if layer.kind in PICTURES and layer.fill is None:
            self.picture(layer, box)
            return
        fill = fill_of(layer)
        if fill is None:
            return
        self.paste(Image.new("RGB", (right - left, bottom - top), fill), box, layer.opacity)
        if is_opaque(layer):
            self.pictured[top:bottom, left:right] = False

    def picture(self, layer: PosterLayer, box: Box) -> None:
        left, top, right, bottom = box
        # Files of the ground truth alone: paths in responses are never opened.
        name = self.images.get(layer.image) if layer.image is not None else None
        found = None
        if name is not None and self.image_root is not None:
            found = load_picture(self.image_root, name)
        if found is not None:
            part = self.part_of(found, layer, box)
            self.paste(found.resize((right - left, bottom - top), Image.Resampling.BILINEAR, part), box, layer.opacity)
            self.pictured[top:bottom, left:right] = False
            return
        placeholder = Image.new("RGB", (right - left, bottom - top), _PLACEHOLDER_FILL)
        pen = ImageDraw.Draw(placeholder)
        edge = (0, 0, right - left - 1, bottom - top - 1)
        pen.line((edge[0], edge[1], edge[2], edge[3]), _PLACEHOLDER_LINE)
        pen.line((edge[0], edge[3], edge[2], edge[1]), _PLACEHOLDER_LINE)
        pen.rectangle(edge, outline=_PLACEHOLDER_LINE)
        if min(edge[2:]) >= 24:
            pen.text((4, 14), layer.kind, _PLACEHOLDER_LINE, font(0, 11), anchor="ls")
        self.paste(placeholder, box, layer.opacity)
        if is_opaque(layer):
            self.pictured[top:bottom, left:right] = True

    def part_of(self, picture: Image.Image, layer: PosterLayer, box: Box) -> tuple[float, float, float, float]:
        """The part of a layer's picture inside a box of the canvas; only that part is scaled."""
        across = picture.width / (layer.width * self.scale)
        down = picture.height / (layer.height * self.scale)
        left, top = (box[0] - layer.x * self.scale) * across, (box[1] - layer.y * self.scale) * down
        right, bottom = left + (box[2] - box[0]) * across, top + (box[3] - box[1]) * down
        # The box was rounded to whole pixels, so it may stand out of the layer by a little.
        left, top = min(max(left, 0.0), picture.width - 1e-3), min(max(top, 0.0), picture.height - 1e-3)
        return (left, top, max(left + 1e-3, min(right, picture.width)), max(top + 1e-3, min(bottom, picture.height)))

    def paste(self, picture: Image.Image, box: Box, opacity: float) -> None:
        if opacity >= 1:
            self.image.paste(picture, box)
        else:
            self.image.paste(picture, box, Image.new("L", picture.size, round(255 * opacity)))

    def look_under(self, layer: PosterLayer, block: TextBlock) -> _Under:
        """The background of a text, before it is drawn."""
        left, top, right, bottom = self.clip(block.box)
        if right <= left or bottom <= top:
            return _Under(_BLACK, 0.0, 0.0)
        area = self.image.crop((left, top, right, bottom))
        mean: Color = area.resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))  # type: ignore[assignment]
        gray = np.asarray(area.convert("L"), np.int16)
        color = layer.color or max((_BLACK, _WHITE), key=lambda c: contrast_ratio(c, mean))
        pictured = float(self.pictured[top:bottom, left:right].mean()) if layer.opacity >= 0.5 else 0.0
        # The mean difference of neighbouring pixels, over the largest possible one.
        across, down = (float(np.abs(np.diff(gray, axis=axis)).sum()) for axis in (1, 0))
        return _Under(color, min(1.0, (across + down) / (2 * 255 * gray.size)), pictured)

    def text(self, layer: PosterLayer, block: TextBlock, under: _Under) -> None:
        if layer.opacity == 0 or not self.is_drawable(block):
            return
        target = Image.new("L", self.image.size) if layer.opacity < 1 else self.image
        ink = round(255 * layer.opacity) if layer.opacity < 1 else under.color
        pen, size_px = ImageDraw.Draw(target), max(1, round(block.size))
        for run in block.runs:
            if -block.size < run.baseline < self.height + 2 * block.size:
                text, x = self.within(run, block.size)
                pen.text((round(x), round(run.baseline)), text, ink, font(run.face, size_px), anchor="ls")
        if target is not self.image:
            self.image.paste(under.color, (0, 0), target)

    def is_drawable(self, block: TextBlock) -> bool:
        """Text larger than the canvas is not drawn: memory of its glyphs is unbounded, and only edges would show."""
        return 0 < block.size <= max(self.width, self.height)

    def within(self, run: GlyphRun, size: float) -> tuple[str, float]:
        """The characters of a run that touch the picture, and where they start: Pillow would draw the rest as well."""
        x, first, start, last = run.x, None, run.x, 0
        for place, character in enumerate(run.text):
            after = x + advance(character) * size
            if after > -size and x < self.width + size:
                first, start = (place, x) if first is None else (first, start)
                last = place + 1
            x = after
        return run.text[first or 0 : last], start

    def covered(self, texts: Sequence[tuple[int, TextBlock]]) -> tuple[list[float], list[float]]:
        """For each text the share of its area that what was drawn after it hides: opaque boxes, and other texts. And
        for each layer the share of its box that opaque boxes leave to be seen."""
        hidden: dict[int, float] = {}
        shown = [0.0] * len(self.poster.layers)
        blocks = dict(texts)
        cover, boxes = np.zeros((2, self.height, self.width), bool)
        for number in range(len(self.poster.layers) - 1, -1, -1):
            layer = self.poster.layers[number]
            if number in blocks:
                left, top, right, bottom = self.clip(blocks[number].box)
                area = cover[top:bottom, left:right]
                hidden[number] = float(area.mean()) if area.size else 0.0
                if layer.opacity > 0:
                    cover[top:bottom, left:right] = True
            left, top, right, bottom = self.layer_box(layer)
            area = boxes[top:bottom, left:right]
            if area.size and layer.opacity > 0:
                shown[number] = self.inside(corners_of(layer, self.scale)) * (1 - float(area.mean()))
            if is_opaque(layer):
                cover[top:bottom, left:right] = boxes[top:bottom, left:right] = True
        return [hidden[number] for number, _ in texts], shown

    def inside(self, box: Sequence[float]) -> float:
        """Share of a box's area that lies inside the canvas."""
        left, top, right, bottom = box
        area = (right - left) * (bottom - top)
        width = max(0.0, min(right, self.width) - max(left, 0.0))
        height = max(0.0, min(bottom, self.height) - max(top, 0.0))
        return min(1.0, width * height / area) if area > 0 else 0.0

    def around(self, block: TextBlock) -> Box:
        """The region of a text in the picture, with a margin without glyphs."""
        left, top, right, bottom = block.box
        return self.clip((left - RIM_PX, top - RIM_PX, right + RIM_PX, bottom + RIM_PX))

    def contrast(self, block: TextBlock, glyphs: Image.Image) -> float:
        """Of a text's glyphs to the pixels around them, in the picture as it is now.

        Args:
            glyphs: how much drawing the text changed each pixel.
        """
        changed = np.asarray(glyphs)
        most = float(changed.max(initial=0))
        ink, ground = changed >= FULL_INK * most, changed <= (1 - FULL_INK) * most
        if most == 0 or not ground.any():
            return 1.0
        area = np.asarray(self.image.crop(self.around(block)), np.float64).reshape(-1, 3)
        ink_mean, ground_mean = (part.reshape(-1) @ area / part.sum() for part in (ink, ground))
        return contrast_ratio(ink_mean, ground_mean)

    def visible(self, block: TextBlock, contrast: float, pictured: float, covered: float) -> float:
        if not self.is_drawable(block) or (contrast < MIN_CONTRAST and pictured < 0.5):
            return 0.0
        legible = min(1.0, block.size / (LEGIBLE_FRAC * max(self.width, self.height)))
        return self.inside(block.box) * (1 - covered) * block.fit * legible


@dataclass(frozen=True, slots=True)
class _Under:
    """Background and colour of a text."""

    color: Color
    gradient: float
    pictured: float
    """Share of its area with a picture of unknown colours on top, where contrast says nothing; 0 if it is faint."""


def corners_of(layer: PosterLayer, scale: float) -> list[float]:
    """Left, top, right and bottom of a layer, in pixels drawn."""
    return [scale * corner for corner in (layer.x, layer.y, layer.x + layer.width, layer.y + layer.height)]


def fill_of(layer: PosterLayer) -> Color | None:
    """The colour of a layer's box; None when it has none."""
    if layer.fill is not None:
        return layer.fill
    if layer.kind == "background":
        return _WHITE
    return _SHAPE_FILL if layer.kind in SHAPES else None


def is_opaque(layer: PosterLayer) -> bool:
    """Whether a layer's box hides what is under it."""
    return layer.opacity >= OPAQUE and (layer.kind in PICTURES or fill_of(layer) is not None)


def contrast_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """WCAG 2.1's contrast ratio of two sRGB colours, 1 to 21."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@lru_cache(maxsize=64)
def load_picture(root: Path, name: str) -> Image.Image | None:
    """A picture file below `root`; None when it is not there, lies elsewhere, is too large or no picture."""
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()) or not path.is_file():
            return None
        with Image.open(path) as found:
            return found.convert("RGB") if found.width * found.height <= MAX_PICTURE_PIXELS else None
    except (OSError, ValueError, Image.DecompressionBombError):
        return None


def _luminance(color: Sequence[float]) -> float:
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in color))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
