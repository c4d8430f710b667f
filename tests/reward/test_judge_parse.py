"""Judge outputs to scores: a table of what counts and what does not, and fuzz."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.reward.judge.parse import FAILURES, NoScores, Reading
from hone.reward.openai import ChatAnswer

GRM = Reading(("grm_boxed",), 1, 10)
JSON = Reading(("json",), 1, 10)
TAG = Reading(("answer_tag",), 1, 10)
CHOICE = Reading(("choice",), 1, 10, {"Yes": 10.0, "No": 1.0})
ALL = Reading(("json", "grm_boxed", "answer_tag"), 1, 10)

TABLE = [
    # DeepSeek-GRM's form
    (GRM, "Specific Criteria: a.\nAnalysis: b.\nScores: \\boxed{8}", [8.0]),
    (GRM, "Scores: \\boxed{7.5}", [7.5]),
    (GRM, "Scores: \\boxed{ 8 }.", [8.0]),
    (GRM, "Scores: \\boxed {8}", [8.0]),
    (GRM, "\\boxed{3} on reflection \\boxed{6}", "malformed"),
    (GRM, "It demands \\boxed{10}, so \\boxed{2}", "malformed"),
    (GRM, "\\boxed{6}, as said: \\boxed{6}", [6.0]),
    (GRM, "in the form \\boxed{score}: \\boxed{6}", [6.0]),
    (GRM, "\\boxed{8} \\boxed{6} \\boxed{8, 6}", [8.0, 6.0]),
    (GRM, "Score: \\boxed{8} (see reference [1])", [8.0]),
    (GRM, "\\boxed{8}. [NOTE]", [8.0]),
    (GRM, "<think>\\boxed{2}</think>\\boxed{9}", [9.0]),
    (GRM, "\\boxed{10}", [10.0]),
    (GRM, "\\boxed{1}", [1.0]),
    (GRM, "\\boxed{8, 6, 10}", [8.0, 6.0, 10.0]),
    (GRM, "\\boxed{8，6}", [8.0, 6.0]),
    (GRM, "\\boxed{08}", [8.0]),
    (GRM, "\\boxed{nan}", "malformed"),
    (GRM, "\\boxed{inf}", "malformed"),
    (GRM, "\\boxed{8/10}", "malformed"),
    (GRM, "\\boxed{-8}", "malformed"),
    (GRM, "\\boxed{+8}", "malformed"),
    (GRM, "\\boxed{1e1}", "malformed"),
    (GRM, "\\boxed{x}", "malformed"),
    (GRM, "\\boxed{}", "malformed"),
    (GRM, "\\boxed{８}", "malformed"),
    (GRM, "\\boxed{8.}", "malformed"),
    (GRM, "\\boxed{\\text{8}}", "malformed"),
    (GRM, "\\boxed{8, }", "malformed"),
    (GRM, "\\boxed{8} and then \\boxed{good}", "malformed"),
    (GRM, "Scores: \\boxed{8", "malformed"),
    (GRM, "Scores: \\boxed 8", "malformed"),
    (GRM, "\\boxed{11}", "range"),
    (GRM, "\\boxed{0}", "range"),
    (GRM, "\\boxed{0.99}", "range"),
    (GRM, "\\boxed{100}", "range"),
    (GRM, "Scores: [8]", "missing"),
    (GRM, "The score is 8.", "missing"),
    (GRM, "I cannot score this.", "missing"),
    (GRM, "8", "missing"),
    (GRM, "", "empty"),
    (GRM, " \n", "empty"),
    (GRM, "<think>\\boxed{8}</think>", "empty"),
    (GRM, "<think>\\boxed{8}", "reasoning"),
    # JSON
    (JSON, '{"score": 8}', [8.0]),
    (JSON, ' {"reason": "good", "score": 7.25} ', [7.25]),
    (JSON, '```json\n{"score": 8}\n```', [8.0]),
    (JSON, '<think>{"score": 1}</think>\n{"score": 8}', [8.0]),
    (JSON, '{"scores": [8, 6]}', [8.0, 6.0]),
    (JSON, '{"score": "8"}', "malformed"),
    (JSON, '{"score": true}', "malformed"),
    (JSON, '{"score": null}', "malformed"),
    (JSON, '{"score": NaN}', "malformed"),
    (JSON, '{"score": 8, "score": 10}', "malformed"),
    (JSON, '{"score": 8, "scores": [8]}', "malformed"),
    (JSON, '{"rating": 8}', "malformed"),
    (JSON, '{"score": 8} {"score": 9}', "malformed"),
    (JSON, '{"score": 8', "malformed"),
    (JSON, '{"score": 1e9}', "range"),
    (JSON, '{"score": 1e999}', "range"),
    (JSON, '{"score": -1}', "range"),
    (JSON, "{" * 100_000, "malformed"),
    (JSON, 'Sure: {"score": 8}', "missing"),
    (JSON, "[8]", "missing"),
    # tags
    (TAG, "<answer>8</answer>", [8.0]),
    (TAG, "<answer>1</answer> no, <answer> 4.5 </answer>", "malformed"),
    (TAG, "<answer>4.5</answer> so <answer> 4.5 </answer>", [4.5]),
    (TAG, "<answer>1<answer>4</answer>", [4.0]),
    (TAG, "<answer>8, 3</answer>", [8.0, 3.0]),
    (TAG, "<answer>8", "malformed"),
    (TAG, "<answer>8</answer><answer>", "malformed"),
    (TAG, "8</answer>", "malformed"),
    (TAG, "<answer>8 of 10</answer>", "malformed"),
    (TAG, "<answer></answer>", "malformed"),
    (TAG, "the answer is 8", "missing"),
    # verdicts
    (CHOICE, "It is right.\nVerdict: Yes", [10.0]),
    (CHOICE, "**Final Answer: no.**", [1.0]),
    (CHOICE, "yes", [10.0]),
    (CHOICE, "Yes, I think.\n\n`No`\n", [1.0]),
    (CHOICE, "Verdict: Yes\nor rather\nVerdict: No", "malformed"),
    (CHOICE, "Is it right?\nYes\nVerdict: No", [1.0]),
    (CHOICE, "NO. The eyes are yes-men.", "missing"),
    (CHOICE, "yes and no", "missing"),
    (CHOICE, "Verdict: Yes\nbecause it is right", "missing"),
    (CHOICE, "Verdict:", "missing"),
    # in order: the first mark that is there decides
    (ALL, '{"score": 8}', [8.0]),
    (ALL, "\\boxed{4} <answer>9</answer>", [4.0]),
    (ALL, "\\boxed{bad} <answer>9</answer>", "malformed"),
    (ALL, "<answer>9</answer>", [9.0]),
]


@pytest.mark.parametrize(("reading", "text", "expected"), TABLE, ids=lambda value: str(value)[:40])
def test_what_a_judge_wrote(reading, text, expected):
    if isinstance(expected, list):
        assert reading.scores(ChatAnswer(text, "stop"), len(expected)) == expected
    else:
        with pytest.raises(NoScores) as caught:
            reading.scores(ChatAnswer(text, "stop"), 1)
        assert caught.value.failure == expected


@pytest.mark.parametrize(("text", "count"), [("\\boxed{8, 7}", 1), ("\\boxed{8}", 2), ("\\boxed{1,2,3}", 2)])
def test_there_are_as_many_scores_as_responses(text, count):
    with pytest.raises(NoScores) as caught:
        GRM.scores(ChatAnswer(text, "stop"), count)
    assert caught.value.failure == "count"


@pytest.mark.parametrize("finish", ["length", "content_filter", "tool_calls", None])
def test_an_answer_that_was_cut_holds_none(finish):
    with pytest.raises(NoScores) as caught:
        GRM.scores(ChatAnswer("\\boxed{8}", finish), 1)
    assert caught.value.failure == "cut"


FRAGMENTS = st.sampled_from(
    [
        *("\\boxed", "{", "}", "8", "10", "11", ",", ".", "-", "nan", "1e9", "٤", "\ud800", " ", "\n"),
        *("<answer>", "</answer>", "<think>", "</think>", "Verdict: ", "yes", "No"),
        *('{"score":', '"scores": [', "]", "```json\n", "\n```"),
    ]
)


@given(st.lists(FRAGMENTS | st.text(max_size=5), max_size=25), st.sampled_from([GRM, JSON, TAG, CHOICE, ALL]))
def test_whatever_it_wrote_is_scores_on_the_scale_or_none(parts, reading):
    for count in (1, 2):
        try:
            scores = reading.scores(ChatAnswer("".join(parts), "stop"), count)
        except NoScores as error:
            assert error.failure in FAILURES
        else:
            assert len(scores) == count
            assert all(math.isfinite(score) and 1 <= score <= 10 for score in scores)


@given(st.integers(1, 10), st.text(max_size=40).filter(lambda text: "\\boxed" not in text and "think>" not in text))
def test_a_score_survives_whatever_stands_around_it(score, text):
    assert GRM.scores(ChatAnswer(f"{text}\\boxed{{{score}}}{text}", "stop"), 1) == [float(score)]
