"""Every example fits the hardware that its comments state, planned as `hone train` would run it there."""

import re
from pathlib import Path

import pytest

from hone.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
STATED = re.compile(r"hone plan (\S+) --hardware (\S+)([^\n]*)")
PLANS = sorted(
    {
        (file, *found.groups()[1:])
        for file in EXAMPLES.rglob("*.yaml")
        for found in STATED.finditer(file.read_text("utf-8"))
        if (EXAMPLES.parent / found[1]).is_file()
    }
)


@pytest.mark.parametrize(("file", "hardware", "words"), PLANS, ids=[f"{p[0].parent.name}/{p[0].name}" for p in PLANS])
def test_an_example_fits_what_it_names(file, hardware, words, capsys):
    code = main(["plan", str(file), "--hardware", hardware, *words.split(), "--json"])
    assert code == 0, capsys.readouterr().out


def test_there_are_some():
    assert {"gsm8k/run.yaml", "cluster/grpo-8b.yaml"} <= {f"{plan[0].parent.name}/{plan[0].name}" for plan in PLANS}
