"""`checkpoint.best`: the step that evaluated best is saved, outlives `keep`, is exported, and known after a resume."""

import asyncio
import json
import math
import shutil

import pytest
import torch
from fakes import fake_run, run_virtually
from tiny import metrics_of, write_run
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from hone.cli.main import main
from hone.errors import DataError
from hone.loop.policy import train_policy
from hone.train.checkpoint import Checkpoints
from hone.train.tensor_files import LiveSnapshot
from hone.types import Progress

SPOILED = ("sft.epochs=10", "sft.optimizer.lr=1e-2", "train.optimizer.lr=3e-2", "checkpoint.keep=1", "eval.every=2")
"""SFT teaches a little, then RL at a ruinous learning rate unlearns it: the best step is not the last."""
BEST = "checkpoint.best=eval/accuracy"


def run_with(values, *, every=2, metric="eval/accuracy"):
    """A fake run of 6 updates that evaluates to `values` in turn; returns it and the steps that were saved."""
    run = fake_run(steps=6)
    changes = {"checkpoint": {"every": 0, "best": metric}, "eval": {"every": every}}
    run.config = run.config.model_validate(run.config.model_dump() | changes)
    left, saved = iter(values), []

    async def evaluate():
        await asyncio.sleep(0.1)
        return {"eval/accuracy": next(left), "eval/reward_mean": 0.0}

    run.evaluate = evaluate
    run.checkpoints.save = lambda progress, *_: saved.append((progress.step, progress.best_step))
    run_virtually(train_policy(run))
    return run, saved


def test_each_new_best_is_saved_at_once():
    run, saved = run_with([0.1, 0.3, 0.3, 0.2])
    assert saved == [(0, 0), (2, 2)], "a tie is no improvement"
    assert (run.progress.best_step, run.progress.best_value) == (2, 0.3)


def test_the_last_step_may_be_the_best_and_what_was_not_measured_never_is():
    run, saved = run_with([math.nan, 0.1, math.nan, 0.2])
    assert saved == [(2, 2)], "the end of a stage is saved by whoever ends it"
    assert run.progress.best_step == 6


def test_another_metric_after_a_resume_starts_anew():
    run, _ = run_with([0.1, 0.3, 0.3, 0.2])
    assert run.progress.best_metric == "eval/accuracy"
    run.config = run.config.model_validate(run.config.model_dump() | {"checkpoint": {"best": "eval/reward_mean"}})
    assert run.is_best_so_far({"eval/reward_mean": -1.0})
    assert (run.progress.best_step, run.progress.best_value) == (6, -1.0)


def test_a_metric_that_evaluation_does_not_measure_ends_the_run_before_it_trains():
    with pytest.raises(DataError, match=r"measures only eval/accuracy, eval/reward_mean"):
        run_with([0.1], metric="eval/pass@8")


def test_the_best_checkpoint_outlives_the_newest_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 5), (6, 5)):
        checkpoints.save(Progress(step=step, best_step=best), LiveSnapshot({"w": torch.tensor([float(step)])}, {}))
        assert f"step-{best:06d}" in [path.name for path in checkpoints.paths()]
    assert [path.name for path in checkpoints.paths()] == ["step-000005", "step-000006"]
    assert checkpoints.at("rl", 5).progress.best_step == 5


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spoiled")
    assert main(["train", str(write_run(folder)), *SPOILED, BEST]) == 0
    return folder


def accuracies(folder):
    return {line["step"]: line["eval/accuracy"] for line in metrics_of(folder) if "eval/accuracy" in line}


@pytest.mark.slow("a whole run")
def test_the_best_weights_are_exported_at_the_end_and_on_demand(spoiled, tmp_path, capsys):
    found = accuracies(spoiled)
    best = max(found, key=found.__getitem__)
    assert found[best] > found[8], "the witness: the last step is not the best"
    names = [path.name for path in (spoiled / "run" / "checkpoints").iterdir()]
    assert sorted(names) == [f"step-{best:06d}", "step-000008"]
    run_file = str(spoiled / "tiny.yaml")
    assert main(["export", run_file, *SPOILED, "--best", "--to", str(tmp_path / "best")]) == 0
    exported = (tmp_path / "best" / "model.safetensors").read_bytes()
    assert exported == (spoiled / "run" / "hf-best" / "model.safetensors").read_bytes()
    assert exported != (spoiled / "run" / "hf" / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert main(["eval", run_file, *SPOILED, "--json", "--model", str(tmp_path / "best")]) == 0
    assert json.loads(capsys.readouterr().out)["eval/accuracy"] == found[best]
    assert main(["export", run_file, *SPOILED, "--best", "--step", "8", "--to", str(tmp_path / "x")]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_every_exported_policy_says_what_ends_and_pads_a_response(tmp_path):
    run_file = str(write_run(tmp_path, steps=1))
    assert main(["train", run_file, BEST, "eval.every=1"]) == 0
    assert main(["export", run_file, "--to", str(tmp_path / "out")]) == 0
    for folder in (tmp_path / "run" / "hf", tmp_path / "run" / "hf-best", tmp_path / "out"):
        tokenizer, generation = AutoTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
        assert generation.eos_token_id == AutoConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id
        assert generation.pad_token_id == AutoConfig.from_pretrained(folder).pad_token_id == tokenizer.pad_token_id


def test_a_torn_best_checkpoint_is_found_at_once_and_set_aside(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    for step in (1, 2):
        progress = Progress(step=step, best_metric="eval/accuracy", best_step=1, best_value=0.5)
        checkpoints.save(progress, LiveSnapshot({"w": torch.zeros(2)}, {}))
    assert checkpoints.forget_incomplete_best(progress) == [] and progress.best_step == 1
    torn = tmp_path / "checkpoints" / "step-000001" / "tensors.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    lost, moved = checkpoints.forget_incomplete_best(progress)
    assert "the best checkpoint (eval/accuracy = 0.5) is lost" in lost and "tensors.safetensors has" in lost
    assert (tmp_path / "set-aside" / "step-000001").is_dir() and "set-aside" in moved
    assert (progress.best_step, progress.best_value) == (None, None)
    assert checkpoints.newest().progress.step == 2


@pytest.mark.slow("a whole run")
def test_a_resumed_run_knows_the_best_step(spoiled, tmp_path):
    shutil.copytree(spoiled, tmp_path, dirs_exist_ok=True)
    run_file = tmp_path / "tiny.yaml"
    run_file.write_text(run_file.read_text().replace(str(spoiled), str(tmp_path)))
    shutil.rmtree(tmp_path / "run" / "hf-best")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000008")
    assert main(["train", str(run_file), *SPOILED, BEST, "--resume"]) == 0
    assert metrics_of(tmp_path) == metrics_of(spoiled)
    for name in ("hf", "hf-best"):
        path = f"run/{name}/model.safetensors"
        assert (tmp_path / path).read_bytes() == (spoiled / path).read_bytes()


def test_without_a_best_step_there_is_none_to_export(tmp_path, capsys):
    run_file = write_run(tmp_path, steps=1)
    assert main(["train", str(run_file)]) == 0
    assert not (tmp_path / "run" / "hf-best").exists()
    assert main(["export", str(run_file), "--best", "--to", str(tmp_path / "x")]) == 2
    assert "no step is known as the best. Set checkpoint.best" in capsys.readouterr().err
