"""Structure, text accuracy, lint and their combination: numbers worked out by hand, and what must always hold."""

import asyncio
import gzip
import itertools
import json
import math
import random
import runpy
from pathlib import Path

import numpy as np
import pytest
from poster_table import GROUND_TRUTH

from hone.observe.metrics import find_metric
from hone.reward.aggregate import component_metrics
from hone.types import Fault
from hone_poster import PosterSettings
from hone_poster.lint import PARTS, WEIGHTS, lint, lint_score, misalignment, overlap
from hone_poster.parse import Poster
from hone_poster.parse import PosterLayer as Layer
from hone_poster.render import render
from hone_poster.scoring import Text, normalize, score_accuracy, score_posters, score_structure
from hone_poster.tasks import make_task

EXAMPLE = Path(__file__).parents[2] / "examples" / "poster"


def canvas(*layers: Layer, malformed: int = 0) -> Poster:
    return Poster(100, 100, layers, ("",) * malformed)


def structure(found: Poster, gold: Poster):
    return score_structure(found, gold, np.zeros((len(found.layers), len(gold.layers))))


def text(words: str, y: float = 0, *, x: float = 0, visible: float = 1.0) -> Text:
    return Text(words, Layer("text", x, y, 10, 10, words), visible)


def accuracy(found: list[Text], gold: list[Text], **keys: int) -> float:
    return score_accuracy(found, gold, **keys).score


def rewards(responses: list[str], **args: object) -> list[float | None]:
    return [score.value for score in asyncio.run(score_posters(responses, GROUND_TRUTH, PosterSettings(**args)))]


GOOD = json.dumps(GROUND_TRUTH)


def test_structure_of_one_box_moved_by_half_its_width():
    # intersection 25 x 50, union 3750: IoU 1/3; centres 0.25 apart: exp(-1); similarity (1/3 + 0.367879) / 2
    found = structure(canvas(Layer("image", 25, 0, 50, 50)), canvas(Layer("image", 0, 0, 50, 50)))
    assert found.f1 == pytest.approx(0.350606, abs=1e-6)
    assert found.score == pytest.approx(0.75 * 0.350606 + 0.25 * 2 * 0.350606, abs=1e-6)


def test_structure_pays_for_what_is_missing_given_twice_or_malformed():
    one, two = Layer("image", 0, 0, 50, 50), Layer("title", 0, 60, 50, 20)
    gold = canvas(one, two)
    assert structure(gold, gold).score == 1.0
    assert structure(canvas(one), gold).f1 == pytest.approx(2 * 1 / 3)
    assert structure(canvas(one, one, two, two), gold).f1 == pytest.approx(2 * 2 / 6)
    assert structure(canvas(one, two, malformed=2), gold).f1 == pytest.approx(2 * 2 / 6)


@pytest.mark.parametrize(
    ("kind", "f1"), [("title", 1.0), ("subtitle", 0.5), ("body", 0.5), ("image", 0.0), ("unheard-of", 0.0)]
)
def test_types_of_one_family_match_by_half(kind, f1):
    found = structure(canvas(Layer(kind, 0, 0, 50, 50)), canvas(Layer("title", 0, 0, 50, 50)))
    assert found.f1 == f1


def test_what_hangs_off_the_canvas_is_measured_against_the_ground_truth():
    # half of one of two boxes is outside: mean 0.25
    inside, bleeding = Layer("image", 0, 0, 50, 50), Layer("title", 75, 0, 50, 20)
    gold, found = canvas(inside, Layer("title", 50, 0, 50, 20)), canvas(inside, bleeding)
    assert structure(found, gold).inside == pytest.approx(0.75)
    assert structure(canvas(inside, bleeding), canvas(inside, bleeding)).inside == 1.0


def test_order_is_the_share_of_pairs_stacked_alike():
    a, b, c = (
        Layer("image", 0, 0, 30, 30),
        Layer("title", 40, 0, 30, 30),
        Layer("body", 0, 60, 30, 30),
    )
    gold = canvas(a, b, c)
    assert structure(canvas(a, c, b), gold).order == pytest.approx(2 / 3)
    found = structure(canvas(c, b, a), gold)
    assert (found.order, found.score) == (0.0, pytest.approx(0.90))
    assert structure(canvas(a), gold).order == 0.0


def test_equal_layers_are_matched_without_crossing():
    gold = canvas(*[Layer("image", 0, 0, 50, 50)] * 7)
    assert structure(gold, gold).score == 1.0


