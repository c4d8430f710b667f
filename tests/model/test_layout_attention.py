"""Transformers' classes over a shared-prompt layout: what they compute of padded rows, each token once."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from model_zoo import OTHERS, TEXT

from hone.config import derived
from hone.config.run import LoraSection
from hone.errors import DataError
from hone.model.hf import TransformersModel
from hone.model.layout import Layout
from hone.model.load import init_model
from hone.model.logprobs import token_logprobs
from hone.model.lora import add_adapter
from hone.plan.families import FAMILIES, architecture_from
from hone.plan.states import LAYER_KINDS

PROMPTS = [[5, 6, 7], list(range(20)), [9]]
PROMPT_S = [0, 1, 1, 2, 0]
RESPONSES = [[1, 2, 3], [7, 8, 9, 10], list(range(30, 10, -1)), [], [1, 2, 3]]
WINDOW = {"sliding_window": 4}
PACKED = {
    "qwen3_moe": TEXT["qwen3_moe"],
    "mixtral": TEXT["mixtral"] | WINDOW,
    "gemma3_text": TEXT["gemma3_text"] | WINDOW | {"query_pre_attn_scalar": 3, "sliding_window_pattern": 2},
    "cohere2": TEXT["cohere2"] | WINDOW | {"sliding_window_pattern": 2},
    "gpt_oss": TEXT["gpt_oss"] | WINDOW,
    "deepseek_v3": TEXT["deepseek_v3"] | {"v_head_dim": 12},
    "granite": TEXT["granite"] | {"attention_multiplier": 0.4},
    "gemma3": OTHERS["gemma3"],
    "qwen2_5_vl": OTHERS["qwen2_5_vl"],
}
QUICK = ("gemma3_text", "gpt_oss", "qwen3_moe")
MODELS = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow("many classes")) for n in PACKED]


def make(model_type: str, keys=None) -> TransformersModel:
    """In float64, with weights that make attention choose."""
    keys = {"model_type": model_type, **(keys or PACKED[model_type])}
    model = init_model(keys, vocab_size=None, seed=0, dtype=torch.float32, device="cpu")
    assert isinstance(model, TransformersModel)
    model.hf.set_experts_implementation("eager")  # PyTorch's grouped product knows no float64
    model.double()
    with torch.no_grad():
        for weight in model.body.parameters():
            weight.mul_(1.5)
    return model


def logprobs_of(model: TransformersModel, layout: Layout) -> torch.Tensor:
    found, _ = token_logprobs(
        model.hidden(layout),
        model.output_weight,
        layout.target_U,
        temperature=1.0,
        chunk_tokens=8,
        logit_map=model.logit_map,
    )
    return found if layout.expand_T is None else found[layout.expand_T]


def gradients_of(model: TransformersModel, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    learning = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    slope = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    found = torch.autograd.grad((slope * logprobs).sum(), list(learning.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(learning, found, strict=True) if gradient is not None}


@contextmanager
def padded(model: TransformersModel):
    """Inside, the class is given padded rows."""
    model.why_rows = "a test"
    try:
        yield
    finally:
        model.why_rows = None


@pytest.mark.parametrize("model_type", MODELS)
def test_logprobs_and_gradients_are_those_of_padded_rows(model_type):
    model = make(model_type)
    assert model.why_rows is None
    layout = Layout.build(PROMPTS, PROMPT_S, RESPONSES)
    found = logprobs_of(model, layout)
    with padded(model):
        expected = logprobs_of(model, layout)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)  # norms and rotations are float32 in these classes
    ours, theirs = gradients_of(model, found), gradients_of(model, expected)
    assert ours.keys() == theirs.keys()
    assert model_type != "gpt_oss" or any("sinks" in name and g.abs().max() > 1e-3 for name, g in ours.items())
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max(), msg=name)


def test_every_token_is_computed_once_whatever_stands_beside_it():
    model = make("gpt_oss")
    computed = []
    model.body.register_forward_pre_hook(lambda _, args, given: computed.append(given["input_ids"]), with_kwargs=True)
    layout = Layout.build(PROMPTS, PROMPT_S, RESPONSES)
    together = logprobs_of(model, layout)
    prompts, responses = 3 + 20 + 1, 2 + 3 + 19  # without the copy, and without last tokens
    assert layout.num_tokens == prompts + responses
    assert [tuple(ids.shape) for ids in computed] == [(1, len(layout.token_ids_X))]
    order = np.random.default_rng(0).permutation(len(RESPONSES))
    shuffled = Layout.build(PROMPTS[::-1], [2 - PROMPT_S[i] for i in order], [RESPONSES[i] for i in order])
    ends = np.cumsum([len(RESPONSES[i]) for i in order])
    parts = dict(
        zip(order.tolist(), logprobs_of(model, shuffled).split(np.diff(ends, prepend=0).tolist()), strict=True)
    )
    start = 0
    for number, response in enumerate(RESPONSES):
        own = together[start : (start := start + len(response))]
        torch.testing.assert_close(parts[number], own, atol=2e-6, rtol=0)
        if response:
            alone = Layout.build([PROMPTS[PROMPT_S[number]]], [0], [response])
            torch.testing.assert_close(logprobs_of(model, alone), own, atol=2e-6, rtol=0)


def test_with_an_adapter_and_recomputed_activations():
    model = make("gpt_oss")
    add_adapter(model, LoraSection(rank=2), seed=1, dtype=torch.float64)
    for name in model.adapter.names:
        model.adapter.factors(name)[1].fill_(0.05)
    layout, found = Layout.build(PROMPTS, PROMPT_S, RESPONSES), {}
    for kind in ("none", "selective", "full", 1):
        model.checkpointing = kind
        found[kind] = gradients_of(model, logprobs_of(model, layout))
    with padded(model):
        expected = gradients_of(model, logprobs_of(model, layout))
    assert expected and all(".lora_" in name for name in expected)
    for gradients in found.values():
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max())


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name in TEXT])
def test_the_plan_counts_rows_where_the_class_computes_them(model_type):
    keys = {"model_type": model_type, **TEXT[model_type]}
    model = init_model(keys, vocab_size=None, seed=0, dtype=torch.float32, device="cpu", implementation="transformers")
    assert isinstance(model, TransformersModel)
    assert architecture_from(keys).why_rows == model.why_rows
    assert (model.why_rows is None) == (model_type not in ("gemma2", *LAYER_KINDS))


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("lfm2", "layers of the kind conv"),
        ("jamba", "states"),
        ("llama4_text", "chunked_attention"),
        ("gemma2", "caps the scores"),
    ],
)
def test_why_a_class_computes_rows_can_be_read(model_type, why):
    keys = {"model_type": model_type, **TEXT[model_type]}
    model = init_model(keys, vocab_size=None, seed=0, dtype=torch.float32, device="cpu")
    assert why in model.why_rows


def test_attention_that_the_kernels_do_not_know_is_never_computed_without_it(monkeypatch):
    monkeypatch.setattr(derived, "why_rows", lambda keys: None)
    layout = Layout.build(PROMPTS, PROMPT_S, RESPONSES)
    with pytest.raises(DataError, match="Gemma2Attention attends with softcap"):
        make("gemma2", TEXT["gemma2"]).hidden(layout)
