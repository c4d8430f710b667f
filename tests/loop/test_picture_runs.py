"""Runs whose prompts have pictures: check, both stages, resuming, and what they leave."""

import numpy as np
import pytest
from model_zoo import OTHERS
from picture_run import write_run
from pictures import for_vllm
from safetensors.numpy import load_file
from surviving import assert_kills_change_nothing
from tiny import metrics_of, weights_of
from transformers import AutoModelForImageTextToText

from hone import assemble
from hone.cli.main import main
from hone.config.load import load_config
from hone.errors import HoneError
from hone.model.load import init_config
from hone.run.refusals import refused_by_run


def test_check_shows_pictures_and_refuses_what_cannot_have_them(tmp_path):
    report = assemble.check_run(load_config(write_run(tmp_path)))
    assert not report.problems
    shown = "'<|vision_start|><|image_pad|>x4<|vision_end|>how many 1?=' -> 18 tokens, 4 of them of 1 pictures"
    assert any(shown in line for line in report.lines)
    assert any("Transformers' logprobs, of a prompt with a picture too" in line for line in report.lines)
    cluster = load_config(tmp_path / "run.yaml", ["cluster.backend=ray", "cluster.engines.use=vllm"]).config
    sees, no_angles, other = (
        init_config({"model_type": kind, **OTHERS[kind]}, vocab_size=None)
        for kind in ("qwen2_5_vl", "qwen3_vl", "internvl")
    )
    assert not refused_by_run(cluster, sees)
    assert "trainer's logprobs for qwen2_5_vl, qwen2_vl, qwen3_vl alone" in refused_by_run(cluster, other)
    assert "has no mrope_interleaved = true" in refused_by_run(cluster, no_angles)
    assert not refused_by_run(cluster, init_config({"model_type": "qwen3_vl", **for_vllm("qwen3_vl")}, vocab_size=None))
    (tmp_path / "3.png").write_bytes(b"no picture")
    broken = assemble.check_run(load_config(tmp_path / "run.yaml"))
    assert any("rows.jsonl:3 images: picture 2: is not a picture" in problem for problem in broken.problems)


@pytest.mark.slow("two runs of two stages")
@pytest.mark.parametrize("overrides", [[], ["model.freeze=[]"]], ids=["frozen", "learning"])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, overrides):
    whole, torn = (write_run(tmp_path / name) for name in ("whole", "torn"))
    assert main(["train", str(whole), *overrides]) == 0 and main(["train", str(torn), *overrides]) == 0
    newest = torn.parent / "run" / "checkpoints" / "step-000003" / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    assert main(["train", "--resume", str(torn.parent / "run")]) == 0
    assert weights_of(torn.parent) == weights_of(whole.parent)
    assert metrics_of(torn.parent) == metrics_of(whole.parent)
    first = next(line for line in metrics_of(whole.parent) if "gate/logprob_gap" in line)
    assert first["gate/logprob_gap"] < 1e-5
    AutoModelForImageTextToText.from_pretrained(whole.parent / "run" / "hf")
    assert (whole.parent / "run" / "hf" / "preprocessor_config.json").is_file()


RANKS = [
    "cluster.backend=ray",
    "cluster.pools={all: {devices: 2, roles: [policy, rollout, reference]}}",
]


@pytest.mark.slow("starts Ray, and whole runs in it")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("freeze", ["[vision]", "[]"], ids=["frozen", "learning"])
def test_two_ranks_and_two_engines_learn_what_one_process_learns(tmp_path, monkeypatch, freeze):
    """Both have the tower's weights in shards, and some microbatches of a rank have pictures where the other's have
    none."""
    run_file = write_run(tmp_path / "ray", settings="algorithm: {kl_loss_coef: 0.1}\n")
    settings = [f"model.freeze={freeze}", "train.tokens_per_microbatch=68"]
    monkeypatch.chdir(tmp_path)
    assemble.train(load_config(run_file, [*settings, f"run.dir={tmp_path}/local/run"]))
    assemble.train(load_config(run_file, [*settings, *RANKS]))
    one, two = (metrics_of(tmp_path / name) for name in ("local", "ray"))
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for theirs, ours in zip(one, two, strict=True):
        for name in ("rollout/reward_mean", "rollout/response_tokens_mean"):
            assert ours.get(name) == theirs.get(name), name
        for name in ("train/loss", "train/grad_norm", "train/kl_ref", "train/entropy", "sft/loss"):
            assert ours.get(name, 0.0) == pytest.approx(theirs.get(name, 0.0), rel=1e-3, abs=1e-5), name
    first = next(line for line in two if "gate/logprob_gap" in line)
    assert first["gate/logprob_gap"] < 1e-5
    assert any(line.get("train/grad_norm", 0.0) > 0.01 for line in two)
    ours, theirs = (load_file(tmp_path / name / "run" / "hf" / "model.safetensors") for name in ("ray", "local"))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        np.testing.assert_allclose(weight, theirs[name], rtol=0, atol=1e-4, err_msg=name)  # a tenth of a step
    AutoModelForImageTextToText.from_pretrained(tmp_path / "ray" / "run" / "hf")


@pytest.mark.slow("nine starts of a run")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("freeze", ["[vision]", "[]"], ids=["frozen", "learning"])
def test_kills_change_nothing(tmp_path, freeze):
    """A killed life keeps nothing of what its frozen tower made of pictures; the next computes the same numbers."""
    files = []
    for name in ("whole", "killed"):
        file = write_run(tmp_path / name)
        text = file.read_text().replace("steps: 3", "steps: 100")
        file.write_text(text.replace("model: {path:", f"model: {{freeze: {freeze}, path:"))
        files.append(file)
    whole, killed = files
    assert main(["train", str(whole)]) == 0
    assert_kills_change_nothing(whole, killed, kills=8, seed=3, updates=100)


@pytest.mark.slow("a check and a run of two stages")
@pytest.mark.parametrize("freeze", ["[vision]", "[]"], ids=["frozen", "learning"])
def test_a_model_that_sees_tiles_is_checked_and_learns(tmp_path, freeze):
    run_file = write_run(tmp_path, model_type="internvl")
    settings = [f"model.freeze={freeze}", "data.max_image_pixels=784"]  # at most two tiles and the whole
    report = assemble.check_run(load_config(run_file, settings))
    assert not report.problems
    assert any("<img><IMG_CONTEXT>x4</img>" in line for line in report.lines)
    assert any("internvl trains" in line and "of a prompt with a picture too" in line for line in report.lines)
    assert main(["train", str(run_file), *settings]) == 0
    first = next(line for line in metrics_of(tmp_path) if "gate/logprob_gap" in line)
    assert first["gate/logprob_gap"] < 1e-5
    AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "hf")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "run/hf"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert any("vision_tower" in name for name in moved) == (freeze == "[]")


@pytest.mark.slow("a run of two stages")
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "internvl"])
def test_an_adapter_learns_from_pictures(tmp_path, model_type):
    run_file = write_run(tmp_path, settings="lora: {rank: 2}\n", model_type=model_type)
    assert main(["train", str(run_file)]) == 0
    with pytest.raises(HoneError, match=r"model.freeze"):
        load_config(run_file, ["model.freeze=[]"])
