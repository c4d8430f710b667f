"""Two ranks that divide a model's layers, or its tokens, make of a microbatch what one process makes of it."""

from dataclasses import replace

import pytest
import torch
from parallel_cases import SIZES, Case, Found, found, refusal, sums_in_layers, vocabulary
from transformers import LlamaConfig

from hone.errors import DataError
from hone.model.parallel import refuse_indivisible
from hone.plan.activations import Pass, saved_per_token
from hone.plan.families import architecture_from

LONG = ((tuple(range(50)) * 6,), (0, 0), (tuple(range(60)) * 2, tuple(range(20, 60)) * 3))


def assert_same(ranks: list[Found], alone: Found) -> None:
    for one in ranks:
        torch.testing.assert_close(one.logprobs_U, alone.logprobs_U, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(one.entropy_U, alone.entropy_U, rtol=1e-10, atol=1e-10)
        assert list(one.gradients) == list(alone.gradients)
        for name, gradient in one.gradients.items():
            torch.testing.assert_close(gradient, alone.gradients[name], rtol=1e-9, atol=1e-9, msg=name)


# ---- layers --------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.slow("ranks, close to test_sharded_pair")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(keys={"tie_word_embeddings": True}), id="tied, norms of q and k"),
        pytest.param(Case("qwen2", {"tie_word_embeddings": False}), id="untied, biases of q, k and v"),
        pytest.param(Case("llama", {"attention_bias": True, "mlp_bias": True}), id="biases everywhere"),
        pytest.param(Case(keys={"vocab_size": 61, "tie_word_embeddings": True}), id="odd vocabulary"),
        pytest.param(Case(checkpointing="full"), id="activations made again"),
        pytest.param(Case(checkpointing="selective"), id="some made again"),
        pytest.param(
            Case(keys={"tie_word_embeddings": True}, implementation="transformers"),
            id="Transformers' own, tied",
        ),
        pytest.param(Case("phi3", implementation="transformers"), id="Transformers' own, fused"),
        pytest.param(Case("olmo2", implementation="transformers"), id="Transformers' own, norms over all heads"),
        pytest.param(Case(lora=True), id="adapter"),
        pytest.param(
            Case("llama", {"attention_bias": True, "mlp_bias": True}, checkpointing="selective", lora=True),
            id="adapter, biases, some made again",
        ),
        pytest.param(Case(lora=True, targets=("k_proj", "down_proj")), id="adapter of some parts"),
        pytest.param(Case(implementation="transformers", lora=True), id="Transformers' own, adapter"),
        pytest.param(
            Case("phi3", implementation="transformers", lora=True),
            id="Transformers' own, fused, adapter",
        ),
    ],
)
def test_divided_layers_compute_what_whole_ones_do(pair, case):
    alone = found(case)
    ranks = pair(found, case, {"tensor": 2})
    assert_same(ranks, alone)
    assert all(one.weight_numbers < 0.62 * alone.weight_numbers for one in ranks)


def test_each_layer_is_summed_over_ranks_twice_each_way(pair):
    """And the embedding once: q, k and v do not send their gradients of the same input one by one."""
    assert pair(sums_in_layers, Case(), 2) == [2 * 2 * 2 + 1] * 2


@pytest.mark.parametrize("size", [16, 13])
@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_logprobs_of_a_divided_vocabulary(pair, size, chunk_tokens):
    alone = vocabulary(size, chunk_tokens, False)
    for ours in pair(vocabulary, size, chunk_tokens, True):
        torch.testing.assert_close(ours, alone, rtol=1e-12, atol=1e-12)


def test_a_class_without_a_plan_is_refused(pair):
    for said in pair(refusal, Case("gpt2", implementation="transformers")):
        assert said.startswith("DataError") and "gpt2 cannot be divided: it has no plan" in said


def test_heads_that_do_not_divide_are_refused_with_the_nearest_that_do():
    config = LlamaConfig(hidden_size=48, num_attention_heads=12, num_key_value_heads=4, intermediate_size=64)
    for tensor, sequence in ((1, 1), (2, 1), (2, 2), (1, 4)):
        refuse_indivisible(config, tensor_parallel=tensor, sequence_parallel=sequence)
    with pytest.raises(DataError, match=r"tensor_parallel must divide the model's 4 key-value .*Nearest: 2 or 4"):
        refuse_indivisible(config, tensor_parallel=3)
    with pytest.raises(DataError, match=r"sequence_parallel must .* / tensor_parallel = 2 \(got 3\). Nearest: 2"):
        refuse_indivisible(config, tensor_parallel=2, sequence_parallel=3)
    with pytest.raises(DataError, match=r"trainer.tensor_parallel must divide the model's feed-forward width 66"):
        refuse_indivisible(LlamaConfig(num_attention_heads=4, intermediate_size=66), tensor_parallel=4)


# ---- tokens --------------------------------------------------------------------------------------------------------


