"""Mixture-of-experts models in vLLM: new weights, as a trainer publishes them, compute what the trainer computes."""

import pytest
import torch
from moe_models import moe_model
from tiny_engines import random_prompts, request
from vllm_engines import Vllm, save

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

SIZES = {
    "qwen3_moe": {"moe_intermediate_size": 40},  # which vLLM pads: its kernel takes multiples of 32
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},  # all that its kernel has on a CPU
    "gpt_oss": {},
}


@pytest.mark.parametrize("architecture", SIZES)
def test_new_weights_of_a_mixture_of_experts_compute_what_the_trainer_computes(architecture, tmp_path, monkeypatch):
    # On CPUs with AMX vLLM takes a kernel of bfloat16 alone for DeepSeek's attention.
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    first, second = (moe_model(architecture, seed, **SIZES[architecture]) for seed in (0, 1))
    vllm = Vllm(save(first, tmp_path / "hf"), {"kv_cache_memory_bytes": 2**24})
    requests = [request(prompt, temperature=1.0, max_tokens=8) for prompt in random_prompts(4)]
    try:
        for version, model in enumerate((first, second, first)):
            if version:
                vllm.load(model, version)
            for one, group in zip(requests, vllm.generate(requests), strict=True):
                for sample in group:
                    ids = torch.tensor([[*one.prompt.token_ids, *sample.token_ids]])
                    with torch.no_grad():
                        logits = model.hf(ids).logits[0, len(one.prompt.token_ids) - 1 : -1]
                    tokens = torch.tensor(sample.token_ids)[:, None]
                    expected = logits.log_softmax(-1).gather(1, tokens)[:, 0]
                    torch.testing.assert_close(torch.tensor(sample.sampler_logprobs), expected, atol=2e-3, rtol=0)
    finally:
        vllm.close()
