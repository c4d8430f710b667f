"""docs/recovery.md: the tests that it names exist, its events and rules are the code's."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from hone.observe.events import KINDS
from hone.run.audit import RULES
from hone.runtime.replicas import ReplicaState

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "recovery.md").read_text("utf-8")
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_every_named_test_exists(file, test):
    (path,) = TESTS.rglob(file)
    assert test in {node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_every_event_has_its_row():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert dict(rows[: len(KINDS)]) == KINDS


def test_every_rule_has_its_row():
    assert all(f"| `{rule}` |" in PAGE for rule in RULES)


def test_the_picture_has_every_state_of_a_replica():
    picture = PAGE.partition("## States of a replica")[2].split("```")[1]
    assert {*get_args(ReplicaState)} <= set(re.findall(r"[a-z]+", picture))
