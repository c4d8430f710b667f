"""Every kind of model ends alike in `hone check` and in a run of two steps; docs/models.md has the table.

The table is rewritten by running this file: `python tests/loop/test_model_outcomes.py`.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from model_zoo import OTHERS, TEXT, WITH_ADAPTER

from hone import assemble
from hone.cli.main import main
from hone.config.load import load_config
from hone.data.chat import character_tokenizer
from hone.errors import HoneError

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
STALE = "docs/models.md is stale: run `python tests/loop/test_model_outcomes.py`"
BEGIN, END = "<!-- table: tests/loop/test_model_outcomes.py -->\n", "<!-- end of table -->\n"
QUICK = ("qwen3", "gemma2", "qwen3_moe", "qwen3_5_text", "rwkv", "t5")
MODELS = [(model_type, False) for model_type in (*TEXT, *OTHERS)] + [(model_type, True) for model_type in WITH_ADAPTER]
RUN = """
run: {{dir: {folder}/run, steps: 2, threads: 1, device: cpu}}
model: {{path: {folder}/model}}
data: {{train: rows.jsonl, answer_column: answer, max_prompt_tokens: 8}}
reward: {{components: [{{use: exact}}]}}
rollout: {{group_size: 2, max_response_tokens: 4}}
train: {{prompts_per_step: 2, tokens_per_microbatch: 256, optimizer: {{lr: 1e-3}}}}
checkpoint: {{every: 2}}
lora: {{rank: {rank}}}
observe: {{console: quiet, tensorboard: false, trace: false}}
"""


def outcome(model_type: str, has_adapter: bool) -> tuple[str, str]:
    """`trains` or a reason, of check and of train."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        save_model(folder / "model", model_type)
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run_file = folder / "run.yaml"
        run_file.write_text(RUN.format(folder=folder, rank=2 if has_adapter else 0))
        loaded = load_config(run_file)
        report = assemble.check_run(loaded)
        proven = [line for line in report.lines if line.startswith("model: ")]
        checked = report.problems[0] if report.problems else "trains" if proven else "untried"
        trained = "trains"
        try:
            assemble.train(loaded)
        except HoneError as error:  # anything else would be shown as a bug in Hone, and fails the test
            trained = str(error)
        return checked, trained


def save_model(folder: Path, model_type: str) -> None:
    """A tiny random model as Transformers saves it, with a tokenizer of characters."""
    keys: dict[str, Any] = dict(TEXT[model_type] if model_type in TEXT else OTHERS[model_type])
    config = AutoConfig.for_model(keys.pop("model_type", model_type), **keys)
    quantized = getattr(config, "quantization_config", None)
    if quantized:
        del config.quantization_config
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with suppress(AttributeError):
        kind = AutoModelForImageTextToText if config.vision_config else kind
    torch.manual_seed(0)
    kind.from_config(config).save_pretrained(folder)
    if quantized:
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"quantization_config": quantized}))
    character_tokenizer("0123456789+=").save_pretrained(folder)


@pytest.mark.parametrize(
    ("model_type", "has_adapter"),
    [
        pytest.param(*model, marks=() if model[0] in QUICK[:3] and not model[1] else pytest.mark.slow("many models"))
        for model in MODELS
    ],
)
def test_check_and_train_end_alike_and_the_page_says_how(model_type, has_adapter):
    checked, trained = outcome(model_type, has_adapter)
    assert checked == trained
    assert cells_of_page()[model_type][has_adapter] == cell(checked), STALE


def test_the_page_has_all_models():
    cells = cells_of_page()
    assert list(cells) == [*TEXT, *OTHERS], STALE
    tried = [(model_type, bool(column)) for column in (0, 1) for model_type in cells if cells[model_type][column]]
    assert sorted(tried) == sorted(MODELS), STALE


def cells_of_page() -> dict[str, list[str]]:
    """`model_type` -> its cells in the page's table."""
    rows = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    cells = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]
    return {name.strip(" `"): [one.strip() for one in outcomes] for name, *outcomes in cells}


def write_replaying_run(folder: Path, model_type: str) -> Path:
    """A run that replays routing, with rewards that give every step a gradient."""
    save_model(folder / "model", model_type)
    (folder / "rows.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n' * 8)
    (folder / "rewards.py").write_text("def score(group):\n    return [s.token_ids[0] % 2 for s in group.samples]\n")
    written = RUN.format(folder=folder, rank=0).replace("{use: exact}", "{use: 'rewards.py:score'}")
    (folder / "run.yaml").write_text(written + "algorithm: {replay_routing: true}\n")
    return folder / "run.yaml"


@pytest.mark.slow("checks and trains two models")
def test_check_and_a_run_replay_routing_or_refuse_to(tmp_path):
    run_file = write_replaying_run(tmp_path / "with", "qwen3_moe")
    report = assemble.check_run(load_config(run_file))
    assert any("routing is replayed" in line for line in report.lines)
    assemble.train(load_config(run_file, ["rollout.group_size=8"]))
    steps = [json.loads(line) for line in (tmp_path / "with" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    for step in steps:
        assert step["train/grad_norm"] > 0 and 0 < step["train/mismatch_gap"] < 1e-5
    run_file = write_replaying_run(tmp_path / "without", "qwen3")
    assert "no layers with experts" in assemble.check_run(load_config(run_file)).problems[0]
    with pytest.raises(HoneError, match="no layers with experts"):
        assemble.train(load_config(run_file))


@pytest.mark.slow("trains a model and a half")
def test_a_run_that_replays_routing_resumes_bit_for_bit(tmp_path):
    """A killed run draws the samples of its unfinished steps again, with the experts that they were sent to."""
    run_file, run = write_replaying_run(tmp_path, "qwen3_moe"), tmp_path / "run"
    arguments = ["train", str(run_file), "run.steps=4", "rollout.group_size=8"]
    assert main(arguments) == 0
    weights, metrics = run / "hf" / "model.safetensors", run / "metrics.jsonl"
    expected = weights.read_bytes()
    assert all(json.loads(line)["train/grad_norm"] > 0 for line in metrics.read_text().splitlines())
    shutil.rmtree(run / "checkpoints" / "step-000004")
    weights.unlink()
    assert main([*arguments, "--resume"]) == 0
    assert weights.read_bytes() == expected


def table() -> str:
    """The outcomes of all, as Markdown."""
    rows = ["| `model_type` | All weights | LoRA |", "|---|---|---|"]
    for model_type in (*TEXT, *OTHERS):
        cells = []
        for has_adapter in (False, True):
            tried = (model_type, has_adapter) in MODELS
            cells.append(cell(outcome(model_type, has_adapter)[0]) if tried else "")
        rows.append(f"| `{model_type}` | {cells[0]} | {cells[1]} |")
    return "\n".join(rows) + "\n"


def cell(said: str) -> str:
    """`trains`, or why not, without the file's name, the size of a gap and what to do instead."""
    if said == "trains":
        return said
    text = said[said.index("model: ") + len("model: ") :].partition(". ")[0]
    return re.sub(r" by \S+ nats \(bound \S+\)", "", text).replace("|", "\\|")


if __name__ == "__main__":
    torch.set_num_threads(1)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
