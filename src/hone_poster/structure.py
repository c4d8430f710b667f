"""Structure score S: how well the layers of a poster match those of the ground truth in position, type and order.

    box similarity  b = IoU / 2 + exp(-4 |c - c'|_1) / 2,      c = (centre x, centre y, width, height) over the canvas
    layer match     M = b * t,                                  t = 1 same type, 1/2 same family, 0 otherwise
    soft F1         2 * (largest total M of a one-to-one matching) / (layers of both)
    S = 0.75 F1 + (0.15 inside + 0.10 order) * min(1, 2 F1)

The exponential follows DocSim (READ, arXiv:1909.00302), which matches by 2^-(distance); IoU alone is flat
once boxes are apart. Omissions, duplicates and malformed layers all cost through F1. `inside` is 1 less what hangs
off the canvas beyond what the ground truth has there; `order` is the share of matched pairs stacked as in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from hone_poster.parse import Poster

Array = NDArray[np.float64]

FAMILIES = (
    frozenset({"text", "title", "subtitle", "headline", "heading", "body", "caption", "slogan"}),
    frozenset({"image", "logo", "photo", "picture", "icon", "illustration"}),
)
SAME_TEXT_BONUS = 1e-6
"""Breaks ties between equal boxes; far below any difference that a score shows."""
SAME_ORDER_BONUS = 1e-9
"""Breaks what is still tied; squared distances, so that the matching without crossings wins."""


@dataclass(frozen=True, slots=True)
class Structure:
    """Score S and what it is made of, each in [0, 1]."""

    score: float
    f1: float
    inside: float
    order: float


def score_structure(found: Poster, gold: Poster, text_similarity_PG: Array) -> Structure:
    """Compare the layers of two posters on one canvas.

    Args:
        text_similarity_PG: (P, G), of the texts of P found layers and G gold layers; breaks ties only.
    """
    boxes_P, boxes_G = _boxes(found), _boxes(gold)
    match_PG = _box_similarity(boxes_P, boxes_G) * _type_similarity(found, gold)
    place_P, place_G = np.arange(len(boxes_P)) / len(boxes_P), np.arange(len(boxes_G)) / len(boxes_G)
    bonus_PG = SAME_TEXT_BONUS * text_similarity_PG - SAME_ORDER_BONUS * (place_P[:, None] - place_G) ** 2
    rows, columns = linear_sum_assignment(match_PG + bonus_PG * (match_PG > 0), maximize=True)
    matched = match_PG[rows, columns]
    f1 = min(1.0, 2 * float(matched.sum()) / (found.num_layers + len(boxes_G)))
    off_found, off_gold = _off_canvas(boxes_P), _off_canvas(boxes_G)
    inside = 1 - max(0.0, off_found - off_gold)
    order = _concordant(columns[matched > 0]) if len(boxes_G) > 1 else 1.0
    return Structure(0.75 * f1 + (0.15 * inside + 0.10 * order) * min(1.0, 2 * f1), f1, inside, order)


def _boxes(poster: Poster) -> Array:
    """(N, 4) left, top, width, height over the canvas."""
    boxes = np.array([(layer.x, layer.y, layer.width, layer.height) for layer in poster.layers], np.float64)
    return boxes / (poster.width, poster.height, poster.width, poster.height)


def _box_similarity(one_P4: Array, other_G4: Array) -> Array:
    """(P, G) in [0, 1]; 1 for equal boxes only."""
    low_P12, low_1G2 = one_P4[:, None, :2], other_G4[None, :, :2]
    high_P12, high_1G2 = low_P12 + one_P4[:, None, 2:], low_1G2 + other_G4[None, :, 2:]
    shared_PG = np.clip(np.minimum(high_P12, high_1G2) - np.maximum(low_P12, low_1G2), 0, None).prod(-1)
    areas_PG = (high_P12 - low_P12).prod(-1) + (high_1G2 - low_1G2).prod(-1)
    iou_PG = shared_PG / (areas_PG - shared_PG)
    centre_P14 = np.concatenate([low_P12 + one_P4[:, None, 2:] / 2, one_P4[:, None, 2:]], -1)
    centre_1G4 = np.concatenate([low_1G2 + other_G4[None, :, 2:] / 2, other_G4[None, :, 2:]], -1)
    near_PG = np.exp(-4 * np.abs(centre_P14 - centre_1G4).sum(-1))
    return np.minimum(1.0, (iou_PG + near_PG) / 2)


def _type_similarity(found: Poster, gold: Poster) -> Array:
    kinds_P, kinds_G = [layer.kind for layer in found.layers], [layer.kind for layer in gold.layers]
    return np.array([[_kinds_match(one, other) for other in kinds_G] for one in kinds_P])


def _kinds_match(one: str, other: str) -> float:
    if one == other:
        return 1.0
    return 0.5 if any(one in family and other in family for family in FAMILIES) else 0.0


def _off_canvas(boxes_N4: Array) -> float:
    """Mean share of the boxes' areas that lies off the canvas."""
    low = np.clip(boxes_N4[:, :2], 0, 1)
    high = np.clip(boxes_N4[:, :2] + boxes_N4[:, 2:], 0, 1)
    return float(np.mean(1 - np.minimum(1.0, (high - low).prod(-1) / boxes_N4[:, 2:].prod(-1))))


def _concordant(gold_places: NDArray[np.intp]) -> float:
    """Share of pairs in ascending order, of the gold places of matched layers from bottom to top; 0 below two."""
    num = len(gold_places)
    if num < 2:
        return 0.0
    ascending = np.triu(gold_places[:, None] < gold_places[None], 1).sum()
    return float(ascending / (num * (num - 1) / 2))
