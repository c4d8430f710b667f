"""The reward-model stage, end to end: it learns, measures itself on held-out pairs, and resumes bit for bit."""

import itertools
import json

import numpy as np
import pytest
import torch
from tiny import metrics_of, weights_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hone import assemble
from hone.cli.main import main
from hone.config.load import load_config
from hone.errors import ConfigError
from hone.train.pairs import PairTrainer

RUN = """
stages: [reward_model]
run: {{dir: {folder}/run, threads: 1, device: cpu}}
model:
  characters: "0123456789+="
  init: {{model_type: qwen3, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
         head_dim: 8, intermediate_size: 64, max_position_embeddings: 32, tie_word_embeddings: false}}
data: {{train: pairs.jsonl, eval: pairs.jsonl, eval_rows: "0:60", max_prompt_tokens: 8}}
rollout: {{max_response_tokens: 4}}
train: {{tokens_per_microbatch: 256, optimizer: {{lr: 3e-3}}}}
rm: {{epochs: 1, pairs_per_step: 32, margin_column: by}}
eval: {{every: 4}}
checkpoint: {{every: 1}}
observe: {{console: quiet, tensorboard: false, trace: false}}
"""


def write_run(folder):
    folder.mkdir(parents=True, exist_ok=True)
    sums = itertools.product(range(10), range(10), (1, 2, 3))
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a), "rejected": str(a + d), "by": 0.5 * d} for a, b, d in sums]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_file = folder / "tiny.yaml"
    run_file.write_text(RUN.format(folder=folder))
    return run_file


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    assert main(["train", str(write_run(folder))]) == 0
    return folder


def same_metrics(folder):
    return [{k: v for k, v in line.items() if k != "rm/pairs_per_s"} for line in metrics_of(folder)]


def test_it_starts_at_chance_and_learns(trained):
    lines = metrics_of(trained)
    assert [line["step"] for line in lines] == list(range(1, 11))
    margins = np.array([0.5, 1.0, 1.5])
    assert lines[0]["rm/loss"] == pytest.approx(
        np.log1p(np.exp(margins)).mean(), abs=0.1
    )  # scores 0: log(1 + e^margin)
    assert lines[0]["rm/accuracy"] == 0.5
    assert lines[-1]["rm/loss"] < lines[0]["rm/loss"]
    assert lines[-1]["rm/eval_accuracy"] > 0.6
    assert [line["step"] for line in lines if "rm/eval_loss" in line] == [4, 8, 10]


def test_the_export_says_what_was_measured_and_transformers_agrees(trained):
    folder = trained / "run" / "hf"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    last = metrics_of(trained)[-1]
    assert not (folder / "generation_config.json").exists()
    assert config["hone_reward_mean"] == last["rm/eval_score_mean"]
    assert config["hone_reward_std"] == last["rm/eval_score_std"]
    assert config["hone_reward_form"] == "text"
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (trained / "pairs.jsonl").read_text().splitlines()[:60]]
    texts = [row["prompt"] + row[name] + tokenizer.eos_token for row in rows for name in ("chosen", "rejected")]
    batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        scores = model(**batch).logits[:, 0]
    assert float(scores.mean()) == pytest.approx(config["hone_reward_mean"], abs=1e-5)
    assert float(scores.std()) == pytest.approx(config["hone_reward_std"], abs=1e-5)


@pytest.mark.parametrize(
    "dies_in_step", [6, *(pytest.param(step, marks=pytest.mark.slow("a run more")) for step in (1, 10))]
)
def test_a_run_that_dies_continues_bit_for_bit(trained, tmp_path, monkeypatch, dies_in_step):
    run_file = write_run(tmp_path)
    update, calls = PairTrainer.update, itertools.count(1)

    def dying(self, pairs):
        if next(calls) == dies_in_step:
            raise KeyboardInterrupt
        return update(self, pairs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PairTrainer, "update", dying)
        assemble.train(load_config(run_file))
    assert main(["train", str(run_file), "--resume"]) == 0
    assert weights_of(tmp_path) == weights_of(trained)
    assert same_metrics(tmp_path) == same_metrics(trained)
    assert (tmp_path / "run/hf/config.json").read_text() == (trained / "run/hf/config.json").read_text()


def test_death_between_the_last_step_and_the_export_loses_nothing(trained, tmp_path, monkeypatch):
    run_file = write_run(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("hone.assemble.stage_runs.hf_folder", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assemble.train(load_config(run_file))
    assert main(["train", str(run_file), "--resume"]) == 0
    assert weights_of(tmp_path) == weights_of(trained)
    assert same_metrics(tmp_path) == same_metrics(trained)
    assert (tmp_path / "run/hf/config.json").read_text() == (trained / "run/hf/config.json").read_text()


def test_a_checkpoint_can_be_exported(trained, tmp_path):
    to = tmp_path / "exported"
    assert main(["export", str(trained / "tiny.yaml"), "--to", str(to)]) == 0
    assert (to / "model.safetensors").read_bytes() == (trained / "run/hf/model.safetensors").read_bytes()
    assert "hone_reward_mean" not in json.loads((to / "config.json").read_text()), "nothing was measured at that step"


def test_check_shows_a_pair(trained, capsys):
    assert main(["check", str(trained / "tiny.yaml")]) == 0
    out = capsys.readouterr().out
    assert "pairs to measure on: pairs.jsonl: 60 of 60 rows" in out and "prefers '0+0=0'" in out


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("stages=[reward_model,rl]", "reward_model must come last and without rl"),
        ("stages=[reward_model,sft]", "reward_model must come last"),
        ("data.eval=null", "data.eval.*is required for stage reward_model"),
        ("train.tokens_per_microbatch=20", "must hold the longest pair of stage reward_model.*Nearest: 24"),
        ("rm.chosen_column=better", "no column 'better'"),
    ],
)
def test_what_cannot_work_is_refused_before_it_starts(trained, change, problem):
    with pytest.raises(ConfigError, match=problem):
        load_config(trained / "tiny.yaml", [change, "data.answer_column=chosen", "reward.components=[{use: exact}]"])
