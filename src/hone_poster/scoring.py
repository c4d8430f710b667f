"""The poster reward: structure, text accuracy and looks of a group's posters, combined into one score each.

    R = w_s S + w_a A + w_v V min(1, F1 / 0.5)          weights normalised to a sum of 1

A response that is not a poster, or that a working visual scorer cannot rate, scores 0 as a fault of the model; the
scorer counts as working if it rates another poster of the group. V has its full weight only from F1 = 0.5, so that a
well-designed but almost empty canvas scores almost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.reward import Fault, Score
from hone_poster.accuracy import Accuracy, Text, normalize, score_accuracy, text_similarity, texts_of
from hone_poster.parse import BadGroundTruth, NotAPoster, Poster, read_ground_truth, read_solution
from hone_poster.render import Rendering, render
from hone_poster.settings import PosterSettings
from hone_poster.structure import Structure, score_structure
from hone_poster.visual import VisualResult

FULL_VISUAL_F1 = 0.5
"""Structure's F1 from which the visual score counts fully."""


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
    looks = dict(zip(posters, await _looks(list(posters.values()), gold, settings), strict=True))
    is_working = any(look.score is not None for look in looks.values())
    broken = {r: look.fault for r, look in looks.items() if look.score is None and look.answered and is_working}
    missing = next((look.fault for r, look in looks.items() if look.score is None and r not in broken), None)
    if missing is not None and settings.on_component_missing == "fail":
        return [Score(None, Fault.INFRA, f"visual: {missing}")] * len(responses)
    use_looks = missing is None or settings.on_component_missing == "unscore"
    weights = settings.weights if use_looks else settings.weights_without_looks
    scores = {r: _combine(found, looks[r], weights, settings) for r, found in posters.items() if r not in broken}
    return [scores[r] if r in scores else _least(broken.get(r) or str(measured[r]), settings) for r in responses]


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


async def _looks(measured: Sequence[MeasuredPoster], gold: Gold, settings: PosterSettings) -> list[VisualResult]:
    """The visual score of each poster; 0 without a scorer, which leaves it without weight."""
    if settings.scorer is None:
        return [VisualResult(0.0)] * len(measured)
    return await settings.scorer.score([(found.poster, found.rendering) for found in measured], gold.rendering)


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
    return Score(value, None, settings.scorer_name, _metrics(settings, found, looks, look.parts))


def _least(why: str, settings: PosterSettings) -> Score:
    return Score(0.0, Fault.MODEL, why, _metrics(settings))


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