def test_accuracy_of_one_wrong_letter():
    assert accuracy([text("ABXD")], [text("ABCD")]) == pytest.approx(0.75)


def test_accuracy_of_a_missing_text():
    # layers: 1 * 8 / (4 + 6); all of it: "AAAA" against "AAAA BB", 3 of 7 letters to insert
    gold = [text("AAAA"), text("BB", 20)]
    assert accuracy([text("AAAA")], gold) == pytest.approx(0.8 * 0.8 + 0.2 * 4 / 7)


def test_accuracy_of_a_text_given_twice():
    # layers: 2 * 4 / (8 + 4); all of it: "AAAA AAAA" against "AAAA"
    assert accuracy([text("AAAA"), text("AAAA", 20)], [text("AAAA")]) == pytest.approx(0.8 * 8 / 12 + 0.2 * 4 / 9)


def test_accuracy_counts_what_can_be_seen_against_the_ground_truth():
    gold = [text("AAAA")]
    assert accuracy([text("AAAA", visible=0.25)], gold) == pytest.approx(0.25)
    assert accuracy([text("AAAA", visible=0.25)], [text("AAAA", visible=0.5)]) == pytest.approx(0.5)
    assert accuracy([text("AAAA", visible=0.0)], [text("AAAA", visible=0.0)]) == pytest.approx(1.0)


def test_the_visible_one_of_two_equal_texts_is_the_one_that_counts():
    hidden, shown = text("AAAA", visible=0.0), text("AAAA", 20)
    for found in ([hidden, shown], [shown, hidden]):
        assert accuracy(found, [text("AAAA")]) == pytest.approx(0.8 * 8 / 12 + 0.2 * 0.5 * 4 / 9)


def test_accuracy_forgives_some_of_a_text_cut_in_two():
    gold = [text("BIG SALE")]
    assert accuracy([text("BIG"), text("SALE", 20)], gold) > accuracy([text("BIG")], gold) + 0.1
    row = [text("SALE", x=50), text("BIG", 1)]  # side by side: read from the left, though its box is a little lower
    assert accuracy(row, gold) == pytest.approx(accuracy([text("BIG"), text("SALE", 20)], gold))


def test_accuracy_without_texts():
    assert accuracy([], []) == 1.0
    assert accuracy([], [text("A")]) == 0.0
    assert accuracy([text("A" * 40)], []) == pytest.approx(math.exp(-1))
    assert accuracy([], [], malformed_characters=80) == pytest.approx(math.exp(-2))
    assert accuracy([text("AAAA")], [text("AAAA")], malformed_characters=8) < 0.7


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("ＳＡＬＥ\u3000５０％", "SALE 50%"),
        (" a\n\tb  c ", "a b c"),
        ("a\u200bb\ufeffc\u202e", "abc"),
        ("ﬁn", "fin"),
        ("\u200b", ""),
    ],
)
def test_texts_are_compared_as_they_are_read(written, normal):
    assert normalize(written) == normal


def test_case_counts_by_default():
    loud = GOOD.replace("SUMMER SALE", "summer sale")
    assert rewards([loud])[0] < rewards([GOOD])[0]
    quiet, loud = rewards([GOOD, loud], ignore_case=True, visual="none")
    assert quiet == loud


def test_chinese_is_compared_by_character():
    assert accuracy([text("夏日大促")], [text("夏日大减")]) == pytest.approx(0.75)


def test_lint_overlap_and_alignment_by_hand():
    # each of two boxes of 0.25 shares 0.125 with the other
    assert overlap(np.array([[0, 0, 0.5, 0.5], [0.25, 0, 0.5, 0.5]])) == pytest.approx(0.5)
    # nearest lines of one kind: left edges, 0.05 apart
    assert misalignment(np.array([[0.1, 0.1, 0.2, 0.2], [0.15, 0.4, 0.3, 0.3]])) == pytest.approx(-math.log(0.95))
    assert overlap(np.zeros((0, 4))) == misalignment(np.zeros((1, 4))) == 0.0


