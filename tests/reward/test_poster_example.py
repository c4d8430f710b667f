"""examples/poster: its files are what its script makes, its tokenizer spells them, a judge that is away is named."""

import asyncio
import base64
import gzip
import importlib.util
import io
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from hone.config.load import load_config
from hone.config.run import ModelSection, RewardSection
from hone.data.chat import load_tokenizer
from hone.observe.observer import Observer
from hone.reward.resolve import picture_of_responses
from hone.reward.rewards import Rewards
from hone.run.check_rewards import services_away
from hone.types import Group
from hone_poster import PosterSettings
from hone_poster.scoring import score_posters

EXAMPLE = Path(__file__).parents[2] / "examples" / "poster"
REAL = [
    "model.init=null",
    "model.tokenizer=null",
    "model.path=Qwen/Qwen2.5-7B-Instruct",
    "reward.components=[{use: poster, timeout_s: 120, args: {visual: visualquality_r1, "
    "visual_args: {endpoint: 'http://127.0.0.1:9/v1', model: TianheWu/VisualQuality-R1-7B, timeout_s: 1}}}]",
]
"""A real policy and judge in the run's own processes; and little patience."""


@pytest.fixture(scope="module")
def make_data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("poster_make_data", EXAMPLE / "make_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shipped(split: str) -> list[dict[str, str]]:
    with gzip.open(EXAMPLE / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("split", ["sft", "train", "test"])
def test_the_data_is_what_the_script_makes(make_data, split):
    assert shipped(split) == make_data.rows(split)


def test_the_tokenizer_is_what_the_script_makes_and_spells_every_poster_shortly(make_data):
    shipped_one = load_tokenizer(ModelSection(tokenizer="tokenizer"), EXAMPLE)
    assert shipped_one.hf.get_vocab() == make_data.tokenizer().get_vocab()
    responses = [row["response"] for split in ("sft", "train", "test") for row in shipped(split)]
    spelled = shipped_one.encode_responses(responses)
    assert [shipped_one.decode(ids) for ids in spelled] == responses
    assert max(map(len, spelled)) <= load_config(EXAMPLE / "run.yaml", []).config.rollout.max_response_tokens
    anything = "".join(map(chr, range(32, 127)))
    assert shipped_one.decode(shipped_one.encode_response(anything)) == anything


def test_ground_truths_earn_nearly_everything():
    for row in shipped("test")[:40]:
        (score,) = asyncio.run(score_posters([row["response"]], row["poster"], PosterSettings()))
        assert score.value is not None and score.value > 0.97


def test_a_judge_that_is_not_there_yet_is_named_and_stops_no_check(make_group):
    loaded = load_config(EXAMPLE / "run.yaml", REAL)
    row = shipped("test")[0]

    scored = asyncio.run(scored_group(loaded.config.reward, make_group(row["response"], answer=row["poster"])))
    (said,) = services_away({name: scores[0] for name, scores in scored.scores.items()}, loaded.config)
    assert said.startswith("reward poster: visual: http://127.0.0.1:9/v1")
    assert "ConnectError" in said


def test_the_report_shows_the_posters(tmp_path, make_group):
    loaded = load_config(EXAMPLE / "run.yaml", [])
    row = shipped("test")[0]
    scored = asyncio.run(scored_group(loaded.config.reward, make_group(row["response"], "prose", answer=row["poster"])))
    observer = Observer(
        tmp_path,
        loaded.config.observe,
        title="posters",
        total_steps=1,
        picture=picture_of_responses(loaded.config.reward.components),
    )
    observer.record("rl", 1, [scored], None)
    observer.log("rl", 1, {"rollout/reward_mean": 0.5})
    observer.close("finished")
    page = (tmp_path / "report.html").read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    good, prose = (Image.open(io.BytesIO(base64.b64decode(s["picture"]))) for s in json.loads(found[1])["samples"])
    assert (good.format, max(good.size)) == ("PNG", 320)
    assert good.size == prose.size
    assert len(good.convert("RGB").getcolors(1 << 20) or []) > 2 > len(prose.convert("RGB").getcolors(1 << 20) or [])


def test_a_run_without_posters_draws_nothing():
    config = load_config(EXAMPLE / "run.yaml", ["reward.components=[{use: exact}]"]).config
    assert picture_of_responses(config.reward.components) is None
    drawing = picture_of_responses(load_config(EXAMPLE / "run.yaml", []).config.reward.components)
    assert drawing is not None and drawing("prose", "no ground truth") is None


async def scored_group(settings: RewardSection, group: Group) -> Group:
    async with Rewards.from_config(settings, EXAMPLE, window_samples=1000) as rewards:
        return await rewards.score(group)
