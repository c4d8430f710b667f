"""The data that travels with the examples is what their pages say it is."""

import importlib.util
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ARITHMETIC = EXAMPLES / "gsm8k-arithmetic"
QUICKSTART = EXAMPLES / "quickstart"


def rows(name, folder=ARITHMETIC):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_counts():
    train, test = rows("train.jsonl"), rows("test.jsonl")
    asked = {row["prompt"] for row in train}
    assert (len(train), len(test)) == (20_038, 3_566)
    assert [row["seen"] for row in test] == [row["prompt"] in asked for row in test]
    assert [row["seen"] for row in test] == [False] * 967 + [True] * 2_599


def is_right(prompt, answer):
    """As Python computes it, with fractions."""
    expression = re.sub(r"\d+", lambda number: f"Fraction({int(number[0])})", prompt.removesuffix("="))
    return eval(expression, {"Fraction": Fraction}) == int(answer)


def test_every_answer_is_right():
    for row in rows("train.jsonl") + rows("test.jsonl"):
        assert is_right(row["prompt"], row["answer"]), row


@pytest.mark.slow("reads every row of the quickstart")
def test_every_reversed_answer_is_right():
    for row in rows("train.jsonl", QUICKSTART) + rows("test.jsonl", QUICKSTART):
        prompt = re.sub(r"\d+", lambda number: number[0][::-1], row["prompt"])
        assert is_right(prompt, row["answer"][::-1]), row
        assert {len(number) for number in re.findall(r"\d+", prompt)} == {4} and len(row["answer"]) == 5


def test_the_quickstart_asks_gsm8k_and_nothing_of_its_unseen_test():
    train, test = rows("train.jsonl", QUICKSTART), rows("test.jsonl", QUICKSTART)
    unseen = {row["prompt"] for row in test if not row["seen"]}
    assert len(unseen) == len({row["prompt"] for row in rows("test.jsonl") if not row["seen"]})
    assert not unseen & {row["prompt"] for row in train}
    supervised, practised = ([row["prompt"] for row in part] for part in (train[:32_000], train[32_000:]))
    assert len(supervised) == len(set(supervised)) and not set(supervised) & set(practised)
    assert len(practised) == len(set(practised)) == len({row["prompt"] for row in rows("train.jsonl")}) == 8_045


def script(path):
    spec = importlib.util.spec_from_file_location("make_data", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow("makes all rows again")
def test_the_scripts_make_exactly_these_files(tmp_path, capsys):
    script(ARITHMETIC / "make_data.py").main(EXAMPLES / "gsm8k", tmp_path)
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (ARITHMETIC / name).read_bytes()
    assert "never seen in train: 967" in capsys.readouterr().out
    script(QUICKSTART / "make_data.py").main(ARITHMETIC, tmp_path)
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (QUICKSTART / name).read_bytes()
