"""What is a poster and what is none, what is a usable ground truth, and the reward end to end."""

import asyncio
import json

import pytest
from poster_table import END, GROUND_TRUTH, PAGE, rows, score, with_table

from hone.reward.resolve import Unusable, load, resolve
from hone.types import Fault
from hone_poster import PosterSettings, poster, render_png
from hone_poster.parse import BadGroundTruth, NotAPoster, read_ground_truth, read_solution
from hone_poster.scoring import score_posters

GOLD = read_ground_truth(GROUND_TRUTH)
BOX = {"x": 1, "y": 2, "width": 3, "height": 4}


def text_of(*layers: object, **more: object) -> str:
    return json.dumps({"layers": list(layers), **more})


def read(response: str, **keys: str):
    return read_solution(response, GOLD, **keys)


@pytest.mark.parametrize(
    "response",
    [
        text_of({"type": "Title ", **BOX, "text": "A"}),
        "Here it is:\n```json\n"
        + text_of({"type": "title", **BOX, "text": "A"}, note=1)
        + "\n```\nI hope {you} like it.",
        '<think>{"layers": [1]} no, better</think>' + text_of({"type": "title", **BOX, "text": "A"}),
        '{"idea": {"layers": []}} ' + text_of({"type": "title", **BOX, "text": "A"}),
        '{"broken": ' + text_of({"type": "title", **BOX, "text": "A"}),
    ],
)
def test_a_poster_is_found_in_its_wrapping(response):
    found = read(response)
    (layer,) = found.layers
    assert (layer.kind, layer.x, layer.y, layer.width, layer.height, layer.text) == ("title", 1, 2, 3, 4, "A")
    assert (found.width, found.height) == (1000, 1000)


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("", "no JSON object with layers"),
        ("[1, 2]", "no JSON object"),
        ('{"layer": []}', "no JSON object"),
        ('{"layers": {}}', "layers is dict, not a list"),
        ('{"layers": []}', "no layer has a usable box"),
        ('{"layers": [3, null, "x"]}', "no layer has a usable box"),
        (text_of(BOX) + text_of(BOX), "2 JSON objects"),
        ('{"layers": [], "layers": []}', "a key is given twice"),
        ('{"layers": [{"x": NaN}]}', "NaN is not JSON"),
        ('{"layers": [{"x": -Infinity}]}', "-Infinity is not JSON"),
        (text_of(*[BOX] * 201), "201 layers, more than 200"),
        ("<think>" + text_of(BOX), "the reasoning never ends"),
        ('{"layers": ' + "[" * 100_000, "nested deeper"),
        ('{"layers": ' + "[" * 100 + "]" * 100 + "}", "nested deeper"),
        ('{"' * 100_000, "too many broken"),
        (text_of(BOX) + " " * 300_000, "300,055 characters, more than 262,144"),
        ("x" * 100_000_000, "100,000,000 characters"),
    ],
)
def test_what_is_no_poster_says_why(response, why):
    with pytest.raises(NotAPoster, match=why):
        read(response)


@pytest.mark.parametrize(
    "change",
    [
        {"x": "1"}, {"x": None}, {"x": True}, {"x": [1]}, {"width": 0}, {"width": -3}, {"height": 1e-9}, {"y": 10**9},
        {"x": int("9" * 400)}, {"width": 1e300}, {"width": 10**9, "height": 10**9},
    ],
)  # fmt: skip
def test_a_layer_without_a_usable_box_counts_but_cannot_match(change):
    found = read(text_of(BOX, {**BOX, **change, "text": "lost"}))
    assert len(found.layers) == 1
    assert found.num_layers == 2
    assert found.malformed_texts == ("lost",)


def test_the_last_of_several_posters_only_where_asked_for():
    two = text_of({**BOX, "text": "A"}) + text_of({**BOX, "text": "B"})
    assert read(two, multi_object="last").layers[0].text == "B"


def test_geometry_is_declared_and_never_guessed():
    ltrb = {"left": 10, "top": 20, "right": 40, "bottom": 60}
    (layer,) = read(text_of(ltrb), geometry="ltrb").layers
    assert (layer.x, layer.y, layer.width, layer.height) == (10, 20, 30, 40)
    with pytest.raises(NotAPoster):
        read(text_of(ltrb))


def test_style_that_makes_no_sense_is_as_if_it_were_absent():
    (layer,) = read(text_of({**BOX, "color": "blurple", "opacity": "x", "align": 3, "fill": [1, 2], "text": 5})).layers
    assert (layer.color, layer.opacity, layer.align, layer.fill, layer.text) == (None, 1.0, "center", None, "")
    (layer,) = read(text_of({**BOX, "color": "rgb(999,0,0)", "opacity": 7, "fill": [1, 2, 3], "font_size": "9"})).layers
    assert (layer.color, layer.opacity, layer.fill, layer.font_size) == ((255, 0, 0), 1.0, (1, 2, 3), 0.0)


def test_half_a_surrogate_pair_becomes_a_replacement_character():
    assert read('{"layers": [{"x":0,"y":0,"width":9,"height":9,"text":"a\\ud800b"}]}').layers[0].text == "a\ufffdb"


@pytest.mark.parametrize(
    "canvas", [{"canvas_size": {"width": 8, "height": 9}}, {"canvas": [8, 9]}, {"width": 8, "height": 9}]
)
@pytest.mark.parametrize("as_text", [False, True])
def test_ground_truth_is_an_object_or_its_json(canvas, as_text):
    truth = {"layers": [BOX], **canvas}
    found = read_ground_truth(json.dumps(truth) if as_text else truth)
    assert (found.width, found.height, len(found.layers)) == (8, 9, 1)


