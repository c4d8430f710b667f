"""Ranks whose models are made without memory hold, to the bit, what they would of whole models."""

import pytest
from cases import ARCHITECTURE
from filling_cases import Case, differences, model_of, peak_growth_mib, refusal
from safetensors.torch import load_file, save_file

from hone.model.load import save_hf

UNTIED = {"tie_word_embeddings": False}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8}

pytestmark = pytest.mark.slow("two and four ranks, the four with a model of 156 MiB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model directory in bfloat16, as they are published."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    model = model_of(Case(keys=UNTIED), "cpu")
    save_hf(folder, model.hf_config, ((name, weight.bfloat16()) for name, weight in model.named_weights()))
    return folder


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(critic=True), id="random, tied, critic"),
        pytest.param(Case(keys=UNTIED, precision="bfloat16", critic=True), id="random, untied, bfloat16, critic"),
        pytest.param(Case(keys={"model_type": "qwen2"}, mesh={"tensor_parallel": 2}), id="tensor parallel, biases"),
        pytest.param(Case(lora=True, precision="bfloat16"), id="adapter"),
        pytest.param(Case(lora=True, mesh={"tensor_parallel": 2}), id="tensor parallel, adapter"),
        pytest.param(Case(offload=("parameters", "reference")), id="offload"),
        pytest.param(Case("transformers", critic=True), id="transformers"),
        pytest.param(Case("transformers", lora=True, keys=UNTIED), id="transformers, adapter"),
        pytest.param(Case("transformers", mesh={"tensor_parallel": 2}), id="transformers, tensor parallel"),
        pytest.param(Case("transformers", keys=EXPERTS, precision="bfloat16"), id="transformers, experts"),
    ],
)
def test_filled_ranks_hold_what_whole_models_would_give_them(pair, case):
    assert pair(differences, case) == [[], []]


@pytest.mark.parametrize("implementation", ["hone", "transformers"])
def test_files_are_read_by_every_rank_for_itself(pair, folder, implementation):
    assert pair(differences, Case(implementation, folder, critic=True, precision="bfloat16")) == [[], []]


@pytest.mark.parametrize("implementation", ["hone", "transformers"])
def test_files_that_do_not_fit_are_refused_by_every_rank(pair, folder, tmp_path, implementation):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    for said in pair(refusal, Case(implementation, broken)):
        assert "DataError" in said and "1 " in said and "model.norm.weight" in said and "missing" in said


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(critic=True), id="four shards"),
        pytest.param(Case(mesh={"shard": 2}), id="replicas"),
        pytest.param(Case(mesh={"tensor_parallel": 2}), id="shards of divided layers"),
        pytest.param(Case(mesh={"sequence_parallel": 2}, lora=True), id="divided tokens, adapter"),
        pytest.param(Case("transformers", mesh={"shard": 2, "tensor_parallel": 2}), id="transformers"),
    ],
)
def test_four_ranks(four, case):
    assert four(differences, case) == [[]] * 4


@pytest.mark.parametrize("on_disk", [True, False])
def test_no_rank_has_the_whole_model(four, tmp_path, on_disk):
    """Of a policy of 156 MiB, of its moments and its reference each of four ranks has a quarter, at any time."""
    keys = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8}
    case = Case(keys={**ARCHITECTURE, **keys, "num_key_value_heads": 8, "head_dim": 64})
    model = model_of(case, "cpu")
    size_mib = sum(p.nbytes for p in model.parameters()) / 2**20
    if on_disk:
        save_hf(tmp_path / "hf", model.hf_config, model.named_weights())
        case = Case(folder=tmp_path / "hf")
    del model
    filled, whole = four(peak_growth_mib, case, "meta"), four(peak_growth_mib, case, "cpu")
    print(f"{size_mib:.0f} MiB model, policy and reference: {filled} against {whole} MiB")
    kept_mib = (2 + 2) / 4 * size_mib  # with two moments
    assert all(growth > 2.2 * size_mib for growth in whole)
    # From disk, the pages of its share of the file are this process's as long as it reads.
    assert all(growth < kept_mib + (0.65 if on_disk else 0.15) * size_mib for growth in filled)
