"""The arguments of the poster reward, as a run file gives them, checked before anything is scored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from hone.reward.poster.parse import Geometry, MultiObject
from hone.reward.poster.visual import VisualScorer, visual_scorer

PICTURE_PX = (512, 1024)
"""Bounds of the longer side of rendered posters."""

OnMissing = Literal["unscore", "group_renormalize", "fail"]


@dataclass(frozen=True)
class Settings:
    """The arguments of the reward, checked. Raises ValueError for what makes no sense."""

    structure_weight: float = 0.4
    accuracy_weight: float = 0.4
    visual_weight: float = 0.2
    visual: str = "heuristic_v1"
    """heuristic_v1, visualquality_r1, none or constant; see `visual`."""
    visual_args: Mapping[str, Any] = field(default_factory=dict)
    on_component_missing: OnMissing = "unscore"
    """When the visual score of a poster cannot be had: leave that sample without a reward, drop the component for the
    whole group, or leave the whole group without rewards."""
    geometry: Geometry = "xywh"
    """Keys of a layer's box: x, y, width, height; or left, top, right, bottom."""
    multi_object: MultiObject = "reject"
    """A response with several posters is none, or is its last one."""
    ignore_case: bool = False
    picture_px: int = 512
    """Longer side of the rendered poster."""
    image_root: str | None = None
    """The only folder that pictures are read from."""

    def __post_init__(self) -> None:
        weights = (self.structure_weight, self.accuracy_weight, self.visual_weight)
        if not all(weight >= 0 for weight in weights) or not math.isfinite(sum(weights)):
            raise ValueError(f"weights must be 0 or more, and their sum finite; got {weights}")
        if self.structure_weight + self.accuracy_weight <= 0:
            raise ValueError("structure_weight and accuracy_weight are both 0: looks alone are no poster")
        choices = {"on_component_missing": OnMissing, "geometry": Geometry, "multi_object": MultiObject}
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name}: got {getattr(self, name)!r}; choose one of {', '.join(get_args(allowed))}")
        if not PICTURE_PX[0] <= self.picture_px <= PICTURE_PX[1]:
            raise ValueError(f"picture_px: got {self.picture_px}; must be {PICTURE_PX[0]} to {PICTURE_PX[1]}")

    @property
    def folder(self) -> Path | None:
        return Path(self.image_root) if self.image_root is not None else None


@dataclass(frozen=True, slots=True)
class Judge:
    """Settings, with the scorer that they name and the weights as they are used."""

    settings: Settings
    scorer: VisualScorer | None
    weights: tuple[float, float, float]
    """Of structure, accuracy and looks; they add up to 1, and nothing weighs looks that nobody judges."""

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Judge:
        """Raises ValueError for arguments that make no sense, TypeError for unknown ones."""
        settings = Settings(**args)
        scorer = visual_scorer(settings.visual, settings.visual_args)
        visual = settings.visual_weight if scorer is not None else 0.0
        total = settings.structure_weight + settings.accuracy_weight + visual
        weights = (settings.structure_weight / total, settings.accuracy_weight / total, visual / total)
        return cls(settings, scorer, weights)

    @property
    def weights_without_looks(self) -> tuple[float, float, float]:
        """The same, when looks are to count for nobody."""
        rest = self.weights[0] + self.weights[1]
        return (self.weights[0] / rest, self.weights[1] / rest, 0.0)

    @property
    def name(self) -> str:
        """Who judged the looks, for people."""
        return f"visual: {self.scorer.model if self.scorer is not None else 'none'}"