@pytest.mark.parametrize(
    ("truth", "why"),
    [
        (None, "NoneType, not an object"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ({"layers": [BOX]}, "no canvas"),
        ({"layers": [BOX], "canvas": [0, 5]}, "no canvas"),
        ({"layers": [BOX], "canvas": [10**9, 10**9]}, "no canvas"),
        ({"layers": [], "canvas": [5, 5]}, "0 of 0 layers"),
        ({"layers": [BOX, {}], "canvas": [5, 5]}, "1 of 2 layers"),
        ({"canvas": [5, 5]}, "layers is NoneType"),
    ],
)
def test_an_unusable_ground_truth_is_a_fault_of_the_data(truth, why):
    with pytest.raises(BadGroundTruth, match=why):
        read_ground_truth(truth)
    (found,) = asyncio.run(score_posters([text_of(BOX)], truth, PosterSettings()))
    assert (found.value, found.fault) == (None, Fault.DATA)


def test_no_poster_is_a_fault_of_the_model_and_earns_nothing():
    (found,) = asyncio.run(score_posters(["sorry"], GROUND_TRUTH, PosterSettings()))
    assert (found.value, found.fault, found.detail) == (0.0, Fault.MODEL, "no JSON object with layers")


def test_every_sample_has_the_same_metrics_and_says_who_judged_the_looks():
    good, bad = asyncio.run(score_posters([text_of(*GROUND_TRUTH["layers"]), "no"], GROUND_TRUTH, PosterSettings()))
    assert good.metrics.keys() == bad.metrics.keys() >= {"structure", "accuracy", "visual", "f1", "visual_contrast"}
    assert good.detail == "visual: heuristic_v1"
    assert set(bad.metrics.values()) == {0.0}


def test_the_order_of_keys_and_another_canvas_change_nothing():
    turned = json.dumps(GROUND_TRUTH, sort_keys=True)
    other = text_of(*GROUND_TRUTH["layers"], canvas=[10, 10])
    one, two, three = asyncio.run(
        score_posters([text_of(*GROUND_TRUTH["layers"]), turned, other], GROUND_TRUTH, PosterSettings())
    )
    assert one.value == two.value == three.value
    assert [score.metrics["canvas_matches"] for score in (one, two, three)] == [1, 1, 0]


def test_a_series_of_ever_worse_posters_earns_ever_less():
    listed = rows()
    best, *others = zip(listed, score(row.response for row in listed), strict=True)
    before = best
    for row, found in others:
        limit = before[1] if row.series and row.series == before[0].series else best[1]
        assert found.value < limit.value, row
        before = (row, found)


def test_the_table_in_the_docs_is_current():
    page = PAGE.read_text("utf-8")
    assert END in page
    assert page == with_table(page)


def test_weights_are_normalised_and_unjudged_looks_have_none(capsys):
    assert PosterSettings().weights == (0.4, 0.4, 0.2)
    assert PosterSettings(structure_weight=2, accuracy_weight=2, visual_weight=4).weights == (0.25, 0.25, 0.5)
    assert PosterSettings(visual="none").weights == (0.5, 0.5, 0.0)
    PosterSettings(structure_weight=0.37, accuracy_weight=1.11, visual="none")
    assert "weights normalised to 0.250, 0.750, 0.000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"visul": "none"}, "Did you mean 'visual'"),
        ({"visual": "pretty"}, "no scorer 'pretty'; there is heuristic_v1"),
        ({"visual": "visualquality_r1"}, "missing a required argument: 'endpoint'"),
        ({"visual_args": {"value": 1}}, "visual_args of heuristic_v1"),
        ({"visual": "constant", "visual_args": {"value": 2}}, "not in \\[0, 1\\]"),
        ({"structure_weight": -1}, "weights must be 0 or more"),
        ({"visual_weight": float("inf")}, "weights must be 0 or more"),
        ({"structure_weight": 0, "accuracy_weight": 0}, "at least one must be positive"),
        ({"geometry": "xyxy"}, "choose one of xywh, ltrb"),
        ({"multi_object": "first"}, "choose one of reject, last"),
        ({"on_component_missing": "zero"}, "choose one of unscore, group_renormalize, fail"),
        ({"picture_px": 4096}, "must be 512 to 1024"),
    ],
)
def test_arguments_are_checked_before_anything_is_scored(tmp_path, args, why):
    with pytest.raises(Unusable, match=why):
        load(resolve("poster", tmp_path), args)


def test_poster_is_registered_and_runs_in_the_pool(make_rewards, make_group):
    async def scored():
        group = make_group(text_of(*GROUND_TRUTH["layers"]), "no poster", answer=json.dumps(GROUND_TRUTH))
        async with make_rewards({"use": "poster"}) as rewards:
            return await rewards.score(group)

    group = asyncio.run(scored())
    here = asyncio.run(poster(group))
    assert group.scores["poster"] == tuple(here)
    assert group.rewards[0] > 0.99
    assert group.rewards[1] == 0.0


def test_pictures_for_people_of_posters_and_of_what_is_none():
    good, empty = render_png(text_of(*GROUND_TRUTH["layers"]), GROUND_TRUTH), render_png("no", GROUND_TRUTH)
    assert good[:8] == empty[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(empty) < len(good)
