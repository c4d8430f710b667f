"""Adapters against peft on the same numbers: logits, gradients, merging, and the files on disk."""

import copy
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_decoder import SIZES, our_logits, pair, their_logits
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig

from hone.config.run import LoraSection
from hone.errors import DataError
from hone.model.decoder import Decoder
from hone.model.fingerprint import weights_fingerprint
from hone.model.hf import TransformersModel
from hone.model.load import load_model, save_hf
from hone.model.logprobs import token_logprobs
from hone.model.lora import (
    DECODER_LAYERS,
    AdapterOff,
    add_adapter,
    check_targets,
    linear_layers,
    merged_copy,
    refuse_other_adapter,
    save_adapter,
)

TARGETS = [None, ("q_proj",), ("v_proj", "up_proj"), ("k_proj", "o_proj", "gate_proj", "down_proj")]


def settings(targets=None, rank=3, alpha=5.0) -> LoraSection:
    return LoraSection(rank=rank, alpha=alpha, targets=targets)


def adapted(model, targets=None, dtype=torch.float32):
    """The model with an adapter that is not nothing."""
    add_adapter(model, settings(targets), seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    for _, factor in model.adapter.weights():
        factor.normal_(0.0, 0.3, generator=generator)
    return model


def in_peft(theirs, adapter):
    """peft's own model on Transformers' class, with the adapter's numbers."""
    names = sorted({name.rpartition(".")[2] for name in adapter.names})
    config = LoraConfig(r=3, lora_alpha=5, target_modules=names, lora_dropout=0.0, task_type="CAUSAL_LM")
    model = get_peft_model(theirs, config).eval()
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, factor in adapter.weights():
            own[name.replace(".weight", ".default.weight")].copy_(factor)
    return model


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("targets", TARGETS)
def test_logits_and_gradients_equal_pefts(name, targets):
    ours, theirs = pair(name)
    theirs = in_peft(theirs, adapted(ours, targets).adapter)
    mine, true = our_logits(ours), their_logits(theirs)
    torch.testing.assert_close(mine, true, atol=1e-5, rtol=1e-5)
    direction = torch.randn(true.shape, generator=torch.Generator().manual_seed(0))
    mine.backward(direction)
    true.backward(direction)
    trained = [p for p in ours.parameters() if p.requires_grad]
    with torch.no_grad():  # gradients stand where the matrices do, so the matrices' own names lead to them
        for parameter in trained:
            parameter.copy_(parameter.grad)
    reference = {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    got = dict(ours.adapter.weights())
    assert got.keys() == reference.keys()
    for factor, gradient in reference.items():
        torch.testing.assert_close(got[factor], gradient, atol=2e-4, rtol=1e-3, msg=factor)


def test_the_fused_product_has_the_gradient_of_autograd():
    ours, _ = pair("qwen2")
    linear = adapted(ours, ("q_proj", "v_proj")).layers[0].qkv_proj.double()
    linear.weight.requires_grad_(False)
    x = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: linear(x), (x, linear.a, *linear.b))


def test_only_the_adapter_is_trained():
    model, _ = pair("qwen3")
    adapted(model, ("q_proj", "up_proj"))
    trained = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 3 * 4 and sum(map(torch.Size.numel, trained.values())) == 3 * 3 * ((24 + 32) + (24 + 40))
    our_logits(model).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", ["decoder", "llama", "gpt2"])
def test_a_new_adapter_is_nothing_and_a_function_of_the_seed(kind):
    model = make(kind)
    before = [name for name, _ in model.named_weights()]
    fingerprint, logits = weights_fingerprint(model.named_weights()), our_logits(model)
    other = copy.deepcopy(model)
    add_adapter(model, settings(), seed=1, dtype=torch.float32)
    add_adapter(other, settings(), seed=1, dtype=torch.float32)
    assert torch.equal(our_logits(model), logits)
    assert [name for name, _ in model.named_weights()] == before
    assert weights_fingerprint(model.named_weights()) == fingerprint == model.adapter.base
    assert weights_fingerprint(model.adapter.weights()) == weights_fingerprint(other.adapter.weights())
    a = dict(model.adapter.weights())[next(iter(dict(model.adapter.weights())))]
    assert a.abs().max() <= 1 / a.shape[1] ** 0.5 and a.std() > 0.4 / a.shape[1] ** 0.5


def make(kind: str):
    if kind == "decoder":
        return pair("qwen3")[0]
    if kind == "llama":
        return TransformersModel(pair("llama")[1], LlamaConfig(**SIZES))
    keys = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=61, n_embd=24, n_layer=2, n_head=4, n_positions=96, **keys)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    return TransformersModel(model, config)


@pytest.mark.parametrize("kind", ["decoder", "llama", "gpt2"])
def test_merged_weights_compute_the_same_and_off_is_the_base_model(kind):
    model = make(kind)
    base = our_logits(model)
    adapted(model)
    merged = merged_copy(model)
    assert weights_fingerprint(merged.named_weights()) == weights_fingerprint(model.named_weights())
    assert merged.adapter is None and model.adapter is not None
    mine = our_logits(model)
    assert (mine - base).norm() > 0.1 * base.norm()
    torch.testing.assert_close(our_logits(merged), mine, atol=2e-4, rtol=1e-4)
    with torch.no_grad():
        assert torch.equal(our_logits(AdapterOff(model)), base)
    assert torch.equal(our_logits(model), mine)
    assert not list(AdapterOff(model).parameters())


