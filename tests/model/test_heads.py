"""Scalar heads: the score is of the last token whatever is shared, and Transformers reads the same from disk."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from hone.errors import DataError
from hone.model.heads import ScalarModel, Sequences, last_token_scores, load_scalar_model, reward_config
from hone.model.layout import Layout
from hone.model.load import init_model, save_hf

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
FAMILIES = [
    [(5, 6, 7, 8), (5, 6, 9), (5, 6, 7, 8)],  # identical ones are computed once
    [(3, 4), (3, 4, 10, 11)],  # one is the beginning of the other
    [(4, 5), (6, 7, 8)],  # nothing shared
    [(12,)],
]
EVERY = [sequence for family in FAMILIES for sequence in family]


def make_model(model_type="qwen3", implementation="hone", tied=False, dtype=torch.float64):
    keys = {"model_type": model_type, "tie_word_embeddings": tied, **SIZES}
    body = init_model(keys, vocab_size=13, seed=0, dtype=dtype, device="cpu", implementation=implementation)
    model = ScalarModel(body)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=dtype) * 0.3)
    return model


def alone(model, sequence):
    return last_token_scores(model, Sequences.of([[sequence]]), np.arange(1))


@pytest.mark.parametrize("implementation", ["hone", "transformers"])
def test_a_score_does_not_depend_on_what_is_computed_with_it(implementation):
    model = make_model(implementation=implementation)
    together = last_token_scores(model, Sequences.of(FAMILIES), np.arange(len(EVERY)))
    assert torch.allclose(together, torch.cat([alone(model, s) for s in EVERY]), rtol=1e-9)
    some = np.array([1, 4, 5])
    assert torch.allclose(last_token_scores(model, Sequences.of(FAMILIES), some), together[some], rtol=1e-9)


def test_shared_beginnings_are_computed_once():
    sequences = Sequences.of(FAMILIES)
    assert sequences.prompts == ((5, 6), (3, 4), (4, 5), (6, 7, 8), (12,))
    assert sequences.prompt_S.tolist() == [0, 0, 0, 1, 1, 2, 3, 4]
    layout = Layout.from_flat(sequences.prompts, sequences.prompt_S, sequences.length_S, sequences.token_ids_T)
    assert sorted(layout.token_ids_X.tolist()) == sorted([5, 6, 7, 8, 9, 3, 4, 10, 11, 4, 5, 6, 7, 8, 12])


def test_a_new_head_gives_one_score_to_all_and_a_critic_has_one_per_token():
    body = init_model({"model_type": "qwen3", **SIZES}, vocab_size=13, seed=0, dtype=torch.float32, device="cpu")
    model = ScalarModel(body)
    values = model(Layout.build([[5, 6]], [0, 0], [[7, 8, 9], [10]]))
    assert values.tolist() == [0.0] * 4


@pytest.mark.parametrize("implementation", ["hone", "transformers"])
def test_the_output_layer_is_gone_or_at_rest(implementation):
    model = make_model(implementation=implementation)
    model(Layout.build([[5, 6]], [0], [[7, 8]])).sum().backward()
    idle = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert idle == []


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_the_same_scores(model_type, tied, tmp_path):
    model = make_model(model_type, tied=tied, dtype=torch.float32)
    config = reward_config(model.hf_config, pad_id=0, form="text")
    config.hone_reward_mean = 0.25
    save_hf(tmp_path / "rm", config, model.named_weights())
    hf, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert hf.config.num_labels == 1 and hf.config.hone_reward_mean == 0.25 and hf.config.hone_reward_form == "text"
    padded = torch.zeros(len(EVERY), 4, dtype=torch.int64)
    for row, sequence in zip(padded, EVERY, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    with torch.no_grad():
        theirs = hf(input_ids=padded, attention_mask=(padded > 0).long()).logits[:, 0]
        ours = last_token_scores(model, Sequences.of(FAMILIES), np.arange(len(EVERY)))
    assert torch.allclose(ours, theirs, atol=1e-5)
    again = load_scalar_model(tmp_path / "rm", dtype=torch.float32, device="cpu")
    for (name, weight), (other, reloaded) in zip(model.named_weights(), again.named_weights(), strict=True):
        assert name == other and torch.equal(weight, reloaded)


def test_a_directory_without_a_head_is_no_reward_model(tmp_path):
    body = init_model({"model_type": "qwen3", **SIZES}, vocab_size=13, seed=0, dtype=torch.float32, device="cpu")
    save_hf(tmp_path / "policy", body.hf_config, body.named_weights())
    with pytest.raises(DataError, match=r"score\.weight, the head of a reward model, is missing"):
        load_scalar_model(tmp_path / "policy", dtype=torch.float32, device="cpu")


def test_other_architectures_are_refused_with_the_reason():
    with pytest.raises(DataError, match=r"stage reward_model: .*model_type gpt2 is not one of"):
        reward_config(AutoConfig.for_model("gpt2"), pad_id=0, form="text")
