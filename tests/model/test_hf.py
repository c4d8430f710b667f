"""Architectures that go through Transformers: the same interface, each sample equal to a run on its own."""

import pytest
import torch
from model_zoo import architecture as keys_of
from moe_models import moe_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from hone.errors import DataError
from hone.model.hf import TransformersModel, auto_class
from hone.model.layout import Layout
from hone.model.load import init_model, load_model, save_hf
from hone.model.logprobs import PLAIN, token_logprobs

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
PROMPTS = [[5, 6, 7], list(range(20)), [9]]
PROMPT_S = [0, 1, 1, 2, 0]
RESPONSES = [[1, 2, 3], [7, 8, 9, 10], list(range(30, 10, -1)), [], [1, 2, 3]]
ARCHITECTURES = [
    {"model_type": "gpt_neox", **SIZES},
    {"model_type": "olmo2", **SIZES},
    {"model_type": "gpt2", "vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64},
    {"model_type": "mistral", **SIZES, "sliding_window": 4},
    {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
]


def make(architecture) -> TransformersModel:
    model = init_model(architecture, vocab_size=None, seed=0, dtype=torch.float32, device="cpu")
    assert isinstance(model, TransformersModel)
    return model


WITH_STATES = ["qwen3_5_text", "lfm2", "mamba2", "qwen3_next", "mamba", "olmo_hybrid", "falcon_h1", "bamba", "jamba"]
WITH_STATES += ["granitemoehybrid", "nemotron_h"]
STATEFUL = [keys_of(model_type) for model_type in WITH_STATES]
SOME = STATEFUL[:2] + [pytest.param(keys, marks=pytest.mark.slow("builds many architectures")) for keys in STATEFUL[2:]]


@pytest.mark.parametrize("architecture", ARCHITECTURES + SOME, ids=lambda a: a["model_type"])
def test_samples_and_gradients_equal_runs_on_their_own(architecture):
    model = make(architecture)
    layout = Layout.build(PROMPTS, PROMPT_S, RESPONSES)
    assert layout.expand_T is not None
    logprob, _ = token_logprobs(
        model.hidden(layout), model.output_weight, layout.target_U, temperature=1.0, chunk_tokens=8
    )
    expected = []
    for prompt, response in zip(PROMPT_S, RESPONSES, strict=True):
        logits = model.hf(torch.tensor([PROMPTS[prompt] + response])).logits[0].log_softmax(-1)
        at = range(len(PROMPTS[prompt]) - 1, len(PROMPTS[prompt]) + len(response) - 1)
        expected += [logits[i, token] for i, token in zip(at, response, strict=True)]
    ours, theirs = logprob[layout.expand_T], torch.stack(expected)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    credit = torch.linspace(-1, 1, len(ours))
    weights = dict(model.hf.named_parameters())
    found, wanted = (
        torch.autograd.grad((credit * one).sum(), list(weights.values()), materialize_grads=True)
        for one in (ours, theirs)
    )
    for name, our_gradient, their_gradient in zip(weights, found, wanted, strict=True):
        bound = 5e-5 * float(their_gradient.abs().max()) + 1e-7  # rounding in float32, of the largest
        torch.testing.assert_close(our_gradient, their_gradient, atol=bound, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a["model_type"])
def test_export_round_trip(tmp_path, architecture):
    model = make(architecture)
    save_hf(tmp_path / "out", model.hf_config, model.named_weights())
    ids = torch.tensor([PROMPTS[1]])
    expected = model.hf(ids).logits
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits, expected)
    again = load_model(tmp_path / "out", dtype=torch.float32, device="cpu")
    assert isinstance(again, TransformersModel)
    torch.testing.assert_close(again.hf(ids).logits, expected)


def test_checkpointing_layers_changes_nothing():
    model = make({**ARCHITECTURES[2], "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5})
    layout = Layout.build(PROMPTS, PROMPT_S, RESPONSES)
    gradients = []
    for kind in ("none", "selective", "full", 1, "full"):
        model.checkpointing = kind
        loss = model.hidden(layout).square().sum()
        gradients.append(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))
    for recomputed in gradients[1:]:
        torch.testing.assert_close(recomputed, gradients[0], rtol=1e-5, atol=1e-6)


class Calls(TorchDispatchMode):
    """Counts calls of an operator."""

    def __init__(self, operator):
        super().__init__()
        self.operator, self.count = operator, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is self.operator
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_selective_checkpointing_stores_products_of_experts(architecture):
    """Two in each of two layers; but not where Transformers adds biases to them in place."""
    model = moe_model(architecture)
    layout = Layout.build(PROMPTS, PROMPT_S, RESPONSES)
    counts, gradients = {}, {}
    for kind in ("none", "selective", "full"):
        model.checkpointing = kind
        with Calls(torch.ops.aten._grouped_mm.default) as calls:
            loss = model.hidden(layout).square().sum()
            gradients[kind] = torch.autograd.grad(loss, list(model.body.parameters()))
        counts[kind] = calls.count
        torch.testing.assert_close(gradients[kind], gradients["none"])
    assert counts == {"none": 12, "selective": 16 if architecture == "gpt_oss" else 12, "full": 16}


def test_weights_come_and_go_by_name():
    model, other = make(ARCHITECTURES[2]), make(ARCHITECTURES[2])
    other.load_weights((name, weight + 1) for name, weight in model.named_weights())
    names = [name for name, _ in model.named_weights()]
    assert "lm_head.weight" not in names and len(names) == len(set(names))  # GPT-2 ties its embeddings
    for (_, a), (_, b) in zip(model.named_weights(), other.named_weights(), strict=True):
        assert torch.equal(a + 1, b)


MAPPED_LOGITS = [
    {"model_type": "gemma2", **SIZES, "final_logit_softcapping": 0.3, "query_pre_attn_scalar": 8},
    {"model_type": "cohere", **SIZES, "logit_scale": 0.25},
    {"model_type": "granite", **SIZES, "logits_scaling": 0.125},
    {
        "model_type": "recurrent_gemma",
        **SIZES,
        "num_hidden_layers": 3,
        "lru_width": 24,
        "logits_soft_cap": 0.5,
        "attention_window_size": 32,
    },
]


@pytest.mark.parametrize("architecture", MAPPED_LOGITS, ids=lambda a: a["model_type"])
@pytest.mark.parametrize("chunk_tokens", [8, 1000])
def test_capped_and_scaled_logits_equal_those_of_the_class(architecture, chunk_tokens):
    """Logprobs, entropies and gradients, in float32; the engine's logits too."""
    model = make(architecture)
    layout = Layout.build(PROMPTS[1:2], [0, 0], [RESPONSES[1], RESPONSES[2]])
    hidden = model.hidden(layout)
    found = token_logprobs(
        hidden,
        model.output_weight,
        layout.target_U,
        temperature=0.7,
        chunk_tokens=chunk_tokens,
        entropy_grad=True,
        logit_map=model.logit_map,
    )
    wanted = []
    for response in RESPONSES[1:3]:
        logits = model.hf(torch.tensor([PROMPTS[1] + response])).logits[0, len(PROMPTS[1]) - 1 : -1]
        logprobs = (logits / 0.7).log_softmax(-1)
        wanted.append((logprobs.gather(1, torch.tensor(response)[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)))
    expected = [torch.cat(values) for values in zip(*wanted, strict=True)]
    torch.testing.assert_close(found, tuple(expected), atol=1e-5, rtol=0)
    assert model.logit_map != PLAIN
    names = dict(model.hf.named_parameters())
    ours, theirs = (
        torch.autograd.grad((logprob + entropy).mean(), list(names.values()), retain_graph=True)
        for logprob, entropy in (found, expected)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    last = model.hf(torch.tensor([PROMPTS[1]]), use_cache=False).logits[:, -1]
    states = model.hf.base_model(input_ids=torch.tensor([PROMPTS[1]]), use_cache=False).last_hidden_state[:, -1]
    with torch.no_grad():
        torch.testing.assert_close(model.logits(states), last, atol=1e-5, rtol=0)


def test_capped_scores_of_attention_are_capped():
    """Transformers' attention by PyTorch's operator leaves the cap of Gemma 2 out."""
    architecture = {"model_type": "gemma2", **SIZES, "attn_logit_softcapping": 0.02, "query_pre_attn_scalar": 1}
    model = make(architecture)
    plain = make({**architecture, "attn_logit_softcapping": None})
    plain.hf.load_state_dict(model.hf.state_dict())
    reference = auto_class(model.hf_config).from_config(model.hf_config, attn_implementation="eager").eval()
    reference.load_state_dict(model.hf.state_dict())
    layout = Layout.build(PROMPTS[1:2], [0], RESPONSES[1:2])
    ids = torch.tensor([PROMPTS[1] + RESPONSES[1]])
    with torch.no_grad():
        wanted = reference.base_model(input_ids=ids).last_hidden_state[0, len(PROMPTS[1]) - 1 : -1]
        torch.testing.assert_close(model.hidden(layout), wanted, atol=1e-5, rtol=0)
        assert (plain.hidden(layout) - wanted).abs().max() > 0.01


def test_a_bias_of_the_output_layer_is_refused():
    with pytest.raises(DataError, match="a bias of the output layer"):
        make({"model_type": "phi", **SIZES})


def test_logits_changed_in_a_way_that_no_key_tells_are_refused(monkeypatch):
    monkeypatch.setattr("hone.model.hf.LogitMap.of", lambda config: PLAIN)
    with pytest.raises(DataError, match="a change of its logits"):
        make({"model_type": "granite", **SIZES, "logits_scaling": 8.0})
