"""Every `hone` command of every page is one that the command line takes; those run that no page's own test runs."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
import typer.core
import yaml

from hone.cli.main import app, main

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
COMMAND = re.compile(r"^ *hone (?!\.)(.*?)(?:  +#.*)?$", re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """Words of the lines of code blocks that begin with `hone`."""
    blocks = re.findall(r"^```(?:sh|bash|shell|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [shlex.split(words) for block in blocks for words in COMMAND.findall(block.replace("\\\n", ""))]


def parsed(words: list[str]) -> str:
    """The verb that takes the words. Raises click's error where none does; nothing is run."""
    command, rest, path = typer.main.get_command(app), list(words), list[str]()
    context = command.make_context("hone", list(words))
    while isinstance(command, typer.core.TyperGroup):
        name, command, rest = command.resolve_command(context, rest)
        assert name and command
        context = command.make_context(name, list(rest), parent=context)
        path.append(name)
    return " ".join(path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_command_line_takes_every_command_of_the_page(page):
    text = page.read_text("utf-8")
    for words in commands(text):
        assert parsed(words)
    verbs = {command.name or "" for command in app.registered_commands} | {"serve"}
    assert set(re.findall(r"`hone ([a-z][a-z-]*)", text)) <= verbs


def test_commands_are_found_and_refused():
    page = "```sh\nhone train run.yaml  # it\n    hone plan a --html b\n```\n`hone x`\n```yaml\nhone no\n```\n"
    assert commands(page) == [["train", "run.yaml"], ["plan", "a", "--html", "b"]]
    assert parsed(["serve", "reward", "rewards.yaml", "--port", "8899"]) == "serve reward"
    for wrong in (
        ["plan", "run.yaml", "--presets", "safe"],
        ["serve", "rewards"],
        ["tran", "run.yaml"],
        ["eval-judge"],
    ):
        with pytest.raises(Exception, match=r"No such|Missing"):
            parsed(wrong)


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    """The `run.yaml` of a page: that of an example, one update of it."""
    monkeypatch.chdir(tmp_path)
    arithmetic = ROOT / "examples/gsm8k-arithmetic/run.yaml"
    short = {"extends": [str(arithmetic)], "run": {"steps": 1}, "stages": ["rl"]}
    short |= {"data": {"eval_rows": ":20"}, "eval": {"every": 0}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(short))


def test_the_commands_of_the_page_on_out_of_memory_run(run_file, capfd):
    train, plan = commands((ROOT / "docs/out-of-memory.md").read_text("utf-8"))
    assert train[0] == "train" and main(train) == 0
    (metrics,) = Path("runs").glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    used = [line["memory/device_frac"] for line in lines if "train/loss" in line]
    assert used and all(0 < frac < 1 for frac in used), "of the budget"
    capfd.readouterr()
    assert plan[0] == "plan" and main(plan) == 0
    assert "of 2.5 GiB" in capfd.readouterr().out


@pytest.mark.slow("traces an update operator by operator")
def test_the_command_of_the_page_on_traces_runs(run_file, capfd):
    (words,) = commands((ROOT / "docs/memory-verification.md").read_text("utf-8"))
    assert main(words) == 0
    assert "closed form and trace, tensors only" in capfd.readouterr().out
