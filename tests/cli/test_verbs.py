"""The verbs on a real small run: train, eval, export, stop and resume, and what a user may do wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hone.cli.main import main

sys.path.append(str(Path(__file__).parents[1] / "loop"))
from tiny import metrics_of, weights_of, write_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    assert main(["train", str(write_run(folder))]) == 0
    return folder


def test_eval_prints_the_figures_of_the_final_weights(trained, capsys):
    run_file = str(trained / "tiny.yaml")
    assert main(["eval", run_file, "--json", "eval.samples=4", "eval.pass_k=[1,4]"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert 0 <= metrics["eval/pass@1"] <= metrics["eval/pass@4"] <= 1
    assert main(["eval", run_file, "eval.temperature=0"]) == 0
    assert "greedy" in capsys.readouterr().out


def test_the_last_evaluation_of_training_is_what_eval_says(trained, capsys):
    last = [line for line in metrics_of(trained) if "eval/accuracy" in line][-1]
    assert main(["eval", str(trained / "tiny.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval/reward_mean"] == pytest.approx(last["eval/reward_mean"])


def test_export_is_a_directory_that_transformers_loads(trained, tmp_path):
    assert main(["export", str(trained / "tiny.yaml"), "--to", str(tmp_path / "model"), "--step", "8"]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    final = AutoModelForCausalLM.from_pretrained(trained / "run" / "hf")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")("12+7=", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(exported(tokens).logits, final(tokens).logits)


def test_export_overwrites_nothing(trained, tmp_path, capsys):
    assert main(["export", str(trained / "tiny.yaml"), "--to", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["export", str(trained / "tiny.yaml"), "--to", str(tmp_path / "m"), "--step", "77"]) == 1
    assert "step-000077" in capsys.readouterr().err


def test_a_folder_with_a_run_needs_a_decision(trained, capsys):
    before = weights_of(trained)
    assert main(["train", str(trained / "tiny.yaml")]) == 2
    message = capsys.readouterr().err
    assert "--resume" in message and "--fresh" in message and weights_of(trained) == before


def test_other_settings_cannot_be_resumed(trained, capsys):
    assert main(["train", str(trained / "tiny.yaml"), "--resume", "rollout.group_size=2", "seed=3"]) == 2
    message = capsys.readouterr().err
    assert "rollout.group_size: 4 -> 2" in message and "seed: 0 -> 3" in message
    assert f"`hone train --resume {trained / 'run'}` takes that run's settings" in message


def test_a_run_is_resumed_and_evaluated_by_its_folder_with_its_own_settings(tmp_path, monkeypatch, capsys):
    """It was started with an override, is resumed from another directory, and its run file is another by then."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert main(["train", str(write_run(whole, steps=4)), "train.optimizer.lr=2e-3"]) == 0
    run_file = write_run(resumed, steps=2)
    assert main(["train", str(run_file), "train.optimizer.lr=2e-3"]) == 0
    run_file.unlink()
    (resumed / "run").rename(resumed / "moved")
    monkeypatch.chdir(resumed)
    assert main(["train", "--resume", "moved", "run.steps=4"]) == 0
    (resumed / "moved").rename(resumed / "run")
    assert weights_of(resumed) == weights_of(whole)
    updates = [[line for line in metrics_of(folder) if "train/loss" in line] for folder in (resumed, whole)]
    assert updates[0] == updates[1] and len(updates[0]) == 4
    capsys.readouterr()
    assert main(["eval", "run", "--json"]) == 0
    assert "eval/accuracy" in capsys.readouterr().out


def test_a_missing_shard_is_named(trained, tmp_path, capsys):
    run_file = write_run(tmp_path)
    assert main(["export", str(trained / "tiny.yaml"), "--to", str(tmp_path / "model")]) == 0
    (tmp_path / "model" / "model.safetensors").unlink()
    arguments = ["stages=[rl]", "model.path=model", "model.init=null", "model.characters=null"]
    assert main(["train", str(run_file), *arguments]) == 2
    assert "model.safetensors" in capsys.readouterr().err


def start(run_file, *arguments):
    """`hone train` as a process of its own, once it has begun to learn."""
    process = subprocess.Popen([sys.executable, "-m", "hone.cli.main", "train", run_file, *arguments])
    metrics = run_file.parent / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and '"rl"' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.slow("several whole runs as processes")
def test_a_signal_ends_with_a_checkpoint_and_resume_equals_the_uninterrupted_run(tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main(["train", str(write_run(whole, steps=60, save_every=0))]) == 0
    run_file = write_run(stopped, steps=60, save_every=0)
    process = start(run_file)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert list((stopped / "run" / "checkpoints").glob("step-*")), "a clean checkpoint was written"
    assert main(["train", str(run_file), "--resume"]) == 0
    assert weights_of(stopped) == weights_of(whole)
    assert metrics_of(stopped) == metrics_of(whole)


@pytest.mark.slow("a whole run as a process")
def test_a_run_that_is_killed_gets_its_report_from_its_folder(tmp_path, capsys):
    run_dir = tmp_path / "run"
    process = start(write_run(tmp_path, steps=100000))
    try:
        deadline = time.monotonic() + 60
        while not (run_dir / "samples" / "rl" / "step-000002.jsonl.gz").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        assert main(["report", str(run_dir)]) == 2
        assert "the run is active" in capsys.readouterr().err
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    page = run_dir / "report.html"
    page.unlink(missing_ok=True)  # a run of some minutes has one
    assert main(["status", str(run_dir)]) == 0
    assert f"report {run_dir}` writes report.html up to its last step" in capsys.readouterr().out
    assert main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    steps = [line["step"] for line in metrics_of(tmp_path) if "train/loss" in line]
    assert data["stages"][-1]["last_step"] == steps[-1] and data["samples"]
    assert data["summary"]["outcome"] == "not finished"
    assert main(["report", str(tmp_path)]) == 2
    assert "there is no run here" in capsys.readouterr().err


@pytest.mark.slow("several whole runs as processes")
def test_two_runs_in_one_folder_and_a_second_signal(tmp_path):
    run_file = write_run(tmp_path, steps=100000)
    process = start(run_file)
    try:
        second = subprocess.run(
            [sys.executable, "-m", "hone.cli.main", "train", run_file, "--resume"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert second.returncode == 2 and f"process {process.pid}" in second.stderr
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.05)  # two signals that wait together are one
        os.kill(process.pid, signal.SIGTERM)
        # The signal's own code: the first one had ended the run already, and Python was on its way out.
        assert process.wait(timeout=30) in (130, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
