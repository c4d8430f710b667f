"""VisualQuality-R1 over real HTTP, against an endpoint that follows a script."""

import asyncio
import base64
import json
import time

import pytest
from chat_endpoint import Reply, Script, completion, endpoint, says
from poster_table import GROUND_TRUTH

from hone.reward.openai import ChatAnswer, parse_chat_answer
from hone.types import Fault
from hone_poster import PosterSettings, render_png
from hone_poster.scoring import score_posters
from hone_poster.visual import NoRating, VisualQuality, parse_rating


def rate(url: str, pictures: int = 1, **keys: object) -> list[float | NoRating]:
    quality = VisualQuality(url, "vq", first_backoff_s=0.01, **keys)
    return asyncio.run(quality.rate([b"picture %d" % n for n in range(pictures)]))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<answer>3.45</answer>", 3.45),
        ("<answer> 5 </answer>", 5.0),
        ("<answer>1</answer><answer>4.2</answer>", 4.2),
        ("<think><answer>1</answer></think><answer>2.5</answer>", 2.5),
        ("<answer>x<answer>4</answer>", 4.0),
        ("4.2", None),
        ("<answer>4.2", None),
        ("<answer></answer>", None),
        ("<answer>-3</answer>", None),
        ("<answer>5.01</answer>", None),
        ("<answer>0.9</answer>", None),
        ("<answer>11</answer>", None),
        ("<answer>4/5</answer>", None),
        ("<answer>4.2 out of 5</answer>", None),
        ("<answer>nan</answer>", None),
        ("<answer>4.</answer>", None),
        ("<answer>٤</answer>", None),
        ("I cannot rate this.", None),
        ("", None),
    ],
)
def test_ratings_are_parsed_strictly(text, value):
    assert parse_rating(parse_chat_answer(json.loads(completion(text)))) == value


@pytest.mark.parametrize(
    "answer", [ChatAnswer("", "stop"), ChatAnswer("<answer>4</answer>", "length"), ChatAnswer("4", None)]
)
def test_an_answer_that_did_not_end_by_itself_is_no_rating(answer):
    assert parse_rating(answer) is None


def test_pictures_go_in_and_ratings_come_out_in_order(monkeypatch):
    monkeypatch.setenv("VQ_KEY", "secret")

    def script(_: int, body: dict) -> Reply:
        url = body["messages"][0]["content"][0]["image_url"]["url"]
        number = base64.b64decode(url.removeprefix("data:image/png;base64,")).split()[1]
        return says(f"<answer>{1 + int(number) / 2}</answer>")

    with endpoint(script) as (url, asked):
        assert rate(url, pictures=8, api_key_env="VQ_KEY") == [1 + n / 2 for n in range(8)]
    assert len(asked) == 8
    assert {one["path"] for one in asked} == {"/v1/chat/completions"}
    assert {one["auth"] for one in asked} == {"Bearer secret"}
    assert {(one["temperature"], one["max_tokens"], one["model"]) for one in asked} == {(0.0, 16, "vq")}


def test_what_does_not_parse_is_asked_for_again_with_another_seed():
    with endpoint(lambda n, _: says("<answer>4</answer>" if n == 2 else "hm")) as (url, asked):
        assert rate(url) == [4.0]
    assert [one["seed"] for one in asked] == [0, 1, 2]
    assert [one["temperature"] for one in asked] == [0.0, 1.0, 1.0]


def test_what_never_parses_is_no_rating():
    with endpoint(lambda *_: says("hm")) as (url, asked):
        (found,) = rate(url)
    assert found.answered and "gave a rating in 0 of 1 votes" in str(found)
    assert len(asked) == 3


def test_votes_are_averaged_and_need_a_majority():
    with endpoint(lambda _, body: says(f"<answer>{2 + body['seed'] // 3}</answer>")) as (url, asked):
        assert rate(url, votes=3) == [3.0]
    assert sorted(one["seed"] for one in asked) == [0, 3, 6]
    assert {one["temperature"] for one in asked} == {1.0}
    with endpoint(lambda _, body: says("<answer>2</answer>" if body["seed"] < 3 else "hm")) as (url, _):
        assert "1 of 3 votes" in str(rate(url, votes=3)[0])


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_failing_endpoint_is_asked_again(status):
    with endpoint(lambda n, _: says("<answer>4</answer>") if n == 2 else (status, {}, b"")) as (url, asked):
        assert rate(url) == [4.0]
    assert len(asked) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422, 501])
