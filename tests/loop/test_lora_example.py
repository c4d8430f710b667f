"""The example with an adapter, as its file stands but shorter."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from hone.cli.main import main

RUN_FILE = str(Path(__file__).parents[2] / "examples" / "lora" / "run.yaml")
SHORT = ("run.steps=2", "sft.rows=0:256", "sft.epochs=1", "data.eval_rows=0:20", "eval.every=1", "run.threads=1")


@pytest.mark.slow("trains an example")
def test_it_trains_its_adapter_and_exports(tmp_path):
    arguments = [RUN_FILE, *SHORT, f"run.dir={tmp_path}/run", "observe.console=quiet"]
    assert main(["train", *arguments]) == 0
    assert {path.name for path in (tmp_path / "run").glob("hf*")} == {"hf", "hf-best", "hf-sft"}
    assert main(["export", *arguments, "--adapter", "--to", str(tmp_path / "adapter")]) == 0
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    whole = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    trained, everything = (sum(tensor.numel() for tensor in tensors.values()) for tensors in (adapter, whole))
    assert trained < 0.2 * everything
