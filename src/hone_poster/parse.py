"""Parsing of responses into posters, strict, with the reason for every rejection. No scoring, no rendering.

A poster is a JSON object with `layers`, bottom to top. A response may wrap it in prose and code fences; it must hold
exactly one. Bounds on length, depth and number of layers make the cost of any text linear in its first 256 KiB.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from PIL import ImageColor

MAX_CHARACTERS = 256 * 1024
MAX_LAYERS = 200
MAX_DEPTH = 64
MAX_BROKEN = 1000
"""Openings of JSON objects in one response that lead to nothing."""
MAX_COORDINATE = 1e6
"""Canvas pixels. Beyond it a layer is malformed: sums of such numbers lose the small ones."""
MIN_SIDE = 1e-3
"""Canvas pixels. Areas of smaller boxes, and smaller font sizes, are no longer safe to divide by."""

Geometry = Literal["xywh", "ltrb"]
MultiObject = Literal["reject", "last"]
Color = tuple[int, int, int]

_KEYS: dict[Geometry, tuple[str, str, str, str]] = {
    "xywh": ("x", "y", "width", "height"),
    "ltrb": ("left", "top", "right", "bottom"),
}


_OPENING = re.compile(r'\{\s*"')
_SURROGATE = re.compile("[\ud800-\udfff]")


class NotAPoster(ValueError):
    """A response is not a poster: a fault of the model."""


class BadGroundTruth(ValueError):
    """A row's poster is unusable: a fault of the data."""


@dataclass(frozen=True, slots=True)
class PosterLayer:
    """One box of a poster; lengths in canvas pixels."""

    kind: str
    """Its `type` in lower case: background, image, logo, shape, title, text, ..."""
    x: float
    y: float
    width: float
    height: float
    text: str = ""
    color: Color | None = None
    """Of the text; None takes black or white, whichever stands out."""
    fill: Color | None = None
    """Of the box; None takes what the kind has by default."""
    opacity: float = 1.0
    font_size: float | None = None
    """None takes the largest that fits. 0 stands for anything that is not a size."""
    align: str = "center"
    image: str | None = None
    """Handle of a picture, to be looked up in the ground truth."""


@dataclass(frozen=True, slots=True)
class Poster:
    """A canvas and its valid layers, bottom to top."""

    width: float
    height: float
    layers: tuple[PosterLayer, ...]
    malformed_texts: tuple[str, ...] = ()
    """One for each layer without a usable box, its text or "": it can be neither matched nor seen, but counts."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Handle -> file below the image root; ground truth only."""
    canvas_matches: bool = True
    """False when a response states another canvas than the ground truth."""

    @property
    def num_layers(self) -> int:
        """Malformed ones included."""
        return len(self.layers) + len(self.malformed_texts)


def read_solution(
    response: str, gold: Poster, *, geometry: Geometry = "xywh", multi_object: MultiObject = "reject"
) -> Poster:
    """The poster in a response, on the canvas of the ground truth.

    Args:
        geometry: which four keys place a layer; never guessed.
        multi_object: what to do with several posters in one response.
    Raises:
        NotAPoster: there is none, there are several, it breaks a bound, or no layer of it has a usable box.
    """
    _, closed, answer = response.rpartition("</think>")
    if not closed and "<think>" in answer:
        raise NotAPoster("the reasoning never ends")
    if len(answer) > MAX_CHARACTERS:
        raise NotAPoster(f"{len(answer):,} characters, more than {MAX_CHARACTERS:,}")
    found = list(_poster_objects(answer))
    if not found:
        raise NotAPoster("no JSON object with layers")
    if len(found) > 1 and multi_object == "reject":
        raise NotAPoster(f"{len(found)} JSON objects with layers; one is asked for")
    layers, malformed = _layers(found[-1], geometry)
    if not layers:
        raise NotAPoster("no layer has a usable box")
    stated = _canvas(found[-1])
    matches = stated is None or stated == (gold.width, gold.height)
    return Poster(gold.width, gold.height, layers, malformed, canvas_matches=matches)


def read_ground_truth(truth: Any, *, geometry: Geometry = "xywh") -> Poster:
    """The poster of a row: an object, or a JSON string of one.

    Raises:
        BadGroundTruth: not an object, no canvas, no layers or too many, or a layer without a usable box.
    """
    if isinstance(truth, str):
        try:
            truth = _DECODER.decode(truth)
        except (ValueError, RecursionError) as error:
            raise BadGroundTruth(f"the ground truth is not JSON: {error}") from error
    if not isinstance(truth, Mapping):
        raise BadGroundTruth(f"the ground truth is {type(truth).__name__}, not an object")
    canvas = _canvas(truth)
    if canvas is None:
        raise BadGroundTruth("the ground truth has no canvas: canvas_size, canvas, or width and height")
    try:
        layers, malformed = _layers(truth, geometry)
    except NotAPoster as error:
        raise BadGroundTruth(f"the ground truth: {error}") from error
    if malformed or not layers:
        raise BadGroundTruth(f"{len(malformed)} of {len(layers) + len(malformed)} layers of the ground truth malformed")
    return Poster(*canvas, layers, images=_images(truth))


def _poster_objects(text: str) -> Iterator[dict[str, Any]]:
    """Every outermost JSON object with a list of layers in a text.

    An attempt that fails costs what it read, and the decoder then counts the lines before it. Both are bounded:
    nested openings would make them quadratic.
    """
    budget, broken = 4 * MAX_CHARACTERS, 0
    opening = _OPENING.search(text)
    while opening is not None:
        try:
            value, end = _DECODER.raw_decode(text, opening.start())
        except json.JSONDecodeError as error:
            end = opening.start() + 1
            budget -= error.pos - end
            broken += 1
            if budget < 0 or broken > MAX_BROKEN:
                raise NotAPoster("too many broken JSON objects") from error
        except RecursionError as error:
            raise NotAPoster(f"nested deeper than {MAX_DEPTH}") from error
        else:
            if "layers" in value:
                _check_depth(value)
                yield value
        opening = _OPENING.search(text, end)


