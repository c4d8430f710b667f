"""Mutated scripts, by fixed seeds: a run file or an error with a message; nothing is executed, no secret is kept."""

import random

import pytest
from foreign_commands import TOOLS_OF_CORPORA, as_file, commands

from hone.config.yaml_tree import read_yaml
from hone.dialects.foreign import DialectError
from hone.dialects.reading import read_foreign
from hone.dialects.translate import translate
from hone.dialects.writing import report_lines, run_file_of

SECRET = "hf_0123456789abcdefghijABCDEFGHIJ"
PIECES = [
    "$(touch WITNESS)",
    "`touch WITNESS`",
    "$((",
    "${",
    "${X:-",
    '"',
    "'",
    "\\",
    "\n",
    "if [ x ]; then\n",
    "done\n",
]
PIECES += [
    "}",
    ")",
    "(",
    "<<EOF\n",
    "\u2028",
    "[",
    "{",
    ": ",
    "- ",
    "= ",
    "é",
    "$@",
    "&",
    "|",
    "1e999",
    "-",
    f" --hub_token {SECRET} ",
]
PIECES += [f"\nexport HF_TOKEN={SECRET}\n", f" trainer.hf_token={SECRET} "]


def mutated(seed: int) -> tuple[str, str]:
    chance = random.Random(seed)
    tool = chance.choice(TOOLS_OF_CORPORA)
    text, name = as_file(tool, chance.choice(list(commands(tool))))
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(text) + 1)
        kind = chance.randrange(3)
        if kind == 0:
            text = text[:at] + chance.choice(PIECES) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + chance.randint(1, 40) :]
        else:
            other = chance.randrange(len(text) + 1)
            text = text[:at] + text[other : other + 60] + text[at:]
    return text, name


def check(seed: int, witness) -> None:
    text, name = mutated(seed)
    text = text.replace("WITNESS", str(witness))
    try:
        one = translate(read_foreign(text, name))
        root, problems = read_yaml(run_file_of(one), "run.yaml")
        assert root is not None and not problems
        said = "\n".join([run_file_of(one), *report_lines(one, None), str(one.as_dict())])
    except DialectError as error:
        said = str(error)
    assert SECRET not in said
    assert not witness.exists()


def test_fifty_mutated_scripts(tmp_path):
    for seed in range(50):
        check(seed, tmp_path / "witness")


@pytest.mark.slow("450 more mutated scripts")
def test_many_mutated_scripts(tmp_path):
    for seed in range(50, 500):
        check(seed, tmp_path / "witness")
