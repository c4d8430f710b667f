"""vLLM that schedules ahead: new weights come while a step's tokens are not returned yet. Real vLLM, two steps in
flight, as asynchronous scheduling has them on GPUs; on CPUs vLLM turns that scheduler itself off."""

import asyncio
import threading

import pytest
import tiny_engines
from tiny_engines import random_prompts, request
from vllm_engines import Vllm, model_for_vllm, save

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

BEFORE, TOKENS = 5, 16


@pytest.fixture(scope="module")
def models():
    return model_for_vllm(seed=0), model_for_vllm(seed=1)


@pytest.fixture(scope="module")
def vllm(models, tmp_path_factory):
    from vllm.config import VllmConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmConfig, "max_concurrent_batches", property(lambda config: 2))
        vllm = Vllm(save(models[0], tmp_path_factory.mktemp("model") / "hf"), takes_turns=True)
        yield vllm
        vllm.close()


def in_flight(llm):
    """Tokens of steps that vLLM has launched and not returned."""
    queue = llm.engine_core.engine_core.batch_queue
    return sum(scheduled.total_num_scheduled_tokens for _, scheduled, _ in queue)


@pytest.fixture
def held(vllm, monkeypatch):
    """vLLM's thread stops when it has launched `BEFORE` steps, the last of which is in flight, until it may go on."""
    reached, go, launched = threading.Event(), threading.Event(), 0
    llm, plain = vllm.engine._llm, vllm.engine._llm.step

    def step():
        nonlocal launched
        outputs = plain()
        if in_flight(llm) and not reached.is_set():
            launched += 1
            if launched == BEFORE:
                reached.set()
                go.wait(60)
        return outputs

    monkeypatch.setattr(llm, "step", step)
    yield reached, go
    go.set()


def greedy(model, prompt):
    return tiny_engines.generate(model, [request(prompt, temperature=0.0, max_tokens=TOKENS)])[0][0]


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["told at the end", "followed"])
def test_tokens_in_flight_are_of_the_weights_that_sampled_them(vllm, models, held, stop):
    first, second = models
    vllm.load(first, 0)
    prompt = next(p for p in random_prompts(50) if all(len(greedy(model, p).token_ids) == TOKENS for model in models))
    reached, go = held

    async def use():
        asked = request(prompt, temperature=0.0, max_tokens=TOKENS, stop=stop)
        flying = asyncio.create_task(vllm.engine.generate(asked))
        await asyncio.to_thread(reached.wait, 60)
        loading = asyncio.create_task(vllm._send(list(second.named_weights()), 1))
        await asyncio.sleep(0.5)
        go.set()
        await loading
        return (await flying)[0], (await vllm.engine.generate(request(prompt, temperature=0.0, max_tokens=TOKENS)))[0]

    sample, afterwards = vllm.run(use())
    old, new = greedy(first, prompt), greedy(second, prompt)
    assert len(sample.token_ids) > BEFORE
    assert sample.token_versions() == [0] * BEFORE + [1] * (len(sample.token_ids) - BEFORE)
    assert sample.token_ids[:BEFORE].tolist() == old.token_ids[:BEFORE].tolist()
    assert sample.sampler_logprobs[:BEFORE] == pytest.approx(old.sampler_logprobs[:BEFORE], abs=1e-4)
    assert abs(sample.sampler_logprobs[BEFORE] - old.sampler_logprobs[BEFORE]) > 1e-3, "the next is of other weights"
    assert afterwards.token_ids.tolist() == new.token_ids.tolist()


def test_nothing_is_in_flight_when_it_sleeps(vllm, models):
    vllm.load(models[0], 0)
    vllm.generate([request(prompt, index=i, max_tokens=8) for i, prompt in enumerate(random_prompts(6))])
    vllm.run(vllm.engine.sleep())
    assert in_flight(vllm.engine._llm) == 0 and not vllm.engine._llm.is_sleeping()
    vllm.load(models[1], 1)
    vllm.run(vllm.engine.wake())
    (sample,) = vllm.generate([request([5, 6, 7], temperature=0.0, max_tokens=4)])[0]
    assert set(sample.token_versions()) == {1}
