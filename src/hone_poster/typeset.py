"""Typesetting of text in a box: line breaks, sizes and positions from glyph advances. No rendering.

Words break at spaces, Chinese, Japanese and Korean anywhere, and a word wider than its box wherever it must. Lines
that do not fit the box's height are left out, as design tools do; how much of the text that is counts as its fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hone_poster.fonts import advance, face_of
from hone_poster.parse import PosterLayer

LINE_HEIGHT = 1.2
"""Distance of two baselines, as a fraction of the font's size."""
BASELINE = 0.95
"""From the top of a line to its baseline; what remains below has room for DejaVu's descenders."""
EM_TOP = 0.07
"""From the top of a line to that of its characters, which are as high as the font's size."""
TIGHT = 1.1
"""Boxes are drawn close around text of a given size: it may stand out of its box by a tenth of the box's height."""
MAX_TYPESET = 2000
"""Characters of one layer that are set at most; the rest counts as not fitting."""
PADDING = 0.15
"""Between the sides of a coloured box and its text, as a fraction of the box's height."""
_AUTO_STEPS = 8
"""Halvings in the search for the largest size that fits: within half a percent."""

_TOKEN = re.compile(r"\n|[ \t]+|[\u1100-\u11ff\u2e80-\ua4cf\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef]|[^\s\u1100-\u11ff"
                    r"\u2e80-\ua4cf\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef]+")  # fmt: skip
"""A line break, white space, one wide character, or a word."""
_INDENT = {"left": 0.0, "center": 0.5, "right": 1.0}
"""Share of a line's free width that is in front of it."""


@dataclass(frozen=True, slots=True)
class GlyphRun:
    """Characters of one face that are drawn together."""

    text: str
    face: int
    x: float
    baseline: float


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A typeset text; lengths in the unit of its box."""

    runs: tuple[GlyphRun, ...]
    size: float
    """0 when there is nothing to draw."""
    fit: float
    """Share of the characters that are on a line of the box."""
    box: tuple[float, float, float, float]
    """Left, top, right and bottom of the characters; without area when there are none."""


def typeset(layer: PosterLayer, scale: float, *, padded: bool = False, max_characters: int = MAX_TYPESET) -> TextBlock:
    """Set a layer's text in its box, centred in height.

    Args:
        scale: pixels drawn per canvas pixel; the result is in pixels drawn.
        padded: keep a margin at the sides, as in a box that has a colour.
    """
    padding = min(PADDING * layer.height, layer.width / 4) if padded else 0.0
    left, width = (layer.x + padding) * scale, (layer.width - 2 * padding) * scale
    top, height = layer.y * scale, layer.height * scale
    tokens = [_piece(token) for token in _TOKEN.findall(layer.text[:max_characters])]
    size = layer.font_size * scale if layer.font_size is not None else _largest_size(tokens, width, height)
    lines = _wrap(tokens, width / size) if size > 0 else []
    has_room = 0 < size <= TIGHT * height
    shown = lines[: 1 + int((TIGHT * height - size) / (LINE_HEIGHT * size))] if has_room else []
    if not shown:
        return TextBlock((), 0.0, 0.0, (left, top, left, top))
    num_characters = sum(not character.isspace() for character in layer.text)
    fit = sum(len(line.text.replace(" ", "")) for line in shown) / max(1, num_characters)
    y = top + (height - len(shown) * LINE_HEIGHT * size) / 2
    starts = [left + _INDENT[layer.align] * (width - line.width * size) for line in shown]
    runs = [
        run
        for number, (line, x) in enumerate(zip(shown, starts, strict=True))
        for run in _runs(line.text, x, y + (number * LINE_HEIGHT + BASELINE) * size, size)
    ]
    right = max(x + line.width * size for line, x in zip(shown, starts, strict=True))
    bottom = y + (EM_TOP + 1 + (len(shown) - 1) * LINE_HEIGHT) * size
    return TextBlock(tuple(runs), size, min(1.0, fit), (min(starts), y + EM_TOP * size, right, bottom))


@dataclass(frozen=True, slots=True)
class _Word:
    """A token or a line; its width is a fraction of the font's size."""

    text: str
    width: float


def _piece(text: str) -> _Word:
    if text.isspace() and text != "\n":
        text = " "
    return _Word(text, sum(map(advance, text)) if text != "\n" else 0.0)


def _largest_size(tokens: Sequence[_Word], width: float, height: float) -> float:
    """The largest size at which every line fits whole and no word is broken."""
    widest_word = max((token.width for token in tokens), default=0.0)
    low, high = 0.0, min(height / LINE_HEIGHT, width / max(widest_word, 1e-3))
    if _needs(tokens, width, high) <= height:
        return high
    for _ in range(_AUTO_STEPS):
        size = (low + high) / 2
        low, high = (size, high) if _needs(tokens, width, size) <= height else (low, size)
    return low


def _needs(tokens: Sequence[_Word], width: float, size: float) -> float:
    """Height of a text at a size, less a tolerance for rounding."""
    return len(_wrap(tokens, width / size)) * LINE_HEIGHT * size * (1 - 1e-9)


def _wrap(tokens: Sequence[_Word], width: float) -> list[_Word]:
    """Lines no wider than `width`, a multiple of the font's size; one character has a line even if it is wider."""
    lines: list[_Word] = []
    text, used = "", 0.0
    for token in tokens:
        if token.text == "\n" or (text and used + token.width > width and token.text != " "):
            lines.append(_stripped(text, used))
            text, used = "", 0.0
        if token.text == "\n" or (token.text == " " and not text):
            continue
        for part in _parts(token, width):
            if text and used + part.width > width and part.text != " ":
                lines.append(_stripped(text, used))
                text, used = "", 0.0
            text, used = text + part.text, used + part.width
    if text.strip():
        lines.append(_stripped(text, used))
    return lines


def _parts(token: _Word, width: float) -> Iterator[_Word]:
    """A token, in pieces when it is too wide for a line of its own."""
    if token.width <= width or len(token.text) == 1:
        yield token
        return
    text, used = "", 0.0
    for character in token.text:
        step = advance(character)
        if text and used + step > width:
            yield _Word(text, used)
            text, used = "", 0.0
        text, used = text + character, used + step
    yield _Word(text, used)


def _stripped(text: str, width: float) -> _Word:
    return _Word(text[:-1], width - advance(" ")) if text.endswith(" ") else _Word(text, width)


def _runs(text: str, x: float, baseline: float, size: float) -> Iterator[GlyphRun]:
    """A line, cut where the face changes."""
    run, face = "", 0
    for character in text:
        other = face if character == " " else face_of(character)
        if run and other != face:
            yield GlyphRun(run, face, x, baseline)
            x += sum(map(advance, run)) * size
            run = ""
        run, face = run + character, other
    if run:
        yield GlyphRun(run, face, x, baseline)