def _layers(poster: Mapping[str, Any], geometry: Geometry) -> tuple[tuple[PosterLayer, ...], tuple[str, ...]]:
    """Valid layers, and the texts of malformed ones. Raises NotAPoster when there is no list, or one too long."""
    listed = poster.get("layers")
    if not isinstance(listed, list):
        raise NotAPoster(f"layers is {type(listed).__name__}, not a list")
    if len(listed) > MAX_LAYERS:
        raise NotAPoster(f"{len(listed)} layers, more than {MAX_LAYERS}")
    layers = [_layer(found, geometry) for found in listed]
    malformed = [_text(found) for found, layer in zip(listed, layers, strict=True) if layer is None]
    return tuple([layer for layer in layers if layer is not None]), tuple(malformed)


def _layer(found: Any, geometry: Geometry) -> PosterLayer | None:
    """A layer; None when its box is unusable: a missing or non-finite number, a string, no area."""
    if not isinstance(found, dict):
        return None
    numbers = [_number(found.get(name)) for name in _KEYS[geometry]]
    if any(number is None or abs(number) > MAX_COORDINATE for number in numbers):
        return None
    x, y, width, height = numbers
    if geometry == "ltrb":
        width, height = width - x, height - y  # type: ignore[operator]
    if width < MIN_SIDE or height < MIN_SIDE:  # type: ignore[operator]
        return None
    kind = found.get("type")
    opacity = _number(found.get("opacity"))
    align = found.get("align")
    font_size = None
    if "font_size" in found:
        size = _number(found["font_size"])
        font_size = 0.0 if size is None or size < MIN_SIDE else min(size, MAX_COORDINATE)
    return PosterLayer(
        kind=kind.strip().lower() if isinstance(kind, str) else "",
        x=x, y=y, width=width, height=height,  # type: ignore[arg-type]
        text=_text(found),
        color=_color(found.get("color")),
        fill=_color(found.get("fill")),
        opacity=1.0 if opacity is None else min(1.0, max(0.0, opacity)),
        font_size=font_size,
        align=align if align in ("left", "right") else "center",
        image=_handle(found.get("image_id")),
    )  # fmt: skip


def _text(found: Any) -> str:
    text = found.get("text") if isinstance(found, dict) else None
    return _SURROGATE.sub("\ufffd", text) if isinstance(text, str) else ""


def _number(value: Any) -> float | None:
    """A finite number; None for strings, booleans, infinities and everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of a row that was read elsewhere
        return None
    return number if math.isfinite(number) else None


def _color(value: Any) -> Color | None:
    """`#rgb`, `#rrggbb`, CSS names and functions, or three numbers up to 255; None for anything else."""
    if isinstance(value, list) and len(value) == 3:
        channels = [number for number in map(_number, value) if number is not None and 0 <= number <= 255]
        return (int(channels[0]), int(channels[1]), int(channels[2])) if len(channels) == 3 else None
    if not isinstance(value, str):
        return None
    try:
        red, green, blue = (min(255, max(0, channel)) for channel in ImageColor.getrgb(value)[:3])
    except ValueError:
        return None
    return red, green, blue  # rgb(999,0,0) and hsl(0,9999%,50%) pass Pillow, as numbers beyond a channel


def _handle(value: Any) -> str | None:
    """A handle as text; None for other types, and for integers too long for Python to print."""
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 64 else None
    return value if isinstance(value, str) else None


def _canvas(found: Mapping[str, Any]) -> tuple[float, float] | None:
    """Width and height in pixels from `canvas_size` or `canvas`, a pair or an object, or from the object's own keys."""
    place = next((found[name] for name in ("canvas_size", "canvas") if name in found), found)
    if isinstance(place, Mapping):
        place = [place.get("width"), place.get("height")]
    if not isinstance(place, list | tuple) or len(place) != 2:
        return None
    width, height = _number(place[0]), _number(place[1])
    if width is None or height is None or not (1 <= width <= MAX_COORDINATE and 1 <= height <= MAX_COORDINATE):
        return None
    return width, height


def _images(truth: Mapping[str, Any]) -> dict[str, str]:
    """`image_id: [{id, image}]` of a row: which file a handle stands for."""
    listed = truth.get("image_id")
    rows = [row for row in listed if isinstance(row, Mapping)] if isinstance(listed, list) else []
    handles = [(_handle(row.get("id")), row.get("image")) for row in rows]
    return {handle: image for handle, image in handles if handle is not None and isinstance(image, str)}


def _check_depth(value: Any) -> None:
    """Raises NotAPoster below MAX_DEPTH levels, independently of the interpreter's recursion limit."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise NotAPoster(f"nested deeper than {MAX_DEPTH}")
        inner = [list(v.values()) if isinstance(v, dict) else v for v in level]
        level = [v for values in inner for v in values if isinstance(v, dict | list)]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise NotAPoster("a key is given twice")
    return found


def _no_constant(name: str) -> float:
    raise NotAPoster(f"{name} is not JSON")


def _integer(digits: str) -> float:
    """As float if it is long; Python refuses to parse an int of thousands of digits."""
    return int(digits) if len(digits) < 16 else float(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_integer)
