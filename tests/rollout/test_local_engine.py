"""The engine as the loop sees it: reproducible, cancellable, honest about failure."""

import asyncio
import threading

import pytest
import torch
from tiny_engines import EOS, Gate, generate, letters, random_prompts, request, tiny_model, with_engine

from hone.errors import DataError, EngineError
from hone.model.load import weights_fingerprint


def tokens_of(groups):
    return [[tuple(sample.token_ids) for sample in group] for group in groups]


@pytest.mark.parametrize("architecture", ["qwen3", "gpt_neox"])
def test_a_sample_does_not_depend_on_what_else_is_in_the_batch(architecture):
    model = tiny_model(architecture)
    requests = [request(p, index=i, samples=3, max_tokens=4 + 3 * i) for i, p in enumerate(random_prompts(8))]
    crowd = generate(model, requests)
    assert tokens_of(generate(model, requests[::-1])) == tokens_of(crowd)[::-1]
    assert tokens_of(generate(model, requests, max_concurrent=4)) == tokens_of(crowd)
    assert tokens_of(generate(model, requests, max_concurrent=1)) == tokens_of(crowd)
    for i in (0, 5):
        (alone,) = generate(model, [requests[i]])
        assert tokens_of([alone]) == tokens_of([crowd[i]])
        for mine, theirs in zip(alone, crowd[i], strict=True):
            assert mine.sampler_logprobs == pytest.approx(theirs.sampler_logprobs, abs=1e-5)


def test_samples_of_a_group_differ_and_seed_stream_and_prompt_change_them():
    model, prompt = tiny_model(), random_prompts(1)[0]
    base = request(prompt, samples=4)
    variants = [base, request(prompt, samples=4, seed=8), request(prompt, samples=4, stream="eval")]
    variants.append(request(prompt, samples=4, index=1))
    (group, *others) = tokens_of(generate(model, variants))
    assert len(set(group)) == 4
    assert all(other != group for other in others)


