"""vLLM as the loop sees it: ends, versions, new weights, cancelling, sleeping. Real vLLM; one engine for all."""

import asyncio
import threading

import pytest
import tiny_engines
import torch
from tiny_engines import EOS, Gate, letters, random_prompts, request
from vllm_engines import Vllm, model_for_vllm, save

from hone.errors import DataError, EngineError
from hone.model.load import weights_fingerprint

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def models():
    return model_for_vllm(seed=0), model_for_vllm(seed=1)


@pytest.fixture(scope="module")
def running(models, tmp_path_factory):
    vllm = Vllm(save(models[0], tmp_path_factory.mktemp("model") / "hf"), takes_turns=True)
    yield vllm
    vllm.close()


@pytest.fixture
def vllm(running, models):
    """With the first model's weights, whatever the test before did."""
    running.load(models[0], 0)
    return running


@pytest.fixture
def gate(vllm):
    """Holds vLLM's thread still when the first sample ends."""
    gate = Gate()
    vllm.engine._decode = gate
    yield gate
    gate.open()
    vllm.engine._decode = letters


def tokens_of(groups):
    return [[tuple(sample.token_ids) for sample in group] for group in groups]


def long_prompts():
    """Of 66 tokens: two whole blocks of vLLM's cache, and two tokens more."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 40, (66,), generator=generator).tolist() for _ in range(50)]


def greedy(model, prompt):
    return tiny_engines.generate(model, [request(prompt, temperature=0.0, max_tokens=24)])[0][0]


def test_it_tells_how_full_its_cache_was_and_what_it_found_there(vllm):
    vllm.engine.cache_use()
    vllm.generate([request(long_prompts()[0], samples=4, max_tokens=8)])
    use = vllm.engine.cache_use()
    assert 66 <= use.tokens < use.room_tokens
    assert use.asked_tokens == 4 * 66 and 0 <= use.found_tokens < use.asked_tokens
    vllm.generate([request(long_prompts()[0], samples=4, max_tokens=8)])
    again = vllm.engine.cache_use()
    assert again.found_tokens >= 4 * 64, "both whole blocks of the prompt, for each sample"


def test_every_way_to_end(vllm, models):
    prompt = [5, 6, 7]
    model = models[0]
    never_eos = [request(prompt, index=i, max_tokens=20) for i in range(40)]
    whole = [(s, i) for i, (s,) in enumerate(vllm.generate(never_eos)) if s.finish_reason == "length"]
    free, index = next((s, i) for s, i in whole if len(set(s.token_ids)) > 9)
    ids, text = free.token_ids.tolist(), letters(free.token_ids)
    cut = next(i for i in range(3, 20) if ids[i] not in ids[:i])
    ends = [
        request(prompt, index=index, max_tokens=20, stop_token_ids=(ids[cut],)),
        request(prompt, index=index, max_tokens=20, stop=("never", text[3:6])),
        request(prompt, index=index, max_tokens=4),
        request(prompt + [1] * 90, index=index, max_tokens=20),
    ]
    by_token, by_string, by_length, by_room = (group[0] for group in vllm.generate(ends))
    assert (by_token.token_ids.tolist(), by_token.finish_reason) == (ids[: cut + 1], "stop")
    end = text.index(text[3:6]) + 3
    assert (by_string.token_ids.tolist(), by_string.finish_reason, by_string.text) == (ids[:end], "stop", text[:end])
    assert (by_length.token_ids.tolist(), by_length.finish_reason) == (ids[:4], "length")
    assert len(by_room.token_ids) == 96 - 93 or by_room.finish_reason == "stop"
    eos = [s for (s,) in vllm.generate(never_eos) if EOS in s.token_ids]
    assert eos and all(
        s.token_ids.tolist().index(EOS) == len(s.token_ids) - 1 and s.finish_reason == "stop" for s in eos
    )
    assert vllm.engine.num_rows == 0 and model.max_positions == 96


def test_draws_are_a_function_of_seed_stream_prompt_and_sample(vllm):
    prompt = random_prompts(1)[0]
    base = request(prompt, samples=4)
    others = [request(prompt, samples=4, seed=8), request(prompt, samples=4, stream="eval")]
    others.append(request(prompt, samples=4, index=1))
    (first, *rest) = tokens_of(vllm.generate([base, *others]))
    assert len(set(first)) == 4
    assert all(other != first for other in rest)
    crowd = [request(p, index=9 + i, samples=5) for i, p in enumerate(random_prompts(7, seed=2))]
    assert tokens_of(vllm.generate([*crowd, base]))[-1] == first


def test_the_samples_of_a_group_share_their_prompts_blocks(vllm, monkeypatch):
    cached, step = [], vllm.engine._llm.step

    def watched():
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs if output.finished)
        return outputs

    monkeypatch.setattr(vllm.engine._llm, "step", watched)
    vllm.generate([request(long_prompts()[0], samples=4, max_tokens=2)])
    assert sorted(cached) == [0, 64, 64, 64]  # two blocks of 32, computed once


def test_samples_and_tokens_are_reported_as_they_come(vllm):
    samples, tokens = [], []

    async def use():
        return await vllm.engine.generate(request([5, 6, 7], samples=3, max_tokens=20), samples.append, tokens.append)

    group = vllm.run(use())
    assert sorted(samples, key=lambda s: s.index) == list(group)
    told = [[(t.id, t.logprob) for t in tokens if t.sample_index == i] for i in range(3)]
    assert told == [list(zip(s.token_ids, s.sampler_logprobs, strict=True)) for s in group]


def test_new_weights_are_sampled_from_and_the_fingerprint_is_the_trainers(vllm, models):
    first, second = models
    requests = [request(p, index=i, temperature=0.0, max_tokens=16) for i, p in enumerate(random_prompts(6))]
    for version, model in ((1, second), (2, first), (3, second)):
        vllm.load(model, version)
        assert vllm.engine.fingerprint() == weights_fingerprint(model.named_weights())
        expected = tiny_engines.generate(model, requests)
        for (mine,), (theirs,) in zip(vllm.generate(requests), expected, strict=True):
            assert mine.token_ids.tolist() == theirs.token_ids.tolist()
            assert mine.sampler_logprobs == pytest.approx(theirs.sampler_logprobs, abs=1e-4)
            assert [span.version for span in mine.versions] == [version]


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["told at the end", "followed"])
def test_tokens_in_flight_carry_the_version_that_sampled_them_and_no_request_reads_older_keys(vllm, models, gate, stop):
    """Six samples are in flight when new weights come; what begins afterwards has a prompt that is in the cache."""
    first, second = models
    swap = 1 if stop else 4  # text is looked at after the first token, or when the first sample has its four
    prompt = next(p for p in long_prompts() if len(greedy(first, p).token_ids) == 24)

    async def use():
        lengths = [4, 24, 24, 24, 24, 24]
        asked = threading.Event()
        vllm.engine._worker.post([lambda: asked.wait(30)])  # all six begin in the same step
        flying = [
            asyncio.create_task(
                vllm.engine.generate(request(prompt, index=i, temperature=0.0, max_tokens=n, stop=stop if i else ()))
            )
            for i, n in enumerate(lengths)
        ]
        await asyncio.sleep(0)
        asked.set()
        await gate.reached()  # each has `swap` tokens
        loading = asyncio.create_task(vllm._send(list(second.named_weights()), 1))
        await asyncio.sleep(0.5)
        gate.open()
        await loading
        afterwards = await vllm.engine.generate(request(prompt, index=9, temperature=0.0, max_tokens=24))
        return [(await task)[0] for task in flying], afterwards[0]

    flying, afterwards = vllm.run(use())
    for sample in flying:
        count = len(sample.token_ids)
        assert sample.token_versions() == [0] * swap + [1] * (count - swap)
    old, new = greedy(first, prompt), greedy(second, prompt)
    crossed = flying[1]
    assert crossed.versions[-1].version == 1
    assert crossed.token_ids[:swap].tolist() == old.token_ids[:swap].tolist()
    assert afterwards.token_ids.tolist() == new.token_ids.tolist()
    assert afterwards.sampler_logprobs == pytest.approx(new.sampler_logprobs, abs=1e-4)


def test_a_cancelled_call_frees_its_rows_and_disturbs_no_other(vllm, gate):
    kept = request([5, 6, 7], index=0, samples=2, max_tokens=30)

    async def use():
        short = asyncio.create_task(vllm.engine.generate(request([8], index=5, max_tokens=1)))
        staying = asyncio.create_task(vllm.engine.generate(kept))
        leaving = asyncio.create_task(vllm.engine.generate(request([9, 9], index=1, samples=6, max_tokens=60)))
        await gate.reached()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        gate.open()
        await short
        return await staying

    group = vllm.run(use())
    assert vllm.engine.num_rows == 0 and not vllm.engine._llm.has_unfinished_requests()
    assert tokens_of([group]) == tokens_of(vllm.generate([kept]))


def test_it_sleeps_wakes_for_weights_and_samples_only_when_all_is_awake(vllm, models, gate):
    engine, one = vllm.engine, request([5, 6, 7], temperature=0.0)

    async def busy():
        flying = asyncio.create_task(engine.generate(request([5], max_tokens=20)))
        other = asyncio.create_task(engine.generate(request([6], index=1, max_tokens=1)))
        await gate.reached()
        sleeping = asyncio.create_task(engine.sleep())
        await asyncio.sleep(0.05)
        gate.open()
        with pytest.raises(EngineError, match="cannot sleep while samples are in flight"):
            await sleeping
        await asyncio.gather(flying, other)

    vllm.run(busy())
    vllm.run(engine.sleep())
    vllm.run(engine.sleep())  # twice is once
    with pytest.raises(EngineError, match="asleep"):
        vllm.run(engine.generate(one))
    with pytest.raises(EngineError, match="discarded on sleep"):
        vllm.run(engine.wake())
    vllm.load(models[1], 7)
    with pytest.raises(EngineError, match="asleep"):
        vllm.run(engine.generate(one))
    vllm.run(engine.sleep())  # its weights alone were awake
    with pytest.raises(EngineError, match="discarded on sleep"):
        vllm.run(engine.wake())
    vllm.load(models[1], 8)
    vllm.run(engine.wake())
    expected = tiny_engines.generate(models[1], [one])
    assert tokens_of(vllm.generate([one])) == tokens_of(expected)


def test_what_cannot_be_sampled_is_refused_and_the_engine_continues(vllm):
    refused = {
        "leaves no room": request([1] * 96),
        "has token 1000000, and the model knows 48": request([5, 10**6]),
        "vLLM applies min_p before top_p": request([5], top_p=0.9, min_p=0.1),
        "vLLM would sample with 0.01": request([5], temperature=0.001),
    }
    for said, one in refused.items():
        with pytest.raises((DataError, EngineError), match=said):
            vllm.run(vllm.engine.generate(one))
    with pytest.raises(EngineError, match="shares no memory"):
        vllm.run(vllm.engine.load(None, 1))
    assert len(vllm.generate([request([5], max_tokens=2)])[0]) == 1
