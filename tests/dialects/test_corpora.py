"""Every key of a public command has one verdict, and enough commands import without a refusal into a valid run file."""

import json
from collections import Counter
from typing import get_args

import pytest
from foreign_commands import as_file, commands, is_rl
from pictures import LETTERS, TEMPLATE, save_picture, save_seeing_model
from transformers import AutoConfig, AutoModelForCausalLM

from hone import assemble
from hone.config.load import load_config
from hone.data.chat import character_tokenizer
from hone.dialects.reading import read_foreign
from hone.dialects.translate import Imported, translate
from hone.dialects.verdict import VerdictKind
from hone.dialects.writing import run_file_of

SHARES = {"verl": 0.75, "openrlhf": 1.0, "trl": 0.9, "mindspeed": 0.6}
"""Of the RL commands, those without a refusal."""
FACTOR = {"verl": 3, "trl": 3}
"""One of this number of commands is loaded in the quick suite."""


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
        assert {line.verdict.kind for line in one.lines} <= set(get_args(VerdictKind))
        assert all(line.verdict.note for line in one.gaps)


@pytest.mark.parametrize("tool", SHARES)
def test_share_without_a_refusal(imported, tool):
    rl = [one for command, one in imported[tool] if is_rl(tool, command["module"])]
    whole = [one for one in rl if not any(line.verdict.kind == "refused" for line in one.lines)]
    assert len(whole) >= SHARES[tool] * len(rl) > 0


def unrefused(imported, tool):
    """Path and import of each command without a refusal."""
    return [
        (command["path"], one)
        for command, one in imported[tool]
        if not any(line.verdict.kind == "refused" for line in one.lines)
    ]


def overrides(text, model):
    """Stub data, a stub reward and a model that is here, in place of what an imported run file names."""
    given = ["data.train=stub.jsonl", f"model.path={model}", "data.prompt_column=prompt", "data.answer_column=answer"]
    given.append('reward.components=[{use: "rewards.py:score"}]')
    return [*given, "data.eval=stub.jsonl"] if "\n  eval:" in text else given


def write_stubs(folder, rows):
    lines = [{"prompt": f"{n} times 2 =", "answer": str(2 * n), "images": ["picture.png"]} for n in range(rows)]
    (folder / "stub.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    score = "[float(sample.text.strip() == group.prompt.answer) for sample in group.samples]"
    (folder / "rewards.py").write_text(f"def score(group):\n    return {score}\n")


@pytest.mark.parametrize("tool", SHARES)
def test_run_files_are_valid(imported, tool, tmp_path):
    write_stubs(tmp_path, rows=1)
    for _, one in unrefused(imported, tool)[:: FACTOR.get(tool, 1)]:
        text = run_file_of(one)
        (tmp_path / "run.yaml").write_text(text)
        config = load_config(tmp_path / "run.yaml", overrides(text, model="a/b")).config
        assert [source.path for source in config.data.train] == ["stub.jsonl"]


@pytest.mark.slow("every command's run file is checked")
@pytest.mark.parametrize("tool", SHARES)
def test_run_files_pass_the_check(imported, tool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_stubs(tmp_path, rows=1)
    save_text_model(tmp_path / "reads")
    save_seeing_model(tmp_path / "sees")
    save_picture(tmp_path / "picture.png", 1, 56, 56)
    for path, one in unrefused(imported, tool):
        text = run_file_of(one)
        (tmp_path / "run.yaml").write_text(text)
        model = "sees" if "image_columns" in text else "reads"
        loaded = load_config(tmp_path / "run.yaml", overrides(text, model))
        write_stubs(tmp_path, rows=loaded.config.train.prompts_per_step)
        report = assemble.check_run(loaded)
        assert not report.problems, (path, report.problems)
        assert any(line.startswith("model: ") for line in report.lines), "a small model of its class was tried"


def save_text_model(folder):
    """A tiny one whose heads and positions are as many as any command divides and needs."""
    tokenizer = character_tokenizer(LETTERS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    keys = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
    keys |= {"num_hidden_layers": 2, "intermediate_size": 128, "max_position_embeddings": 2**18}
    config = AutoConfig.for_model(**keys, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
