"""Our decoder against Transformers' classes: logits, gradients, names; every variant that we claim."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hone.errors import DataError
from hone.model.decoder import Decoder, unsupported
from hone.model.layout import Layout

FAMILY = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "sliding_window": None,
}
PROMPTS = [[5, 6, 7], list(range(40)), [9]]
PROMPT_S = [0, 0, 1, 1, 2, 0, 1]
RESPONSES = [[1, 2, 3], [4], [7, 8, 9, 10], list(range(50, 20, -1)), [], [1, 2, 3], [3, 2]]


def pair(name: str, **keys) -> tuple[Decoder, torch.nn.Module]:
    """Ours and Transformers' with the same random weights, large enough that every part matters."""
    config_class, model_class = FAMILY[name]
    config = config_class(**{**SIZES, **keys})
    torch.manual_seed(0)
    theirs = model_class(config).eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(0.0, 0.3)
    ours = Decoder(config)
    ours.load_weights(theirs.state_dict().items())
    return ours, theirs


def our_logits(model: Decoder) -> torch.Tensor:
    layout = Layout.build(PROMPTS, PROMPT_S, RESPONSES)
    assert layout.expand_T is not None
    return (model.hidden(layout) @ model.output_weight.T)[layout.expand_T]


def their_logits(model: torch.nn.Module) -> torch.Tensor:
    rows = []
    for prompt, response in zip(PROMPT_S, RESPONSES, strict=True):
        ids = PROMPTS[prompt] + response
        logits = model(torch.tensor([ids])).logits[0]
        rows.append(logits[len(PROMPTS[prompt]) - 1 : len(ids) - 1])
    return torch.cat(rows)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 24},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
VARIANTS = [
    *((name, {"tie_word_embeddings": tied}) for name in FAMILY for tied in (False, True)),
    *(("llama", {"rope_parameters": rope}) for rope in ROPES.values()),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1, "head_dim": None}),
    ("mistral", {"sliding_window": 96}),
]


@pytest.mark.parametrize(("name", "keys"), VARIANTS)
def test_logits_and_gradients_equal_transformers(name, keys):
    ours, theirs = pair(name, **keys)
    mine, true = our_logits(ours), their_logits(theirs)
    torch.testing.assert_close(mine, true, atol=1e-5, rtol=1e-5)
    direction = torch.randn(true.shape, generator=torch.Generator().manual_seed(0))
    mine.backward(direction)
    true.backward(direction)
    with torch.no_grad():  # gradients stand where the weights do, so the weights' own names lead to them
        for parameter in ours.parameters():
            parameter.copy_(parameter.grad)
    reference = {n: p.grad for n, p in theirs.named_parameters()}
    got = dict(ours.named_weights())
    assert got.keys() == reference.keys()
    for weight_name, gradient in reference.items():
        torch.testing.assert_close(got[weight_name], gradient, atol=2e-4, rtol=1e-3, msg=weight_name)


def test_bfloat16_is_as_close_as_transformers_itself():
    ours, theirs = pair("qwen3")
    exact = their_logits(theirs)
    mine = (our_logits(ours.bfloat16()).float() - exact).norm()
    reference = (their_logits(theirs.bfloat16()).float() - exact).norm()
    assert mine < 1.2 * reference


def test_checkpointing_layers_changes_nothing():
    model, _ = pair("qwen3")
    gradients = []
    for kind in ("none", "selective", "full", 1):
        model.checkpointing = kind
        gradients.append(torch.autograd.grad(our_logits(model).square().sum(), list(model.parameters())))
    for recomputed in gradients[1:]:
        torch.testing.assert_close(recomputed, gradients[0], rtol=0, atol=0)


def test_only_needed_positions_leave_the_last_layer():
    model, _ = pair("llama")
    layout = Layout.build(PROMPTS, PROMPT_S, RESPONSES)

    def first_value(_layer, q, k, v):
        return v.repeat_interleave(2, dim=1)

    needed = torch.tensor([4, 0, 7])
    everything = model(layout.token_ids_X, layout.position_X, first_value)
    some = model(layout.token_ids_X, layout.position_X, first_value, needed)
    torch.testing.assert_close(some, everything[needed])


def test_weights_are_views_under_hugging_face_names():
    model, theirs = pair("qwen2", tie_word_embeddings=True)
    names = [name for name, _ in model.named_weights()]
    assert sorted(names) == sorted(name for name, _ in theirs.named_parameters())
    key = dict(model.named_weights())["model.layers.1.self_attn.k_proj.weight"]
    key.zero_()
    assert not model.layers[1].qkv_proj.weight[32:48].any() and model.layers[1].qkv_proj.weight[:32].all()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(**{**SIZES, "sliding_window": 95}), "sliding_window 95"),
        (Qwen2Config(**{**SIZES, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}), "sliding"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "hidden_act gelu"),
    ],
)
def test_what_it_cannot_do_is_said(config, reason):
    assert reason in (unsupported(config) or "")
    with pytest.raises(DataError, match=rf"{reason}.*model\.implementation"):
        Decoder(config)


def test_a_number_of_layers_is_made_again_and_no_other():
    """Each layer that is made again calls attention twice."""
    model, _ = pair("qwen3")
    assert len(model.layers) == 3
    layout, calls = Layout.build(PROMPTS, PROMPT_S, RESPONSES), []

    def first_value(layer, q, k, v):
        calls.append(layer)
        return q

    for number, expected in ((1, [0, 1, 2, 0]), (2, [0, 1, 2, 1, 0]), (9, [0, 1, 2, 2, 1, 0])):
        calls.clear()
        model.checkpointing = number
        model(layout.token_ids_X, layout.position_X, first_value).sum().backward()
        assert calls == expected
