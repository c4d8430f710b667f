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
from PIL import Image, ImageColor

from hone import assemble
from hone.cli.main import main
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
def test_the_data_is_what_the_script_makes(make_data, split, monkeypatch):
    """Some pictures, by their pixels: another version of PIL may compress otherwise."""
    ours = shipped(split)
    for row in ours[:20]:
        layers = json.loads(row["poster"])["layers"]
        assert pixels(row["reference"]) == pixels(make_data.reference(layers))
    monkeypatch.setattr(make_data, "reference", lambda layers: "")
    assert [{**row, "reference": ""} for row in ours] == make_data.rows(split)


def pixels(url: str) -> bytes:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB").tobytes()


def test_a_reference_shows_the_boxes_of_its_poster(make_data):
    for row in shipped("test")[:20]:
        image = Image.open(io.BytesIO(base64.b64decode(row["reference"].partition(",")[2]))).convert("RGB")
        assert image.size == make_data.CANVAS
        top = json.loads(row["poster"])["layers"][-1]  # nothing is above the last layer
        middle = image.getpixel((top["x"] + top["width"] // 2, top["y"] + top["height"] // 2))
        assert middle == ImageColor.getrgb(make_data.COLOURS[top["type"]])


def test_with_references_the_run_file_passes_its_check():
    few = ["sft.rows=0:64", "data.train_rows=0:32", "data.eval_rows=0:8"]
    report = assemble.check_run(load_config(EXAMPLE / "pictures.yaml", few))
    assert not report.problems
    assert any("<|image_pad|>x35" in line for line in report.lines)
    assert any("of a prompt with a picture too" in line for line in report.lines)


@pytest.mark.slow("trains an example, shortly")
def test_a_policy_that_sees_references_learns(tmp_path):
    short = [
        "sft.rows=0:256",
        "sft.epochs=2",
        "sft.rows_per_step=16",
        "run.steps=2",
        "train.prompts_per_step=4",
        "data.eval_rows=0:4",
    ]
    short += ["run.threads=1", "observe.console=quiet", f"run.dir={tmp_path}/run"]
    assert main(["train", str(EXAMPLE / "pictures.yaml"), *short]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["sft/loss"] for line in lines if "sft/loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert all(line["gate/logprob_gap"] < 1e-4 for line in lines if "gate/logprob_gap" in line)


def test_the_tokenizer_is_what_the_script_makes_and_spells_every_poster_shortly(make_data):
    shipped_one = load_tokenizer(ModelSection(tokenizer="tokenizer"), EXAMPLE)
    assert shipped_one.hf.get_vocab() == make_data.tokenizer().get_vocab()
    responses = [row["response"] for split in ("sft", "train", "test") for row in shipped(split)]
    spelled = shipped_one.encode_responses(responses)
    assert [shipped_one.decode(ids) for ids in spelled] == responses
    assert max(map(len, spelled)) <= load_config(EXAMPLE / "run.yaml", []).config.rollout.max_response_tokens
    anything = "".join(map(chr, range(32, 127)))
    assert shipped_one.decode(shipped_one.encode_responses([anything])[0]) == anything


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