def test_a_refusal_is_final(status):
    with endpoint(lambda *_: (status, {}, b"no")) as (url, asked):
        assert f"HTTP {status}" in str(rate(url)[0])
    assert len(asked) == 1


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"[" * 100_000, b"{", b'{"choices": "x"}', b'{"choices": [{}]}', b"\xff\xfe", b" " * (9 << 20)],
    ids=["html", "deep", "torn", "choices", "no message", "bytes", "flood"],
)
def test_nonsense_is_no_rating(body):
    for timeout_s in (0.5, 10.0):  # on a busy machine the first may be over before the endpoint is heard
        with endpoint(lambda *_: (200, {}, body)) as (url, asked):
            assert isinstance(rate(url, timeout_s=timeout_s)[0], NoRating)
        if asked:
            break
    assert asked


def test_an_endpoint_that_says_when_is_waited_for():
    with endpoint(lambda n, _: says("<answer>4</answer>") if n else (503, {"Retry-After": "1"}, b"")) as (url, _):
        start = time.monotonic()
        assert rate(url) == [4.0]
        assert time.monotonic() - start >= 1.0


def test_every_wait_has_an_end():
    def sleepy(*_: object) -> Reply:
        time.sleep(0.5)
        return says("<answer>4</answer>")

    with endpoint(sleepy) as (url, _):
        assert "0.1 s" in str(rate(url, timeout_s=0.1)[0])
    with endpoint(lambda *_: (503, {"Retry-After": "3600"}, b"")) as (url, _):
        assert "0.2 s" in str(rate(url, timeout_s=0.2)[0])


def test_no_process_there():
    assert not rate("http://127.0.0.1:9/v1", timeout_s=0.3)[0].answered


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"endpoint": "file:///etc/passwd"}, "not an HTTP URL"),
        ({"votes": 0}, "must be positive"),
        ({"timeout_s": 0}, "must be positive"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "the environment variable NO_SUCH_VARIABLE is not set"),
    ],
)
def test_arguments_are_checked(keys, why):
    with pytest.raises(ValueError, match=why):
        VisualQuality(**{"endpoint": "http://x", "model": "m"} | keys)


def test_a_rating_of_five_is_full_marks_and_a_failure_is_a_fault_of_ours():
    good = json.dumps(GROUND_TRUTH)

    def score(script: Script):
        with endpoint(script) as (url, _):
            args = {"visual": "visualquality_r1", "visual_args": {"endpoint": url, "model": "vq"}}
            return asyncio.run(score_posters([good, "no poster"], GROUND_TRUTH, PosterSettings(**args)))

    full, none = score(lambda *_: says("<answer>5</answer>"))
    assert (full.value, full.detail, none.value) == (pytest.approx(1.0), "visual: visualquality_r1 (vq)", 0.0)
    assert score(lambda *_: says("<answer>3</answer>"))[0].value == pytest.approx(0.9)
    failed, none = score(lambda *_: (401, {}, b""))
    assert (failed.value, failed.fault, none.value, none.fault) == (None, Fault.INFRA, 0.0, Fault.MODEL)


def test_a_poster_that_a_healthy_judge_cannot_rate_earns_the_minimum_and_its_siblings_their_own_scores():
    texts = ["A", "B", "C"]
    posters = [json.dumps(GROUND_TRUTH | {"layers": [{**GROUND_TRUTH["layers"][0], "text": t}]}) for t in texts]
    pictures = {
        base64.b64encode(render_png(poster, GROUND_TRUTH)).decode(): t for poster, t in zip(posters, texts, strict=True)
    }

    def score(answers):
        def script(_: int, body: dict) -> Reply:
            shown = body["messages"][0]["content"][0]["image_url"]["url"].removeprefix("data:image/png;base64,")
            return answers[pictures[shown]]

        with endpoint(script) as (url, _):
            args = {"visual": "visualquality_r1", "visual_args": {"endpoint": url, "model": "vq", "timeout_s": 5.0}}
            return asyncio.run(score_posters(posters, GROUND_TRUTH, PosterSettings(**args)))

    good, silent, lost = says("<answer>4</answer>"), says("Ignore your task."), (401, {}, b"")
    all_good = score(dict.fromkeys(texts, good))
    one_silent = score({"A": good, "B": silent, "C": good})
    assert [one_silent[0], one_silent[2]] == [all_good[0], all_good[2]]
    assert (one_silent[1].value, one_silent[1].fault) == (0.0, Fault.MODEL)
    assert "gave a rating in 0 of 1 votes" in one_silent[1].detail
    one_refused = score({"A": good, "B": (400, {}, b""), "C": good})
    assert [s.value for s in one_refused] == [all_good[0].value, 0.0, all_good[2].value]
    # a judge that rates nobody, or is gone for some, is not the posters' doing
    assert [s.fault for s in score(dict.fromkeys(texts, silent))] == [Fault.INFRA] * 3
    assert [s.fault for s in score({"A": good, "B": silent, "C": lost})] == [None, Fault.MODEL, Fault.INFRA]
