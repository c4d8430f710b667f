from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest

from hone.data.sources import read_rows
from hone.reward.rules.exact import exact, final_number, gsm8k
from hone.types import Fault, Group, Prompt, Sample, Score

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_exact_ignores_white_space_around_and_nothing_else(make_group):
    assert exact(make_group("24", " 24\n", "24.0", "2 4", "", "The answer is 24")) == [1, 1, 0, 0, 0, 0]


def test_exact_takes_a_number_as_answer(make_group):
    assert exact(make_group("24", "25", answer=24)) == [1, 0]


def test_exact_without_an_answer_is_a_fault_of_the_data(make_group):
    assert exact(make_group("24", answer=None)) == [Score(None, Fault.DATA, "the row has no answer")]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 9 is left\n#### 72", "72"),
        ("####72", "72"),
        ("#### 1,234", "1234"),
        ("#### $1,234.50", "1234.5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### 72.00", "72"),
        ("#### .5 litres", "0.5"),
        ("#### 72.", "72"),
        ("#### 1 #### 2", "2"),
        ("#### 0", "0"),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize(
    "text", ["", "72", "#### ", "#### seventy", "#### x72", "#### 1 ####", "#### --5", "#### -$-5"]
)
def test_no_final_number(text):
    assert final_number(text) is None


def test_gsm8k_compares_numbers_after_the_last_marker(make_group):
    group = make_group("#### 1,234.0", "1234", "#### 1235", "#### 1234 #### 9", answer="long story\n#### 1234")
    assert gsm8k(group) == [1, 0, 0, 0]


@pytest.mark.parametrize(("answer", "scores"), [("72", [1]), (72, [1]), (72.0, [1]), ("$72", [1])])
def test_gsm8k_takes_a_bare_number_as_answer(make_group, answer, scores):
    assert gsm8k(make_group("#### 72", answer=answer)) == scores


@pytest.mark.parametrize("answer", [None, "", "#### ?", "unknown"])
def test_gsm8k_without_a_number_in_the_answer_is_a_fault_of_the_data(make_group, answer):
    (score,) = gsm8k(make_group("#### 72", answer=answer))
    assert score.fault is Fault.DATA


def test_all_of_gsm8k_scores_1_on_its_own_answers_and_0_on_others():
    rows = [*read_rows("gsm8k/train.jsonl.gz", EXAMPLES), *read_rows("gsm8k/test.jsonl.gz", EXAMPLES)]
    answers = sorted((row.values["answer"] for row in rows), key=final_number)
    assert len(answers) == 8792
    most_common = max(Counter(final_number(answer) for answer in answers).values())
    others = answers[most_common:] + answers[:most_common]  # so no answer meets its equal
    groups = [group_of(answer, other, gold=answer) for answer, other in zip(answers, others, strict=True)]
    assert [gsm8k(group) for group in groups] == [[1.0, 0.0]] * 8792


def group_of(*texts, gold):
    samples = tuple(Sample("p", i, (), (), (), "stop", text) for i, text in enumerate(texts))
    return Group(Prompt("p", 0, "", (), answer=gold), samples)