def test_lint_names_each_defect():
    def parts(*layers: Layer, gold: Poster | None = None) -> dict[str, float]:
        poster = canvas(*layers)
        return lint(poster, render(poster, 512), render(gold or poster, 512))

    good = parts(Layer("title", 10, 10, 80, 20, "SALE"), Layer("image", 10, 40, 80, 40))
    assert all(value == 1.0 for name, value in good.items() if name != "density")
    assert good["density"] == pytest.approx((1 - 0.48) / 0.65, abs=0.03)
    gray = parts(Layer("title", 10, 10, 80, 20, "SALE", color=(255, 255, 255), fill=(119, 119, 119)))
    assert gray["contrast"] == pytest.approx((4.48 - 1) / 3.5, abs=0.01)  # WCAG's example of what just fails 4.5
    assert parts(Layer("body", 10, 10, 20, 5, "far too much for it", font_size=5))["seen"] < 0.5
    assert parts(Layer("body", 10, 10, 80, 5, "small", font_size=1.5))["seen"] == pytest.approx(0.5, abs=0.01)
    half = Layer("shape", 50, 0, 50, 100, fill=(255, 255, 255))
    assert parts(Layer("image", 10, 40, 80, 40), half)["seen"] == pytest.approx(0.5)
    veil = Layer("shape", 0, 0, 100, 100, fill=(255, 255, 255), opacity=0.8)
    assert parts(Layer("title", 10, 10, 80, 20, "SALE", color=(0, 0, 0)), veil)["contrast"] < 0.2  # 1.6 : 1
    red, pink = (
        Layer("background", 0, 0, 100, 100, fill=(255, 0, 0)),
        Layer("background", 0, 0, 100, 100, fill=(255, 128, 128)),
    )
    assert parts(red, gold=canvas(red))["colour"] == 1.0
    assert (
        parts(pink, gold=canvas(red))["colour"]
        == parts(red, gold=canvas(pink))["colour"]
        == pytest.approx(0.5, abs=0.01)
    )
    assert parts(Layer("background", 0, 0, 100, 100), gold=canvas(red))["colour"] == 0.0
    assert parts(red, gold=canvas(Layer("background", 0, 0, 100, 100)))["colour"] == 1.0  # no colours were asked for
    assert parts(*[red, half] * 5, gold=canvas(red, half))["clutter"] == 1.0  # the upper two hide the others
    dots = [Layer("shape", 10 * n, 10, 5, 5) for n in range(10)]
    assert parts(*dots, gold=canvas(*dots[:4]))["clutter"] == 0.5
    assert parts(Layer("title", 0, 0, 80, 20, "A"), Layer("body", 0, 0, 80, 20, "B"))["overlap"] < 0.1
    assert parts(Layer("title", 1, 10, 80, 20, "A"))["margin"] == 0.0
    assert parts(Layer("image", 10, 10, 30, 30), Layer("title", 10, 10, 30, 30, "X" * 9))["readability"] < 1.0


def test_lint_weights_add_up():
    assert sum(WEIGHTS.values()) == pytest.approx(1.0)
    assert lint_score(dict.fromkeys(PARTS, 1.0)) == 1.0
    assert lint_score(dict.fromkeys(PARTS, 1.0) | {"seen": 0.25}) == 0.25