@pytest.mark.parametrize("kind", ["decoder", "llama", "gpt2"])
def test_peft_loads_the_adapter_on_the_exported_base(kind, tmp_path):
    model = make(kind)
    save_hf(tmp_path / "base", model.hf_config, model.own_weights())
    adapted(model)
    save_adapter(tmp_path / "adapter", model, str(tmp_path / "base"))
    save_hf(tmp_path / "merged", model.hf_config, model.named_weights())
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    mine = our_logits(model)
    torch.testing.assert_close(mine, their_logits(theirs.eval()), atol=2e-4, rtol=1e-4)
    merged = load_model(tmp_path / "merged", dtype=torch.float32, device="cpu")
    torch.testing.assert_close(our_logits(merged), mine, atol=2e-4, rtol=1e-4)


def test_in_bfloat16_the_base_is_rounded_and_the_identity_is_not():
    model, theirs = pair("qwen3")
    exact = model.adapter or weights_fingerprint(model.named_weights())
    adapted(model, dtype=torch.bfloat16)
    assert model.adapter.base == exact
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert dict(model.named_weights())["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert {weight.dtype for _, weight in model.named_weights()} == {torch.bfloat16}
    exact = their_logits(in_peft(theirs, model.adapter))
    assert (our_logits(model).float() - exact).norm() < 0.03 * exact.norm()


def test_checkpointing_layers_changes_nothing():
    model = adapted(pair("qwen3")[0])
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = []
    for kind in ("none", "selective", "full"):
        model.checkpointing = kind
        gradients.append(torch.autograd.grad(our_logits(model).square().sum(), trained))
    for recomputed in gradients[1:]:
        torch.testing.assert_close(recomputed, gradients[0], rtol=0, atol=0)


def test_transformers_own_class_trains_its_adapter_too():
    model = adapted(make("llama"))
    ours = adapted(pair("llama")[0])
    for policy in (model, ours):
        our_logits(policy).square().sum().backward()
    mine = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    fused = ours.layers[1].gate_up_proj.b[1].grad
    theirs = mine["hf.model.layers.1.mlp.up_proj.lora_B.default.weight"]
    torch.testing.assert_close(theirs, fused, rtol=1e-3, atol=1e-2)


def test_targets_that_the_model_does_not_have_are_named():
    with pytest.raises(
        DataError, match=r"lora\.targets: this model has no linear layer qq_proj\. It has: q_proj, k_proj"
    ):
        add_adapter(make("decoder"), settings(("q_proj", "qq_proj")), seed=0, dtype=torch.float32)
    gpt2 = make("gpt2").hf_config
    assert check_targets(gpt2, settings(), "auto") == ["c_attn", "c_proj", "c_fc"]
    with pytest.raises(DataError, match="no linear layer q_proj"):
        check_targets(gpt2, settings(("q_proj",)), "auto")
    assert tuple(check_targets(make("decoder").hf_config, settings(), "auto")) == DECODER_LAYERS
    assert tuple(linear_layers(make("llama").hf)) == DECODER_LAYERS


def test_the_output_layer_needs_no_gradient():
    model = adapted(pair("llama")[0])
    assert isinstance(model, Decoder)
    hidden = torch.randn(4, 24, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, model.output_weight, torch.tensor([1, 2, 3, 4]), temperature=1, chunk_tokens=2)
    logprobs.sum().backward()
    assert model.output_weight.grad is None and hidden.grad is not None


@pytest.mark.parametrize("kind", ["decoder", "llama"])
def test_a_saved_adapter_is_started_from(kind, tmp_path):
    model = adapted(make(kind))
    save_adapter(tmp_path, model, "base")
    again = make(kind)
    again.load_weights(model.own_weights())
    add_adapter(again, settings(), seed=7, dtype=torch.float32, start=tmp_path)
    assert torch.equal(our_logits(again), our_logits(model))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (settings(rank=4), r"lora\.rank = 4, but the adapter in lora\.start has 3"),
        (settings(alpha=6.0), r"lora\.alpha = 6, but .* Set lora\.alpha=5"),
        (settings(("q_proj",)), r"down_proj.lora_A.weight has shape \(3, \d+\) there and none here"),
    ],
)
def test_another_adapter_than_the_run_files_is_refused(changed, message, tmp_path):
    save_adapter(tmp_path, adapted(make("decoder")), "base")
    with pytest.raises(DataError, match=message):
        add_adapter(make("decoder"), changed, seed=7, dtype=torch.float32, start=tmp_path)


def test_an_adapter_of_another_kind_is_refused(tmp_path):
    save_adapter(tmp_path, adapted(make("decoder")), "base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(DataError, match=r"another kind \(use_dora\)"):
        refuse_other_adapter(tmp_path, settings())
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(DataError, match=r"lora\.start: .* cannot be read"):
        refuse_other_adapter(tmp_path, settings())
