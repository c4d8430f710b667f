"""The stages before RL on the trainer's ranks: they learn what one process learns, and outlive a rank."""

import itertools
import json
import os
import signal

import pytest
from ray_runs import Life, write_run
from safetensors.numpy import load_file
from test_ray_runs import COLOCATED, metrics_of

from hone import assemble
from hone.config.load import load_config
from hone.observe.events import read_events

pytestmark = [pytest.mark.slow("starts Ray, and whole runs in it"), pytest.mark.timeout(600)]

SFT_STAGE = ["stages=[sft,rl]", "run.steps=1", "sft.rows_per_step=20", "sft.optimizer.lr=3e-3"]
PREFERENCES = [
    "stages=[reward_model]",
    "data={train: pairs.jsonl, eval: pairs.jsonl, answer_column: null}",
    "rm.pairs_per_step=10",
    "eval.every=6",
    "train.optimizer.lr=3e-3",
]

ALONE = ["cluster.backend=ray", "cluster.pools={all: {devices: 2, roles: [policy]}}"]


def write_pairs(folder):
    pairs = itertools.permutations(range(10), 2)
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a), "rejected": str(b)} for a, b in pairs]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def lines_of(run, kind):
    return [line for line in metrics_of(run) if any(name.startswith(kind) for name in line)]


def assert_same_weights(folder, other):
    ours, theirs = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert weight == pytest.approx(theirs[name], rel=0, abs=2e-5), name


def test_sft_on_two_ranks_and_then_rl(tmp_path, monkeypatch):
    run_file = write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    assemble.train(load_config(run_file, [*SFT_STAGE, "run.dir=local", "observe.console=quiet"]))
    assemble.train(load_config(run_file, [*SFT_STAGE, *COLOCATED, "run.dir=ray", "observe.console=quiet"]))
    assert "trainer ranks: 2; ready" in (tmp_path / "ray" / "logs" / "training.log").read_text()
    ours, theirs = lines_of(tmp_path / "ray", "sft/"), lines_of(tmp_path / "local", "sft/")
    assert [line["step"] for line in ours] == list(range(1, 11))
    for line, expected in zip(ours, theirs, strict=True):
        for name in ("sft/loss", "sft/lr", "sft/grad_norm"):
            assert line[name] == pytest.approx(expected[name], rel=1e-3), name
    assert ours[-1]["sft/loss"] < ours[0]["sft/loss"] - 0.1
    assert_same_weights(tmp_path / "ray" / "hf-sft", tmp_path / "local" / "hf-sft")
    assert lines_of(tmp_path / "ray", "rollout/reward_mean")[0]["rollout/reward_mean"] == pytest.approx(
        lines_of(tmp_path / "local", "rollout/reward_mean")[0]["rollout/reward_mean"], abs=0.2
    )


def test_a_reward_model_on_two_ranks_is_that_of_one_process(tmp_path, monkeypatch):
    run_file = write_run(tmp_path)
    write_pairs(tmp_path)
    monkeypatch.chdir(tmp_path)
    assemble.train(load_config(run_file, [*PREFERENCES, "run.dir=local", "observe.console=quiet"]))
    assemble.train(load_config(run_file, [*PREFERENCES, *ALONE, "run.dir=ray", "observe.console=quiet"]))
    for line, expected in zip(metrics_of(tmp_path / "ray"), metrics_of(tmp_path / "local"), strict=True):
        rm = {name for name in expected if name.startswith("rm/")} - {"rm/pairs_per_s"}
        assert {name: line[name] for name in rm} == pytest.approx({name: expected[name] for name in rm}, rel=1e-3)
    assert_same_weights(tmp_path / "ray" / "hf", tmp_path / "local" / "hf")
    configs = [json.loads((tmp_path / run / "hf" / "config.json").read_text()) for run in ("ray", "local")]
    assert configs[0]["hone_reward_mean"] == pytest.approx(configs[1]["hone_reward_mean"], rel=1e-3)


def test_sft_continues_by_itself_when_a_rank_dies(tmp_path):
    run_file = write_run(tmp_path)
    longer = [*SFT_STAGE, *ALONE, "stages=[sft]", "sft.epochs=20", "checkpoint.every=10"]
    faultless = Life(run_file, *longer, "run.dir=faultless")
    assert faultless.end() == 0, faultless.text()
    life = Life(run_file, *longer)
    run = tmp_path / "run"
    life.until(lambda: (run / "metrics.jsonl").exists() and len(lines_of(run, "sft/")) > 20)
    os.kill(life.started("ray::TrainerRank")[-1].pid, signal.SIGKILL)
    assert life.end() == 0, life.text()
    assert life.nothing_is_left()
    downs = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "trainer_down"]
    assert len(downs) == 1 and "died" in downs[0]["why"], "the fault really happened"
    assert [line["step"] for line in lines_of(tmp_path / "run", "sft/")] == list(range(1, 201))
    ours, theirs = ((tmp_path / run / "hf" / "model.safetensors").read_bytes() for run in ("run", "faultless"))
    assert ours == theirs, "bit for bit on the same ranks"
