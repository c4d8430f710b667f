"""Curves of shares as small multiples in one SVG file: a panel for each.

Written directly, so that a figure needs no plotting library. Not a plotting library itself: one kind of picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

Points = Sequence[tuple[float, float]]

PANEL_W, PANEL_H, GAP_X, GAP_Y, COLUMNS = 180, 108, 20, 44, 5
LEFT, TOP, BOTTOM = 44, 76, 40
INK, QUIET, OTHERS, OWN = "#1f2328", "#656d76", "#d0d7de", "#0969da"
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


@dataclass(frozen=True)
class Scale:
    """From values to places in a panel; y grows upwards in values and downwards on the page."""

    x_max: float
    y_min: float
    y_max: float

    def place(self, x: float, y: float) -> tuple[float, float]:
        return PANEL_W * x / self.x_max, PANEL_H * (self.y_max - y) / (self.y_max - self.y_min)

    def y_ticks(self) -> list[float]:
        """Three to six round numbers, from bottom to top."""
        step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if (self.y_max - self.y_min) / s <= 5.001)
        return [step * n for n in range(round(self.y_min / step), round(self.y_max / step) + 1)]


def scale_of(curves: Mapping[str, Points]) -> Scale:
    """One scale for all panels: round bounds around every value, a share of 1."""
    values = [y for points in curves.values() for _, y in points] or [0.0, 1.0]
    grid = 0.05 if max(values) - min(values) <= 0.3 else 0.1
    low, high = int(min(values) / grid) * grid, -int(-max(values) // grid) * grid
    return Scale(max((x for points in curves.values() for x, _ in points), default=1) or 1, low, max(high, low + grid))


def small_multiples(
    curves: Mapping[str, Points], *, title: str, subtitle: str, x_label: str, comparable: bool = True
) -> str:
    """The figure as SVG text.

    Args:
        curves: panel title -> points in order of x; without points a panel says so.
        comparable: all panels share their x axis, and each has all the others behind it in grey; else each has an x
            axis of its own. They share the y axis in any case.
    """
    scale, names = scale_of(curves), list(curves)
    rows = -(-len(names) // COLUMNS)
    width = LEFT + COLUMNS * (PANEL_W + GAP_X)
    height = TOP + rows * (PANEL_H + GAP_Y) + BOTTOM - GAP_Y // 2
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'"
        f" role='img' aria-label='{escape(title, quote=True)}' {FONT}>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
        _text(LEFT, 28, title, size=17, weight=600),
        _text(LEFT, 48, subtitle, size=12, color=QUIET),
        _text(LEFT + (width - LEFT - GAP_X) / 2, height - 10, x_label, size=12, color=QUIET, anchor="middle"),
        f"<defs><g id='all' stroke='{OTHERS}'>",
        *(_line(points, scale) for points in curves.values() if points),
        "</g></defs>",
    ]
    for number, name in enumerate(names):
        row, column = divmod(number, COLUMNS)
        x, y = LEFT + column * (PANEL_W + GAP_X), TOP + row * (PANEL_H + GAP_Y) + 12
        if not comparable:
            scale = replace(scale, x_max=scale_of({name: curves[name]}).x_max)
        below = number + COLUMNS >= len(names)
        parts.append(f"<g transform='translate({x} {y})'>")
        parts += _axes(scale, y_labels=column == 0, x_labels=below or not comparable)
        parts += ["<use href='#all'/>"] if comparable else []
        parts += _panel(name, curves[name], scale)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(scale: Scale, *, y_labels: bool, x_labels: bool) -> list[str]:
    parts = []
    for tick in scale.y_ticks():
        y = scale.place(0, tick)[1]
        parts.append(f"<path d='M0 {y:.1f}H{PANEL_W}' stroke='#eaeef2'/>")
        if y_labels:
            parts.append(_text(-6, y + 3.5, f"{tick:.0%}", size=10, color=QUIET, anchor="end"))
    if x_labels:
        parts.append(_text(0, PANEL_H + 14, "0", size=10, color=QUIET))
        parts.append(_text(PANEL_W, PANEL_H + 14, f"{scale.x_max:g}", size=10, color=QUIET, anchor="end"))
    return parts


def _panel(name: str, points: Points, scale: Scale) -> list[str]:
    parts = [_text(0, -7, name, size=11, weight=600)]
    if not points:
        return [*parts, _text(PANEL_W / 2, PANEL_H / 2, "not run", size=11, color=QUIET, anchor="middle")]
    x, y = scale.place(*points[-1])
    parts.append(f"<g stroke='{OWN}' stroke-width='2'>{_line(points, scale)}</g>")
    parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.5' fill='{OWN}'/>")
    parts.append(_text(PANEL_W, -7, f"{points[-1][1]:.1%}", size=11, color=OWN, anchor="end"))
    return parts


def _line(points: Points, scale: Scale) -> str:
    places = " ".join("{:.1f},{:.1f}".format(*scale.place(x, y)) for x, y in points)
    return f"<polyline points='{places}' fill='none' stroke-linejoin='round'/>"


def _text(
    x: float, y: float, text: str, *, size: int, weight: int = 400, color: str = INK, anchor: str = "start"
) -> str:
    style = f"font-size='{size}' font-weight='{weight}' fill='{color}' text-anchor='{anchor}'"
    return f"<text x='{x:g}' y='{y:g}' {style}>{escape(text)}</text>"
