"""examples/poster: its files are what its script makes, its tokenizer spells them, a judge that is away is named."""

import asyncio
import gzip
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from hone.config.load import load_config
from hone.config.run import ModelSection
from hone.data.chat import load_tokenizer
from hone.loop.preflight import services_away
from hone.reward.base import Rewards
from hone.reward.poster import judge_of
from hone.reward.poster.scoring import score_posters
from hone.types import Group

EXAMPLE = Path(__file__).parents[2] / "examples" / "poster"
REAL = [
    "model.init=null",
    "model.tokenizer=null",
    "model.path=Qwen/Qwen2.5-VL-7B-Instruct",
    "reward.components=[{use: poster, args: {visual: visualquality_r1, "
    "visual_args: {endpoint: 'http://127.0.0.1:9/v1', model: TianheWu/VisualQuality-R1-7B}}}]",
]
"""What the run file's comment says to change for a real policy and judge."""


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
        (score,) = asyncio.run(score_posters([row["response"]], row["poster"], judge_of({})))
        assert score.value is not None and score.value > 0.97


def test_a_judge_that_is_not_there_yet_is_named_and_stops_no_check(make_group):
    loaded = load_config(EXAMPLE / "run.yaml", REAL)
    row = shipped("test")[0]

    async def scored() -> Group:
        async with Rewards.from_config(loaded.config.reward, EXAMPLE, window_samples=1000) as rewards:
            return await rewards.score(make_group(row["response"], answer=row["poster"]))

    (said,) = services_away(asyncio.run(scored()), loaded.config)
    assert "reward poster: visual: http://127.0.0.1:9/v1/chat/completions cannot be reached" in said
