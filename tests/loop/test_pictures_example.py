"""examples/pictures: its data is what its script draws, its answers are right, and it learns by its own settings."""

import base64
import importlib.util
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny import metrics_of

from hone.cli.main import main
from hone.config.load import load_config
from hone.data.chat import load_tokenizer
from hone.data.sources import SourceRow, read_rows
from hone.model.load import init_config
from hone.run.refusals import refused_by_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "pictures"
RUN_FILE = str(EXAMPLE / "run.yaml")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_data", EXAMPLE / "make_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(part):
    found = [row for row in read_rows(f"{part}.jsonl.gz", EXAMPLE) if isinstance(row, SourceRow)]
    return [row.values for row in found]


def test_every_answer_is_what_the_picture_shows(script):
    """Counted again from pixels, and no picture of test is in train."""
    train, test = rows("train"), rows("test")
    assert (len(train), len(test)) == (3600, 600)
    assert not {row["image"] for row in train} & {row["image"] for row in test}
    for row in test + train[:300]:
        image = Image.open(io.BytesIO(base64.b64decode(row["image"].partition(",")[2]))).convert("RGB")
        centres = np.asarray(image, np.int64)[3::8, 3::8]
        colour = script.COLOURS[row["prompt"].rstrip("?")]
        assert str((np.abs(centres - colour).sum(-1) < 30).sum()) == row["answer"]


def test_the_script_draws_alike(script):
    """Not byte for byte: another version of PIL may compress otherwise."""
    chance = script.random.Random(0)
    cells = script.drawn(chance)
    assert rows("train")[0]["answer"] == str(cells.count("red"))


def test_a_token_of_a_picture_means_the_same_to_model_and_tokenizer():
    model = load_config(RUN_FILE).config.model
    tokenizer = load_tokenizer(model, EXAMPLE)
    right, wrong = ({**(model.init or {}), "image_token_id": token} for token in (22, 21))
    assert refused_by_tokenizer(init_config(right, vocab_size=tokenizer.vocab_size), tokenizer) == ""
    refused = refused_by_tokenizer(init_config(wrong, vocab_size=tokenizer.vocab_size), tokenizer)
    assert "image_token_id of qwen2_5_vl is 21, but the tokenizer's <|image_pad|> is 22" in refused


@pytest.mark.slow("trains an example")
def test_it_learns(tmp_path):
    """A part of its RL stage; accuracy on half of the test rows rises."""
    short = ["run.steps=24", "eval.every=24", "data.eval_rows=0:300", "rollout.group_size=8"]
    short += ["run.threads=1", "observe.console=quiet", f"run.dir={tmp_path}/run"]
    assert main(["train", RUN_FILE, *short]) == 0
    first, last = (line[name] for line in metrics_of(tmp_path) if (name := "eval/reward_mean") in line)
    assert last - first > 0.05
