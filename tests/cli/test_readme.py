"""README.md as a newcomer follows it: every command and every file, in order, in an empty folder.

Replaced are only the names of the model and the data set, by tiny ones of this machine, the number of steps and a port.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

from hone.data.chat import character_tokenizer
from hone.model.load import init_model, save_hf
from hone.services.process import free_port

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
COMMANDS = [line.partition("  #")[0].strip() for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
FILES = {found[1]: text for _, text in BLOCKS if (found := re.match(r"# (\S+\.\w+)\n", text))}
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The README's files, a model of four tokens that a random policy can answer with, and rows for it."""
    folder = tmp_path_factory.mktemp("readme")
    tokenizer = character_tokenizer("01")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    model = init_model(CONFIG, vocab_size=len(tokenizer), seed=0, dtype=torch.float32, device="cpu")
    save_hf(folder / "tiny", model.hf_config, model.named_weights(), tokenizer)
    rows = [{"question": format(number, "b"), "answer": str(number % 2)} for number in range(300)]
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tldr").mkdir()
    prompts = "".join(json.dumps({"prompt": row["question"]}) + "\n" for row in rows)
    (folder / "tldr" / "train.jsonl").write_text(prompts)
    for name, text in FILES.items():
        (folder / name).write_text(replaced(text))
    return folder


def replaced(text):
    for theirs, ours in (("Qwen/Qwen3-0.6B", "./tiny"), ("trl-lib/tldr", "./tldr")):
        text = text.replace(theirs, ours)
    return re.sub(r"(\"?steps\"?): 200", r"\1: 4", text)


@pytest.fixture(scope="module")
def shell(folder):
    """Runs a command line of the README in a shell, with this environment's programs."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
        "HONE_RUNTIME_DIR": str(folder / "runtime"),
        "HF_HOME": str(folder / "hub"),
    }

    def run(command, *, code=0):
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    run.begin = lambda command: subprocess.Popen(
        f"exec {command}", shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    yield run
    run("hone stop --all")


def until(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read().decode()
        time.sleep(0.05)


def interrupted_train(command, shell, folder):
    """Ctrl-C after the first update: the hint is the README's next line."""
    process, lines = shell.begin(f"{command} run.steps=100000 checkpoint.every=0"), folder / "runs/first/metrics.jsonl"
    until(lambda: lines.exists() and "train/loss" in lines.read_text(), process)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "`hone train --resume runs/first`" in said.decode()
    made = json.loads(lines.read_text().splitlines()[-1])["step"]
    return made


def served(command, shell, path):
    """A server that answers, and ends when it is asked to."""
    port = free_port()
    command = re.sub(r" --port \d+", "", command)
    process = shell.begin(f"{command} --port {port}")

    def answers():
        try:
            return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    until(answers, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)


def test_all_that_the_readme_shows_is_run_here():
    """A command or file that is new needs a look at how it is run below."""
    assert set(FILES) == {"run.yaml", "rewards.py", "train.py", "served.yaml", "rewards.yaml"}
    verbs = ["check", "plan", "explain", "train", "eval", "export", "up", "status", "stop", "serve"]
    known = {"pip install", "make quickstart", "make test", *(f"hone {verb}" for verb in verbs)}
    assert {" ".join(command.split()[:2]) for command in COMMANDS} == known
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert "pip install ." in COMMANDS and "pip install hone-rl" in README and 'name = "hone-rl"' in project
    targets = re.findall(r"^(\S+): .*\n\t(.*)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert {"quickstart", "test"} <= {name for name, _ in targets}
    assert dict(targets)["quickstart"] == "$(VENV)/bin/hone train examples/quickstart/run.yaml --fresh"


@pytest.mark.slow("some twenty processes, each of which loads torch")
@pytest.mark.timeout(900)
def test_every_command_works_in_order(shell, folder):
    before = []
    for command in COMMANDS:
        if not command.startswith("hone "):
            continue
        words = shlex.split(command)
        if words[1:3] == ["train", "run.yaml"]:
            made = interrupted_train(command, shell, folder)
        elif "--resume" in words:
            shell(f"{command} run.steps={made + 2}")
            log = (folder / "runs/first/logs/training.log").read_text()
            assert f"(rl step {made})" in log and "finished" in log
        elif words[1] == "serve":
            served(command, shell, {"reward": "/health", "policy": "/v1/models"}[words[2]])
        else:
            said = shell(command)
            if words[1:3] == ["eval", "served.yaml"]:
                assert "the one that `hone up` keeps as served" in said
        before.append(words[1])
    assert before.index("up") < before.index("stop") and (folder / "my-model" / "model.safetensors").is_file()


@pytest.mark.slow("many processes, each of which loads torch")
def test_the_python_example_runs(shell, folder):
    assert "\nruns/python/hf runs/python/report.html 4\n" in shell("python train.py"), "4 lines of metrics"


@pytest.mark.slow("the quickstart at a small size")
def test_quickstart_does_what_it_calls(shell, folder):
    small = ["run.steps=1", "sft.rows=0:256", "sft.epochs=1", "eval.every=0", "data.eval_rows=0:32"]
    place = [f"run.dir={folder}/quickstart", "train.prompts_per_step=4"]
    example = ROOT / "examples" / "quickstart" / "run.yaml"
    assert "finished. Report" in shell(shlex.join(["hone", "train", str(example), "--fresh", *small, *place]))
