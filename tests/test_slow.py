"""Slow tests say why they are slow: `@pytest.mark.slow("starts Ray")`."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_slow_mark_has_a_reason():
    given, bare = 0, []
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text("utf-8")
        if ".slow" not in text:
            continue
        tree = ast.parse(text)
        marks = {node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "slow"}
        reasoned = {
            node.func
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and node.func in marks
            and [type(argument.value) for argument in node.args if isinstance(argument, ast.Constant)] == [str]
            and "as above" not in ast.unparse(node)
        }
        given += len(reasoned)
        bare += [f"{path.relative_to(TESTS)}:{node.lineno}" for node in marks - reasoned]
    assert given > 30 and bare == []
