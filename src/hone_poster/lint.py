"""`heuristic_v1`: a lint of the finished picture, in [0, 1]. It catches defects; it cannot see beauty.

    V = seen x (weighted sum of the parts)

`seen` is the mean over texts and pictures of how much of each can be seen and read, so that nothing under a box, off
the canvas or too small to read counts for its place. Colour and clutter are taken against the ground truth's picture.
Weights and scales are priors, not fitted to ratings. Every part is 1 when nothing is wrong, also when there
is nothing of its kind to look at (a poster without text has no contrast to complain about; what it lacks is the
business of the other scores). Overlap and alignment are those of LayoutGAN++ (arXiv:2108.00871), after the losses
3.6.3 and 3.6.4 of Attribute-conditioned Layout GAN (arXiv:2009.05284); readability is PosterLayout's
(arXiv:2303.15937).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hone_poster.parse import Poster, PosterLayer
from hone_poster.render import LEGIBLE_FRAC, PICTURES, SHAPES, Rendering

Array = NDArray[np.float64]

WEIGHTS: Mapping[str, float] = {
    "contrast": 0.20,
    "colour": 0.20,
    "clutter": 0.20,
    "overlap": 0.15,
    "readability": 0.10,
    "alignment": 0.05,
    "density": 0.05,
    "margin": 0.05,
}
PARTS = ("seen", *WEIGHTS)
GOOD_CONTRAST = 4.5
"""WCAG 2.1's ratio for body text; where the contrast part reaches 1."""
BEST_DENSITY = 0.35
"""Share of the canvas that elements cover where the density part is 1."""
MARGIN = 0.02
"""Of the canvas's width and height, that elements should keep from its edges."""
READABLE_FRAC = 0.02
"""Font size, as a fraction of the canvas's long side, from which a text is read with ease; none is at LEGIBLE_FRAC."""
SPARE_LAYERS = 1.25
"""As many layers as the ground truth shows, times this, are not clutter."""
HUES = 12
"""Sectors that colours are counted in."""
COLOURLESS = 0.005
"""Mean chroma of a picture, up to 1, below which it has no colours to compare with."""
COARSE_PX = 8
"""Side of the squares that colours are averaged over, in pixels."""
GROUND_AREA = 0.5
"""A picture that covers more of the canvas than this is a ground for others, not an element among them."""
_CELLS = 64
"""Cells per side of the grid that the covered area is counted on."""


def lint(poster: Poster, rendering: Rendering, gold: Rendering) -> dict[str, float]:
    """`seen` and every part of the lint, each in [0, 1].

    Args:
        gold: the ground truth's picture.
    """
    texts = rendering.texts
    readable = {
        text.layer: text.visible * min(1.0, max(0.0, (text.size - LEGIBLE_FRAC) / (READABLE_FRAC - LEGIBLE_FRAC)))
        for text in texts
    }
    seen = {
        number: readable.get(number, rendering.shown[number])
        for number, layer in enumerate(poster.layers)
        if number in readable or not _is_ground(layer, poster)
    }
    boxes_N4 = boxes_of([poster.layers[number] for number in seen], poster)
    gold_H, found_H, same_colours = colours(gold), colours(rendering), 1.0
    if gold_H.sum() >= COLOURLESS:
        same_colours = float(np.minimum(found_H, gold_H).sum() / max(found_H.sum(), gold_H.sum()))
    low_N2, high_N2 = boxes_N4[:, :2], boxes_N4[:, :2] + boxes_N4[:, 2:]
    inside_N = np.asarray(((low_N2 >= MARGIN) & (high_N2 <= 1 - MARGIN)).all(-1))
    return {
        "seen": _mean(list(seen.values())),
        "contrast": _mean([min(1.0, (text.contrast - 1) / (GOOD_CONTRAST - 1)) for text in texts]),
        "colour": same_colours,
        "clutter": min(1.0, SPARE_LAYERS * max(1, _num_shown(gold)) / max(1, _num_shown(rendering))),
        "overlap": math.exp(-3 * overlap(boxes_N4)),
        "readability": _mean([1 - text.gradient for text in texts]),
        "alignment": math.exp(-20 * misalignment(boxes_N4)),
        "density": _density(boxes_N4),
        "margin": _mean([float(inside) for inside in inside_N]),
    }


