"""Sampling of models with layers of linear attention, convolution or state space, against Transformers' `generate`."""

from typing import Any

import pytest
import torch
from model_zoo import architecture as keys_of
from tiny_engines import EOS, generate, random_prompts, reference_of, request
from transformers import GenerationConfig

from hone.model.load import init_model

WITH_STATES = ["qwen3_5_text", "lfm2", "mamba2", "qwen3_next", "mamba", "olmo_hybrid", "falcon_h1", "bamba", "jamba"]
WITH_STATES += ["granitemoehybrid", "nemotron_h"]
CLAMPS = {"nemotron_h": {"time_step_min": 1e-6}}
"""Transformers 5.19 clamps Nemotron-H's time steps from below in a forward pass and not in a decoding step, so that its
own `generate` differs from its own forward pass by up to 0.003 nats with the default of 0.001."""
STATEFUL = pytest.mark.parametrize(
    "architecture",
    WITH_STATES[:2] + [pytest.param(n, marks=pytest.mark.slow("builds many architectures")) for n in WITH_STATES[2:]],
)


@STATEFUL
def test_layers_with_states_sample_as_transformers_generates(architecture):
    """Prompts of several lengths in one wave, groups that fork from one prefill, rows that end at other times."""
    keys = keys_of(architecture) | CLAMPS.get(architecture, {})
    model = init_model(keys, vocab_size=None, seed=0, dtype=torch.float32, device="cpu")
    prompts = random_prompts(4, longest=9)
    greedy = generate(model, [request(p, index=i, temperature=0.0, max_tokens=8) for i, p in enumerate(prompts)])
    hf: Any = reference_of(model)
    config = GenerationConfig(do_sample=False, max_new_tokens=8, eos_token_id=EOS, pad_token_id=EOS)
    for prompt, (sample,) in zip(prompts, greedy, strict=True):
        out = hf.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), generation_config=config)
        assert list(sample.token_ids) == out[0, len(prompt) :].tolist()
    groups = generate(model, [request(p, index=i, samples=3, max_tokens=6 + i) for i, p in enumerate(prompts)])
    for prompt, group in zip(prompts, groups, strict=True):
        for sample in group:
            with torch.no_grad():
                ids = torch.tensor([prompt + list(sample.token_ids)])
                logprobs = hf(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.sampler_logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["mamba2", "mamba"])
def test_a_residual_stream_in_float32_is_sampled_from_with_weights_in_bfloat16(architecture):
    """Mamba's classes have one (`residual_in_fp32`), and convert it where the output layer begins."""
    model = init_model(keys_of(architecture), vocab_size=None, seed=0, dtype=torch.bfloat16, device="cpu")
    prompts = random_prompts(2, longest=9)
    groups = generate(model, [request(p, index=i, samples=2, max_tokens=6) for i, p in enumerate(prompts)])
    hf: Any = reference_of(model, torch.bfloat16)
    assert hf.config.residual_in_fp32
    for prompt, group in zip(prompts, groups, strict=True):
        for sample in group:
            with torch.no_grad():
                ids = torch.tensor([prompt + list(sample.token_ids)])
                logprobs = hf(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.sampler_logprobs), expected, atol=0.1, rtol=0)
