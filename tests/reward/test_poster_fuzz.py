"""Whatever a policy writes: a finite score in [0, 1], soon."""

import asyncio
import itertools
import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from poster_table import GROUND_TRUTH
from random_search import examples

from hone.types import Fault
from hone_poster import PosterSettings
from hone_poster.parse import MAX_LAYERS
from hone_poster.scoring import score_posters

NUMBERS = st.one_of(
    st.integers(-100, 1200),
    st.floats(),
    st.sampled_from(
        [0, -0.0, 1e-9, 1e6, -1e6, 1e9, 1e300, 10**400, float("inf"), float("nan"), "12", None, True, [], {}]
    ),
)
TEXTS = st.one_of(
    st.text(max_size=30),
    st.text("aあ海한é \n\t\u200b\u202e\ud800😀", max_size=30),
    st.sampled_from(["SUMMER SALE", "W" * 5000, "\n" * 500, "字 " * 900, 5, None, ["x"]]),
)
STYLES = st.one_of(
    st.sampled_from(
        ["#fff", "red", "rgb(900,0,0)", "hsl(0,100%,50%)", "x" * 200, [1, 2, 3], [1, 2, "3"], [1e300] * 3, 7, None]
    ),
    st.text(max_size=8),
)
KINDS = st.one_of(st.sampled_from(["title", "image", "background", "shape", "Button "]), st.integers(), st.text())
LAYERS = st.fixed_dictionaries(
    {},
    optional={
        "type": KINDS,
        "x": NUMBERS, "y": NUMBERS, "width": NUMBERS, "height": NUMBERS, "font_size": NUMBERS, "opacity": NUMBERS,
        "text": TEXTS, "color": STYLES, "fill": STYLES, "align": STYLES, "image_id": NUMBERS,
    },
)  # fmt: skip
BOXES = st.fixed_dictionaries({name: st.integers(-50, 1100) for name in ("x", "y", "width", "height")})
USABLE = st.builds(lambda layer, box: layer | box, LAYERS, BOXES)
ANYTHING = st.recursive(
    NUMBERS | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


def check(response: str, truth: dict = GROUND_TRUTH, **args: object) -> None:
    (score,) = asyncio.run(score_posters([response], truth, PosterSettings(**args)))
    assert score.value is not None and 0.0 <= score.value <= 1.0
    for name, value in score.metrics.items():
        assert math.isfinite(value), name
        assert 0.0 <= value <= 1.0 or name in ("num_layers", "malformed_layers"), name


@examples(40)
@given(st.lists(st.one_of(LAYERS, USABLE, ANYTHING), max_size=12))
def test_any_layers(layers):
    check(json.dumps({"layers": layers}))


@examples(30)
@given(st.lists(USABLE, min_size=1, max_size=12))
def test_any_layers_as_python_would_write_them(layers):
    check(json.dumps({"layers": layers}, allow_nan=True, ensure_ascii=False).replace("1e+300", "1e999"))


@examples(50)
@given(st.one_of(st.text(), st.text('{}[]":,layers 01\\', max_size=80), ANYTHING.map(str)))
def test_any_text(text):
    check(text)


@examples(30)
@given(st.data())
def test_a_damaged_poster(data):
    whole = json.dumps(GROUND_TRUTH)
    start = data.draw(st.integers(0, len(whole)))
    check(whole[:start] + data.draw(st.text(max_size=5)) + whole[start + data.draw(st.integers(0, 9)) :])


FULL = {"type": "text", "x": 0, "y": 0, "width": 1000, "height": 1000}


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "layer",
    [
        {"text": "ab cd " * 200, "opacity": 0.5},
        {"text": "字" * 1200},
        {"text": "WWW " * 280, "font_size": 600},
        {"text": "W" * 1100, "font_size": 999, "width": 1e6},
        {"text": "W", "font_size": 1e6, "x": -1e5, "y": -1e5, "width": 1e6, "height": 1e6},
        {"text": "W" * 1100, "font_size": 0.001},
        {"text": "W" * 1100, "width": 0.001, "height": 1e6},
        {"type": "image"},
        {"type": "shape", "opacity": 0.5, "width": 1e6, "height": 1e6},
    ],
)  # fmt: skip
def test_as_many_layers_as_there_may_be_of_the_worst_kind(layer):
    check(json.dumps({"layers": [FULL | layer] * MAX_LAYERS}, ensure_ascii=False))


