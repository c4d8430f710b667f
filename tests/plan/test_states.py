"""Layers with states: parameters, cache and activations against Transformers' classes, Hone's engine and trainer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from measuring import allocated
from model_zoo import DELTA_RULE, SIZES, TEXT
from test_local_measured import GROUP, PROMPT_TOKENS, PROMPTS, RESPONSE_TOKENS, random_batch, saved_bytes
from transformers import AutoConfig, AutoModelForCausalLM

from hone.algo.algorithm import Algorithm
from hone.config.algorithm import AlgorithmSection
from hone.config.run import LoraSection, OptimizerSection
from hone.errors import DataError
from hone.model.load import init_model
from hone.model.lora import add_adapter
from hone.plan import local
from hone.plan.activations import Pass, kept_by_layers
from hone.plan.architecture import adapter_parameters
from hone.plan.families import architecture_from
from hone.plan.kv_cache import CacheRoom, most_within
from hone.plan.states import LAYER_KINDS
from hone.rollout.local import make_stepper
from hone.train.learner import Passes
from hone.train.policy import PolicyTrainer
from hone.train.roles import Roles

FEW = {"num_hidden_layers": 6, "hidden_size": 64}
COUNTED = {
    **{family: {"model_type": family, **TEXT[family]} for family in LAYER_KINDS},
    "lfm2 by the class's defaults": {"model_type": "lfm2", **FEW, "intermediate_size": 900, "full_attn_idxs": [2, 4]},
    "lfm2 with biases": {"model_type": "lfm2", **TEXT["lfm2"], "conv_bias": True, "block_auto_adjust_ff_dim": False},
    "qwen3_5 by the class's defaults": {"model_type": "qwen3_5_text", **FEW, "intermediate_size": 96},
    "qwen3_5 with biases": {"model_type": "qwen3_5_text", **TEXT["qwen3_5_text"], "attention_bias": True},
    "qwen3_next by the class's defaults": {"model_type": "qwen3_next", **FEW, "mlp_only_layers": [1]},
    "mamba2 by the class's defaults": {"model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 2},
    "mamba2 with biases": {"model_type": "mamba2", **TEXT["mamba2"], "use_bias": True, "use_conv_bias": False},
    "mamba2, tied": {"model_type": "mamba2", **TEXT["mamba2"], "tie_word_embeddings": True},
    "falcon_h1 by the class's defaults": {"model_type": "falcon_h1", **FEW},
    "falcon_h1 with biases": {
        **{"model_type": "falcon_h1", **TEXT["falcon_h1"], "mamba_d_ssm": None, "mamba_d_head": "auto"},
        **dict.fromkeys(("mamba_rms_norm", "mamba_proj_bias", "projectors_bias", "mlp_bias", "attention_bias"), True),
    },
    "nemotron_h by the class's defaults": {"model_type": "nemotron_h", "hidden_size": 64, "vocab_size": 50},
    "nemotron_h with experts": {
        **{"model_type": "nemotron_h", **TEXT["nemotron_h"], "tie_word_embeddings": True},
        **{"layers_block_type": ["mamba", "moe", "attention", "mlp", "moe"], "n_routed_experts": 5},
        **{"moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 24, "moe_latent_size": 12},
        **dict.fromkeys(("mlp_bias", "use_bias", "attention_bias"), True),
    },
    "nemotron_h as repositories have it": {
        **{"model_type": "nemotron_h", "hidden_size": 64, "hybrid_override_pattern": "M-M*-", "mamba_n_groups": 4},
        **{"intermediate_size": 96, "n_groups": 2, "mamba_d_conv": 3, "mamba_num_heads": 8, "mamba_head_dim": 16},
    },
}
GIVEN = ("num_attention_heads", "vocab_size", "intermediate_size", "max_position_embeddings")
"""What every config.json of a model that has it says; of other keys the plan knows what the class fills in."""


@pytest.mark.parametrize("name", COUNTED)
def test_counts_are_those_of_the_class(name):
    keys = dict(COUNTED[name])
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    given = {key: getattr(config, key) for key in GIVEN if hasattr(config, key)} | keys
    given["model_type"] = config.model_type
    biases = sum(b.numel() for key, b in model.named_buffers() if key.endswith("e_score_correction_bias"))
    assert architecture_from(given).total_parameters == sum(p.numel() for p in model.parameters()) + biases
    assert architecture_from(config.to_dict()) == architecture_from(given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", LAYER_KINDS)
def test_the_cache_of_the_engine_has_what_is_planned(family, dtype):
    """Two prompts, of which one has three samples: a sample has keys, values and states of its own."""
    keys = {"model_type": family, **TEXT[family]}
    model = init_model(keys, vocab_size=None, seed=0, dtype=dtype, device="cpu")
    stepper = make_stepper(model, 4, 64, CacheRoom(96, 96, 4, 4, None, shares_prompts=False))
    with torch.no_grad():
        one, other = stepper.add_prompts([np.array([3, 1, 4, 1, 5], np.int32), np.array([9, 2], np.int32)])
        stepper.add_rows([one, one, one, other], [np.zeros(0, np.int32)] * 4)
        stepper.advance(np.array([5, 6, 7, 8]))
    arch, width = architecture_from(keys), 5 + 1
    each = width * arch.kv_bytes_per_token(bytes_each=dtype.itemsize) + arch.state_bytes(dtype.itemsize)
    assert stepper.cache_use().room_bytes == 4 * each


@pytest.mark.parametrize("family", LAYER_KINDS)
def test_an_adapter_has_as_many_parameters_as_are_planned(family):
    keys = {"model_type": family, **TEXT[family]}
    if family == "qwen3_next":  # of experts adapters have none
        keys |= {"mlp_only_layers": [0, 1]}
    model = init_model(keys, vocab_size=None, seed=0, dtype=torch.float32, device="cpu")
    add_adapter(model, LoraSection(rank=2), seed=0, dtype=torch.float32)
    assert model.adapter is not None
    trained = sum(factor.numel() for _, factor in model.adapter.weights())
    assert adapter_parameters(architecture_from(keys), 2, None) == trained


SHAPE = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 256}
LINEAR = {**SHAPE, **DELTA_RULE, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
LINEAR |= {"num_hidden_layers": 3, "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 16}
NEMOTRON = {key: value for key, value in SHAPE.items() if key != "num_hidden_layers"}
NEMOTRON |= {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 32}
FALCON = {"mamba_n_heads": 6, "mamba_d_head": 24, "mamba_d_ssm": 144, "mamba_n_groups": 2, "mamba_d_state": 16}
MORE = pytest.mark.slow("trains many small models")
QUICK = ("lfm2", "qwen3_5_text", "mamba2")
TRAINED = {
    "lfm2": {
        **{**SHAPE, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3_5_text": LINEAR,
    "qwen3_next": {
        **{**LINEAR, "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    },
    "mamba2": {
        **{key: value for key, value in SHAPE.items() if "head" not in key},
        **{"num_hidden_layers": 4, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 32},
    },
    "mamba2, wide": {
        **{key: value for key, value in SHAPE.items() if "head" not in key},
        **{"model_type": "mamba2", "hidden_size": 128, "num_hidden_layers": 4, "num_heads": 4, "head_dim": 64},
        **{"n_groups": 1, "state_size": 16, "chunk_size": 16},
    },
    "mamba2, one chunk": {
        **{key: value for key, value in SHAPE.items() if "head" not in key},
        **{"model_type": "mamba2", "num_hidden_layers": 3, "num_heads": 4, "head_dim": 32, "n_groups": 1},
        **{"state_size": 16, "chunk_size": 256},
    },
    "falcon_h1": {**SHAPE, **FALCON, "num_hidden_layers": 3, "mamba_chunk_size": 32},
    "falcon_h1, normed": {
        **{"model_type": "falcon_h1", **SHAPE, **FALCON, "mamba_rms_norm": True, "mamba_d_state": 64},
        **{"num_hidden_layers": 3, "mamba_chunk_size": 64},
    },
    "nemotron_h": {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"]},
    "nemotron_h with experts": {
        **{"model_type": "nemotron_h", **NEMOTRON, "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe"]},
        **{"n_routed_experts": 4, "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 40},
    },
}


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=MORE), "bfloat16"])
@pytest.mark.parametrize(
    "checkpointing", ["selective", *(pytest.param(way, marks=MORE) for way in ("none", "full", 1))]
)
@pytest.mark.parametrize("family", [name if name in QUICK else pytest.param(name, marks=MORE) for name in TRAINED])
def test_update_and_logprobs_take_what_is_planned(family, checkpointing, precision):
    keys = {"model_type": family, **TRAINED[family]}
    model, arch = init_model(keys, vocab_size=None, seed=0, dtype=torch.float32, device="cpu"), architecture_from(keys)
    model.checkpointing = checkpointing
    passes = Passes(precision, tokens_per_microbatch=4096, logprob_chunk_tokens=128, temperature=1.0)
    trainer = Roles(policy=PolicyTrainer(model, passes, optimizer=OptimizerSection(), total_optimizer_steps=10))
    batch, algorithm = random_batch(arch.vocab), Algorithm(AlgorithmSection(), correction="none")
    trainer.update(batch, algorithm)
    update = allocated(lambda: trainer.update(batch, algorithm), scratch=False)
    logprobs = allocated(lambda: trainer.logprobs(batch), scratch=False)
    samples, longest = PROMPTS * GROUP, PROMPT_TOKENS + RESPONSE_TOKENS
    work = Pass(
        arch,
        "transformers",
        4 if precision == "float32" else 2,
        tokens=samples * (longest - 1),
        response_tokens=samples * RESPONSE_TOKENS,
        longest=longest,
        checkpointing=checkpointing,
        chunk_tokens=128,
        rows="padded",
    )
    planned = max(moment.bytes for moment in local.update_moments("", work, [], trained=True))
    passed = max(moment.bytes for moment in local.forward_moments(work, []))
    assert -0.03 < planned / update - 1 < 0.45
    assert -0.03 < passed / logprobs - 1 < 0.45


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_layer_that_attends_keeps_a_mask_of_padded_rows(dtype):
    """And keys and values once per query head; against rows of one length, for which Transformers makes no mask and
    PyTorch's attention no copies."""
    keys = {"model_type": "nemotron_h", **NEMOTRON, "layers_block_type": ["attention"] * 3 + ["mlp"]}
    model = init_model(keys, vocab_size=None, seed=0, dtype=dtype, device="cpu")
    real = torch.ones(2, 96, dtype=torch.int64)
    unequal = real.clone()
    unequal[1, 40:] = 0
    saved = [
        saved_bytes(lambda mask=mask: model.body(torch.zeros_like(mask), attention_mask=mask, use_cache=False))
        for mask in (unequal, real)
    ]
    work = Pass(architecture_from(keys), "transformers", dtype.itemsize, 2 * 96, 1, longest=96, rows="padded")
    planned = kept_by_layers(work)[0] - kept_by_layers(replace(work, rows=None))[0]
    assert saved[0] - saved[1] == pytest.approx(planned, rel=0.02)


def test_states_leave_less_room_for_tokens():
    arch = architecture_from({"model_type": "lfm2", **TEXT["lfm2"]})
    share, each = 10_000, arch.kv_bytes_per_token(bytes_each=4)
    assert most_within(2 * share, arch, 4, rows=0) == share // each
    assert most_within(2 * share, arch, 4, rows=5) == (share - 5 * arch.state_bytes(4)) // each
    assert most_within(2 * share, arch, 4, rows=1000) == 0


def test_kinds_of_layers_that_are_not_known_are_refused():
    with pytest.raises(DataError, match=r"layer_types must name each of 2 layers, as full_attention or conv \(got"):
        architecture_from({"model_type": "lfm2", **TEXT["lfm2"], "layer_types": ["conv", "chunked_attention"]})
