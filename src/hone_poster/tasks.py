"""Poster tasks with their ground truth, made from a seed: for tests, benchmarks and examples.

Each task is a brief in one line and the poster that answers it. A brief names one of a few compositions and gives
the texts; positions vary a little from task to task. No model and no real posters were
used.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Alphabet = Literal["latin", "cjk"]

WORDS: dict[Alphabet, dict[str, tuple[str, ...]]] = {
    "latin": {
        "title": ("BIG SALE", "JAZZ NIGHT", "OPEN DAY", "OLD BOOKS", "NEW MENU", "CITY RUN", "ART WEEK", "FLEA FAIR"),
        "subtitle": ("UP TO 50% OFF", "LIVE ON STAGE", "COME AND SEE", "FREE ENTRY", "FRESH AND LOCAL", "ALL WELCOME"),
        "body": ("FRI 7 PM", "MAY 12", "SAT AND SUN", "JUNE 3", "TODAY ONLY", "DOORS AT 8"),
        "button": ("BOOK NOW", "SHOP NOW", "JOIN US", "SEE MORE"),
    },
    "cjk": {
        "title": ("夏日大促", "爵士之夜", "开放日", "图书市集", "全新菜单", "城市跑", "艺术周", "跳蚤市场"),
        "subtitle": ("全场五折起", "现场演出", "欢迎参观", "免费入场", "本地新鲜", "敬请光临"),
        "body": ("周五晚七点", "五月十二日", "周末两天", "六月三日", "仅限今日", "八点开门"),
        "button": ("立即预订", "立即购买", "加入我们", "了解更多"),
    },
}  # fmt: skip
PALETTES = (
    ("#fff7ed", "#7c2d12", "#ea580c"),
    ("#eff6ff", "#1e3a8a", "#2563eb"),
    ("#f0fdf4", "#14532d", "#16a34a"),
    ("#fdf4ff", "#581c87", "#9333ea"),
    ("#111827", "#f9fafb", "#f59e0b"),
)
"""Background, text and accent."""

Slot = tuple[str, int, int, int, int]
"""Type of a layer, and left, top, width, height in hundredths of the canvas."""

COMPOSITIONS: dict[str, tuple[Slot, ...]] = {
    "hero": (("image", 8, 6, 84, 46), ("title", 8, 56, 84, 12), ("subtitle", 8, 70, 84, 7), ("button", 30, 84, 40, 8)),
    "headline": (("title", 8, 8, 84, 14), ("subtitle", 8, 24, 84, 7), ("image", 8, 36, 84, 44), ("body", 8, 86, 84, 6)),
    "split": (("image", 6, 6, 40, 88), ("title", 52, 14, 42, 18), ("body", 52, 40, 42, 8), ("button", 52, 78, 42, 9)),
    "notice": (("logo", 38, 6, 24, 12), ("title", 8, 26, 84, 16), ("subtitle", 8, 48, 84, 8), ("body", 8, 64, 84, 7)),
}
"""Where things stand, from bottom to top of the stack."""


@dataclass(frozen=True, slots=True)
class PosterTask:
    """A brief, and the poster that is asked for, as a JSON-able object with `canvas_size` and `layers`."""

    brief: str
    poster: dict[str, Any]


def make_task(
    seed: int,
    index: int,
    *,
    canvas: tuple[int, int] = (900, 1200),
    script: Alphabet = "latin",
    styled: bool = True,
    jitter: int = 2,
    compositions: Sequence[str] = tuple(COMPOSITIONS),
) -> PosterTask:
    """Task number `index` of a seed; the same on every machine.

    Args:
        styled: with a background and colours; otherwise boxes and texts alone.
        jitter: the most that a box is moved from its composition, in hundredths of the canvas.
        compositions: names to choose among.
    """
    chance = random.Random(f"{seed}/{index}")
    name = chance.choice(compositions)
    ground, ink, accent = chance.choice(PALETTES)
    layers: list[dict[str, Any]] = []
    if styled:
        layers.append({"type": "background", "x": 0, "y": 0, "width": canvas[0], "height": canvas[1], "fill": ground})
    spoken: list[str] = []
    for kind, *place in COMPOSITIONS[name]:
        moved = [value + chance.randint(-jitter, jitter) if side < 2 else value for side, value in enumerate(place)]
        left, top, width, height = (value * canvas[side % 2] // 100 for side, value in enumerate(moved))
        layer: dict[str, Any] = {"type": kind, "x": left, "y": top, "width": width, "height": height}
        if kind in WORDS[script]:
            layer["text"] = chance.choice(WORDS[script][kind])
            spoken.append(layer["text"])
            if styled:
                layer |= {"fill": accent, "color": "#ffffff"} if kind == "button" else {"color": ink}
        layers.append(layer)
    poster = {"canvas_size": {"width": canvas[0], "height": canvas[1]}, "layers": layers}
    return PosterTask(f"{name}: {'; '.join(spoken)}", poster)
