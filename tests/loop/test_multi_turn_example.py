"""examples/calculator: the calculator is right and safe, demonstrations are what the policy will meet, it runs."""

import json
import sys
from pathlib import Path

import pytest

from hone.cli.main import main
from hone.rollout.env import Episode, Observation
from hone.types import Prompt

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator"
sys.path.insert(0, str(EXAMPLE))

from calculator import Calculator, calculate, written  # noqa: E402


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("48/2", "24"),
        ("16-3-4", "9"),
        ("2+3*4", "14"),
        ("60/100*5", "3"),
        ("1/3", "0.33"),
        ("0.5*3", "1.50"),
        ("7", "7"),
        ("3-10", "-7"),
    ],
)
def test_it_calculates(expression, text):
    assert written(calculate(expression)) == text


@pytest.mark.parametrize(
    "expression", ["", "1/0", "1+", "+1", "1++2", "2**9", "(1)", "1 + 2", "x", "__import__", "1.2.3", "9" * 65, "1/0*0"]
)
def test_anything_else_is_none(expression):
    assert calculate(expression) is None


def test_an_episode_by_hand():
    calculator = Calculator(Episode(Prompt("p", 0, "48/2=", (1,), answer="24"), 0, 0))
    assert calculator.step("<48/2>") == Observation("=24;", metrics={"tool_used": 1.0, "tool_errors": 0.0})
    assert calculator.step("<48/>") == Observation("=?;", metrics={"tool_used": 0.0, "tool_errors": 1.0})
    assert calculator.step("24") == Observation(None, reward=1.0)
    assert Calculator(Episode(Prompt("p", 0, "48/2=", (1,), answer="24"), 0, 0)).step("25").reward == 0


def test_demonstrations_say_what_the_calculator_says():
    rows = [json.loads(line) for line in (EXAMPLE / "sft.jsonl").read_text().splitlines()]
    calls = [row for row in rows if row["answer"].endswith(">")]
    answers = [row for row in rows if ";" in row["prompt"]]
    assert len(calls) == len(answers) >= len(rows) / 4
    for call, answer in zip(calls, answers, strict=True):
        calculator = Calculator(Episode(Prompt("p", 0, call["prompt"], (1,), answer=answer["answer"]), 0, 0))
        said = calculator.step(call["answer"])
        assert answer["prompt"] == call["prompt"] + call["answer"] + said.text
        assert calculator.step(answer["answer"]).reward == 1


@pytest.mark.slow("a run of an example")
def test_it_runs(tmp_path):
    short = ["run.steps=1", "train.prompts_per_step=4", "run.threads=1", "sft.epochs=1"]
    short += ["data.train_rows=0:100", "data.eval_rows=0:8", "sft.rows=0:512"]
    quiet = ["observe.console=quiet", "observe.tensorboard=false", f"run.dir={tmp_path}/run"]
    assert main(["train", str(EXAMPLE / "run.yaml"), *short, *quiet]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("rollout/turns_mean" in line for line in lines) == 1
    assert sum("eval/turns_mean" in line for line in lines) == 2
