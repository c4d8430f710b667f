"""Fused weights of Transformers' classes leave under the names of the model's own repository."""

import pytest
import torch
from moe_models import MOE, moe_model
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from hone.errors import DataError
from hone.model.load import exported_shapes, load_model, read_weights, save_hf, weight_shapes
from hone.rollout.vllm_weights import publishing_problem

pytestmark = pytest.mark.parametrize("architecture", list(MOE))

ONE_EXPERT = {
    "qwen3_moe": "model.layers.1.mlp.experts.3.up_proj.weight",
    "deepseek_v3": "model.layers.1.mlp.experts.3.up_proj.weight",
    "gpt_oss": "model.layers.1.mlp.experts.gate_up_proj",  # fused in the repository too
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w3.weight",
}


@pytest.fixture
def exported(architecture, tmp_path):
    model = moe_model(architecture)
    save_hf(tmp_path / "hf", model.hf_config, model.named_weights())
    return model, tmp_path / "hf"


def test_names_and_numbers_are_those_that_transformers_saves(exported, architecture):
    model, folder = exported
    expected = revert_weight_conversion(model.hf, model.hf.state_dict())
    found = dict(read_weights(folder))
    assert ONE_EXPERT[architecture] in found and found.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


def test_they_are_views_of_the_parameters(exported, architecture):
    model, _ = exported
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    own |= {weight.untyped_storage().data_ptr() for weight in model.buffers()}
    assert all(weight.untyped_storage().data_ptr() in own for _, weight in model.named_weights())
    assert sum(weight.numel() for _, weight in model.named_weights()) == sum(
        weight.numel() for weight in model.hf.state_dict().values()
    )


def test_an_export_computes_the_same_in_transformers_and_here(exported, architecture):
    model, folder = exported
    ids = torch.arange(24).view(2, 12)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert torch.equal(loaded(ids).logits, model.hf(ids).logits)
    other = moe_model(architecture, seed=1)
    assert not torch.equal(other.hf(ids).logits, model.hf(ids).logits)
    other.load_weights(load_model(folder, dtype=torch.float32, device="cpu").named_weights())
    assert torch.equal(other.hf(ids).logits, model.hf(ids).logits)


def test_names_and_shapes_are_known_without_a_model(exported, architecture):
    model, folder = exported
    assert exported_shapes(model.hf_config) == weight_shapes(folder)
    assert publishing_problem(folder, model.hf_config) is None


def test_a_directory_of_other_names_is_known_before_the_start(exported, architecture):
    model, folder = exported
    other = [(name.replace("model.", "transformer."), weight) for name, weight in model.named_weights()]
    save_hf(folder, model.hf_config, other)
    problem = publishing_problem(folder, model.hf_config)
    assert problem is not None and "model.embed_tokens.weight ((64, 64) of the trainer, none here)" in problem
    with pytest.raises(DataError, match="weights are missing"):
        load_model(folder, dtype=torch.float32, device="cpu")
