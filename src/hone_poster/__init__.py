"""The poster reward: how close a poster in JSON comes to the ground truth, in structure, text and looks.

    reward:
      components:
        - use: poster
          args: {visual: heuristic_v1}

Each formula is in the module that computes it and, with worked numbers, in docs/rewards-poster.md. A package of its
own: it uses the public interface of `hone.reward` alone, and pyproject.toml registers it as `poster`.
"""

from __future__ import annotations

from typing import Any

from hone.reward import Group, Score, reward
from hone_poster.parse import BadGroundTruth, Geometry, NotAPoster, Poster, read_ground_truth, read_solution
from hone_poster.render import render
from hone_poster.scoring import score_posters
from hone_poster.settings import PosterSettings

__all__ = ["PosterSettings", "poster", "render_png", "score_posters"]

REPORT_PICTURE_PX = 320
"""Longer side of pictures in the report."""


def draw(response: str, ground_truth: Any, settings: PosterSettings) -> bytes | None:
    """The poster of a response for the report; None if the ground truth cannot be read."""
    try:
        return render_png(response, ground_truth, picture_px=REPORT_PICTURE_PX, geometry=settings.geometry)
    except BadGroundTruth:
        return None


@reward(minimum=0.0, maximum=1.0, settings=PosterSettings, picture=draw)
async def poster(group: Group, settings: PosterSettings) -> list[Score]:
    """Scores of a group's posters; the prompt's answer is the ground truth."""
    return await score_posters([sample.text for sample in group.samples], group.prompt.answer, settings)


def render_png(response: str, ground_truth: Any, *, picture_px: int = 512, geometry: Geometry = "xywh") -> bytes:
    """The poster of a response as a PNG file; an empty canvas if the response is not a poster.

    Raises:
        BadGroundTruth: the ground truth cannot be read, so the canvas is unknown.
    """
    gold = read_ground_truth(ground_truth, geometry=geometry)
    try:
        found = read_solution(response, gold, geometry=geometry)
    except NotAPoster:
        found = Poster(gold.width, gold.height, ())
    return render(found, picture_px).png()
