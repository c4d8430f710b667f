"""examples/poster-service: what its files say fits together, and one command trains with both services beside it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
import yaml
from poster_table import GROUND_TRUTH

from hone import assemble
from hone.cli.main import main
from hone.config.load import load_config
from hone.data.chat import load_tokenizer
from hone.model.load import init_model, save_hf
from hone.services.process import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "poster-service"


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A program of this name, which is never started."""
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_the_real_run_file_fits_its_machine_and_is_planned_where_its_programs_are_not(capsys):
    words = [str(EXAMPLE / "run.yaml"), "services.judge.command=[not-here, '{port}']"]
    assert main(["check", *words]) == 2
    assert "no program 'not-here' to run here. Install it" in capsys.readouterr().err
    assert main(["plan", *words, "--hardware", "8xH100-80G", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["verdict"]["level"] == "fits" and not planned["verdict"]["problems"]
    assert "vision tower: 676,550,144 parameters" in " ".join(planned["notes"])


def test_the_real_run_file_passes_its_check_with_a_small_model_of_the_family(vllm, tmp_path):
    """Its tokenizer, processor and class; what differs is the size."""
    small = load_config(EXAMPLES / "poster" / "pictures.yaml").config.model
    tokenizer = load_tokenizer(small, EXAMPLES / "poster")
    model = init_model(small.init or {}, vocab_size=tokenizer.vocab_size, seed=0, dtype=torch.float32, device="cpu")
    weights = list(model.named_weights())
    save_hf(tmp_path / "model", model.hf_config, weights, tokenizer.hf, processor=tokenizer.processor)
    less = ["data.max_prompt_tokens=80", "rollout.max_response_tokens=80", "data.train_rows=0:32", "data.eval_rows=0:8"]
    config = load_config(EXAMPLE / "run.yaml", [f"model.path={tmp_path}/model", *less])
    report = assemble.check_run(config)
    assert not report.problems
    assert any("of a prompt with a picture too" in line for line in report.lines)


def test_the_real_run_file_names_the_judge_that_its_rewards_ask(vllm):
    config = load_config(EXAMPLE / "run.yaml").config
    server, judge = config.services["reward_server"], config.services["judge"]
    (served,) = yaml.safe_load((EXAMPLE / server.reward).read_text())["reward"]["components"]
    asked = served["args"]["visual_args"]
    assert (server.port, judge.devices, config.cluster.pools["all"].devices) == (8899, (7,), 7)
    assert asked["endpoint"] == f"http://127.0.0.1:{judge.port}/v1"
    assert judge.command[:3] == ("vllm", "serve", asked["model"])
    assert asked["timeout_s"] < served["timeout_s"]


def ask(url: str, body: object = None, token: str = "") -> dict:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, body and json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def until_healthy(process: subprocess.Popen, url: str) -> dict:
    while process.poll() is None:
        try:
            return ask(f"{url}/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise AssertionError(f"training ended with exit code {process.returncode} before its service was ready")


@pytest.mark.timeout(600)
@pytest.mark.slow("a training run with two services, each an interpreter of its own")
def test_one_command_starts_the_services_trains_and_stops_them(tmp_path):
    for name in ("poster", "poster-service"):
        shutil.copytree(EXAMPLES / name, tmp_path / name)
    port, judge_port = free_port(), free_port()
    rewards = tmp_path / "poster-service" / "rewards.yaml"
    rewards.write_text(rewards.read_text().replace(":8000/v1", f":{judge_port}/v1"))
    changes = {
        "services.reward_server.port": port, "services.judge.port": judge_port, "services.judge.devices": [7],
        "run.dir": tmp_path / "run", "run.steps": 3, "run.threads": 1, "train.prompts_per_step": 4,
        "sft.rows": "0:64", "sft.rows_per_step": 16, "sft.epochs": 30, "data.eval_rows": "0:8",
    }  # fmt: skip
    command = [sys.executable, "-m", "hone.cli.main", "train", str(tmp_path / "poster-service" / "cpu.yaml")]
    command += [f"{key}={value}" for key, value in changes.items()]
    console = tmp_path / "console"
    with console.open("w") as out:
        training = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        until_healthy(training, f"http://127.0.0.1:{port}")
        body = {"solution_str": json.dumps(GROUND_TRUTH), "ground_truth": GROUND_TRUTH, "extra_info": {}}
        scored = ask(
            f"http://127.0.0.1:{port}/compute_reward", body, (tmp_path / "run" / "services.token").read_text().strip()
        )
        training.wait()
    finally:
        training.kill()
        training.wait()
    assert training.returncode == 0, console.read_text()
    parts = scored["components"]["poster"]["metrics"]
    assert (parts["structure"], parts["accuracy"]) == (1.0, 1.0) and 0 < parts["visual"] < 1
    assert scored["score"] == pytest.approx(0.4 + 0.4 + 0.2 * parts["visual"])

    logs = tmp_path / "run" / "logs"
    assert {"training.log", "reward_server.log", "judge.log"} <= {path.name for path in logs.iterdir()}
    assert "POST /v1/rewards 200" in (logs / "reward_server.log").read_text()
    assert (logs / "judge.log").read_text().count("POST /v1/chat/completions") > 1  # for us, and for the run
    assert "there is no GPU here, so it runs without" in console.read_text()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards_seen = [line["rollout/reward_mean"] for line in lines if "rollout/reward_mean" in line]
    assert len(rewards_seen) == 3 and all(0 <= value < 1 for value in rewards_seen) and max(rewards_seen) > 0
    for each in (port, judge_port):  # nothing listens any more
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", each), timeout=5)
