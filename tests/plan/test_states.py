"""Layers with states: parameters, cache and activations against Transformers' classes, Hone's engine and trainer."""

import numpy as np
import pytest
import torch
from measuring import allocated
from model_zoo import DELTA_RULE, SIZES, TEXT
from test_local_measured import GROUP, PROMPT_TOKENS, PROMPTS, RESPONSE_TOKENS, random_batch
from transformers import AutoConfig, AutoModelForCausalLM

from hone.algo.algorithm import Algorithm
from hone.config.algorithm import AlgorithmSection
from hone.config.run import LoraSection, OptimizerSection
from hone.errors import DataError
from hone.model.load import init_model
from hone.model.lora import add_adapter
from hone.plan import local
from hone.plan.activations import Pass
from hone.plan.architecture import adapter_parameters, architecture_from
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
}
GIVEN = ("num_attention_heads", "vocab_size", "intermediate_size", "max_position_embeddings")
"""What every config.json has; of other keys the plan knows what the class fills in."""


@pytest.mark.parametrize("name", COUNTED)
def test_counts_are_those_of_the_class(name):
    keys = dict(COUNTED[name])
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    given = {key: getattr(config, key) for key in GIVEN} | keys | {"model_type": config.model_type}
    assert architecture_from(given).total_parameters == sum(p.numel() for p in model.parameters())
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
TRAINED = {
    "lfm2": {**SHAPE, "layer_types": ["conv", "conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {**SHAPE, **DELTA_RULE, "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
}
TRAINED["qwen3_5_text"] |= {"linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 16}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full", 1])
@pytest.mark.parametrize("family", TRAINED)
def test_update_and_logprobs_take_what_is_planned(family, checkpointing, precision):
    keys = {"model_type": family, **TRAINED[family], "num_hidden_layers": len(TRAINED[family]["layer_types"])}
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


def test_states_leave_less_room_for_tokens():
    arch = architecture_from({"model_type": "lfm2", **TEXT["lfm2"]})
    share, each = 10_000, arch.kv_bytes_per_token(bytes_each=4)
    assert most_within(2 * share, arch, 4, rows=0) == share // each
    assert most_within(2 * share, arch, 4, rows=5) == (share - 5 * arch.state_bytes(4)) // each
    assert most_within(2 * share, arch, 4, rows=1000) == 0


def test_kinds_of_layers_that_are_not_known_are_refused():
    with pytest.raises(DataError, match=r"layer_types must name each of 2 layers, as full_attention or conv \(got"):
        architecture_from({"model_type": "lfm2", **TEXT["lfm2"], "layer_types": ["conv", "chunked_attention"]})
