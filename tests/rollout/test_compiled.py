"""Sampling with compiled kernels between two attentions gives what sampling without them gives."""

import asyncio
import shutil
from types import SimpleNamespace

import pytest
import torch
from needs import needs
from tiny_engines import generate, random_prompts, request, tiny_model

from hone.assemble.sampling import make_engine
from hone.config.run import RolloutSection
from hone.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own


@pytest.mark.slow("compiles a model")
@pytest.mark.timeout(600)
@needs("a C++ compiler", any(map(shutil.which, ("c++", "g++", "clang++"))))
def test_compiled_equals_eager():
    requests = [
        request(prompt, index=i, samples=3, max_tokens=20, temperature=t)
        for t in (0.0, 0.8)
        for i, prompt in enumerate(random_prompts(5))
    ]
    eager = generate(tiny_model(), requests)
    model = tiny_model()
    model.compile_inference()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    compiled = generate(model, requests, timeout_s=400.0, longest_s=500)  # the first step compiles
    assert 2 <= graphs["unique_graphs"] - before <= 8  # one per half and kind of size, however many layers there are
    for ours, theirs in zip(compiled, eager, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.sampler_logprobs == pytest.approx(b.sampler_logprobs, abs=1e-5)


def test_gradients_never_go_through_compiled_kernels():
    model = tiny_model()
    model.compile_inference()

    def fail(*_):
        raise AssertionError("compiled")

    model._compiled = fail, fail
    tokens = torch.arange(4)
    hidden = model(tokens, tokens, lambda layer, q, k, v: q)
    hidden.sum().backward()
    with torch.no_grad(), pytest.raises(AssertionError, match="compiled"):
        model(tokens, tokens, lambda layer, q, k, v: q)


def test_only_our_own_decoder_is_compiled(tmp_path):
    config = SimpleNamespace(rollout=RolloutSection(compile=True))
    with pytest.raises(DataError, match=r"rollout\.compile = true: GPTNeoXConfig"):
        asyncio.run(make_engine(config, None, tiny_model("gpt_neox"), tmp_path))
