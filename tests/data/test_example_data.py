"""The data that travels with the examples is what their pages say it is."""

import importlib.util
import json
import re
from fractions import Fraction
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
ARITHMETIC = EXAMPLES / "gsm8k-arithmetic"


def rows(name):
    return [json.loads(line) for line in (ARITHMETIC / name).read_text().splitlines()]


def test_counts():
    train, test = rows("train.jsonl"), rows("test.jsonl")
    asked = {row["prompt"] for row in train}
    assert (len(train), len(test)) == (20_038, 3_566)
    assert [row["seen"] for row in test] == [row["prompt"] in asked for row in test]
    assert [row["seen"] for row in test] == [False] * 967 + [True] * 2_599


def test_every_answer_is_right():
    for row in rows("train.jsonl") + rows("test.jsonl"):
        expression = re.sub(r"\d+", r"Fraction(\g<0>)", row["prompt"].removesuffix("="))
        assert eval(expression, {"Fraction": Fraction}) == int(row["answer"]), row


def test_the_script_makes_exactly_these_files(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("make_data", ARITHMETIC / "make_data.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(EXAMPLES / "gsm8k", tmp_path)
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (ARITHMETIC / name).read_bytes()
    assert "never seen in train: 967" in capsys.readouterr().out
