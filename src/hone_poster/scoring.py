"""The poster reward: structure, text accuracy and looks of a group's posters, combined into one score each.

    R = w_s S + w_a A + w_v V min(1, F1 / 0.5)          weights normalised to a sum of 1

A response that is not a poster, or that a working visual scorer cannot rate, scores 0 as a fault of the model; the
scorer counts as working if it rates another poster of the group. V has its full weight only from F1 = 0.5, so that a
well-designed but almost empty canvas scores almost nothing.

S, structure: how well the layers of a poster match those of the ground truth in position, type and order.

    box similarity  b = IoU / 2 + exp(-4 |c - c'|_1) / 2,      c = (centre x, centre y, width, height) over the canvas
    layer match     M = b * t,                                  t = 1 same type, 1/2 same family, 0 otherwise
    soft F1         2 * (largest total M of a one-to-one matching) / (layers of both)
    S = 0.75 F1 + (0.15 inside + 0.10 order) * min(1, 2 F1)

The exponential follows DocSim (READ, arXiv:1909.00302), which matches by 2^-(distance); IoU alone is flat
once boxes are apart. Omissions, duplicates and malformed layers all cost through F1. `inside` is 1 less what hangs
off the canvas beyond what the ground truth has there; `order` is the share of matched pairs stacked as in it.

A, accuracy: whether a poster says what the ground truth says, and visibly.

    similarity  1 - Levenshtein distance / longer length, on code points: right for scripts without spaces
    A_layers    sum over matched texts of similarity * visible * (lengths of both) / (all lengths of both)
    A = 0.8 A_layers + 0.2 * (similarity of all texts in reading order) * (mean visible)

Texts are matched for the largest such sum, whatever their boxes. The second term forgives a text that was cut into
two layers. Visibility is taken relative to the ground truth's own: a poster equal to it has A = 1.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist
from scipy.optimize import linear_sum_assignment

from hone.reward import Fault, Score
from hone_poster.lint import Array, boxes_of
from hone_poster.parse import BadGroundTruth, NotAPoster, Poster, PosterLayer, read_ground_truth, read_solution
from hone_poster.render import PICTURES, Rendering, render
from hone_poster.settings import PosterSettings
from hone_poster.visual import VisualResult

FULL_VISUAL_F1 = 0.5
"""Structure's F1 from which the visual score counts fully."""
FAMILIES = (
    frozenset({"text", "title", "subtitle", "headline", "heading", "body", "caption", "slogan"}),
    PICTURES,
)
SAME_TEXT_BONUS = 1e-6
"""Breaks ties between equal boxes; far below any difference that a score shows."""
SAME_ORDER_BONUS = 1e-9
"""Breaks what is still tied; squared distances, so that the matching without crossings wins."""
NO_TEXT_SCALE = 40
"""Characters too many that cost a factor of e when the ground truth has no text at all."""


@dataclass(frozen=True, slots=True)
class MeasuredPoster:
    """A poster with its structure and text accuracy."""

    poster: Poster
    rendering: Rendering
    structure: Structure
    accuracy: Accuracy


@dataclass(frozen=True, slots=True)
class Gold:
    """The ground truth of a group, measured once."""

    poster: Poster
    rendering: Rendering
    texts: tuple[Text, ...]
    """Its texts that are not empty."""
    layer_texts: tuple[str, ...]
    """The normalised text of every layer."""

    @classmethod
    def of(cls, poster: Poster, settings: PosterSettings) -> Gold:
        rendering = render(poster, settings.picture_px, images=poster.images, image_root=settings.folder)
        texts = tuple(texts_of(poster, rendering, ignore_case=settings.ignore_case))
        return cls(poster, rendering, texts, layer_texts(poster, settings))


