"""`hone plan` of run files with a `cluster` section, and the commands that docs/cluster.md and the examples show."""

import json
import re
import shlex
from pathlib import Path

import pytest

from hone.cli.main import main
from hone.config.load import load_config

ROOT = Path(__file__).parents[2]
PPO = ROOT / "examples/cluster/ppo-70b-hybrid.yaml"
SHOWN = [
    line.lstrip("# ").partition("  #")[0].strip()
    for path in (
        ROOT / "docs/cluster.md",
        *(ROOT / "examples/cluster").glob("*.yaml"),
        *ROOT.glob("examples/judge/grm*"),
    )
    for line in path.read_text("utf-8").splitlines()
    if re.match(r"(#\s+)?hone plan ", line)
]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_people_see_the_placement_first(capsys):
    assert main(["plan", str(PPO), "--hardware", "A100-80G"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("placement: 48 of 6 x 8 devices, roles take turns\n")
    assert "    rollout       all   0-47     0-5       12 replicas on 4 devices each\n" in out
    assert "fits: A100-80G (all): peak" in out


def test_json_has_the_pools(capsys):
    assert main(["plan", "examples/cluster/ppo-70b-thirds.yaml", "--hardware", "A100-80G", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(pool["name"], len(pool["devices"])) for pool in found["topology"]["pools"]] == [
        ("sample", 16),
        ("policy", 16),
        ("critic", 16),
    ]
    assert found["hardware"]["devices"] == 48


@pytest.mark.slow("plans every preset")
def test_what_a_preset_writes_is_a_cluster_section(tmp_path, capsys):
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        "model: {path: Qwen/Qwen3-8B}\ndata: {train: a/b, answer_column: answer}\nrun: {precision: bfloat16}\n"
        "reward: {components: [{use: exact}]}\ntrain: {tokens_per_microbatch: 4096}\n"
        "cluster: {backend: ray, devices_per_node: 8, engines: {use: vllm}}\n"
    )
    better = tmp_path / "better.yaml"
    assert (
        main(["plan", str(run_file), "--hardware", "H100-80G", "--preset", "recommended", "--write", str(better)]) == 0
    )
    capsys.readouterr()
    assert load_config(better).config.cluster.engines.tensor_parallel_size > 1
    assert main(["plan", str(better), "--hardware", "H100-80G", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["level"] == "fits"


def test_commands_are_shown():
    assert len(SHOWN) >= 7


@pytest.mark.parametrize("line", [line for line in SHOWN if "FILE" not in line])
def test_commands_that_are_shown_run(line, capsys):
    assert main(shlex.split(line)[1:]) == 0
    assert "placement: " in capsys.readouterr().out
