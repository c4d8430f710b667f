"""What vLLM samples, against the embedded engine, Transformers, and a plain forward pass. Real vLLM."""

import pytest
import tiny_engines
import torch
from tiny_engines import VOCAB, random_prompts, reference_of, request, warped
from vllm_engines import Vllm, model_for_vllm, save

from hone.rollout.engine import Request

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

TRUNCATIONS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.05},
]


def with_random_biases(model):
    """Qwen2 has biases, and a new model's are 0."""
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.named_weights():
        if name.endswith("bias"):
            weight.normal_(0, 0.3, generator=generator)
    return model


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen2", "qwen3-tied"])
def pair(request, tmp_path_factory):
    """A model, and vLLM with the same weights in float32."""
    name, _, tied = request.param.partition("-")
    model = with_random_biases(model_for_vllm(name, tie_word_embeddings=bool(tied)))
    vllm = Vllm(save(model, tmp_path_factory.mktemp("model") / "hf"))
    yield model, vllm
    vllm.close()


def gaps_to_reference(model, requests, groups, dtype=torch.float32, **truncation):
    """|sampler's logprob - that of a plain forward pass| of every token."""
    hf, gaps = reference_of(model, dtype), []
    for one, group in zip(requests, groups, strict=True):
        prompt = list(one.prompt.token_ids)
        for sample in group:
            with torch.no_grad():
                logits = hf(torch.tensor([prompt + list(sample.token_ids)])).logits[0, len(prompt) - 1 : -1].float()
            expected = warped(logits, **truncation).log_softmax(-1)
            expected = expected.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            gaps.append((torch.tensor(sample.sampler_logprobs) - expected).abs())
    return torch.cat(gaps)


def test_greedy_is_the_embedded_engines_token_for_token(pair):
    model, vllm = pair
    requests = [request(p, index=i, temperature=0.0, max_tokens=24) for i, p in enumerate(random_prompts(9))]
    for mine, theirs in zip(vllm.generate(requests), tiny_engines.generate(model, requests), strict=True):
        assert mine[0].token_ids.tolist() == theirs[0].token_ids.tolist()
        assert mine[0].finish_reason == theirs[0].finish_reason
        assert mine[0].text == theirs[0].text
        assert mine[0].sampler_logprobs == pytest.approx(theirs[0].sampler_logprobs, abs=1e-4)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_logprobs_are_of_the_distribution_really_sampled_from(pair, truncation):
    model, vllm = pair
    requests = [request(p, index=i, samples=4, max_tokens=16, **truncation) for i, p in enumerate(random_prompts(5))]
    groups = vllm.generate(requests)
    assert [sample.index for sample in groups[0]] == [0, 1, 2, 3]
    gaps = gaps_to_reference(model, requests, groups, **truncation)
    assert len(gaps) > 60 and gaps.max() < 1e-4


def test_greedy_and_truncated_samples_in_one_batch_keep_their_own_distributions(pair):
    model, vllm = pair
    kinds = [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {}]
    requests = [request([5, 6, 7], index=i, samples=2, **kind) for i, kind in enumerate(kinds)]
    for one, group, kind in zip(requests, vllm.generate(requests), kinds, strict=True):
        assert gaps_to_reference(model, [one], [group], **kind).max() < 1e-4


def test_tokens_come_as_often_as_they_are_likely(pair):
    model, vllm = pair
    drawn = request([9, 4, 30], samples=400, max_tokens=1, top_k=6)
    first = torch.tensor([sample.token_ids[0] for sample in vllm.generate([drawn])[0]])
    with torch.no_grad():
        expected = warped(reference_of(model)(torch.tensor([[9, 4, 30]])).logits[0, -1:], top_k=6).softmax(-1)[0]
    found = torch.bincount(first, minlength=VOCAB) / 400
    assert (found - expected).abs().max() < 0.1  # 4 standard deviations of a frequency of 0.5 in 400
    assert not found[expected == 0].any()


def test_bfloat16_stays_near_the_trainers_own_arithmetic(tmp_path):
    model = model_for_vllm()
    vllm = Vllm(save(model, tmp_path / "hf"), precision="bfloat16")
    try:
        requests = [request(p, index=i, samples=4, max_tokens=24) for i, p in enumerate(random_prompts(8))]
        gaps = gaps_to_reference(model, requests, vllm.generate(requests), torch.bfloat16)
        assert gaps.mean() < 3e-2
    finally:
        vllm.close()


def test_a_continued_sample_continues_with_other_draws(pair):
    _, vllm = pair
    whole = request([5, 6, 7], samples=3, max_tokens=10)
    turned = Request(whole.prompt, 1, whole.sampling, whole.seed, whole.stream, first_sample=2, first_position=4)
    (third, again, later) = (vllm.generate([one])[0] for one in (whole, whole, turned))
    assert third == again
    assert [sample.index for sample in later] == [2]
    assert later[0].token_ids[:6].tolist() != third[2].token_ids[:6].tolist()


def test_weights_loaded_later_are_the_same_as_weights_started_with(pair):
    """In every architecture: fused, biased, tied."""
    model, vllm = pair
    other = model_for_vllm(model.hf_config.model_type, seed=5, tie_word_embeddings=model.hf_config.tie_word_embeddings)
    requests = [request(p, index=i, temperature=0.0, max_tokens=24) for i, p in enumerate(random_prompts(9))]
    for version, new in ((1, with_random_biases(other)), (2, model)):
        vllm.load(new, version)
        for mine, theirs in zip(vllm.generate(requests), tiny_engines.generate(new, requests), strict=True):
            assert mine[0].token_ids.tolist() == theirs[0].token_ids.tolist()
            assert mine[0].sampler_logprobs == pytest.approx(theirs[0].sampler_logprobs, abs=1e-4)