EDGES = [
    0.0, -0.0, 5e-324, -5e-324, 1.1e-311, 2.3e-308, 1e-160, 1e-9, 1e-3, math.nextafter(1e-3, 1), 0.5, 1.0,
    math.nextafter(1e6, 0), 1e6, -1e6, 1e16, 1.4e154, 1e308, sys.float_info.max, -sys.float_info.max,
]  # fmt: skip
"""Numbers whose products, quotients, sums or squares leave float64, and the bounds that a poster has itself."""
NUMERIC = {"x": 5, "y": 5, "width": 400, "height": 200, "font_size": 40, "opacity": 1}
CORNERS = {"left": 5, "top": 5, "right": 400, "bottom": 200}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(NUMERIC, 2)))
def test_numbers_at_the_edges_of_float64_in_every_pair_of_fields(one, other):
    layer, kinds = NUMERIC | {"text": "so far"}, itertools.cycle(["text", "shape", "image"])
    layers = [layer | {"type": next(kinds), one: a, other: b} for a in EDGES for b in EDGES]
    for start in range(0, len(layers), MAX_LAYERS):
        check(json.dumps({"layers": [*layers[start : start + MAX_LAYERS - 1], layer]}))


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(CORNERS, 2)))
def test_corners_at_the_edges_of_float64(one, other):
    layer = CORNERS | {"type": "text", "text": "so far"}
    truth = {"canvas_size": [500, 500], "layers": [layer]}
    layers = [layer | {one: a, other: b} for a in EDGES for b in EDGES]
    for start in range(0, len(layers), MAX_LAYERS):
        check(json.dumps({"layers": [*layers[start : start + MAX_LAYERS - 1], layer]}), truth, geometry="ltrb")


@pytest.mark.parametrize("canvas", [(1, 1), (1e6, 1), (1, 1e6), (1e6, 1e6), (math.nextafter(1, 2), 3)])
def test_numbers_at_the_edges_of_float64_on_canvases_at_theirs(canvas):
    layer = NUMERIC | {"type": "text", "text": "so far"}
    truth = {"canvas_size": list(canvas), "layers": [layer | {"font_size": 1e-3}]}
    check(json.dumps({"layers": [layer | {name: edge} for name in NUMERIC for edge in EDGES]}), truth)


COLORS = [
    *([edge, 255, edge] for edge in EDGES),
    *("hsl(0,9999%,50%)", "hsl(0,0%,9999%)", "hsv(720,900%,900%)", "rgb(900%,0%,0%)", f"rgb({'9' * 80},0,0)"),
    f"hsl({'9' * 80},{'9' * 9}%,50%)",
]


@pytest.mark.parametrize("color", COLORS, ids=str)
def test_colours_beyond_what_a_channel_holds(color):
    check(json.dumps({"layers": [NUMERIC | {"text": "so far", "color": color, "fill": color}]}))


@pytest.mark.parametrize("number", [10**400, 10**5000, -(10**400)], ids=["400", "5000", "-400"])
def test_integers_of_a_ground_truth_that_no_float_holds(number):
    good = NUMERIC | {"image_id": number, "color": [number] * 3, "font_size": number, "opacity": number}
    truth = {"canvas_size": [500, 500], "layers": [good], "image_id": [{"id": number, "image": "a.png"}]}
    check(json.dumps({"layers": [NUMERIC]}), truth)
    for name in ("x", "width"):
        (score,) = asyncio.run(score_posters(["x"], truth | {"layers": [good | {name: number}]}, PosterSettings()))
        assert (score.value, score.fault) == (None, Fault.DATA)
