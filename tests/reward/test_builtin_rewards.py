import asyncio
from decimal import Decimal
from pathlib import Path

import pytest

from hone.config.run import DataSection, RewardComponent, RewardSection
from hone.data.prompts import read_answers
from hone.reward.base import Rewards
from hone.reward.builtin import exact, final_number, gsm8k
from hone.reward.gold import check_gold, other_answers
from hone.types import Fault, Score

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
    files = {"train": "gsm8k/train.jsonl.gz", "eval": "gsm8k/test.jsonl.gz"}
    data = DataSection(**files, prompt_column="question", answer_column="answer")
    prompts = read_answers(data, EXAMPLES, part="train") + read_answers(data, EXAMPLES, part="eval")
    section = RewardSection(components=(RewardComponent(use="gsm8k"),))
    report = asyncio.run(check_gold(Rewards.from_config(section, EXAMPLES, window_samples=10_000), prompts))
    assert report.rows == 8792
    assert report.gold == (1.0,) * 8792
    assert report.shuffled == (0.0,) * 8792


def test_other_answers_never_stay_with_their_equals():
    answers = ["#### 1", "#### 0", "2", "so #### 1.0", "3", "4", "#### 0.00", "#### 1"]
    others = other_answers(answers)
    assert sorted(others) == sorted(answers)
    ones = {"#### 1", "so #### 1.0"}
    assert not any(mine == other or {mine, other} <= ones for mine, other in zip(answers, others, strict=True))


def test_other_answers_are_none_where_one_fills_more_than_half():
    assert other_answers(["yes", "yes", "no"]) == []
