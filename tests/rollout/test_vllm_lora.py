"""An adapter alone inside vLLM, version by version. Real vLLM."""

import asyncio

import pytest
import tiny_engines
import torch
from tiny_engines import random_prompts, request
from vllm_engines import Vllm, model_for_vllm, save

from hone.config.run import LoraSection
from hone.errors import EngineError
from hone.model.fingerprint import weights_fingerprint
from hone.model.lora import add_adapter, merged_copy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

LORA = LoraSection(rank=4, publish="adapter")
REQUESTS = [request(p, index=i, temperature=0.0, max_tokens=12) for i, p in enumerate(random_prompts(6))]


@pytest.fixture(scope="module")
def base():
    return model_for_vllm(seed=0)


@pytest.fixture(scope="module")
def vllm(base, tmp_path_factory):
    vllm = Vllm(save(base, tmp_path_factory.mktemp("model") / "hf"), adapter=LORA)
    yield vllm
    vllm.close()


def with_adapter(seed):
    """The base with an adapter that changes what it computes."""
    model = model_for_vllm(seed=0)
    add_adapter(model, LORA, seed=seed, dtype=torch.float32)
    assert model.adapter is not None
    generator = torch.Generator().manual_seed(seed)
    for name in model.adapter.names:
        model.adapter.factors(name)[1].normal_(0, 0.2, generator=generator)
    return model


def samples_as(vllm, model):
    for (mine,), (theirs,) in zip(vllm.generate(REQUESTS), tiny_engines.generate(model, REQUESTS), strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.sampler_logprobs == pytest.approx(theirs.sampler_logprobs, abs=1e-3)


def test_each_version_of_an_adapter_computes_as_the_merged_weights_do(vllm, base):
    assert not vllm.engine.opens_buckets
    samples_as(vllm, base)
    seen = []
    for version, model in [(1, with_adapter(1)), (2, with_adapter(2))]:
        adapter = dict(model.adapter.weights())
        vllm.load(list(adapter.items()), version)
        assert vllm.engine.version == version
        assert vllm.engine.fingerprint() == weights_fingerprint(adapter.items())
        samples_as(vllm, merged_copy(model))
        seen.append([tuple(group[0].token_ids) for group in vllm.generate(REQUESTS)])
    assert seen[0] != seen[1]


def test_requests_in_flight_continue_with_the_new_adapter(vllm):
    first, second = with_adapter(3), with_adapter(4)
    vllm.load(list(first.adapter.weights()), 3)

    async def use():
        long = [asyncio.create_task(vllm.engine.generate(request([5, 6], index=i, max_tokens=80))) for i in range(8)]
        await asyncio.sleep(0.05)
        await vllm._send(list(second.adapter.weights()), 4)
        return [(await task)[0] for task in long]

    versions = {version for sample in vllm.run(use()) for version in sample.token_versions()}
    assert versions <= {3, 4} and 4 in versions
    samples_as(vllm, merged_copy(second))


def test_what_is_no_adapter_is_refused_and_the_last_one_stays(vllm, base):
    model = with_adapter(5)
    vllm.load(list(model.adapter.weights()), 5)
    with pytest.raises(EngineError, match="is not a tensor of an adapter"):
        vllm.load(base, 6)
    with pytest.raises(EngineError, match="two matrices"):
        vllm.load(list(model.adapter.weights())[:-1], 6)
    assert vllm.engine.version == 5
    samples_as(vllm, merged_copy(model))
