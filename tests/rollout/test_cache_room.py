"""A cache without room for all: samples wait, or leave and come back, and are the same as with room for all."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_engines import VOCAB, generate, random_prompts, request, tiny_model, with_engine

from hone.errors import DataError
from hone.plan.kv_cache import CacheRoom, columns_for
from hone.rollout.cache import Region
from hone.rollout.decoding import DecoderStepper
from hone.rollout.local import whole_room
from hone.rollout.rows import Rows

LONGEST = CacheRoom(prompt_tokens=20, response_tokens=40, prompts=64, samples=64)


def bounded(tokens):
    return replace(LONGEST, most_tokens=tokens)


def requests(count=3, samples=3, **sampling):
    sampling = {"max_tokens": 40} | sampling
    return [request(p, index=i, samples=samples, **sampling) for i, p in enumerate(random_prompts(count))]


def same(found, expected):
    for group, other in zip(found, expected, strict=True):
        for a, b in zip(group, other, strict=True):
            assert (a.index, a.finish_reason, a.text, a.versions) == (b.index, b.finish_reason, b.text, b.versions)
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.sampler_logprobs == pytest.approx(b.sampler_logprobs, abs=1e-5)
    return True


MORE = pytest.mark.slow("more of the same samples in other caches")


@pytest.fixture
def watched(monkeypatch):
    """Samples that left a row, and most tokens that were laid out, of the engines of a test."""
    seen = {"left": 0, "most": 0}
    leave, lay_out = Rows.leave, Region.lay_out

    def counted(self, row):
        seen["left"] += 1
        leave(self, row)

    def measured(self, slots, columns, *, live):
        lay_out(self, slots, columns, live=live)
        seen["most"] = max(seen["most"], self.tokens + self._other.tokens)

    monkeypatch.setattr(Rows, "leave", counted)
    monkeypatch.setattr(Region, "lay_out", measured)
    return seen


@pytest.mark.parametrize("tokens", [70, pytest.param(90, marks=MORE), pytest.param(240, marks=MORE)])
def test_samples_are_the_same_in_a_cache_of_any_size(tokens, watched):
    model, asked = tiny_model(), requests()
    expected = generate(model, asked, eos_ids=())
    assert not watched["left"]
    watched["most"] = 0
    assert same(generate(model, asked, eos_ids=(), room=bounded(tokens)), expected)
    assert watched["most"] <= tokens
    assert watched["left"]


@MORE
def test_ragged_samples_with_stops_are_the_same(watched):
    model = tiny_model()
    asked = [
        *requests(4, 4, temperature=1.2),
        *(replace(one, first_sample=9, first_position=3) for one in requests(3, 2, stop=("BC",), max_tokens=25)),
        *requests(2, 1, temperature=0.0, max_tokens=7),
    ]
    expected = generate(model, asked)
    for tokens in (110, 200):
        assert same(generate(model, asked, room=bounded(tokens)), expected)
    assert watched["left"]


def test_the_newest_samples_leave_first(monkeypatch):
    leave, move, left, in_order = Rows.leave, Rows.move, [], []

    def leaves(self, row):
        ages = list(zip(self.job_number.tolist(), self.sample_index.tolist(), strict=True))[: self.count]
        in_order.append(ages[row] == max(set(ages) - set(left)))
        left.append(ages[row])
        leave(self, row)

    def moves(self, *arguments):
        left.clear()
        move(self, *arguments)

    monkeypatch.setattr(Rows, "leave", leaves)
    monkeypatch.setattr(Rows, "move", moves)
    generate(tiny_model(), requests(6, 2), eos_ids=(), room=bounded(180))
    assert len(in_order) > 1 and all(in_order)


def test_tokens_keep_their_versions_and_logprobs_over_a_change_of_weights(watched):
    """Rows that left before new weights came continue under these, from what they had."""
    model, other = tiny_model(), tiny_model(seed=1)

    async def use(engine):
        tasks = [asyncio.create_task(engine.generate(one)) for one in requests()]
        while not watched["left"]:
            await asyncio.sleep(0.001)
        await engine.load(list(other.named_weights()), 1)
        return await asyncio.gather(*tasks)

    found = with_engine(model, use, eos_ids=(), room=bounded(150))
    changed = 0
    for group, asked in zip(found, requests(), strict=True):
        expected = generate(tiny_model(), [asked], eos_ids=())[0]
        for sample, before in zip(group, expected, strict=True):
            versions = sample.token_versions()
            old = versions.count(0)
            changed += 0 < old < 40
            assert versions == [0] * old + [1] * (40 - old)
            assert sample.token_ids[:old].tolist() == before.token_ids[:old].tolist()
            assert sample.sampler_logprobs[:old] == pytest.approx(before.sampler_logprobs[:old], abs=1e-5)
    assert changed


def test_a_sample_that_comes_back_is_drawn_from_the_new_weights_with_all_it_has_read():
    """After a change of weights its earlier tokens are read by the new ones too."""
    model, other = tiny_model(), tiny_model(seed=1)
    stepper, whole = (DecoderStepper(one, 4, room=whole_room(one, 4)) for one in (model, other))
    prompt, begun = (5, 9, 17), np.array([3, 8, 2, 11], np.int32)
    with torch.no_grad():
        stepper.add_prompts([prompt])
        model.load_weights(list(other.named_weights()))
        logits = stepper.add_rows(stepper.add_prompts([prompt]), [begun])
        expected = whole.add_rows(whole.add_prompts([(*prompt, *begun.tolist())]), [()])
    assert torch.allclose(logits, expected, atol=1e-5)


def test_rows_that_come_back_among_others_continue_as_alone():
    model, chance = tiny_model(), np.random.default_rng(0)
    prompts = [tuple(chance.integers(1, VOCAB, length).tolist()) for length in (3, 7)]
    begun = [chance.integers(1, VOCAB, length).astype(np.int32) for length in (0, 5, 0, 30, 5)]
    of_prompt, following = [0, 0, 1, 1, 0], [7, 1, 2, 3, 4, 5]
    stepper = DecoderStepper(model, 8, room=whole_room(model, 8), prefill_tokens=8)
    with torch.no_grad():
        ids = stepper.add_prompts(prompts)
        stepper.add_rows([ids[1]], [()])
        stepper.advance(np.array([4]))
        found = stepper.add_rows([ids[p] for p in of_prompt], begun)
        after = stepper.advance(np.array(following))
        taken = [(1, [4]), *((p, tokens.tolist()) for p, tokens in zip(of_prompt, begun, strict=True))]
        for row, (p, tokens) in enumerate(taken):
            alone = DecoderStepper(model, 1, room=whole_room(model, 1))
            logits = alone.add_rows(alone.add_prompts([(*prompts[p], *tokens)]), [()])
            if row:
                assert torch.allclose(found[row - 1], logits[0], atol=1e-4)
            assert torch.allclose(after[row], alone.advance(np.array([following[row]]))[0], atol=1e-4)


def test_a_cancelled_request_is_gone_wherever_its_samples_are(watched):
    model, asked = tiny_model(), requests(6, 2)
    expected = generate(model, asked[:2], eos_ids=())

    async def use(engine):
        tasks = [asyncio.create_task(engine.generate(one)) for one in asked]
        while not watched["left"]:
            await asyncio.sleep(0.001)
        for task in tasks[2:]:
            task.cancel()
        found = await asyncio.gather(*tasks[:2])
        await engine.sleep()
        await engine.wake()
        return found, await asyncio.gather(*(engine.generate(one) for one in asked[:2]))

    for found in with_engine(model, use, eos_ids=(), room=bounded(160)):
        assert same(found, expected)


def test_waves_of_a_transformers_model_have_as_many_rows_as_fit():
    model, asked = tiny_model("gpt_neox"), requests(3, 4, max_tokens=12)
    expected = generate(model, asked)
    sizes, forward = [], model.hf.base_model.forward
    model.hf.base_model.forward = lambda **keys: sizes.append(len(keys["input_ids"])) or forward(**keys)
    assert same(generate(model, asked, room=replace(bounded(100), shares_prompts=False)), expected)
    assert 1 < max(sizes) <= 100 // 13


def test_what_never_fits_is_refused_by_name():
    async def use(engine):
        return await engine.generate(request(range(1, 31), max_tokens=40))

    with pytest.raises(DataError, match=r"p0 has 30 tokens .* 78 tokens; .* room for 68\. Raise rollout.kv_cache"):
        with_engine(tiny_model(), use, room=CacheRoom(20, 40, prompts=1, samples=1, most_tokens=60))


def test_room_follows_the_rows_and_one_sample_always_fits():
    room = CacheRoom(prompt_tokens=20, response_tokens=60, prompts=8, samples=64)
    assert room.tokens(64) == 8 * 20 + 64 * columns_for(59)
    assert room.tokens(512) == room.tokens(64) and room.tokens(4) == 4 * 20 + 4 * 64
    assert replace(room, most_tokens=500).tokens(64) == 500
    assert replace(room, most_tokens=10).tokens(64) == 20 + 64
    assert replace(room, shares_prompts=False).tokens(3) == 3 * 80
