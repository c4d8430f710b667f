"""Visual scorers of posters: the local lint, a vision-language model behind an endpoint, or none.

A scorer that fails returns a fault, never a number. Each states its name in the results, so that a run with the local
lint cannot be mistaken for one with a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hone_poster.lint import PARTS, lint, lint_score
from hone_poster.parse import Poster
from hone_poster.render import Rendering
from hone_poster.visualquality import NoRating, VisualQuality


@dataclass(frozen=True, slots=True)
class VisualResult:
    """The visual score of one picture."""

    score: float | None
    """In [0, 1]; None: the scorer failed."""
    fault: str = ""
    """Why it failed."""
    answered: bool = False
    """The model answered, without a rating: if it rates other posters of the group, the picture is at fault."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of the score, by the scorer's `part_names`."""


class VisualScorer(Protocol):
    """Scores pictures of posters."""

    @property
    def model(self) -> str:
        """Name of the scorer and its model, part of every result."""
        ...

    @property
    def part_names(self) -> Sequence[str]:
        """Keys of every result's `parts`."""
        ...

    async def score(self, posters: Sequence[tuple[Poster, Rendering]], gold: Rendering) -> list[VisualResult]:
        """One result per poster, in order; `gold` is the picture of the ground truth."""
        ...


class HeuristicScorer:
    """The local default: a lint of the picture, see `lint`."""

    model = "heuristic_v1"
    part_names = PARTS

    async def score(self, posters: Sequence[tuple[Poster, Rendering]], gold: Rendering) -> list[VisualResult]:
        parts = [lint(poster, rendering, gold) for poster, rendering in posters]
        return [VisualResult(lint_score(found), parts=found) for found in parts]


class ConstantScorer:
    """One score for every poster, for tests; fails for every poster if the value is None."""

    model = "constant"
    part_names = ()

    def __init__(self, value: float | None = 1.0) -> None:
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"value {value} is not in [0, 1]")
        self.result = VisualResult(value, "" if value is not None else "this scorer always fails")

    async def score(self, posters: Sequence[tuple[Poster, Rendering]], gold: Rendering) -> list[VisualResult]:
        return [self.result] * len(posters)


class EndpointScorer:
    """VisualQuality-R1, or a model with the same answer format, behind an OpenAI-compatible endpoint."""

    part_names = ()

    def __init__(self, **args: Any) -> None:
        self.client = VisualQuality(**args)
        self.model = f"visualquality_r1 ({self.client.model})"

    async def score(self, posters: Sequence[tuple[Poster, Rendering]], gold: Rendering) -> list[VisualResult]:
        ratings = await self.client.rate([rendering.png() for _, rendering in posters])
        return [
            VisualResult(None, str(r), r.answered) if isinstance(r, NoRating) else VisualResult((r - 1) / 4)
            for r in ratings
        ]


def visual_scorer(name: str, args: Mapping[str, Any]) -> VisualScorer | None:
    """The scorer that a run file names; None for `none`.

    Raises:
        ValueError: no scorer of this name, or arguments that do not fit it.
    """
    if name not in _SCORERS:
        raise ValueError(f"visual: no scorer {name!r}; there is {', '.join(_SCORERS)}")
    make, signature_of = _SCORERS[name]
    try:
        inspect.signature(signature_of).bind(**args)
    except TypeError as error:
        raise ValueError(f"visual_args of {name}: {error}") from error
    return make(**args)


_SCORERS: dict[str, tuple[Callable[..., VisualScorer | None], Callable[..., Any]]] = {
    "heuristic_v1": (HeuristicScorer, HeuristicScorer),
    "visualquality_r1": (EndpointScorer, VisualQuality),
    "constant": (ConstantScorer, ConstantScorer),
    "none": (lambda: None, lambda: None),
}
"""Name -> the scorer's class, and the callable whose signature its arguments must fit."""
