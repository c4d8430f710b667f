"""Whole runs that train an adapter: what is learnt, sampled, saved, resumed and exported, and what is refused."""

import json
import shutil
from collections import Counter

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny import metrics_of, weights_of, write_run
from transformers import AutoModelForCausalLM

from hone.cli.main import main

LORA = ("lora.rank=4", "lora.stages=[rl]", "train.optimizer.lr=1e-2", "checkpoint.keep=20")
ADAPTER_SIZE = 2 * 4 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 2 * (32 + 64) + (64 + 32))
"""Layers x rank x (in + out) of q, k and v, o, gate and up, down of the tiny model."""


def train(run_file, *arguments):
    return main(["train", str(run_file), *LORA, *arguments])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    assert train(write_run(folder)) == 0
    return folder


def start_from_sft(trained, folder):
    """A run file in `folder` whose model is what the SFT stage of another run left."""
    run_file = write_run(folder)
    shutil.copytree(trained / "run" / "hf-sft", folder / "model")
    return run_file, ("stages=[rl]", "model.path=model", "model.init=null", "model.characters=null")


def test_the_sampler_agrees_with_the_trainer_and_the_reference_with_the_new_adapter(trained):
    first = next(line for line in metrics_of(trained) if "gate/logprob_gap" in line)
    assert first["gate/logprob_gap"] < 1e-5 and first["gate/reference_gap"] == 0
    kl = [line["train/kl_ref"] for line in metrics_of(trained) if "train/kl_ref" in line]
    assert kl[0] == 0 and kl[-1] > 0, "the policy moved away from its base"


def test_a_checkpoint_holds_the_adapter_and_its_moments_and_nothing_else(trained):
    newest = trained / "run" / "checkpoints" / "step-000008"
    tensors = load_file(newest / "tensors.safetensors")
    sizes = Counter()
    for name, tensor in tensors.items():
        kind, _, weight = name.partition("/")
        assert ".lora_" in weight
        sizes[kind] += tensor.numel()
    assert sizes == dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), ADAPTER_SIZE)
    rest = json.loads((newest / "state.json").read_text())["rest"]
    assert len(rest["base"]) == 32
    whole = load_file(trained / "run" / "hf" / "model.safetensors")
    assert sum(tensor.numel() for tensor in whole.values()) > 2.5 * ADAPTER_SIZE


def test_a_run_starts_from_an_exported_adapter(trained, tmp_path):
    assert main(["export", str(trained / "tiny.yaml"), *LORA, "--to", str(tmp_path / "adapter"), "--adapter"]) == 0
    run_file, settings = start_from_sft(trained, tmp_path)
    settings += ("run.steps=1", "lora.start=adapter", "train.optimizer.lr=1e-9", "run.name=second try")
    assert train(run_file, *settings) == 0
    before, after = (load_file(folder / "run" / "hf" / "model.safetensors") for folder in (trained, tmp_path))
    for name, weight in after.items():
        torch.testing.assert_close(weight, before[name], atol=1e-6, rtol=0)
    first = next(line for line in metrics_of(tmp_path) if "train/kl_ref" in line)
    assert first["train/kl_ref"] > 0 and "gate/reference_gap" not in first, "the reference is the base model"
    assert "<title>second try" in (tmp_path / "run" / "report.html").read_text()


