"""`math` on answers that people, models and attackers write: a table, a fuzz, and what computes without end."""

import asyncio
import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_search import examples

from hone.reward.rules.answer import after_reasoning, final_answer, last_boxed
from hone.reward.rules.mathematics import UnreadableMath, gold_answer, score_response
from hone.types import Fault, Group, Prompt, Sample, VersionSpan

NOTHING = "no \\boxed{} and no ####"

ANSWERS = [
    # where the answer is
    (r"\boxed{42}", "42", 1),
    (r"The result is \boxed{42}, as it should be.", "42", 1),
    ("so it is\n#### 72", "72", 1),
    ("#### 72\nwhich I have checked", "72", 1),
    (r"first \boxed{5}, no: \boxed{4}", "4", 1),
    (r"first \boxed{4}, no: \boxed{5}", "4", 0),
    (r"#### 5 but \boxed{4}", "4", 1),
    (r"<think>\boxed{5}</think>\boxed{4}", "4", 1),
    (r"<think>\boxed{4}</think> I do not know.", "4", 0),
    (r"<think>\boxed{4}", "4", 0),
    (r"\boxed{\boxed{42}}", "42", 1),
    (r"\boxed{4} and, cut off, \boxed{\frac{1}{", "4", 1),
    (r"\boxed{42", "42", 0),
    (r"\boxed{}", "42", 0),
    ("42", "42", 0),
    ("The answer is 42.", "42", 0),
    (r"\fbox{3}", "3", 1),
    (r"\boxed {3}", "3", 1),
    (r"\\boxed{3}", "3", 1),
    # numbers
    (r"\boxed{1,234}", "1234", 1),
    (r"\boxed{1{,}234}", "1234", 1),
    ("#### 1,234", "1234", 1),
    (r"\boxed{\$18}", "18", 1),
    (r"\boxed{18 \text{ dollars}}", "18", 1),
    (r"\boxed{18\text{ cm}^2}", "18", 1),
    (r"\boxed{90^\circ}", "90", 1),
    (r"\boxed{1.0}", "1", 1),
    (r"\boxed{7}", "7.0000001", 0),
    (r"\boxed{1.5e3}", "1500", 1),
    (r"\boxed{123456789123456789}", "123456789123456788", 0),
    (r"\boxed{50\%}", "0.5", 1),
    (r"\boxed{50}", r"50\%", 1),
    (r"\boxed{−3}", "-3", 1),
    (r"\boxed{３．５}", "3.5", 1),
    (r"\boxed{0.1+0.2}", "0.3", 1),
    # fractions, roots, powers
    (r"\boxed{\frac{1}{2}}", "0.5", 1),
    (r"\boxed{0.5}", "1/2", 1),
    (r"\boxed{\dfrac{3}{4}}", r"\frac34", 1),
    (r"\boxed{1\frac{1}{2}}", "3/2", 1),
    (r"\boxed{-\frac{1}{3}}", "-1/3", 1),
    (r"\boxed{-0.333}", "-1/3", 0),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1),
    (r"\boxed{3.4641}", r"\sqrt{12}", 0),
    (r"\boxed{\frac{\pi}{2}}", r"\pi/2", 1),
    (r"\boxed{2^{10}}", "1024", 1),
    (r"\boxed{10!}", "3628800", 1),
    (r"\boxed{\log_2 8}", "3", 1),
    (r"\boxed{3+4i}", "4i+3", 1),
    (r"\boxed{\frac{1}{0}}", "1", 0),
    (r"\boxed{\infty}", r"\infty", 1),
    # expressions, equations, sets
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
    (r"\boxed{x^2+1}", "(x+1)^2", 0),
    (r"\boxed{\sin^2 x+\cos^2 x}", "1", 1),
    (r"\boxed{x=3}", "3", 1),
    (r"\boxed{x=1 \text{ or } x=2}", "1,2", 1),
    (r"\boxed{2,-2}", r"\pm 2", 1),
    (r"\boxed{2, 1}", r"\{1,2\}", 1),
    (r"\boxed{(1,2)}", "(1,2)", 1),
    (r"\boxed{(2,1)}", "(1,2)", 0),
    (r"\boxed{[0,1)}", "[0,1)", 1),
    (r"\boxed{[0,1]}", "[0,1)", 0),
    (r"\boxed{x < 3}", r"x\le 3", 0),
    (r"\boxed{(-\infty,3]}", r"x\le 3", 1),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    (r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 0),
    # words
    (r"\boxed{\text{B}}", "B", 1),
    (r"\boxed{Yes.}", "yes", 1),
    (r"\boxed{no}", "yes", 0),
    (r"\boxed{\text{Monday}}", "monday", 1),
    (r"\boxed{north}", "thorn", 0),
    (r"\boxed{no solution}", r"\text{No solution}", 1),
    (r"\boxed{five}", "5", 0),
    # how rows give it
    (r"\boxed{7}", r"It follows that \boxed{7}.", 1),
    (r"\boxed{72}", "Add them up.\n#### 72", 1),
    (r"\boxed{3}", 3, 1),
    (r"\boxed{2.5}", 2.5, 1),
]


@pytest.mark.parametrize(("response", "gold", "expected"), ANSWERS)
def test_table(response, gold, expected):
    assert score_response(response, gold_answer(gold)).value == expected


def test_the_table_is_long_enough():
    assert len(ANSWERS) >= 40


@pytest.mark.parametrize("gold", [None, "", "  ", True, r"\boxed{}", "$$", "x" * 1001])
def test_rows_without_an_answer(gold):
    with pytest.raises(UnreadableMath):
        gold_answer(gold)


