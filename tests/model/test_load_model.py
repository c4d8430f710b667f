"""Models from and to disk: names, shapes and bytes survive; what cannot be loaded says why."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, Qwen3Config, Qwen3ForCausalLM

from hone.errors import DataError
from hone.model.decoder import Decoder
from hone.model.hf import TransformersModel
from hone.model.layout import Layout
from hone.model.load import (
    describe_model,
    init_config,
    init_model,
    link_with_config,
    load_model,
    read_config,
    save_hf,
    weights_fingerprint,
)
from hone.plan.known_models import known_models, named_config

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8, **SIZES}
CPU_FLOAT32 = {"dtype": torch.float32, "device": "cpu"}
IDS = [3, 1, 4, 1, 5, 9]


@pytest.fixture
def folder(tmp_path):
    """A Qwen3 that Transformers itself wrote, in three shards."""
    torch.manual_seed(0)
    path = tmp_path / "model"
    Qwen3ForCausalLM(Qwen3Config(**QWEN3)).save_pretrained(path, max_shard_size="10KB")
    assert len(list(path.glob("model-*.safetensors"))) >= 3
    return path


def logits(model) -> torch.Tensor:
    """(tokens - 1, V) of IDS, through the interface that both implementations share."""
    layout = Layout.build([IDS[:1]], [0], [IDS[1:]])
    return (model.hidden(layout) @ model.output_weight.T).detach()


def transformers_logits(path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model(torch.tensor([IDS])).logits[0, :-1].detach()


@pytest.mark.parametrize("implementation", ["hone", "transformers"])
def test_sharded_directory_loads_to_the_same_logits(folder, implementation):
    model = load_model(folder, implementation=implementation, **CPU_FLOAT32)
    torch.testing.assert_close(logits(model), transformers_logits(folder), atol=1e-5, rtol=0)


def test_auto_takes_our_decoder_only_where_it_fits(folder):
    assert isinstance(load_model(folder, **CPU_FLOAT32), Decoder)
    assert isinstance(
        init_model({"model_type": "gpt_neox", **SIZES}, vocab_size=None, seed=0, **CPU_FLOAT32), TransformersModel
    )


@pytest.mark.parametrize("tied", [True, False])
def test_export_loads_in_transformers_to_the_same_logits(tmp_path, tied):
    model = init_model({**QWEN3, "tie_word_embeddings": tied}, vocab_size=None, seed=1, **CPU_FLOAT32)
    save_hf(tmp_path / "out", model.hf_config, model.named_weights())
    torch.testing.assert_close(logits(model), transformers_logits(tmp_path / "out"), atol=1e-5, rtol=0)
    again = load_model(tmp_path / "out", **CPU_FLOAT32)
    assert weights_fingerprint(again.named_weights()) == weights_fingerprint(model.named_weights())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("several", [False, True])
def test_generate_of_transformers_stops_where_an_exported_policy_ends(tmp_path, several):
    """The third token of a greedy response ends it, once the export says so."""
    model = init_model({**QWEN3, "initializer_range": 0.3}, vocab_size=None, seed=1, **CPU_FLOAT32)

    def generate(**export) -> list[int]:
        save_hf(tmp_path / "out", model.hf_config, model.named_weights(), **export)
        hf = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        return hf.generate(torch.tensor([IDS]), max_new_tokens=12, do_sample=False)[0, len(IDS) :].tolist()

    endless = generate()
    assert len(endless) == 12 and endless[2] not in endless[:2]
    never = next(token for token in range(40) if token not in endless)
    eos_ids = (never, endless[2]) if several else (endless[2],)
    assert generate(eos_ids=eos_ids) == endless[:3]
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["eos_token_id"] == (list(eos_ids) if several else eos_ids[0])
    assert config["pad_token_id"] == eos_ids[0]


def test_export_replaces_an_older_one_and_keeps_the_dtype(tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        model = init_model(QWEN3, vocab_size=None, seed=1, dtype=dtype, device="cpu")
        save_hf(tmp_path / "out", model.hf_config, model.named_weights())
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}


def test_init_depends_on_the_seed_alone():
    def fingerprint(seed: int, global_seed: int) -> str:
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        model = init_model(QWEN3, vocab_size=None, seed=seed, **CPU_FLOAT32)
        assert torch.equal(torch.get_rng_state(), before)
        return weights_fingerprint(model.named_weights())

    assert fingerprint(0, 1) == fingerprint(0, 2) != fingerprint(1, 1)


def test_init_follows_the_architecture():
    model = init_model({**QWEN3, "initializer_range": 0.1}, vocab_size=7, seed=0, **CPU_FLOAT32)
    weights = dict(model.named_weights())
    assert model.vocab_size == 7 and weights["model.embed_tokens.weight"].shape == (7, 16)
    assert weights["model.layers.0.mlp.gate_proj.weight"].std().item() == pytest.approx(0.1, rel=0.2)
    assert weights["model.layers.0.self_attn.q_norm.weight"].tolist() == [1.0] * 8


def test_bfloat16_starts_from_the_same_random_numbers():
    full = init_model(QWEN3, vocab_size=None, seed=0, **CPU_FLOAT32)
    half = init_model(QWEN3, vocab_size=None, seed=0, dtype=torch.bfloat16, device="cpu")
    for (_, a), (_, b) in zip(full.named_weights(), half.named_weights(), strict=True):
        assert torch.equal(a.bfloat16(), b)


def test_fingerprint_sees_every_bit_name_shape_and_dtype():
    weight = torch.arange(6.0).view(2, 3)
    prints = {
        weights_fingerprint([(name, value)])
        for name, value in [
            ("a", weight),
            ("b", weight),
            ("a", weight.view(3, 2)),
            ("a", weight.view(torch.int32)),
            ("a", torch.nextafter(weight, weight + 1)),
        ]
    }
    assert len(prints) == 5
    assert weights_fingerprint([("a", weight.T.contiguous().T)]) == weights_fingerprint([("a", weight)])


def test_missing_shard_is_named(folder):
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(DataError, match=rf"1 of \d+ shards are missing \({shard.name}\).*Fetch"):
        load_model(folder, **CPU_FLOAT32)


@pytest.mark.parametrize("implementation", ["hone", "transformers"])
def test_shard_cut_short_is_named(folder, implementation):
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(DataError, match=rf"{shard.name}: corrupt or cut short.*Fetch"):
        load_model(folder, implementation=implementation, **CPU_FLOAT32)


@pytest.mark.parametrize("implementation", ["hone", "transformers"])
def test_missing_weight_is_named(folder, implementation):
    model = load_model(folder, **CPU_FLOAT32)
    shutil.rmtree(folder)
    save_hf(folder, model.hf_config, [(n, w) for n, w in model.named_weights() if n != "model.norm.weight"])
    with pytest.raises(DataError, match=r"missing, model\.norm\.weight among them"):
        load_model(folder, implementation=implementation, **CPU_FLOAT32)


def test_weights_of_another_size_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    with pytest.raises(DataError, match=r"mlp\.\w+_proj\.weight has shape .*24.* wants .*32.*config\.json"):
        load_model(folder, **CPU_FLOAT32)


def test_pickled_weights_are_refused(folder):
    for shard in folder.glob("*.safetensors*"):
        shard.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"pytorch_model\.bin, a pickle.*Convert"):
        load_model(folder, **CPU_FLOAT32)


def test_what_is_no_model_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for path, message in [
        (tmp_path / "empty", "no config.json"),
        (tmp_path / "file", "is not a directory"),
        (tmp_path / "absent", "is not a directory"),
    ]:
        with pytest.raises(DataError, match=message):
            load_model(path, **CPU_FLOAT32)
    with pytest.raises(DataError, match=r"model\.init: no model_type"):
        init_model(SIZES, vocab_size=None, seed=0, **CPU_FLOAT32)
    with pytest.raises(DataError, match=r"model\.init: .*qwen33"):
        init_model({**QWEN3, "model_type": "qwen33"}, vocab_size=None, seed=0, **CPU_FLOAT32)


def test_repository_code_runs_only_when_allowed(folder):
    config = json.loads((folder / "config.json").read_text())
    custom = {**config, "model_type": "custom", "auto_map": {"AutoConfig": "custom.Config"}}
    (folder / "config.json").write_text(json.dumps(custom))
    (folder / "custom.py").write_text("raise SystemExit('ran')")
    with pytest.raises(DataError, match="trust_remote_code"):
        load_model(folder, **CPU_FLOAT32)


def test_unsupported_models_are_refused_where_ours_is_demanded():
    with pytest.raises(DataError, match=r"model_type gpt_neox.*model\.implementation"):
        init_model({"model_type": "gpt_neox", **SIZES}, vocab_size=None, seed=0, implementation="hone", **CPU_FLOAT32)


def test_load_weights_is_strict():
    model = init_model(QWEN3, vocab_size=None, seed=0, **CPU_FLOAT32)
    weights = list(model.named_weights())
    with pytest.raises(DataError, match="came twice"):
        model.load_weights([*weights, weights[0]])
    with pytest.raises(DataError, match="is not a weight of this architecture"):
        model.load_weights([*weights, ("model.extra.weight", torch.zeros(1))])
    model.load_weights([(name, weight + 1) for name, weight in weights])


def test_one_file_directory(tmp_path):
    model = init_model({"model_type": "gpt_neox", **SIZES}, vocab_size=None, seed=0, **CPU_FLOAT32)
    model.hf_config.save_pretrained(tmp_path)
    save_file({n: w.clone() for n, w in model.named_weights()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert isinstance(model.hf_config, GPTNeoXConfig)
    torch.testing.assert_close(logits(load_model(tmp_path, **CPU_FLOAT32)), logits(model), atol=1e-6, rtol=0)


def test_a_new_model_says_which_class_it_is():
    assert init_config({"model_type": "qwen3"}, vocab_size=12).architectures == ["Qwen3ForCausalLM"]


def test_a_key_of_the_wrong_type_is_an_error_of_the_run_file_or_of_the_directory(tmp_path):
    with pytest.raises(DataError, match=r"model.init: .*'hidden_size'"):
        init_config({"model_type": "qwen3", "hidden_size": "wide"}, vocab_size=12)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": "wide"}))
    with pytest.raises(DataError, match="'hidden_size'"):
        load_model(tmp_path, **CPU_FLOAT32)


@pytest.mark.parametrize("implementation", ["hone", "transformers"])
def test_keys_of_the_config_are_replaced_and_exported(folder, tmp_path, implementation):
    override = {"max_position_embeddings": 128, "rope_parameters": {"rope_theta": 50.0}}
    plain = load_model(folder, implementation=implementation, **CPU_FLOAT32)
    model = load_model(folder, implementation=implementation, override=override, **CPU_FLOAT32)
    assert (model.max_positions, plain.max_positions) == (128, 64)
    assert model.hf_config.rope_parameters["rope_theta"] == 50.0
    assert weights_fingerprint(model.named_weights()) == weights_fingerprint(plain.named_weights())
    assert not torch.equal(logits(model), logits(plain)), "other frequencies"
    save_hf(tmp_path / "export", model.hf_config, model.named_weights())
    assert torch.equal(
        logits(load_model(tmp_path / "export", implementation=implementation, **CPU_FLOAT32)), logits(model)
    )
    assert describe_model(folder, override=override)["model type"] == "qwen3"
    with pytest.raises(DataError, match=r"model\.override: qwen3 has no key max_positions"):
        load_model(folder, override={"max_positions": 3}, **CPU_FLOAT32)


def test_a_directory_with_another_config_has_the_same_weights(folder, tmp_path):
    config = read_config(folder, override={"max_position_embeddings": 128})
    link_with_config(folder, tmp_path / "start", config)
    assert json.loads((tmp_path / "start" / "config.json").read_text())["max_position_embeddings"] == 128
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 64
    linked, plain = (load_model(path, **CPU_FLOAT32) for path in (tmp_path / "start", folder))
    assert weights_fingerprint(linked.named_weights()) == weights_fingerprint(plain.named_weights())


def test_a_misspelled_key_of_an_architecture_is_named():
    with pytest.raises(DataError, match=r"num_hiden_layers: unknown key of qwen3\. Did you mean num_hidden_layers\?"):
        init_config({**QWEN3, "num_hiden_layers": 1}, vocab_size=None)
    # Keys of another family, which nothing reads, are no misspelled ones.
    assert init_config({**QWEN3, "moe_intermediate_size": 8, "n_experts": 2}, vocab_size=None).model_type == "qwen3"


def test_a_model_has_a_layer():
    with pytest.raises(DataError, match=r"num_hidden_layers: must be at least 1 \(got 0\)"):
        init_config({**QWEN3, "num_hidden_layers": 0}, vocab_size=None)


@pytest.mark.parametrize("name", known_models())
def test_keys_of_known_models_are_not_taken_for_misspelled(name):
    assert init_config(named_config(name, Path(), "model"), vocab_size=None).model_type
