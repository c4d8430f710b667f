"""Scores of a good poster as it is degraded step by step; the table of docs/rewards-poster.md.

python tests/reward/poster_table.py [PAGE]          rewrites the table of the page (default: that one)
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.reward import Score
from hone_poster.scoring import score_posters
from hone_poster.settings import PosterSettings

PAGE = Path("docs/rewards-poster.md")
BEGIN, END = "<!-- table: python tests/reward/poster_table.py -->\n", "<!-- end of table -->\n"

INK = "#7c2d12"
GROUND_TRUTH: dict[str, Any] = {
    "canvas_size": {"width": 1000, "height": 1000},
    "layers": [
        {"type": "background", "x": 0, "y": 0, "width": 1000, "height": 1000, "fill": "#fff7ed"},
        {"type": "image", "x": 100, "y": 340, "width": 800, "height": 400},
        {"type": "title", "x": 100, "y": 80, "width": 800, "height": 120, "text": "SUMMER SALE", "color": INK},
        {"type": "subtitle", "x": 100, "y": 220, "width": 800, "height": 80, "text": "up to 50% off", "color": INK},
        {"type": "body", "x": 250, "y": 800, "width": 500, "height": 80, "text": "today only", "color": INK},
    ],
}  # fmt: skip
TEXTS = (2, 3, 4)
"""Places of the layers with a text."""

Layers = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row: a poster of a series of increasing degradation."""

    series: str
    step: str
    response: str


def rows() -> list[TableRow]:
    """The table's posters; within a series each is worse than the one before."""
    return [
        TableRow("", "equal to the ground truth", _response(lambda layers: layers)),
        *_series("every layer moved right, px", (1, 24, 60, 120, 300), _moved),
        *_series("texts left out", (1, 2, 3), _dropped),
        *_series("every layer given several times", (2, 4, 8), lambda layers, n: layers * n),
        *_series("characters of all texts replaced, %", (10, 30, 60, 100), _garbled),
        *_series("texts hidden by the canvas's colour", (1, 2, 3), _hidden(lambda layer: {"color": "#fff7ed"})),
        *_series("texts off the canvas", (1, 2, 3), _hidden(lambda layer: {"x": layer["x"] + 1000})),
        *_series("texts covered by a box", (1, 2, 3), _covered),
        *_series("texts fading, opacity in %", (30, 10, 0), lambda layers, n: _on_texts(layers, {"opacity": n / 100})),
        *_series("font size of all texts, px", (5, 2, 0), lambda layers, n: _on_texts(layers, {"font_size": n})),
        TableRow("", "layers stacked in the opposite order", _response(lambda layers: layers[::-1])),
        TableRow("", "every box as large as the canvas", _response(_full_canvas)),
        TableRow("", "one large word", _response(lambda layers: _full_canvas([layers[2] | {"text": "HI"}]))),
        TableRow("", "no layer", '{"layers": []}'),
        TableRow("", "the ground truth twice", _response(lambda layers: layers) * 2),
        TableRow("", "prose", "A poster with a large title, a picture and the date."),
    ]  # fmt: skip


def score(responses: Iterable[str]) -> list[Score]:
    """Scores of responses to the table's task, with the default settings."""
    return asyncio.run(score_posters(list(responses), GROUND_TRUTH, PosterSettings()))


def table() -> str:
    """The table, as Markdown."""
    listed = rows()
    lines = ["| series | step | structure | text accuracy | visual | reward |", "|---|---|---|---|---|---|"]
    before = ""
    for row, found in zip(listed, score(row.response for row in listed), strict=True):
        parts = [found.metrics[name] for name in ("structure", "accuracy", "visual")]
        numbers = " | ".join(f"{value:.3f}" for value in (*parts, found.value or 0.0))
        lines.append(f"| {row.series if row.series != before else ''} | {row.step} | {numbers} |")
        before = row.series
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """A page with its table replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


def main(page: Path) -> None:
    page.write_text(with_table(page.read_text("utf-8")), "utf-8")


def _response(change: Callable[[Layers], Layers]) -> str:
    return json.dumps({"layers": change(copy.deepcopy(GROUND_TRUTH["layers"]))})


def _series(name: str, steps: Iterable[int], change: Callable[[Layers, int], Layers]) -> list[TableRow]:
    return [TableRow(name, str(step), _response(lambda layers, step=step: change(layers, step))) for step in steps]


def _moved(layers: Layers, pixels: int) -> Layers:
    return [layer | {"x": layer["x"] + pixels} for layer in layers]


def _dropped(layers: Layers, number: int) -> Layers:
    return [layer for place, layer in enumerate(layers) if place not in TEXTS[:number]]


def _garbled(layers: Layers, percent: int) -> Layers:
    for place in TEXTS:
        text = layers[place]["text"]
        wrong = round(len(text) * percent / 100)
        layers[place]["text"] = "#" * wrong + text[wrong:]
    return layers


def _hidden(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Layers, int], Layers]:
    def hide(layers: Layers, number: int) -> Layers:
        for place in TEXTS[:number]:
            layers[place] |= change(layers[place])
        return layers

    return hide


def _covered(layers: Layers, number: int) -> Layers:
    boxes = [{key: layers[place][key] for key in ("x", "y", "width", "height")} for place in TEXTS[:number]]
    return layers + [{"type": "shape", **box} for box in boxes]


def _on_texts(layers: Layers, change: dict[str, Any]) -> Layers:
    return [layer | change if "text" in layer else layer for layer in layers]


def _full_canvas(layers: Layers) -> Layers:
    return [layer | {"x": 0, "y": 0, "width": 1000, "height": 1000} for layer in layers]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE)