def test_a_repeated_run_is_identical_to_the_last_bit():
    requests = [request(p, index=i, samples=4, max_tokens=30) for i, p in enumerate(random_prompts(8))]
    runs = [generate(tiny_model(), requests, max_concurrent=11) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_prompt_is_computed_once_for_all_its_samples():
    model, seen = tiny_model(), []
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    generate(model, [request(range(1, 21), samples=6, max_tokens=3)], max_concurrent=4)
    assert seen[0] == 20
    assert 20 not in seen[1:]  # although the last two samples started later than the first four


def test_the_cache_is_fullest_before_the_end_and_holds_a_prompt_and_equal_responses_once():
    async def use(engine):
        await engine.generate(request(range(1, 21), samples=6, max_tokens=4, temperature=0.0))
        return engine.cache_use(), engine.cache_use()

    fullest, since = with_engine(tiny_model(), use, eos_ids=())
    assert fullest.tokens == 20 + 3, "six equal responses are one; its last token is never an input"
    assert fullest.room_tokens >= 23 and fullest.room_bytes > 0
    assert since.tokens == 0
    measured = fullest.metrics("engine-0")
    assert measured["memory/engine-0_cache_tokens"] == 23 and "engine/engine-0_prefix_hit_frac" not in measured


def test_every_way_to_end():
    model, prompt = tiny_model(), [5, 6, 7]
    (free,) = generate(model, [request(prompt, max_tokens=20, seed=3)], eos_ids=())[0]
    ids = free.token_ids.tolist()
    third, text = int(free.token_ids[2]), letters(free.token_ids)
    assert EOS not in free.token_ids and third not in free.token_ids[:2]
    ends = {
        "stop_token_ids": request(prompt, max_tokens=20, seed=3, stop_token_ids=(third,)),
        "stop": request(prompt, max_tokens=20, seed=3, stop=("never", text[3:6])),
        "max_tokens": request(prompt, max_tokens=4, seed=3),
    }
    by_token, by_string, by_length = (group[0] for group in generate(model, list(ends.values()), eos_ids=()))
    assert (by_token.token_ids.tolist(), by_token.finish_reason) == (ids[:3], "stop")
    assert (by_string.token_ids.tolist(), by_string.finish_reason) == (ids[:6], "stop")
    assert by_string.text == text[:6]
    assert (by_length.token_ids.tolist(), by_length.finish_reason) == (ids[:4], "length")
    (eos,) = generate(model, [request(prompt, max_tokens=20, seed=3)], eos_ids=(third,))[0]
    assert eos.token_ids.tolist() == ids[:3]


def test_the_text_ends_with_the_stop_string_although_its_last_token_says_more():
    def two_letters(token_ids):
        return "".join(f"{chr(97 + t % 26)}{chr(65 + t % 26)}" for t in token_ids)

    (free,) = generate(tiny_model(), [request([5, 6], max_tokens=8)], decode=two_letters, eos_ids=())[0]
    stop = two_letters(free.token_ids)[3:5]  # the second half of one token, the first of the next
    (cut,) = generate(tiny_model(), [request([5, 6], max_tokens=8, stop=(stop,))], decode=two_letters, eos_ids=())[0]
    assert cut.token_ids.tolist() == free.token_ids[:3].tolist()
    assert cut.text == two_letters(free.token_ids)[:5]


def test_a_response_ends_where_the_positions_of_the_model_do():
    model = tiny_model(max_position_embeddings=24)
    prompt = [1] * 20
    (sample,) = generate(model, [request(prompt, max_tokens=50)], eos_ids=())[0]
    assert (len(sample.token_ids), sample.finish_reason) == (4, "length")
    with pytest.raises(DataError, match=r"24 positions.*max_prompt_tokens"):
        generate(model, [request([1] * 24)])


def test_new_weights_reach_sequences_in_flight_and_their_tokens_say_so():
    model, other, gate = tiny_model(), tiny_model(seed=1), Gate()

    async def use(engine):
        calls = [
            asyncio.create_task(engine.generate(request([3], index=i, max_tokens=n))) for i, n in ((0, 20), (1, 5))
        ]
        await gate.reached()  # both have 5 tokens
        load = asyncio.create_task(engine.load(list(other.named_weights()), 7))
        await asyncio.sleep(0)
        gate.open()
        await load
        assert engine.version == 7
        assert engine.fingerprint() == weights_fingerprint(other.named_weights())
        return [(await call)[0] for call in calls]

    long, short = with_engine(model, use, decode=gate, eos_ids=())
    assert short.versions == ((0, 5),)
    assert long.versions == ((0, 5), (7, 15))
    before = generate(tiny_model(), [request([3])], eos_ids=())[0][0]
    assert long.token_ids[:5].tolist() == before.token_ids[:5].tolist()


def test_shared_weights_need_only_a_version_and_stay_trainable():
    model = tiny_model()

    async def use(engine):
        (first,) = await engine.generate(request([3, 4]))
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.5)
        await engine.load(None, 1)
        (second,) = await engine.generate(request([3, 4]))
        return first, second

    first, second = with_engine(model, use)
    assert [span.version for span in (*first.versions, *second.versions)] == [0, 1]
    assert first.sampler_logprobs.tolist() != second.sampler_logprobs.tolist()
    model.output_weight.square().sum().backward()
    assert model.output_weight.grad is not None


def test_each_sample_is_reported_as_it_is_finished():
    told, gate = [], Gate()

    async def use(engine):
        ragged = request([3, 4], samples=6, max_tokens=40)
        call = asyncio.create_task(engine.generate(ragged, lambda sample: told.append((sample, call.done()))))
        await gate.reached()
        assert not told
        gate.open()
        samples = await call
        assert [sample for sample, _ in sorted(told, key=lambda each: each[0].index)] == list(samples)
        return samples

    samples = with_engine(tiny_model(), use, decode=gate)
    lengths = [len(sample.token_ids) for sample, _ in told]
    assert lengths == sorted(lengths) and len(set(lengths)) > 1  # in the order of finishing
    assert not any(is_done for _, is_done in told)
    assert samples == generate(tiny_model(), [request([3, 4], samples=6, max_tokens=40)])[0]  # telling changes nothing