GEMMA = {"sliding_window": 4, "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 1024}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(), id="ragged"),
        pytest.param(Case("qwen2", {"tie_word_embeddings": True}, checkpointing="full"), id="made again"),
        pytest.param(Case(checkpointing="selective"), id="some made again"),
        pytest.param(Case(lora=True), id="adapter"),
        pytest.param(Case(samples=(((3,),), (0,), ((1,),))), id="one token, which one rank has"),
        pytest.param(Case(samples=(((3, 4, 5),), (0, 0), ((), (2, 3)))), id="an empty response"),
        pytest.param(Case(samples=LONG), id="long"),
        pytest.param(Case(implementation="transformers"), id="Transformers' own"),
        pytest.param(
            Case("mistral", {"sliding_window": 5}, implementation="transformers", samples=LONG, checkpointing="full"),
            id="Transformers' own, sliding window, made again",
        ),
        pytest.param(
            Case("gemma3_text", GEMMA, implementation="transformers", lora=True, checkpointing="selective"),
            id="Transformers' own, windows here and there, adapter",
        ),
        pytest.param(Case("gpt2", GPT2, implementation="transformers"), id="Transformers' own, learnt positions"),
        pytest.param(
            Case(implementation="transformers", samples=(((3,),), (0,), ((1,),))), id="Transformers' own, one token"
        ),
    ],
)
def test_divided_tokens_compute_what_all_of_them_do(pair, case):
    assert_same(pair(found, case, {"sequence": 2}), found(case))


WIDE = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "num_hidden_layers": 4}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_activations_of_divided_tokens_take_half_the_memory(pair, checkpointing):
    case = Case(keys=WIDE, samples=LONG, checkpointing=checkpointing)
    alone = found(case)
    ranks = pair(found, case, {"sequence": 2})
    assert sum(one.saved_bytes for one in ranks) < 1.1 * alone.saved_bytes  # q, k, v and output are kept twice
    assert all(one.saved_bytes < 0.6 * alone.saved_bytes for one in ranks)  # all responses stand in the second half
    assert all(one.weight_numbers == alone.weight_numbers for one in ranks)


@pytest.mark.parametrize("divided", [{}, {"tensor": 2}, {"sequence": 2}], ids=str)
def test_plans_know_what_a_layer_keeps(pair, divided):
    """Two layers more keep so much more; numbers of eight bytes, for the arithmetic here is float64."""
    few, more = (Case(keys=WIDE | {"num_hidden_layers": layers}, samples=LONG) for layers in (2, 4))
    ranks = [pair(found, case, divided) if divided else [found(case)] for case in (few, more)]
    kept = sum(b.saved_bytes - a.saved_bytes for a, b in zip(*ranks, strict=True))
    tensor, sequence = divided.get("tensor", 1), divided.get("sequence", 1)
    arch = architecture_from({"model_type": "qwen3", **SIZES, **WIDE})
    work = Pass(arch, "hone", 8, 576 // sequence, 240, 419, tensor_parallel=tensor, sequence_parallel=sequence)
    assert kept == pytest.approx(2 * len(ranks[0]) * work.tokens * saved_per_token(work), rel=0.02)


@pytest.mark.parametrize(
    ("model_type", "keys", "why"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of the kind conv"),
        ("bloom", {"n_head": 4}, "not in Transformers' registry"),
    ],
)
def test_classes_that_mix_tokens_in_other_ways_are_refused(pair, model_type, keys, why):
    for said in pair(refusal, Case(model_type, keys, implementation="transformers"), "sequence"):
        assert said.startswith("DataError") and why in said


@pytest.mark.parametrize(
    ("case", "divided"),
    [
        pytest.param(Case(), {"sequence": 4}, id="two exchange heads, two chunks go round"),
        pytest.param(Case(keys={"num_key_value_heads": 1}), {"sequence": 4}, id="four chunks go round"),
        pytest.param(Case(samples=LONG), {"sequence": 4}, id="long"),
        pytest.param(Case(keys={"num_key_value_heads": 1}, samples=LONG), {"sequence": 4}, id="long, four chunks"),
        pytest.param(Case(checkpointing="full", lora=True, samples=LONG), {"sequence": 4}, id="made again, adapter"),
        pytest.param(Case(checkpointing="selective"), {"sequence": 4}, id="some made again"),
        pytest.param(Case(samples=LONG), {"tensor": 2, "sequence": 2}, id="beside divided layers"),
        pytest.param(Case(samples=(((3,),), (0,), ((1,),))), {"sequence": 4}, id="one token"),
    ],
)
def test_more_ranks_than_key_value_heads_send_chunks_round(four, case, divided):
    assert_same(four(found, case, divided), found(case))


def test_a_ring_is_hones_own_decoders(four):
    for said in four(refusal, Case(implementation="transformers"), "sequence"):
        assert said.startswith("DataError") and "sequence_parallel must divide" in said


def test_layers_and_tokens_together(four):
    """Four ranks: each has a quarter of the heads."""
    case = Case(keys={"num_key_value_heads": 4})
    assert_same(four(found, case, {"tensor": 2, "sequence": 2}), found(case))
    assert_same(four(found, case, {"sequence": 4}), found(case))
    of_class = replace(case, implementation="transformers", lora=True)
    assert_same(four(found, of_class, {"tensor": 2, "sequence": 2}), found(of_class))
    assert_same(four(found, case, {"tensor": 4}), found(case))  # 62 tokens: the vocabulary stays whole
