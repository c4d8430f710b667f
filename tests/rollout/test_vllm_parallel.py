"""vLLM with its weights divided over two processes of its own. Real vLLM."""

import pytest
import tiny_engines
from tiny_engines import random_prompts, request
from vllm_engines import Vllm, model_for_vllm, save

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]


def test_two_ranks_sample_what_one_process_does_with_old_and_new_weights(tmp_path):
    first, second = (model_for_vllm(seed=seed, num_key_value_heads=2) for seed in (0, 1))
    vllm = Vllm(save(first, tmp_path / "hf"), {"tensor_parallel_size": 2})
    requests = [request(p, index=i, temperature=0.0, max_tokens=16) for i, p in enumerate(random_prompts(6))]
    try:
        for model in (first, second, first):
            for (mine,), (theirs,) in zip(vllm.generate(requests), tiny_engines.generate(model, requests), strict=True):
                assert mine.token_ids.tolist() == theirs.token_ids.tolist()
                assert mine.sampler_logprobs == pytest.approx(theirs.sampler_logprobs, abs=1e-4)
            vllm.load(second if model is first else first, vllm.engine.version + 1)
    finally:
        vllm.close()
