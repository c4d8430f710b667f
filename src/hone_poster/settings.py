"""Arguments of the poster reward, as given in a run file."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from hone_poster.parse import Geometry, MultiObject
from hone_poster.visual import VisualScorer, visual_scorer

PICTURE_PX = (512, 1024)
"""Bounds of the longer side of rendered posters."""

OnMissing = Literal["unscore", "group_renormalize", "fail"]


@dataclass(frozen=True)
class PosterSettings:
    """The arguments of the reward. Raises ValueError for invalid ones."""

    structure_weight: float = 0.4
    accuracy_weight: float = 0.4
    visual_weight: float = 0.2
    visual: str = "heuristic_v1"
    """heuristic_v1, visualquality_r1, none or constant; see `visual.py`."""
    visual_args: Mapping[str, Any] = field(default_factory=dict)
    on_component_missing: OnMissing = "unscore"
    """If the visual score of a poster fails: leave that sample without a reward, drop the component for the whole
    group, or leave the whole group without rewards."""
    geometry: Geometry = "xywh"
    """Keys of a layer's box: x, y, width, height; or left, top, right, bottom."""
    multi_object: MultiObject = "reject"
    """A response with several posters: reject it, or take the last one."""
    ignore_case: bool = False
    picture_px: int = 512
    """Longer side of the rendered poster."""
    image_root: str | None = None
    """The only folder that picture files are read from."""

    def __post_init__(self) -> None:
        weights = (self.structure_weight, self.accuracy_weight, self.visual_weight)
        if not all(weight >= 0 for weight in weights) or not math.isfinite(sum(weights)):
            raise ValueError(f"weights must be 0 or more, and their sum finite; got {weights}")
        if self.structure_weight + self.accuracy_weight <= 0:
            raise ValueError("structure_weight and accuracy_weight are both 0: at least one must be positive")
        choices = {"on_component_missing": OnMissing, "geometry": Geometry, "multi_object": MultiObject}
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name}: got {getattr(self, name)!r}; choose one of {', '.join(get_args(allowed))}")
        if not PICTURE_PX[0] <= self.picture_px <= PICTURE_PX[1]:
            raise ValueError(f"picture_px: got {self.picture_px}; must be {PICTURE_PX[0]} to {PICTURE_PX[1]}")
        if abs(sum(weights) - 1) > 1e-9 or self.scorer is None:
            shares = ", ".join(f"{weight:.3f}" for weight in self.weights)
            _print_once(f"poster: weights normalised to {shares} (structure, accuracy, visual)")

    @property
    def folder(self) -> Path | None:
        return Path(self.image_root) if self.image_root is not None else None

    @cached_property
    def scorer(self) -> VisualScorer | None:
        """The visual scorer; raises ValueError if there is none of this name, or its arguments do not fit."""
        return visual_scorer(self.visual, self.visual_args)

    @cached_property
    def weights(self) -> tuple[float, float, float]:
        """Of structure, accuracy and looks, with a sum of 1; looks without a scorer have none."""
        visual = self.visual_weight if self.scorer is not None else 0.0
        total = self.structure_weight + self.accuracy_weight + visual
        return (self.structure_weight / total, self.accuracy_weight / total, visual / total)


@cache
def _print_once(message: str) -> None:
    print(message, file=sys.stderr)