def lint_score(parts: Mapping[str, float]) -> float:
    """The weighted sum of the parts, as far as the poster is seen; in [0, 1]."""
    return parts["seen"] * min(1.0, math.fsum(weight * parts[name] for name, weight in WEIGHTS.items()))


@lru_cache(maxsize=2)
def colours(rendering: Rendering) -> Array:
    """(HUES,) mean chroma of the picture in each sector of hue, without pictures that are not at hand."""
    coarse = np.asarray(rendering.image.reduce(COARSE_PX)) / 255
    red, green, blue = coarse[~rendering.pictured[::COARSE_PX, ::COARSE_PX]].T
    across, up = red - (green + blue) / 2, math.sqrt(3) / 2 * (green - blue)
    place, chroma = np.arctan2(up, across) / (2 * np.pi) % 1 * HUES, np.hypot(across, up)
    sector, share = place.astype(int), place % 1
    # Shared between neighbouring sectors: a little another hue is a little another colour.
    counted = np.bincount(sector % HUES, chroma * (1 - share), HUES) + np.bincount(
        (sector + 1) % HUES, chroma * share, HUES
    )
    return counted / max(1, len(red))


def overlap(boxes_N4: Array) -> float:
    """Mean over elements of the share of each that others cover, every other counted on its own: 0 or more.

    Args:
        boxes_N4: left, top, width, height over the canvas.
    """
    if len(boxes_N4) < 2:
        return 0.0
    low_N12, high_N12 = boxes_N4[:, None, :2], (boxes_N4[:, :2] + boxes_N4[:, 2:])[:, None]
    low, high = np.maximum(low_N12, low_N12.swapaxes(0, 1)), np.minimum(high_N12, high_N12.swapaxes(0, 1))
    shared_NN = np.clip(high - low, 0, None).prod(-1)
    np.fill_diagonal(shared_NN, 0)
    return float((shared_NN / boxes_N4[:, 2:].prod(-1)[:, None]).sum() / len(boxes_N4))


def misalignment(boxes_N4: Array) -> float:
    """Mean over elements of -log(1 - distance to the nearest edge or centre line of the same kind of another)."""
    if len(boxes_N4) < 2:
        return 0.0
    low, size = boxes_N4[:, :2], boxes_N4[:, 2:]
    lines_N6 = np.concatenate([low, low + size / 2, low + size], -1)
    apart_NN = np.abs(lines_N6[:, None] - lines_N6[None]).min(-1)
    np.fill_diagonal(apart_NN, np.inf)
    return float(np.mean(-np.log1p(-np.minimum(apart_NN.min(-1), 1 - 1e-9))))


def boxes_of(layers: Sequence[PosterLayer], poster: Poster) -> Array:
    """(N, 4) left, top, width, height over the canvas."""
    boxes = np.array([(layer.x, layer.y, layer.width, layer.height) for layer in layers], np.float64).reshape(-1, 4)
    return boxes / (poster.width, poster.height, poster.width, poster.height)


def _is_ground(layer: PosterLayer, poster: Poster) -> bool:
    """Whether other elements are meant to lie on it."""
    if layer.kind == "background" or (layer.kind in SHAPES and not layer.text):
        return True
    large = layer.width * layer.height > GROUND_AREA * poster.width * poster.height
    return large and layer.kind in PICTURES


def _num_shown(rendering: Rendering) -> int:
    return sum(share > 0 for share in rendering.shown)


def _density(boxes_N4: Array) -> float:
    """1 where elements cover BEST_DENSITY of the canvas, falling to 0 towards an empty and a full one."""
    cells = np.zeros((_CELLS, _CELLS), bool)
    for left, top, width, height in np.clip(boxes_N4, -1e3, 1e3) * _CELLS:
        columns = slice(max(0, round(left)), max(0, round(left + width)))
        cells[max(0, round(top)) : max(0, round(top + height)), columns] = True
    covered = float(cells.mean())
    return covered / BEST_DENSITY if covered < BEST_DENSITY else (1 - covered) / (1 - BEST_DENSITY)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 1.0
