"""Every key of a public command has one verdict, and enough commands import without a refusal into a valid run file."""

from collections import Counter
from typing import get_args

import pytest
from foreign_commands import as_file, commands, is_rl

from hone.config.load import load_config
from hone.dialects.reading import read_foreign
from hone.dialects.translate import Imported, translate
from hone.dialects.verdict import Kind
from hone.dialects.writing import run_file_of

SHARES = {"verl": 0.75, "openrlhf": 1.0, "trl": 0.9, "mindspeed": 0.6}
"""Of the RL commands, those without a refusal."""
FACTOR = {"verl": 3, "trl": 3}
"""Every so many commands are loaded in the quick suite."""


@pytest.fixture(scope="module")
def imported():
    found: dict[str, list[tuple[dict, Imported]]] = {}
    for tool in SHARES:
        found[tool] = [(command, translate(read_foreign(*as_file(tool, command)))) for command in commands(tool)]
    return found


@pytest.mark.parametrize("tool", SHARES)
def test_every_key_has_one_verdict(imported, tool):
    for command, one in imported[tool]:
        assert one.foreign.tool == tool
        names = Counter(key.lstrip("+~") for key, _ in command["keys"])
        found = Counter(str(line.key).lstrip("+~") for line in one.keys)
        missing = [name for name in names if name not in found]
        assert not missing, (command["path"], missing)
        assert max(found.values()) == 1
        assert {line.verdict.kind for line in one.lines} <= set(get_args(Kind))
        assert all(line.verdict.note for line in one.gaps)


@pytest.mark.parametrize("tool", SHARES)
def test_share_without_a_refusal(imported, tool):
    rl = [one for command, one in imported[tool] if is_rl(tool, command["module"])]
    whole = [one for one in rl if not any(line.verdict.kind == "refused" for line in one.lines)]
    assert len(whole) >= SHARES[tool] * len(rl) > 0


def check_all(imported, tool, folder, every):
    (folder / "stub.jsonl").write_text('{"prompt": "a", "answer": "b", "images": []}\n')
    (folder / "rewards.py").write_text("def score(group):\n    return [0.0 for _ in group.samples]\n")
    given = ["data.train=stub.jsonl", "model.path=a/b", "data.prompt_column=prompt", "data.answer_column=answer"]
    given.append('reward.components=[{use: "rewards.py:score"}]')
    whole = [one for _, one in imported[tool] if not any(line.verdict.kind == "refused" for line in one.lines)]
    for one in whole[::every]:
        text = run_file_of(one)
        (folder / "run.yaml").write_text(text)
        overrides = [*given, "data.eval=stub.jsonl"] if "\n  eval:" in text else given
        config = load_config(folder / "run.yaml", overrides).config
        assert [source.path for source in config.data.train] == ["stub.jsonl"]


@pytest.mark.parametrize("tool", SHARES)
def test_run_files_are_valid(imported, tool, tmp_path):
    check_all(imported, tool, tmp_path, FACTOR.get(tool, 1))


@pytest.mark.slow("every command's run file is loaded")
@pytest.mark.parametrize("tool", FACTOR)
def test_all_run_files_are_valid(imported, tool, tmp_path):
    check_all(imported, tool, tmp_path, 1)