def test_what_is_no_answer_says_so():
    gold = gold_answer("4")
    assert score_response("four", gold).detail == NOTHING
    assert score_response(r"\boxed{}", gold).detail == "cannot be read as mathematics: ''"
    too_long = score_response(r"\boxed{" + "1" * 1001 + "}", gold)
    assert (too_long.value, too_long.fault) == (0.0, Fault.MODEL)
    assert too_long.detail == "an answer of 1001 characters; at most 1000 are read"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"} \boxed{1} {", "1"),
        (r"{ \boxed{1}", "1"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed{\frac{1}{2}", None),
        ("boxed{1}", None),
        ("", None),
    ],
)
def test_last_balanced_box(text, found):
    assert last_boxed(text) == found


def test_searching_an_answer_is_linear_in_whatever_there_is():
    for hostile in (r"\boxed{" * 40_000, "{" * 250_000, r"\boxed{1}" * 30_000, "####" * 60_000, "<think>" * 40_000):
        started = time.process_time()
        final_answer(hostile)
        assert time.process_time() - started < 2.0  # quadratic ones take minutes


@given(st.text(alphabet=st.sampled_from("\\{}boxed#1<think>/ \n"), max_size=80))
def test_the_last_box_is_balanced_and_in_the_text(text):
    found = last_boxed(text)
    assert found is None or (found in text and after_reasoning(text) in text)


PIECES = st.sampled_from(
    [
        *"0123456789xyie+-*/^_=(){}[],.!|<>%$ \ud800中\x00",
        *(r"\frac{", r"\sqrt{", r"\pi", r"\boxed{", r"\text{", r"\infty", r"\cup", r"\begin{pmatrix}", r"\\"),
        *("½", "√", "²", "∞", "0.", r"\overline{", r"\text{or}", " or ", "...", r"^\circ", r"\ "),
        *(r"\left(", r"\{", r"\}", r"\le", r"\sin", r"\log_", r"\pm"),
    ]
)


@examples(60)
@given(st.lists(PIECES, max_size=12).map("".join).filter(lambda text: "^" not in text and "!" not in text))
def test_any_answer_has_a_finite_score_in_range(text):
    """Without powers and factorials, which may compute without end; those are the pool's to end, below."""
    score = score_response("\\boxed{" + text + "}", gold_answer("4"))
    assert score.value in (0.0, 1.0) and math.isfinite(score.value)


# ---- in the pool, where it belongs

BOMBS = (r"\boxed{9^{9^9}}", r"\boxed{(10^7)!}", r"\boxed{10^{10^{10}}}", r"\boxed{\binom{10^9}{10^8}}")


def group(*texts: str, answer: object = "4") -> Group:
    samples = tuple(Sample("p", i, (5,), (-0.5,), (VersionSpan(0, 1),), "stop", text) for i, text in enumerate(texts))
    return Group(Prompt("p", 0, "2+2=", (6, 10), answer=answer), samples)


def workers(rewards) -> set[int]:
    return {worker._process.pid for worker in rewards._pool.workers._workers if worker is not None and worker.alive}


@pytest.mark.slow("waits for the time-out of every worker")
def test_a_stalling_answer_on_every_worker_at_once_and_the_next_good_one_is_scored(make_rewards):
    limit_s = 1.5

    async def run():
        component = {"use": "math", "timeout_s": limit_s}
        async with make_rewards(component, workers=2, max_unscored_frac=1.0) as rewards:
            before = workers(rewards)
            stalled = [asyncio.create_task(rewards.score(group(bomb, BOMBS[2]))) for bomb in BOMBS[:2]]
            await asyncio.sleep(0)  # both have a worker now, and the next in line waits
            started = time.monotonic()
            good = await rewards.score(group(r"\boxed{4}"))
            waited_s, done = time.monotonic() - started, [task.done() for task in stalled]
            return before, workers(rewards), good, waited_s, done, await asyncio.gather(*stalled)

    before, after, good, waited_s, done, stalled = asyncio.run(run())
    assert good.rewards == (1.0,)
    assert waited_s >= limit_s - 0.1  # it did wait for a stalled worker to be killed,
    assert done == [False, False]  # and for no second stall; benchmarks/rules.py says how long beyond the limit
    for scored in stalled:
        for score in scored.scores["math"]:
            assert (score.value, score.fault) == (0.0, Fault.MODEL)
            assert score.detail == "took longer than 1.5 s; its process was killed"
    assert len(before) == 2 and after and not before & after  # replaced
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)


@pytest.mark.slow("waits for time-outs")
def test_one_stalling_answer_among_eight_costs_the_others_nothing(make_rewards):
    good = [r"\boxed{4}", r"\boxed{5}", "#### 4", "none", r"\boxed{\frac{8}{2}}", r"\boxed{2^2}", r"\boxed{x}"]

    async def run(*texts: str):
        async with make_rewards({"use": "math", "timeout_s": 2.0}, max_unscored_frac=1.0) as rewards:
            return (await rewards.score(group(*texts))).rewards

    clean = asyncio.run(run(*good))
    assert clean == (1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0)
    assert asyncio.run(run(*good[:3], BOMBS[2], *good[3:])) == (*clean[:3], 0.0, *clean[3:])


def test_a_row_whose_answer_stalls_is_no_samples_fault(make_rewards):
    async def run():
        async with make_rewards({"use": "math", "timeout_s": 1.5}, max_unscored_frac=1.0) as rewards:
            bad = await rewards.score(group(r"\boxed{4}", r"\boxed{5}", answer="9^{9^9}"))
            return bad, await rewards.score(group(r"\boxed{4}"))

    bad, good = asyncio.run(run())
    assert [score.fault for score in bad.scores["math"]] == [Fault.DATA] * 2
    assert bad.scores["math"][0].detail.startswith("the row took longer than 1.5 s")
    assert good.rewards == (1.0,)
