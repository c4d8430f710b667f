"""Parameter counts and cache sizes of public models, against published figures and against Transformers' classes."""

import json

import pytest
import torch
from shapes import shape
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hone.errors import DataError
from hone.plan.architecture import padding_parameters
from hone.plan.families import architecture_from
from hone.plan.known_models import MODELS, known_models

PARAMETERS = {
    "meta-llama-3-8b": 8_030_261_248,
    "meta-llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b-v0.1": 46_702_792_704,
    "gemma-2-9b": 9_241_705_984,
    "gemma-7b": 8_537_680_896,
    "phi-3-mini-4k": 3_821_079_552,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
}
KV_BYTES = {
    "qwen3-8b": 147_456,
    "qwen2.5-7b": 56 * 1024,
    "qwen3-32b": 256 * 1024,
    "qwen3-30b-a3b": 96 * 1024,
    "qwen3-235b-a22b": 188 * 1024,
    "meta-llama-3-8b": 128 * 1024,
    "deepseek-v2-lite": 31_104,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_parameter_counts(name):
    arch = shape(name)
    assert arch.total_parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", KV_BYTES)
def test_cache_bytes_per_token(name):
    arch = shape(name)
    assert arch.kv_bytes_per_token() == KV_BYTES[name]


def test_the_latent_of_mla_is_on_every_device_and_heads_are_not():
    latent, heads = shape("deepseek-v2-lite"), shape("qwen3-8b")
    assert latent.kv_bytes_per_token(tensor_parallel=2) == 31_104
    assert heads.kv_bytes_per_token(tensor_parallel=2) == 73_728
    assert heads.kv_bytes_per_token(tensor_parallel=16) == 147_456 // 8  # 8 heads: 16 devices hold one each


@pytest.mark.parametrize("name", known_models())
def test_counts_are_those_of_the_class(name):
    """The real class on the meta device; V3's correction biases are buffers there, and counted here."""
    config = json.loads((MODELS / f"{name}.json").read_text("utf-8"))
    model_type = config.pop("model_type")
    arch = architecture_from({"model_type": model_type, **config})
    auto = AutoModelForImageTextToText if arch.tower else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.for_model(model_type, **config))
    biases = sum(b.numel() for key, b in model.named_buffers() if key.endswith("e_score_correction_bias"))
    tower = arch.tower.parameters if arch.tower else 0
    assert arch.total_parameters + tower == sum(p.numel() for p in model.parameters()) + biases


@pytest.mark.parametrize(
    ("name", "active_billions"), [("qwen3-30b-a3b", 3.35), ("qwen3-235b-a22b", 22.2), ("deepseek-v3", 37.6)]
)
def test_active_parameters_are_what_the_names_say(name, active_billions):
    arch = shape(name)
    assert arch.active_parameters / 1e9 == pytest.approx(active_billions, abs=0.05)


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B", "qwen3-8b-base", "Qwen/Qwen3-4B-Instruct-2507", "mistralai/Mistral-7B-v0.3"]
)
def test_hub_names_find_their_shape(name):
    assert shape(name) is not None


def test_what_cannot_be_counted_says_so():
    with pytest.raises(DataError, match=r"model_type 'gpt2' is not supported.*qwen3"):
        architecture_from({"model_type": "gpt2"})
    with pytest.raises(DataError, match="hidden_size must be a whole number"):
        architecture_from({"model_type": "qwen3", "num_attention_heads": 4})


def test_experts_that_do_not_come_out_even_are_divided_inside_or_filled_up():
    """Eight experts: rows of each on 64 devices; on 48 devices, which divide no rows, as if there were 48 of them."""
    arch = shape("mixtral-8x7b-v0.1")
    assert padding_parameters(arch, 8) == padding_parameters(arch, 64) == 0
    assert padding_parameters(arch, 48) == 40 * 3 * arch.hidden * arch.inner
