"""A run ordered by pass rate, of sources with weights: resumed, it trains on the prompts that it would have."""

import json

import pytest
from tiny import metrics_of, weights_of, write_run

from hone.cli.main import main
from hone.data.order import OUTSIDE, WITHIN, _unpacked

SETTINGS = (
    "stages=[rl]",
    "data.train=[{path: sums.jsonl, weight: 3}, {path: few.jsonl, weight: 1}]",
    "data.order=pass_rate",
    "data.train_rows=':212'",
    "model.init.num_hidden_layers=1",
    "eval.every=0",
    "data.eval=null",
)


def write(folder):
    run_file = write_run(folder)
    rows = (folder / "sums.jsonl").read_text().splitlines()
    (folder / "sums.jsonl").write_text("\n".join(rows[:20]) + "\n")
    (folder / "few.jsonl").write_text("\n".join(rows[20:32]) + "\n")
    return run_file


@pytest.mark.slow("three runs")
def test_a_resumed_run_continues_in_the_same_order(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(["train", str(write(whole)), *SETTINGS, "run.steps=12"]) == 0
    assert main(["train", str(write(cut)), *SETTINGS, "run.steps=5"]) == 0
    assert main(["train", str(cut / "tiny.yaml"), *SETTINGS, "run.steps=12", "--resume"]) == 0
    assert [line for line in metrics_of(cut) if "rollout/reward_mean" in line] == [
        line for line in metrics_of(whole) if "rollout/reward_mean" in line
    ]
    assert weights_of(cut) == weights_of(whole)
    (saved,) = sorted((whole / "run" / "checkpoints").glob("*-000012/state.json"))
    state = json.loads(saved.read_text())["progress"]["order"]["sources"]
    assert {known for source in state for known in _unpacked(source["known"]).tolist()} == {WITHIN, OUTSIDE}
    assert any(number > 1 for source in state for number, *_ in source["rounds"]), "pass rates have decided an order"
    line = next(line for line in metrics_of(whole) if "rollout/reward_mean" in line)
    assert line["rollout/prompts_frac[source=sums.jsonl]"] == 0.75
    assert "rollout/pass_rate[source=few.jsonl]" in line
