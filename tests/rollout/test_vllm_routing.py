"""The experts that vLLM sent tokens to: those that Transformers chooses, and replayed by the trainer. Real vLLM.

Only vLLM's second model runner records them, and that one needs Triton; `make test-vllm` gives these tests a folder
with it, whose kernels Triton's interpreter computes.
"""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from moe_models import moe_model
from test_routing import batch_of, trainer_of
from tiny_engines import random_prompts, request
from vllm_engines import Vllm, save

from hone.experts import UNRECORDED
from hone.types import Group

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: make test-vllm"),
]
MODELS = {
    "qwen3_moe": {"num_hidden_layers": 3, "mlp_only_layers": [0], "num_experts": 8, "num_experts_per_tok": 3},
    "gpt_oss": {},
}
"""The first layer of one has no experts."""
LONGER_THAN_A_BLOCK = 40
"""Tokens of a prompt whose first block is in the cache when its second sample comes."""


@pytest.fixture(scope="module", params=MODELS)
def running(request, tmp_path_factory):
    """Two models of an architecture, and vLLM with the first's weights."""
    models = [moe_model(request.param, seed, **MODELS[request.param]) for seed in (0, 1)]
    folder = save(models[0], tmp_path_factory.mktemp("model") / "hf")
    vllm = Vllm(folder, {"kv_cache_memory_bytes": 2**24}, records_routing=True)
    yield models, vllm
    vllm.close()


def chosen_by(model, ids):
    """The experts that Transformers' forward pass chooses, in order of their numbers."""
    with model.routing.recording() as taken, torch.no_grad():
        model.hf(torch.tensor([list(ids)]))
        return np.sort(taken(), axis=-1)


def check_record(model, prompt, group):
    """Every token's experts but those of the last, which was no input; the prompt's with the first sample."""
    assert [sample.prompt_routing is None for sample in group] == [False] + [True] * (len(group) - 1)
    for sample in group:
        expected = chosen_by(model, [*prompt.token_ids, *sample.token_ids])
        of_prompt = np.sort(group[0].prompt_routing, axis=-1)
        assert np.array_equal(of_prompt, expected[: len(prompt.token_ids)])
        assert sample.routing.dtype == of_prompt.dtype == model.routing.dtype
        assert np.array_equal(np.sort(sample.routing[:-1], axis=-1), expected[len(prompt.token_ids) : -1])
        assert (sample.routing[-1] == UNRECORDED).all()


def requests_of(**sampling):
    generator = np.random.default_rng(0)
    prompts = [*random_prompts(3), generator.integers(1, 48, LONGER_THAN_A_BLOCK).tolist()]
    return [request(prompt, index=index, samples=2, max_tokens=8, **sampling) for index, prompt in enumerate(prompts)]


def test_records_are_the_experts_that_transformers_chooses_for_every_version(running):
    models, vllm = running
    requests = requests_of()
    for version, model in enumerate((models[0], models[1], models[0])):
        if version:
            vllm.load(model, version)
        for one, group in zip(requests, vllm.generate(requests), strict=True):
            check_record(model, one.prompt, group)
    again = vllm.generate(requests[-1:])[0]  # the first block of the prompt comes from the cache
    check_record(models[0], requests[-1].prompt, again)


def test_a_sample_that_ends_with_a_stop_string_has_its_record(running):
    models, vllm = running
    plain = vllm.generate(requests_of())
    stop = plain[3][1].text[2:4]
    requests = requests_of(stop=(stop,))
    vllm.load(models[0], 7)
    groups = vllm.generate(requests)
    assert any(sample.finish_reason == "stop" and sample.token_ids[-1] != 0 for group in groups for sample in group)
    for one, group in zip(requests, groups, strict=True):
        check_record(models[0], one.prompt, group)


def test_replaying_what_vllm_recorded_lessens_the_mismatch_of_rounding(tmp_path):
    """bfloat16 in vLLM, float32 in the trainer: without replay some tokens go to other experts."""
    model = moe_model("qwen3_moe", num_experts=16, num_experts_per_tok=4)
    vllm = Vllm(
        save(model, tmp_path / "hf"), {"kv_cache_memory_bytes": 2**24}, precision="bfloat16", records_routing=True
    )
    try:
        requests = [request(prompt, index=i, samples=4, max_tokens=24) for i, prompt in enumerate(random_prompts(6))]
        sampled = vllm.generate(requests)
    finally:
        vllm.close()
    groups = [
        Group(one.prompt, group).scored({}, (0.0, 1.0, 0.0, 1.0)) for one, group in zip(requests, sampled, strict=True)
    ]
    batch, trainer = batch_of(groups), trainer_of(model)
    replayed_T, anew_T = (
        (trainer.logprobs(one) - one.sampler_logprobs_T).abs() for one in (batch, replace(batch, routing_T=None))
    )
    assert replayed_T.mean() < 0.7 * anew_T.mean()
    assert replayed_T.quantile(0.99) < 0.5 * anew_T.quantile(0.99)
