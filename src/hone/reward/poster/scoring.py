"""The poster reward: structure, text accuracy and looks of a group's posters, combined into one score each.

    R = w_s S + w_a A + w_v V min(1, F1 / 0.5)          weights normalised to a sum of 1

A response that is no poster, or whose poster a healthy visual scorer cannot rate, scores 0 as a fault of the model;
that the scorer is healthy it proves by rating another poster of the group. Other posters score 0 or more. V counts
fully only once the layout is half right, so that a pretty canvas with next to nothing on it earns next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.reward.poster.accuracy import Accuracy, Text, normalize, score_accuracy, text_similarity, texts_of
from hone.reward.poster.parse import BadGroundTruth, NotAPoster, Poster, read_ground_truth, read_solution
from hone.reward.poster.render import Rendering, render
from hone.reward.poster.settings import Judge, Settings
from hone.reward.poster.structure import Structure, score_structure
from hone.reward.poster.visual import VisualResult
from hone.reward.signature import all_faulty
from hone.types import Fault, Score

FULL_VISUAL_F1 = 0.5
"""Structure's F1 from which the visual score counts fully."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A poster with everything that can be said of it without a visual scorer."""

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
    def of(cls, poster: Poster, settings: Settings) -> Gold:
        rendering = render(poster, settings.picture_px, images=poster.images, image_root=settings.folder)
        texts = tuple(texts_of(poster, rendering, ignore_case=settings.ignore_case))
        return cls(poster, rendering, texts, layer_texts(poster, settings))


async def score_posters(responses: Sequence[str], ground_truth: Any, judge: Judge) -> list[Score]:
    """Scores in [0, 1] of several posters for one ground truth. Equal responses are looked at once."""
    settings = judge.settings
    try:
        gold = Gold.of(read_ground_truth(ground_truth, geometry=settings.geometry), settings)
    except BadGroundTruth as error:
        return list(all_faulty(len(responses), str(error), Fault.DATA))
    measured = {response: measure(response, gold, settings) for response in dict.fromkeys(responses)}
    posters = {response: found for response, found in measured.items() if isinstance(found, Measured)}
    looks = dict(zip(posters, await _looks(list(posters.values()), gold, judge), strict=True))
    is_well = any(look.score is not None for look in looks.values())
    broken = {r: look.fault for r, look in looks.items() if look.score is None and look.answered and is_well}
    missing = next((look.fault for r, look in looks.items() if look.score is None and r not in broken), None)
    if missing is not None and settings.on_component_missing == "fail":
        return list(all_faulty(len(responses), f"visual: {missing}"))
    use_looks = missing is None or settings.on_component_missing == "unscore"
    weights = judge.weights if use_looks else judge.weights_without_looks
    scores = {r: _combine(found, looks[r], weights, judge) for r, found in posters.items() if r not in broken}
    return [scores[r] if r in scores else _least(broken.get(r) or str(measured[r]), judge) for r in responses]


def measure(response: str, gold: Gold, settings: Settings) -> Measured | NotAPoster:
    """Structure and text accuracy of a response, or why it is no poster."""
    try:
        poster = read_solution(response, gold.poster, geometry=settings.geometry, multi_object=settings.multi_object)
    except NotAPoster as error:
        return error
    rendering = render(poster, settings.picture_px, images=gold.poster.images, image_root=settings.folder)
    similarity_PG = text_similarity(layer_texts(poster, settings), gold.layer_texts)
    structure = score_structure(poster, gold.poster, similarity_PG)
    unheard = sum(len(normalize(text, ignore_case=settings.ignore_case)) for text in poster.malformed_texts)
    texts = texts_of(poster, rendering, ignore_case=settings.ignore_case)
    accuracy = score_accuracy(texts, gold.texts, malformed_characters=unheard)
    return Measured(poster, rendering, structure, accuracy)


def layer_texts(poster: Poster, settings: Settings) -> tuple[str, ...]:
    return tuple(normalize(layer.text, ignore_case=settings.ignore_case) for layer in poster.layers)


async def _looks(measured: Sequence[Measured], gold: Gold, judge: Judge) -> list[VisualResult]:
    """How the posters look; 0 for each when nobody judges that, where it has no weight."""
    if judge.scorer is None:
        return [VisualResult(0.0)] * len(measured)
    return await judge.scorer.score([(found.poster, found.rendering) for found in measured], gold.rendering)


def _combine(found: Measured, look: VisualResult, weights: tuple[float, float, float], judge: Judge) -> Score:
    """The weighted sum; no value when looks have a weight and could not be judged."""
    structure, accuracy = found.structure.score, found.accuracy.score
    if look.score is None and weights[2] > 0:
        return Score(None, Fault.INFRA, f"visual: {look.fault}")
    looks = look.score or 0.0
    coupled = looks * min(1.0, found.structure.f1 / FULL_VISUAL_F1)
    value = min(1.0, weights[0] * structure + weights[1] * accuracy + weights[2] * coupled)
    return Score(value, None, judge.name, _metrics(judge, found, looks, look.parts))


def _least(why: str, judge: Judge) -> Score:
    return Score(0.0, Fault.MODEL, why, _metrics(judge))


def _metrics(
    judge: Judge, found: Measured | None = None, looks: float = 0.0, parts: Mapping[str, float] | None = None
) -> dict[str, float]:
    """What a score is made of. The same names for every sample of a run; all 0 for what is no poster."""
    metrics = {
        "structure": found.structure.score if found else 0.0,
        "accuracy": found.accuracy.score if found else 0.0,
        "f1": found.structure.f1 if found else 0.0,
        "text_visible": found.accuracy.visible if found else 0.0,
        "num_layers": float(found.poster.num_layers) if found else 0.0,
        "malformed_layers": float(len(found.poster.malformed_texts)) if found else 0.0,
        "canvas_matches": float(found.poster.canvas_matches) if found else 0.0,
    }
    if judge.scorer is not None:
        metrics["visual"] = looks
        metrics |= {f"visual_{name}": (parts or {}).get(name, 0.0) for name in judge.scorer.part_names}
    return metrics
