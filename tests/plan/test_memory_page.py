"""docs/memory.md: every line of arithmetic on the page is done again, and what it starts from is looked up."""

import ast
import operator
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from shapes import shape

from hone.cli.main import main
from hone.plan.activations import Pass, logits_backward_bytes_each, saved_per_token
from hone.plan.cluster import Trained, update_moments
from hone.plan.hardware import find_hardware
from hone.sizes import GIB

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "memory.md").read_text("utf-8")
BOXES = re.findall(r"```\n(.*?)```", PAGE, flags=re.S)
LINES = [line for box in BOXES for line in box.splitlines() if line.strip()]

UNITS = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10, "GB": 1e9, "kB": 1e3, "B": 1, "ms": 1e-3, "s": 1}
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def computed(text: str) -> float:
    """The value of `2 x 36 x 144 KiB`."""
    text = text.replace(" x ", " * ")
    text = re.sub(rf"\s({'|'.join(UNITS)})\b", lambda unit: f" * {UNITS[unit[1]]!r}", text)

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        assert isinstance(node, ast.Constant) and isinstance(node.value, int | float)
        return node.value

    return value(ast.parse(text.strip(), mode="eval").body)


def test_there_is_something_to_check():
    assert len(LINES) > 15 and all(line.count(" = ") == 1 for line in LINES)


@pytest.mark.parametrize("line", LINES)
def test_every_line_is_right(line):
    left, right = line.split(" = ")
    assert computed(left) == pytest.approx(computed(right), rel=0.006)


def test_the_page_starts_from_the_real_model():
    arch = shape("qwen3-8b")
    assert (arch.hidden, arch.layers, arch.heads, arch.kv_heads) == (4096, 36, 32, 8)
    assert (arch.head_dim, arch.inner, arch.vocab) == (128, 12_288, 151_936)
    assert arch.total_parameters == pytest.approx(8.19e9, rel=0.001)
    assert arch.kv_bytes_per_token() == 144 * 1024
    lite = shape("deepseek-v2-lite")
    assert lite.kv_bytes_per_token() == 31_104
    assert lite.total_parameters == pytest.approx(15.7e9, rel=0.001)
    h100 = find_hardware("H100-80G")
    assert (h100.memory_bytes / GIB, h100.bf16_flops, h100.bandwidth) == (pytest.approx(79.1), 989e12, 3.35e12)


def test_coefficients_are_the_planners():
    arch = shape("qwen3-8b")
    work = Pass(arch, "hone", 2, 16_384, 16_384, 4096)
    assert saved_per_token(work) == pytest.approx(137.2e3, rel=0.005)
    assert saved_per_token(replace(work, checkpointing="full")) == 2 * 4096
    assert logits_backward_bytes_each(work) == 10


def test_the_example_of_a_peak_is_the_planners_and_the_traces():
    arch = shape("qwen3-8b")
    work = Pass(arch, "transformers", 2, 16_384, 16_384, 4096, "full", "naive")
    peak = max(update_moments(Trained("", work, 8, accumulates=False), []), key=lambda moment: moment.bytes)
    terms = {term.name: term.bytes / GIB for term in peak.terms}
    assert peak.bytes / GIB == pytest.approx(46.9, abs=0.05)
    assert terms["master weights"] + terms["AdamW moments"] == pytest.approx(11.4, abs=0.05)
    assert terms["activations"] == pytest.approx(4.5, abs=0.05)
    assert terms["hidden states"] == pytest.approx(0.5, abs=0.05)
    assert terms["gathered root"] + terms["gathered layers"] == pytest.approx(2.7, abs=0.05)
    assert terms["logits"] == pytest.approx(27.8, abs=0.05)


@pytest.mark.slow("plans and searches for presets")
@pytest.mark.parametrize("line", re.findall(r"^hone plan .*$", PAGE, flags=re.M))
def test_commands_run(line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out
