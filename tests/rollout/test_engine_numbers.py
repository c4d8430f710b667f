"""What the engine samples, against Transformers' `generate` and against a plain forward pass."""

import pytest
import torch
from tiny_engines import ARCHITECTURES, EOS, generate, random_prompts, reference_of, request, tiny_model, warped
from transformers import GenerationConfig

ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES)


@ARCHITECTURE
def test_greedy_equals_transformers_generate_token_for_token(architecture):
    model, prompts = tiny_model(architecture), random_prompts(9)
    groups = generate(model, [request(p, index=i, temperature=0.0, max_tokens=24) for i, p in enumerate(prompts)])
    hf, config = (
        reference_of(model),
        GenerationConfig(do_sample=False, max_new_tokens=24, eos_token_id=EOS, pad_token_id=EOS),
    )
    for prompt, (sample,) in zip(prompts, groups, strict=True):
        out = hf.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), generation_config=config)
        assert list(sample.token_ids) == out[0, len(prompt) :].tolist()
        assert sample.finish_reason == ("stop" if sample.token_ids[-1] == EOS else "length")


@ARCHITECTURE
@pytest.mark.parametrize(
    "truncation",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_logprobs_are_of_the_distribution_really_sampled_from(architecture, truncation):
    model, prompts = tiny_model(architecture), random_prompts(5)
    groups = generate(
        model,
        [request(p, index=i, samples=4, max_tokens=16, **truncation) for i, p in enumerate(prompts)],
        max_concurrent=7,
    )
    hf, gaps = reference_of(model), []
    for prompt, group in zip(prompts, groups, strict=True):
        assert [sample.index for sample in group] == [0, 1, 2, 3]
        for sample in group:
            with torch.no_grad():
                logits = hf(torch.tensor([prompt + list(sample.token_ids)])).logits[0, len(prompt) - 1 : -1]
            expected = warped(logits, **truncation).log_softmax(-1)
            expected = expected.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            gaps.append((torch.tensor(sample.sampler_logprobs) - expected).abs().max())
    assert max(gaps) < 1e-5