async def score_posters(responses: Sequence[str], ground_truth: Any, settings: PosterSettings) -> list[Score]:
    """Scores in [0, 1] of several responses to one brief. Equal responses are scored once."""
    try:
        gold = Gold.of(read_ground_truth(ground_truth, geometry=settings.geometry), settings)
    except BadGroundTruth as error:
        return [Score(None, Fault.DATA, str(error))] * len(responses)
    measured = {response: measure(response, gold, settings) for response in dict.fromkeys(responses)}
    posters = {response: found for response, found in measured.items() if isinstance(found, MeasuredPoster)}
    results = [VisualResult(0.0)] * len(posters)  # without a scorer, which leaves them without weight
    if settings.scorer is not None:
        drawn = [(found.poster, found.rendering) for found in posters.values()]
        results = await settings.scorer.score(drawn, gold.rendering)
    looks = dict(zip(posters, results, strict=True))
    is_working = any(look.score is not None for look in looks.values())
    broken = {r: look.fault for r, look in looks.items() if look.score is None and look.answered and is_working}
    missing = next((look.fault for r, look in looks.items() if look.score is None and r not in broken), None)
    if missing is not None and settings.on_component_missing == "fail":
        return [Score(None, Fault.INFRA, f"visual: {missing}")] * len(responses)
    weights = settings.weights
    if missing is not None and settings.on_component_missing == "group_renormalize":
        rest = weights[0] + weights[1]
        weights = (weights[0] / rest, weights[1] / rest, 0.0)
    scores = {r: _combine(found, looks[r], weights, settings) for r, found in posters.items() if r not in broken}
    for response in measured.keys() - scores.keys():
        why = broken.get(response) or str(measured[response])
        scores[response] = Score(0.0, Fault.MODEL, why, _metrics(settings))
    return [scores[response] for response in responses]


def measure(response: str, gold: Gold, settings: PosterSettings) -> MeasuredPoster | NotAPoster:
    """Structure and text accuracy of a response, or the reason why it is not a poster."""
    try:
        poster = read_solution(response, gold.poster, geometry=settings.geometry, multi_object=settings.multi_object)
    except NotAPoster as error:
        return error
    rendering = render(poster, settings.picture_px, images=gold.poster.images, image_root=settings.folder)
    similarity_PG = text_similarity(layer_texts(poster, settings), gold.layer_texts)
    structure = score_structure(poster, gold.poster, similarity_PG)
    num_malformed = sum(len(normalize(text, ignore_case=settings.ignore_case)) for text in poster.malformed_texts)
    texts = texts_of(poster, rendering, ignore_case=settings.ignore_case)
    accuracy = score_accuracy(texts, gold.texts, malformed_characters=num_malformed)
    return MeasuredPoster(poster, rendering, structure, accuracy)


def layer_texts(poster: Poster, settings: PosterSettings) -> tuple[str, ...]:
    return tuple(normalize(layer.text, ignore_case=settings.ignore_case) for layer in poster.layers)


def _combine(
    found: MeasuredPoster, look: VisualResult, weights: tuple[float, float, float], settings: PosterSettings
) -> Score:
    """The weighted sum; no value if looks have a weight and their score failed."""
    structure, accuracy = found.structure.score, found.accuracy.score
    if look.score is None and weights[2] > 0:
        return Score(None, Fault.INFRA, f"visual: {look.fault}")
    looks = look.score or 0.0
    coupled = looks * min(1.0, found.structure.f1 / FULL_VISUAL_F1)
    value = min(1.0, weights[0] * structure + weights[1] * accuracy + weights[2] * coupled)
    scorer = settings.scorer.model if settings.scorer is not None else "none"
    return Score(value, None, f"visual: {scorer}", _metrics(settings, found, looks, look.parts))


