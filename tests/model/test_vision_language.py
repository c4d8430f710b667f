"""Vision-language models: the language model learns and samples, the tower stays, files are as their repository's."""

import pytest
import torch
from model_zoo import OTHERS
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForImageTextToText

from hone.config.run import LoraSection
from hone.model.hf import TransformersModel, as_computed, has_tower
from hone.model.layout import Layout
from hone.model.load import init_model, load_model, save_hf
from hone.model.logprobs import token_logprobs
from hone.model.lora import linear_layers, wanted_layers

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm", "internvl"]
PROMPTS, RESPONSES = [[5, 6, 7], list(range(20))], [[1, 2, 3], [7, 8, 9, 10], [1, 2]]
PROMPT_S = [0, 1, 1]


def make(model_type: str) -> TransformersModel:
    architecture = {"model_type": model_type, **OTHERS[model_type]}
    model = init_model(architecture, vocab_size=None, seed=0, dtype=torch.float32, device="cpu")
    assert isinstance(model, TransformersModel)
    return model


@pytest.mark.parametrize("model_type", FAMILIES)
def test_text_alone_equals_the_whole_models_forward_pass(model_type):
    model = make(model_type)
    layout = Layout.build(PROMPTS, PROMPT_S, RESPONSES)
    logprobs, _ = token_logprobs(
        model.hidden(layout), model.output_weight, layout.target_U, temperature=1.0, chunk_tokens=8
    )
    expected = []
    for prompt, response in zip(PROMPT_S, RESPONSES, strict=True):
        ids = torch.tensor([PROMPTS[prompt] + response])
        at = model.hf(ids).logits[0, len(PROMPTS[prompt]) - 1 : -1].log_softmax(-1)
        expected.append(at.gather(1, torch.tensor(response)[:, None])[:, 0])
    torch.testing.assert_close(logprobs, torch.cat(expected), atol=1e-5, rtol=0)
    logprobs.sum().backward()
    learning = {name for name, weight in model.hf.named_parameters() if weight.grad is not None}
    assert learning and learning == {name for name, weight in model.hf.named_parameters() if weight.requires_grad}
    assert all("visual" not in name and "vision" not in name for name in learning)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_directory_comes_back_as_transformers_wrote_it(tmp_path, model_type):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **OTHERS[model_type])
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs", dtype=torch.float32, device="cpu")
    processor = {"preprocessor_config.json": "{}"}
    save_hf(tmp_path / "ours", model.hf_config, model.named_weights(), processor=processor)
    theirs, ours = ({**tensors(tmp_path / name)} for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    assert (tmp_path / "ours" / "preprocessor_config.json").read_text() == "{}"
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours")
    assert type(again).__name__ in (again.config.architectures or [])


def tensors(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


def test_dropout_is_off_in_every_part():
    keys = OTHERS["smolvlm"]
    text, tower = ({**keys[part], "attention_dropout": 0.3} for part in ("text_config", "vision_config"))
    config = AutoConfig.for_model("smolvlm", **{**keys, "text_config": text, "vision_config": tower})
    quiet = as_computed(config)
    assert has_tower(quiet) and quiet.text_config.attention_dropout == quiet.vision_config.attention_dropout == 0.0
    assert config.vision_config.attention_dropout == 0.3


def test_adapters_are_beside_layers_of_the_language_model():
    model = make("qwen2_5_vl")
    assert "qkv" not in linear_layers(model.hf)  # the tower's
    assert wanted_layers(LoraSection(rank=2, targets=("gate_proj",)), linear_layers(model.hf)) == ["gate_proj"]
