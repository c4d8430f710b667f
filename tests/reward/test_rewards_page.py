"""docs/rewards.md and the pages of rules and posters: their code runs, their numbers are the code's."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from hone.config.rewards import BUILTIN_REWARDS, registered_rewards
from hone.config.run import RewardSection
from hone.reward.rewards import Rewards
from hone.types import Fault, Group, Prompt, Sample, VersionSpan
from hone_poster import PosterSettings
from hone_poster.scoring import score_posters

DOCS = Path(__file__).parents[2] / "docs"
FRONT, RULES, POSTER = ((DOCS / f"rewards{name}.md").read_text("utf-8") for name in ("", "-rules", "-poster"))


def block(page: str, name: str) -> str:
    found = re.search(rf"```\w+\n# {re.escape(name)}\n(.*?)```", page, re.DOTALL)
    assert found is not None, name
    return found[1]


def section(page: str, name: str) -> RewardSection:
    return RewardSection.model_validate(YAML(typ="safe").load(block(page, name))["reward"])


def group(*texts: str, answer: object = "4") -> Group:
    samples = tuple(Sample("p", i, (5,), (-0.5,), (VersionSpan(0, 1),), "stop", text) for i, text in enumerate(texts))
    return Group(Prompt("p", 0, "2+2=", (6, 10), answer=answer, columns={"answer": answer}), samples)


def score(settings: RewardSection, folder: Path, scored: Group) -> Group:
    async def run() -> Group:
        async with Rewards.from_config(settings, folder, window_samples=1000) as rewards:
            return await rewards.score(scored)

    return asyncio.run(run())


def test_the_four_forms_run_and_agree(tmp_path):
    (tmp_path / "rewards.py").write_text(block(FRONT, "rewards.py"))
    found = score(section(FRONT, "run.yaml"), tmp_path, group("4", "5"))
    for name in ("same_text", "reward_func", "compute_score"):
        assert [s.value for s in found.scores[name]] == [1.0, 0.0], name
    assert found.rewards == (3.2, 0.2)  # short, times 0.2; `math` finds no box
    assert found.scores["compute_score"][0].metrics == {"characters": 1.0}


def test_the_typed_example_runs(tmp_path):
    (tmp_path / "typed.py").write_text(block(FRONT, "typed.py"))
    settings = RewardSection.model_validate({"components": [{"use": "typed.py:signed"}], "max_unscored_frac": 1.0})
    assert score(settings, tmp_path, group("4", "5", " ")).rewards == (1.0, -0.5, -1.0)
    (bad,) = score(settings, tmp_path, group("4", answer=None)).scores["signed"]
    assert bad.fault is Fault.DATA


@pytest.mark.parametrize("name", ["run.yaml", "mindspeed.yaml"])
def test_run_files_of_the_rules_run(name, tmp_path):
    right = r"Step 1: add</think><answer>\boxed{4}</answer>"
    text = right if name == "run.yaml" else f"<think>{right}"
    found = score(section(RULES, name), tmp_path, group(text))
    assert found.rewards == (pytest.approx(1.2 if name == "run.yaml" else 1.5 + 0.1 / 3),)


def test_every_built_in_reward_is_listed_on_the_front_page():
    table = FRONT.partition("## A function")[0]
    assert [name for name in (*BUILTIN_REWARDS, *registered_rewards()) if f"`{name}`" not in table] == []


def test_every_rule_is_on_the_page_of_rules():
    rules = [name for name, row in BUILTIN_REWARDS.items() if row.runs != "stateful"]
    assert [name for name in rules if f"`{name}`" not in RULES] == []


IMAGE = {"type": "image", "x": 0, "y": 0, "width": 50, "height": 50}
PAIR = [IMAGE | {"width": 60, "height": 60}, IMAGE | {"type": "shape", "x": 40, "y": 40, "width": 60, "height": 60}]
TEXTS = [
    {"type": "title", "x": 10, "y": 10, "width": 80, "height": 20, "text": "AAAA"},
    {"type": "body", "x": 10, "y": 50, "width": 80, "height": 20, "text": "BB"},
]
BY_HAND_TABLE = POSTER.partition("| by hand |")[2].partition("A good poster made worse")[0]
BY_HAND = [
    ([IMAGE], [IMAGE | {"x": 25}]),
    ([IMAGE | {"x": 50, "y": 25}], [IMAGE | {"x": 75, "y": 25}]),
    ([IMAGE], [IMAGE, IMAGE]),
    (PAIR, PAIR[::-1]),
    (PAIR, PAIR[:1]),
    (TEXTS, TEXTS[:1]),
    (TEXTS, [TEXTS[0], TEXTS[1] | {"text": "BC"}]),
    (TEXTS, [TEXTS[0], TEXTS[1] | {"opacity": 0}]),
]
"""Ground truth and response of the page's rows, in order."""


def test_posters_worked_by_hand():
    rows = re.findall(r"\| (\d\.\d{3}) \| (\d\.\d{3}) \| (\d\.\d{3}) \| [^|]+ \|\n", BY_HAND_TABLE)
    assert len(rows) == len(BY_HAND)
    for row, (truth, response) in zip(rows, BY_HAND, strict=True):
        gold = {"canvas_size": {"width": 100, "height": 100}, "layers": truth}
        (found,) = asyncio.run(score_posters([json.dumps({"layers": response})], gold, PosterSettings(visual="none")))
        numbers = (found.metrics["structure"], found.metrics["accuracy"], found.value)
        assert [f"{number:.3f}" for number in numbers] == list(row), row