def _metrics(
    settings: PosterSettings,
    found: MeasuredPoster | None = None,
    looks: float = 0.0,
    parts: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """The parts of a score. The same names for every sample of a run; all 0 for a response that is not a poster."""
    metrics = {
        "structure": found.structure.score if found else 0.0,
        "accuracy": found.accuracy.score if found else 0.0,
        "f1": found.structure.f1 if found else 0.0,
        "text_visible": found.accuracy.visible if found else 0.0,
        "num_layers": float(found.poster.num_layers) if found else 0.0,
        "malformed_layers": float(len(found.poster.malformed_texts)) if found else 0.0,
        "canvas_matches": float(found.poster.canvas_matches) if found else 0.0,
    }
    if settings.scorer is not None:
        metrics["visual"] = looks
        metrics |= {f"visual_{name}": (parts or {}).get(name, 0.0) for name in settings.scorer.part_names}
    return metrics


# ---- structure


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
    boxes_P, boxes_G = boxes_of(found.layers, found), boxes_of(gold.layers, gold)
    types_PG = np.array([[_kinds_match(one.kind, other.kind) for other in gold.layers] for one in found.layers])
    match_PG = _box_similarity(boxes_P, boxes_G) * types_PG
    place_P, place_G = np.arange(len(boxes_P)) / len(boxes_P), np.arange(len(boxes_G)) / len(boxes_G)
    bonus_PG = SAME_TEXT_BONUS * text_similarity_PG - SAME_ORDER_BONUS * (place_P[:, None] - place_G) ** 2
    rows, columns = linear_sum_assignment(match_PG + bonus_PG * (match_PG > 0), maximize=True)
    matched = match_PG[rows, columns]
    f1 = min(1.0, 2 * float(matched.sum()) / (found.num_layers + len(boxes_G)))
    off_found, off_gold = _off_canvas(boxes_P), _off_canvas(boxes_G)
    inside = 1 - max(0.0, off_found - off_gold)
    order = _concordant(columns[matched > 0]) if len(boxes_G) > 1 else 1.0
    return Structure(0.75 * f1 + (0.15 * inside + 0.10 * order) * min(1.0, 2 * f1), f1, inside, order)


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


# ---- text accuracy


@dataclass(frozen=True, slots=True)
class Text:
    """A text of a poster, normalised."""

    text: str
    layer: PosterLayer
    visible: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Score A and the mean visibility of the texts, each in [0, 1]."""

    score: float
    visible: float


def normalize(text: str, *, ignore_case: bool = False) -> str:
    """NFKC, without invisible characters, white space collapsed."""
    shown = "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")
    collapsed = " ".join(shown.split())
    return collapsed.casefold() if ignore_case else collapsed


def texts_of(poster: Poster, rendering: Rendering, *, ignore_case: bool = False) -> list[Text]:
    """The texts that were drawn, in the order of the layers; those that normalise to nothing left out."""
    texts = [
        Text(
            normalize(poster.layers[facts.layer].text, ignore_case=ignore_case),
            poster.layers[facts.layer],
            facts.visible,
        )
        for facts in rendering.texts
    ]
    return [text for text in texts if text.text]


def score_accuracy(found: Sequence[Text], gold: Sequence[Text], *, malformed_characters: int = 0) -> Accuracy:
    """Compare what two posters say.

    Args:
        malformed_characters: length of the texts of layers without a usable box, which match nothing.
    """
    length_P = np.array([len(text.text) for text in found], np.float64)
    length_G = np.array([len(text.text) for text in gold], np.float64)
    num_found = float(length_P.sum()) + malformed_characters
    if not gold:
        return Accuracy(math.exp(-num_found / NO_TEXT_SCALE), 1.0)
    if not found:
        return Accuracy(0.0, 0.0)
    similarity_PG = text_similarity([text.text for text in found], [text.text for text in gold])
    visible_P = np.array([text.visible for text in found])
    visible_G = np.array([text.visible for text in gold])
    # A share of the ground truth's, at most 1; 1 where that cannot be seen either.
    seen_PG = np.ones(similarity_PG.shape)
    seen_PG = np.minimum(1.0, np.divide(visible_P[:, None], visible_G, out=seen_PG, where=visible_G > 0))
    worth_PG = similarity_PG * seen_PG * (length_P[:, None] + length_G)
    rows, columns = linear_sum_assignment(worth_PG, maximize=True)
    layers = float(worth_PG[rows, columns].sum()) / (num_found + float(length_G.sum()))
    seen_P = visible_P.copy()
    seen_P[rows] = seen_PG[rows, columns]
    visible = float(seen_P @ length_P) / num_found
    whole = Levenshtein.normalized_similarity(_read_aloud(found), _read_aloud(gold))
    return Accuracy(min(1.0, 0.8 * layers + 0.2 * whole * visible), min(1.0, visible))


def text_similarity(found: Sequence[str], gold: Sequence[str]) -> NDArray[np.float64]:
    """(P, G) similarity in [0, 1] of all pairs."""
    return cdist(found, gold, scorer=Levenshtein.normalized_similarity, dtype=np.float64)


def _read_aloud(texts: Sequence[Text]) -> str:
    """All texts in reading order: rows from the top, each from the left.

    Two texts are in one row if they share half the height of the lower box, so that small shifts change no order.
    """
    waiting = sorted(texts, key=lambda text: (text.layer.y + text.layer.height / 2, text.layer.x))
    spoken: list[str] = []
    while waiting:
        first = waiting[0].layer
        row = [text for text in waiting if _share_a_row(first, text.layer)]
        waiting = [text for text in waiting if not _share_a_row(first, text.layer)]
        spoken += [text.text for text in sorted(row, key=lambda text: text.layer.x)]
    return re.sub(" +", " ", " ".join(spoken))


def _share_a_row(one: PosterLayer, other: PosterLayer) -> bool:
    shared = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
    return one is other or shared >= min(one.height, other.height) / 2
