"""docs/rewards-faults.md: every test that it names exists; the client in docs/rewards-service.md is the code's."""

import ast
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from hone.config.run import RewardSection
from hone.reward import http
from hone.reward.client import ServiceReward, ServiceSettings

TESTS = Path(__file__).parents[1]
PAGE, SERVICE = ((TESTS.parent / "docs" / f"rewards-{name}.md").read_text("utf-8") for name in ("faults", "service"))
CLIENT = SERVICE.partition("## Use it from Hone")[2].partition("\n## ")[0]
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)))


def test_every_row_names_a_test():
    tables = PAGE[PAGE.index("## Services") :]
    rows = [line for line in tables.splitlines() if line.startswith("| ") and "| outcome |" not in line]
    assert len(rows) > 50
    assert [row for row in rows if "::test_" not in row] == []


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_named_test_exists(file):
    (path,) = TESTS.rglob(file)
    there = {node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)}
    assert {name for other, name in NAMED if other == file} <= there


def test_the_run_file_loads(monkeypatch, tmp_path):
    monkeypatch.setenv("REWARD_TOKEN", "t")
    (block,) = re.findall(r"```yaml run.yaml\n(.*?)```", CLIENT, re.DOTALL)
    (component,) = RewardSection.model_validate(YAML(typ="safe").load(block)["reward"]).components
    ServiceReward.from_args(component.args, folder=tmp_path)
    assert component.args["deadline_s"] == ServiceSettings().deadline_s


def test_every_arg_is_in_the_table():
    assert set(re.findall(r"^\| `(\w+)` \|", CLIENT, re.MULTILINE)) == set(ServiceSettings.model_fields)


def test_its_numbers_are_the_codes():
    assert (http.FIRST_BACKOFF_S, http.MAX_BACKOFF_S, http.EJECT_AFTER) == (0.5, 30.0, 3)
    assert (http.RETRIES_PER_REQUEST, http.RETRIES_PER_S) == (0.1, 10.0)
