"""`hone plan` as a command: exit codes, JSON, files that it writes, and that a bad argument says what is right."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hone.cli.main import main

ROOT = Path(__file__).parents[2]
RUN = """
model: {path: Qwen/Qwen3-8B}
data: {train: a/b, answer_column: answer}
run: {precision: bfloat16}
train: {prompts_per_step: 64}
reward: {components: [{use: exact}]}
"""
GPUS = ["--hardware", "8xH100-80G", "cluster.backend=ray", "cluster.engines.use=vllm"]


@pytest.fixture
def run_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return file


def planned(capsys, *arguments):
    code = main(["plan", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_what_fits_is_0_and_what_does_not_is_4(run_file, capsys):
    code, found = planned(capsys, run_file, *GPUS, "train.tokens_per_microbatch=4096")
    assert (code, found["verdict"]["level"]) == (0, "fits")
    code, found = planned(capsys, run_file, *GPUS, "train.tokens_per_microbatch=65536")
    assert (code, found["verdict"]["level"]) == (4, "does not fit")


def test_people_get_the_sentence(run_file, capsys):
    main(["plan", str(run_file), *GPUS, "train.tokens_per_microbatch=32768", "--price", "2.5"])
    text = capsys.readouterr().out
    assert "does not fit: H100-80G (all): peak " in text
    assert "in update, loss backward: activations " in text
    assert "would free" in text and "1,000 steps cost" in text


@pytest.mark.parametrize("name", ["gsm8k-arithmetic", "ppo"])
def test_todays_examples_fit_this_machine(name, capsys):
    code, found = planned(capsys, ROOT / "examples" / name / "run.yaml")
    assert code == 0
    assert found["topology"]["backend"] == "local"
    assert found["model"]["parameters"] < 10_000_000


@pytest.mark.slow("plans every preset")
def test_a_preset_writes_a_run_file_that_plans_as_promised(run_file, capsys):
    better = run_file.with_name("better.yaml")
    words = ["train.tokens_per_microbatch=32768", "rollout.temperature=0.9"]
    code, found = planned(capsys, run_file, *GPUS, *words[1:], "train.logprob_chunk_tokens=512", "--write", better)
    assert code == 0
    proposal = next(one for one in found["proposals"] if one["preset"] == "recommended")
    code, again = planned(capsys, better, *GPUS[:2])
    assert code == 0
    assert again["ledgers"] == proposal["plan"]["ledgers"]
    assert again["workload"] == found["workload"]
    assert "rollout:\n  temperature: 0.9" in better.read_text()


@pytest.mark.slow("plans every preset")
def test_presets_stand_side_by_side(run_file, capsys):
    main(["plan", str(run_file), *GPUS, "--preset", "safe"])
    text = capsys.readouterr().out
    header = next(line for line in text.splitlines() if "today" in line)
    assert [word for word in header.split() if word.isalpha()] == ["today", "safe", "recommended", "aggressive"]
    assert "samples per" in text
    assert "would change the algorithm, so not done" in text


@pytest.mark.slow("plans every preset")
def test_a_page_has_a_picture_of_every_device(run_file, capsys):
    page = run_file.with_name("plan.html")
    assert main(["plan", str(run_file), *GPUS, "--preset", "recommended", "--html", str(page)]) == 0
    text = page.read_text()
    assert text.count("<svg") == 4  # devices and host, today and recommended
    for part in text.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + part.partition("</svg>")[0] + "</svg>")
    assert "<script" not in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "8xH10"], "no such device"),
        (["placement.tensor_parallel=2"], "placement"),
        (["model.path=Qwen/Qwen3-9B"], "Did you mean qwen3-"),
        (["--write", "/nowhere/x.yaml"], "must be beside"),
    ],
)
def test_wrong_arguments_are_2_and_say_what_is_right(run_file, arguments, message, capsys):
    assert main(["plan", str(run_file), *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_plan_needs_nothing_heavy(run_file):
    program = (
        f"import sys\nfrom hone.cli.main import main\ncode = main(['plan', {str(run_file)!r}, *{GPUS!r}])\n"
        "print(*sorted({'torch', 'transformers', 'scipy', 'fastapi', 'math_verify'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == ""


def test_no_run_file_is_said(capsys):
    assert main(["plan"]) == 2
    assert "--compare" in capsys.readouterr().err
