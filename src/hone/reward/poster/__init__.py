"""The poster reward: how close a poster in JSON comes to the ground truth, in structure, text and looks.

    reward:
      components:
        - use: poster
          args: {visual: heuristic_v1}

Every formula is in the module that computes it and, with worked numbers, in docs/rewards-poster.md. Drawing and
matching take milliseconds of processor time, so this reward runs in the killable processes, never in the run's own.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from hone.reward.poster.parse import NotAPoster, Poster, read_ground_truth, read_solution
from hone.reward.poster.render import render
from hone.reward.poster.scoring import score_posters
from hone.reward.poster.settings import Judge, Settings
from hone.reward.signature import reward
from hone.types import Group, Score

__all__ = ["poster", "render_png"]


@reward(minimum=0.0, maximum=1.0)
async def poster(group: Group, **args: Any) -> list[Score]:
    """Scores of a group's posters; the answer of the prompt is the ground truth. `args` are those of `Settings`."""
    return await score_posters([sample.text for sample in group.samples], group.prompt.answer, judge_of(args))


def check_args(args: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments that make no sense. Says so when the weights had to be normalised."""
    settings = judge_of(args).settings
    total = settings.structure_weight + settings.accuracy_weight + settings.visual_weight
    if abs(total - 1) > 1e-9 or settings.visual == "none":
        shares = ", ".join(f"{weight:.3f}" for weight in judge_of(args).weights)
        print(f"poster: weights normalised to {shares} (structure, accuracy, visual)", file=sys.stderr)


def judge_of(args: Mapping[str, Any]) -> Judge:
    """The judge that arguments describe; one for equal arguments."""
    return _judge(json.dumps(args, sort_keys=True, default=str))


def render_png(solution: str, ground_truth: Any, *, picture_px: int = 512, geometry: Any = "xywh") -> bytes:
    """The poster of a response as a PNG file, for people; an empty canvas when it is none.

    Raises:
        BadGroundTruth: the ground truth cannot be read, so there is no canvas.
    """
    gold = read_ground_truth(ground_truth, geometry=geometry)
    try:
        found = read_solution(solution, gold, geometry=geometry)
    except NotAPoster:
        found = Poster(gold.width, gold.height, ())
    return render(found, picture_px).png()


@lru_cache(maxsize=16)
def _judge(args_json: str) -> Judge:
    return Judge.of(json.loads(args_json))


poster.hone_check_args = check_args  # type: ignore[attr-defined]
poster.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # so that a wrong key is met with a hint
    [next(iter(inspect.signature(poster).parameters.values())), *inspect.signature(Settings).parameters.values()]
)
