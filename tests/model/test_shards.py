"""Weight files that are written one weight at a time."""

import json
from math import prod

import pytest
import torch
from measuring import allocated
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hone.model.load import read_weights, save_hf, weight_shapes
from hone.model.shards import HEADER_BYTES, write_weights

WEIGHTS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.arange(4, dtype=torch.bfloat16).view(2, 2).T,  # not contiguous
    "c": torch.tensor(3, dtype=torch.int64),
    "d": torch.zeros(0, 5),
}


def test_one_file_holds_what_was_given(tmp_path):
    write_weights(tmp_path, WEIGHTS.items())
    found = load_file(tmp_path / "model.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert found.keys() == WEIGHTS.keys()
    for name, weight in WEIGHTS.items():
        assert found[name].dtype == weight.dtype and torch.equal(found[name], weight)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_only_numbers_with_a_point_are_converted(tmp_path):
    write_weights(tmp_path, WEIGHTS.items(), dtype=torch.float16)
    dtypes = {name: weight.dtype for name, weight in load_file(tmp_path / "model.safetensors").items()}
    assert dtypes == {"a": torch.float16, "b": torch.float16, "c": torch.int64, "d": torch.float16}


def test_a_large_model_is_written_in_shards_that_transformers_loads(tmp_path):
    config = Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    config.save_pretrained(tmp_path)
    write_weights(tmp_path, model.state_dict().items(), shard_bytes=6000)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in model.state_dict().values())
    assert all((tmp_path / name).stat().st_size <= 6000 + HEADER_BYTES for name in files)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_file_ends_where_its_header_is_full(tmp_path):
    weights = {
        f"model.layers.{number}.mlp.experts.7.gate_proj.weight": torch.full((2,), number) for number in range(40)
    }
    write_weights(tmp_path, weights.items(), header_bytes=1024)
    assert len([*tmp_path.glob("*.safetensors")]) > 4
    assert {name: weight.tolist() for name, weight in read_weights(tmp_path)} == {
        name: weight.tolist() for name, weight in weights.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_holds_one_weight_at_a_time(tmp_path, dtype):
    """Of 12 weights, each made when it is asked for: its float32 numbers, and the converted ones."""
    size = 4 * 256 * 256
    weights = ((f"layer.{number}", torch.full((256, 256), float(number))) for number in range(12))
    config = Qwen3Config()
    held = allocated(lambda: save_hf(tmp_path / "hf", config, weights, dtype=dtype))
    assert size <= held <= 1.6 * size
    assert sum(prod(shape) for shape in weight_shapes(tmp_path / "hf").values()) == 12 * 256 * 256
