"""Prompts with pictures in vLLM, against Transformers' own forward pass. Real vLLM.

vLLM's classes of these models import torchvision; `make test-vllm` gives these tests a folder with it.
"""

from importlib.util import find_spec

import pytest
import torch
from pictures import for_vllm, forward, picture, prompt_with, save_seeing_model
from vllm_engines import Vllm

from hone.config.engine import VLLM_VISION_MODELS
from hone.model.load import load_model
from hone.rollout.engine import Request, Sampling

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision: make test-vllm"),
]
MARK = 42
"""Token that stands at pictures in the models of `save_seeing_model`."""


@pytest.fixture(scope="module", params=[*sorted(VLLM_VISION_MODELS), "qwen2_5_vl tied"])
def running(request, tmp_path_factory):
    """Two models of a family, and vLLM with the first's weights."""
    kind, _, tied = request.param.partition(" ")
    sizes = {**for_vllm(kind), "tie_word_embeddings": bool(tied)}
    folders = [tmp_path_factory.mktemp("model") for _ in range(2)]
    for seed, folder in enumerate(folders):
        save_seeing_model(folder, kind, seed=seed, sizes=sizes)
    vllm = Vllm(folders[0], picture_pixels=(28 * 28, 28 * 28 * 64))
    yield [load_model(folder, dtype=torch.float32, device="cpu") for folder in folders], vllm
    vllm.close()


def prompts_of(model):
    """Without a picture, with one, with three, and twice the same but for the picture, which is in the first block of
    the cache."""
    few, many = picture(model, 0, 2, 3), [picture(model, 1, 1, 4), picture(model, 0, 2, 3), picture(model, 2, 3, 2)]
    twins = [[picture(model, seed, 5, 6)] for seed in (3, 4)]
    return [
        prompt_with(pictures, index=index, mark=MARK)
        for index, pictures in zip((0, 1, 2, 3, 3), ([], [few], many, *twins), strict=True)
    ]


def gap(model, vllm):
    """Largest |sampler's logprob - that of a plain forward pass| over groups of all prompts."""
    sampling = Sampling(8, 1.0, top_k=0, top_p=1.0, min_p=0.0, stop=(), stop_token_ids=())
    requests = [Request(prompt, 3, sampling, seed=7, stream="train") for prompt in prompts_of(model)]
    gaps = []
    for one, group in zip(requests, vllm.generate(requests), strict=True):
        known = [sample for sample in group if MARK not in sample.token_ids]  # Transformers looks for pictures there
        assert len(group) == 3 and known
        for sample in known:
            with torch.no_grad():
                expected = forward(model, one.prompt, sample.token_ids)
            gaps.append((torch.tensor(sample.sampler_logprobs) - expected).abs().max().item())
    return max(gaps)


def test_logprobs_of_prompts_with_pictures_are_transformers_after_each_load(running):
    (first, second), vllm = running
    assert gap(first, vllm) < 1e-4
    assert gap(first, vllm) < 1e-4, "what is in the caches now"
    assert gap(second, vllm) > 1e-2, "these models differ"
    for version, model in ((1, second), (2, first)):
        vllm.load(model, version)
        assert gap(model, vllm) < 1e-4


def test_a_trained_tower_alone_reaches_vllm(running):
    """What older weights made of the same pictures is not read again."""
    (first, second), vllm = running
    if first.hf_config.tie_word_embeddings:
        pytest.skip("the last word predicts itself whatever the pictures are")
    own = dict(first.named_weights())
    both = {n: w for n, w in second.named_weights() if "visual" in n}
    assert both
    vllm.load(list({**own, **both}.items()), 3)
    found = gap(first, vllm)
    first.load_weights({**own, **both}.items())
    assert found > 0.1 and gap(first, vllm) < 1e-4