def test_a_cancelled_call_frees_its_rows_and_disturbs_no_other():
    def requests():
        return [request(p, index=i, samples=2, max_tokens=3 + 20 * i) for i, p in enumerate(random_prompts(4))]

    expected, gate = generate(tiny_model(), requests(), eos_ids=()), Gate()

    async def use(engine):
        calls = [asyncio.create_task(engine.generate(r)) for r in requests()]
        await gate.reached()
        calls[1].cancel()  # in flight
        calls[3].cancel()  # still waiting for a row
        await asyncio.sleep(0)
        gate.open()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError) and isinstance(results[3], asyncio.CancelledError)
        await engine.sleep()  # would refuse if a row were still live
        return [results[0], results[2]]

    kept = with_engine(tiny_model(), use, decode=gate, max_concurrent=4, eos_ids=())
    assert tokens_of(kept) == tokens_of([expected[0], expected[2]])


@pytest.mark.parametrize("architecture", ["qwen3", "gpt_neox"])
def test_cancelling_before_anything_started(architecture):
    async def use(engine):
        call = asyncio.create_task(engine.generate(request([1, 2])))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return await engine.generate(request([1, 2]))

    assert len(with_engine(tiny_model(architecture), use)) == 1


def test_sleep_frees_the_cache_and_refuses_work_until_wake():
    async def use(engine):
        (before,) = await engine.generate(request([1, 2]))
        await engine.sleep()
        with pytest.raises(EngineError, match="asleep"):
            await engine.generate(request([1, 2]))
        await engine.wake()
        assert await engine.generate(request([1, 2])) == (before,)
        call = asyncio.create_task(engine.generate(request([1, 2], max_tokens=90)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="in flight"):
            await engine.sleep()
        await call

    with_engine(tiny_model(), use, eos_ids=())


def test_a_failure_in_the_worker_reaches_every_caller_and_later_ones():
    def decode(token_ids):
        raise RuntimeError("tokenizer is broken")

    async def use(engine):
        calls = (engine.generate(request([1], index=i, max_tokens=2 + i)) for i in range(3))
        results = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(EngineError, match="tokenizer is broken"):
            await engine.generate(request([1]))
        return results

    for error in with_engine(tiny_model(), use, decode=decode):
        assert isinstance(error, EngineError)
        assert "RuntimeError: tokenizer is broken" in str(error)


def test_after_weights_that_do_not_fit_nothing_is_sampled_until_a_whole_version_came():
    async def use(engine):
        with pytest.raises(DataError, match=r"weights: .*what\.weight"):
            await engine.load([("what.weight", torch.zeros(1))], 1)
        assert engine.version == 0
        sampling = asyncio.create_task(engine.generate(request([1])))
        done, _ = await asyncio.wait({sampling}, timeout=0.2)
        assert not done
        await engine.load(tiny_model(seed=1).named_weights(), 2)
        (sample,) = await sampling
        assert sample.token_versions() == [2] * len(sample.token_ids)

    with_engine(tiny_model(), use)


def test_close_fails_what_is_in_flight_and_may_be_called_twice():
    gate = Gate()

    async def use(engine):
        calls = [
            asyncio.create_task(engine.generate(request([1], index=i, max_tokens=n))) for i, n in ((0, 90), (1, 2))
        ]
        await gate.reached()
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        gate.open()
        await closing
        with pytest.raises(EngineError, match="closed"):
            await calls[0]
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request([1]))
        await calls[1]
        await engine.close()

    with_engine(tiny_model(), use, decode=gate, eos_ids=())


def test_an_engine_without_a_sign_of_life_is_given_up():
    stuck = threading.Event()

    def decode(token_ids):
        stuck.wait(20)
        return ""

    async def use(engine):
        try:
            with pytest.raises(EngineError, match=r"no step in 0\.2 s"):
                await engine.generate(request([1], max_tokens=1))
        finally:
            stuck.set()

    with_engine(tiny_model(), use, decode=decode, timeout_s=0.2)


def test_finished_groups_are_delivered_while_others_continue():
    async def use(engine):
        done = []

        async def one(index, max_tokens):
            await engine.generate(request([1, 2], index=index, max_tokens=max_tokens))
            done.append(index)

        await asyncio.gather(one(0, 90), one(1, 2))
        return done

    assert with_engine(tiny_model(), use, eos_ids=()) == [1, 0]
