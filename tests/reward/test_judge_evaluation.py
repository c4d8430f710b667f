"""`hone eval-judge` over real HTTP: accuracy, ties, swaps, canaries, and rows that are no pairs."""

import json
import re

import pytest
from chat_endpoint import Reply, Script, endpoint, says

from hone.cli.main import main


def shown(body: dict) -> list[str]:
    prompt = body["messages"][-1]["content"]
    return re.findall(r"\[Begin of Answer \d+ \w+\]\n(.*?)\n\[End of Answer", prompt, re.DOTALL)


def by_length(_: int, body: dict) -> Reply:
    """A judge that likes long answers."""
    return says("\\boxed{" + ", ".join(str(min(10, 1 + len(text))) for text in shown(body)) + "}")


@pytest.fixture
def evaluate(tmp_path, capsys):
    def run(script: Script, *rows: dict, code: int = 0, **args: object) -> dict[str, float]:
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with endpoint(script) as (url, _):
            component = {"use": "judge", "args": {"url": "http://127.0.0.1:9", "log_every_s": 1e6, **args}}
            (tmp_path / "r.yaml").write_text(json.dumps({"reward": {"components": [component]}}))
            words = ["eval-judge", str(tmp_path / "r.yaml"), str(tmp_path / "pairs.jsonl"), "--url", url, "--json"]
            assert main(words) == code
        said = capsys.readouterr()
        return json.loads(said.out) if code == 0 else {"error": said.err}

    return run


ROWS = [
    {"prompt": "a?", "chosen": "long", "rejected": "no"},
    {"prompt": "b?", "chosen": "a", "rejected": "wrong"},
    {"prompt": "c?", "chosen": "same", "rejected": "here"},
    {"prompt": [{"role": "user", "content": "d?"}], "chosen": "longer", "rejected": "s"},
]


@pytest.mark.parametrize("mode", ["pointwise", "groupwise"])
def test_figures_of_a_judge_that_likes_long_answers(evaluate, mode):
    found = evaluate(by_length, *ROWS, mode=mode)
    assert found["pairs"] == 4
    assert found["unscored_frac"] == 0
    assert found["pairwise_accuracy"] == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert found["tie_frac"] == 0.25
    assert found["swap_consistency"] == 1.0
    canaries = {name: value for name, value in found.items() if name.startswith("canary_")}
    assert canaries == {
        "canary_empty": 0.0,
        "canary_colon": pytest.approx(1 / 9),
        "canary_thought": 1.0,
        "canary_echo": pytest.approx(2 / 9),
        "canary_injected": 1.0,
    }


def test_a_judge_that_goes_by_the_place_is_found_out(evaluate):
    def first_wins(_: int, body: dict) -> Reply:
        return says("\\boxed{" + ", ".join(["10", "1"][: len(shown(body))]) + "}")

    found = evaluate(first_wins, *ROWS, mode="groupwise")
    assert (found["pairwise_accuracy"], found["swap_consistency"]) == (0.5, 0.0)


def test_what_has_no_score_is_counted_and_in_no_mean(evaluate):
    found = evaluate(lambda n, body: says("hm") if "wrong" in shown(body) else by_length(n, body), *ROWS)
    assert found["unscored_frac"] == 0.25
    assert found["pairwise_accuracy"] == pytest.approx(2.5 / 3)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"chosen": "a", "rejected": "b"}, "pairs.jsonl:1: no prompt"),
        ({"prompt": "p", "chosen": "a"}, "chosen and rejected must be texts"),
        ({"prompt": "p", "chosen": "a", "rejected": 3}, "chosen and rejected must be texts"),
    ],
)
def test_rows_that_are_no_pairs_are_refused(evaluate, row, why):
    assert why in evaluate(by_length, row, code=2)["error"]


def test_a_file_without_a_judge_is_refused(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text("reward: {components: [{use: exact}]}")
    assert main(["eval-judge", str(tmp_path / "r.yaml"), "pairs.jsonl"]) == 2
    assert "it has none" in capsys.readouterr().err