def real_posters() -> list[dict]:
    """Ground truths of examples/poster (without colours), generated ones with colours, and the documented one."""
    with gzip.open(EXAMPLE / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
        shipped = [json.loads(json.loads(line)["poster"]) for line in itertools.islice(lines, 12)]
    return [GROUND_TRUTH, *(make_task(5, number).poster for number in range(12)), *shipped]


def looks(layers: list[dict], truth: dict) -> float:
    (score,) = asyncio.run(score_posters([json.dumps({"layers": layers})], truth, PosterSettings()))
    return score.metrics["visual"]


def covered(layers: list[dict], width: float, height: float) -> list[dict]:
    return [*layers, {"type": "shape", "x": 0, "y": 0, "width": width, "height": height, "fill": "#123456"}]


def cluttered(layers: list[dict], width: float, height: float) -> list[dict]:
    chance, side = random.Random(0), 0.05 * max(width, height)
    squares = [
        {
            "x": chance.uniform(0, width - side),
            "y": chance.uniform(0, height - side),
            "fill": f"#{chance.randrange(1 << 24):06x}",
        }
        for _ in range(50)
    ]
    return [*layers, *({"type": "shape", "width": side, "height": side} | square for square in squares)]


def small(layers: list[dict], width: float, height: float) -> list[dict]:
    """12.5 pixels on a canvas of 1000."""
    kinds = ("subtitle", "body")
    return [layer | ({"font_size": 0.0125 * max(width, height)} if layer["type"] in kinds else {}) for layer in layers]


def colourless(layers: list[dict], width: float, height: float) -> list[dict]:
    return [{key: value for key, value in layer.items() if key not in ("color", "fill")} for layer in layers]


@pytest.mark.parametrize(
    ("cheat", "most"), [(covered, 0.01), (cluttered, 0.7), (small, 0.85), (colourless, 0.8)]
)  # fmt: skip
def test_what_cannot_be_seen_in_the_picture_earns_no_looks(cheat, most):
    for truth in real_posters():
        layers, canvas_size = truth["layers"], truth["canvas_size"].values()
        assert looks(layers, truth) > 0.9
        if cheat(layers, *canvas_size) != layers:
            assert looks(cheat(layers, *canvas_size), truth) < most


def test_rewards_of_a_perfect_poster_with_a_constant_judge():
    assert rewards([GOOD], visual="constant", visual_args={"value": 0.5}) == [pytest.approx(0.9)]
    assert rewards([GOOD], visual="none") == [pytest.approx(1.0)]


def test_looks_count_fully_only_for_a_layout_that_is_half_right():
    one = json.dumps({"layers": [GROUND_TRUTH["layers"][1]]})  # 1 of 5 layers: F1 = 2/6
    (found,) = asyncio.run(score_posters([one], GROUND_TRUTH, PosterSettings(visual="constant")))
    assert found.metrics["f1"] == pytest.approx(1 / 3)
    assert found.value == pytest.approx(0.4 * found.metrics["structure"] + 0.2 * (1 / 3) / 0.5)


@pytest.mark.parametrize(
    ("policy", "good", "bad"), [("unscore", None, 0.0), ("group_renormalize", 1.0, 0.0), ("fail", None, None)]
)
def test_looks_that_could_not_be_judged_are_never_a_number(policy, good, bad):
    keys = {"visual": "constant", "visual_args": {"value": None}, "on_component_missing": policy}
    scores = asyncio.run(score_posters([GOOD, "no poster"], GROUND_TRUTH, PosterSettings(**keys)))
    assert [score.value for score in scores] == [good, bad]
    assert scores[0].fault is (Fault.INFRA if good is None else None)


@pytest.mark.parametrize("script", ["latin", "cjk"])
@pytest.mark.parametrize("styled", [True, False])
def test_every_generated_ground_truth_answers_its_own_task(script, styled):
    for number in range(12):
        task = make_task(7, number, script=script, styled=styled)
        (found,) = asyncio.run(score_posters([json.dumps(task.poster)], task.poster, PosterSettings()))
        assert (found.metrics["structure"], found.metrics["accuracy"]) == (1.0, pytest.approx(1.0))
        assert found.metrics["text_visible"] == 1.0
        assert found.value > 0.96


def test_tasks_are_a_function_of_seed_and_number():
    assert make_task(1, 5) == make_task(1, 5)
    assert len({json.dumps(make_task(1, number).poster) for number in range(20)}) == 20


@pytest.mark.parametrize("seed", range(3))
def test_moving_a_poster_further_never_pays(seed):
    task = make_task(seed, 0)
    moved = [
        json.dumps({"layers": [layer | {"y": layer["y"] + step} for layer in task.poster["layers"]]})
        for step in (0, 5, 20, 50, 100, 200, 400, 800)
    ]
    scores = asyncio.run(score_posters(moved, task.poster, PosterSettings(visual="none")))
    values = [score.value for score in scores]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == len(values)


def test_the_parts_of_the_score_are_metrics_of_their_own(make_group):
    group = make_group(GOOD, GOOD, "no poster", answer=GROUND_TRUTH)
    scores = tuple(asyncio.run(score_posters([GOOD, GOOD, "no poster"], GROUND_TRUTH, PosterSettings())))
    scored = group.scored({"poster": scores}, tuple(score.value for score in scores))
    same = group.scored({"poster": scores[:1] * 3}, (scores[0].value,) * 3)
    metrics = component_metrics([scored, same])
    assert metrics["reward/poster_structure_mean"] == pytest.approx(5 / 6)
    assert metrics["reward/poster_structure_zero_std_group_frac"] == 0.5
    assert {"reward/poster_accuracy_mean", "reward/poster_visual_mean", "reward/poster_visual_seen_mean"} <= set(
        metrics
    )
    for name in metrics:
        find_metric(name)


def test_the_benchmark_runs_on_the_reward_as_it_is():
    """benchmarks/posters.py; the benchmarks are no package."""
    benchmark = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "posters.py"))
    assert all(work() >= 1 for work in benchmark["cases"](1).values())