def test_only_layers_with_an_adapter_changed(trained):
    before, after = (load_file(trained / "run" / name / "model.safetensors") for name in ("hf-sft", "hf"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj" in name}


def test_a_resumed_run_equals_the_uninterrupted_one(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    for step in range(4, 9):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:06d}")
    run_file = tmp_path / "tiny.yaml"
    run_file.write_text(run_file.read_text().replace(str(trained), str(tmp_path)))
    assert train(run_file, "--resume") == 0
    assert weights_of(tmp_path) == weights_of(trained)
    assert metrics_of(tmp_path) == metrics_of(trained)


def test_another_base_is_refused(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    run_file = tmp_path / "tiny.yaml"
    run_file.write_text(run_file.read_text().replace(str(trained), str(tmp_path)))
    shutil.copy(tmp_path / "run" / "hf" / "model.safetensors", tmp_path / "run" / "hf-sft" / "model.safetensors")
    assert train(run_file, "--resume") == 1
    assert "an adapter of weights that hash to" in capsys.readouterr().err
    assert main(["export", str(run_file), *LORA, "--to", str(tmp_path / "x")]) == 1


def test_exports_merged_and_adapter_compute_the_same(trained, tmp_path):
    run_file = str(trained / "tiny.yaml")
    assert main(["export", run_file, *LORA, "--to", str(tmp_path / "merged")]) == 0
    assert main(["export", run_file, *LORA, "--to", str(tmp_path / "adapter"), "--adapter"]) == 0
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == weights_of(trained)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    with_adapter = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.tensor([[1, 2, 10, 3, 11]])
    with torch.no_grad():
        torch.testing.assert_close(with_adapter(ids).logits, merged(ids).logits, atol=1e-5, rtol=1e-5)


def test_without_an_adapter_there_is_none_to_export(tmp_path, capsys):
    run_file = write_run(tmp_path, steps=1)
    assert main(["train", str(run_file)]) == 0
    assert main(["export", str(run_file), "--to", str(tmp_path / "a"), "--adapter"]) == 2
    assert "stage rl trained every weight: there is no adapter" in capsys.readouterr().err


MORE = pytest.mark.slow("one of the two settings that another case has together")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(("rollout.max_staleness=1",), marks=MORE),
        pytest.param(("run.precision=bfloat16",), marks=MORE),
        ("run.precision=bfloat16", "rollout.max_staleness=1"),
        ("model.implementation=transformers",),
        ("lora.targets=[q_proj,v_proj]", "train.activation_checkpointing=full"),
        ("algorithm.credit=gae", "algorithm.kl_loss_coef=0", "reward.min_valid_per_group=1"),
    ],
    ids=lambda changes: changes[0],
)
def test_it_runs_in_every_kind_of_run(trained, tmp_path, changes):
    """The gate, on by default, has then compared engine and trainer; the two ways to final weights agree."""
    run_file, start = start_from_sft(trained, tmp_path)
    assert train(run_file, *start, *changes, "run.steps=3") == 0
    arguments = [str(run_file), *LORA, *start, *changes, "--to", str(tmp_path / "x")]
    assert main(["export", *arguments]) == 0
    assert (tmp_path / "x" / "model.safetensors").read_bytes() == weights_of(tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "x" / "model.safetensors").values()} == {torch.float32}


@pytest.mark.slow("a whole run")
def test_supervised_training_of_an_adapter(trained, tmp_path):
    run_file, start = start_from_sft(trained, tmp_path)
    arguments = (*start, "stages=[sft]", "lora.stages=[sft]", "sft.optimizer.lr=2e-3", "sft.epochs=6")
    assert train(run_file, *arguments) == 0
    losses = [line["sft/loss"] for line in metrics_of(tmp_path)]
    assert sum(losses[-10:]) < sum(losses[:10])


def test_what_cannot_work_is_said_by_check(trained, tmp_path, capsys):
    run_file, start = start_from_sft(trained, tmp_path)
    for target, said in (
        ("lm_head", "lora.targets: may not name lm_head"),
        ("query", "no linear layer query. It has: q"),
    ):
        assert main(["check", str(run_file), *start, "lora.rank=2", f"lora.targets=[{target}]"]) == 2
        streams = capsys.readouterr()
        assert said in streams.out + streams.err
    assert main(["check", str(run_file), *start, "lora.rank=2", "lora.targets=[q_proj]"]) == 0
    assert "adapter of rank 2 beside every q_proj" in capsys.readouterr().out
