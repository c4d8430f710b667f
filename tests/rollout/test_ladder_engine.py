"""Memory runs out while an engine samples: finished samples stay, the others come again, and are the same."""

import asyncio

import pytest
import torch
from measuring import FakeGauge
from tiny_engines import EOS, letters, random_prompts, request, tiny_model

from hone.errors import EngineError, MemoryExhausted
from hone.memory.gauges import Meter
from hone.memory.ladder import Ladder
from hone.memory.rungs import PREFILL, ROWS, Knob
from hone.model.load import weights_fingerprint
from hone.plan.kv_cache import CacheRoom
from hone.rollout.decoding import DecoderStepper
from hone.rollout.local import LocalEngine
from hone.types import Progress

ROWS_AT_FIRST, PREFILL_AT_FIRST = 12, 64
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def make_ladder():
    ladder = Ladder(Meter(FakeGauge()), settings={ROWS: ROWS_AT_FIRST, PREFILL: PREFILL_AT_FIRST})
    ladder.begin(Progress())
    return ladder


def sampled(ladder, model, *, samples=5, on_sample=None):
    """What an engine under this ladder draws for a few prompts: more samples than it has rows."""

    async def run():
        engine = LocalEngine(
            model,
            decode=letters,
            eos_ids=(EOS,),
            max_concurrent=ROWS_AT_FIRST,
            prefill_tokens=PREFILL_AT_FIRST,
            timeout_s=30,
            guard=ladder,
        )
        ladder.bind(
            Knob(ROWS, lambda value: engine.limit(max_concurrent=value), in_use=lambda: engine.num_rows),
            Knob(PREFILL, lambda value: engine.limit(prefill_tokens=value), lowest=16),
        )
        try:
            requests = [request(p, index=i, samples=samples) for i, p in enumerate(random_prompts(6))]
            return await asyncio.gather(*(engine.generate(one, on_sample) for one in requests))
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


def same(found, expected):
    """Tokens are the same; logprobs are those of other matrix products."""
    for group, other in zip(found, expected, strict=True):
        for a, b in zip(group, other, strict=True):
            assert (a.index, a.finish_reason, a.text) == (b.index, b.finish_reason, b.text)
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.sampler_logprobs == pytest.approx(b.sampler_logprobs, abs=1e-5)
    return True


def failing(monkeypatch, name, at):
    """Let calls number `at` of a stepper's method run out of memory; returns how often it was called."""
    method, calls = getattr(DecoderStepper, name), []

    def fails(self, *arguments):
        calls.append(name)
        if len(calls) in at:
            raise OUT_OF_MEMORY
        return method(self, *arguments)

    monkeypatch.setattr(DecoderStepper, name, fails)
    return calls


MORE = pytest.mark.slow("samples as often as it fails")


@pytest.mark.parametrize(
    ("site", "moment", "key"),
    [
        ("_prefill", "prompts computed", PREFILL),
        ("add_rows", "prompts computed", PREFILL),
        ("advance", "sampling", ROWS),
    ],
)
@pytest.mark.parametrize("at", [{1}, {3}, {1, 2}, *(pytest.param(at, marks=MORE) for at in ({2}, {2, 3}))])
def test_samples_are_the_same_wherever_memory_ran_out(monkeypatch, site, moment, key, at):
    model = tiny_model()
    expected = sampled(make_ladder(), model)
    told, ladder = [], make_ladder()
    calls = failing(monkeypatch, site, at)
    found = sampled(ladder, model, on_sample=told.append)
    assert len(calls) >= max(at), "the failure happened"
    assert same(found, expected)
    assert sorted((s.prompt_id, s.index) for s in told) == [(f"p{i}", j) for i in range(6) for j in range(5)]
    assert [(c.phase, c.key) for c in ladder.changes] == [("rollout", key)] * len(at)
    assert {c.moment for c in ladder.changes} == {moment}
    assert ladder.redone == len(at)
    assert "memory/rollout_peak_mib" in ladder.metrics()


@pytest.mark.slow("samples as often as it fails")
def test_finished_samples_are_kept_and_not_drawn_again(monkeypatch):
    """A job that was complete in the very step that failed is not lost either."""
    expected = sampled(make_ladder(), tiny_model())
    collect = []
    for at in (1, 5, 9, 13):
        with monkeypatch.context() as patch:
            told, ladder = [], make_ladder()
            calls = failing(patch, "advance", {at})
            assert same(sampled(ladder, tiny_model(), on_sample=told.append), expected)
            assert len(told) == 30
            collect.append(len(calls) >= at)
    assert all(collect)


def test_a_transformers_model_begins_again_too(monkeypatch):
    model = tiny_model("gpt_neox")
    expected = sampled(make_ladder(), model)
    ladder, forward, calls = make_ladder(), model.hf.base_model.forward, []

    def fails(**keys):
        calls.append(1)
        if len(calls) == 4:
            raise OUT_OF_MEMORY
        return forward(**keys)

    monkeypatch.setattr(model.hf.base_model, "forward", fails)
    assert same(sampled(ladder, model), expected)
    assert ladder.changes


def test_an_engine_without_rungs_left_ends_with_exit_code_4(monkeypatch):
    failing(monkeypatch, "advance", set(range(1000)))
    ladder = make_ladder()
    with pytest.raises(MemoryExhausted, match=r"out of memory in rollout \(sampling\)") as error:
        sampled(ladder, tiny_model())
    assert error.value.exit_code == 4
    assert ladder.settings == {ROWS: 1, PREFILL: 16}
    assert len(ladder.changes) <= 4 + 2


def test_other_failures_end_the_engine_as_ever(monkeypatch):
    def broken(self, tokens):
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(DecoderStepper, "advance", broken)
    with pytest.raises(EngineError, match="shapes"):
        sampled(make_ladder(), tiny_model())


def test_bounds_change_while_sequences_are_in_flight():
    """Up without losing anything, down by beginning again; from another thread than the engine's."""
    model = tiny_model()
    expected = sampled(make_ladder(), model)

    async def run(bounds):
        engine = LocalEngine(model, decode=letters, eos_ids=(EOS,), max_concurrent=3, timeout_s=30)
        try:
            requests = [request(p, index=i, samples=5) for i, p in enumerate(random_prompts(6))]
            tasks = [asyncio.create_task(engine.generate(one)) for one in requests]
            for rows in bounds:
                await asyncio.sleep(0.005)
                engine.limit(max_concurrent=rows)
            return await asyncio.gather(*tasks)
        finally:
            await engine.close()

    for bounds in ((7, 20), (20, 2), (1, 5, 2, 30)):
        assert same(asyncio.run(asyncio.wait_for(run(bounds), 60)), expected)


def test_fewer_rows_free_the_cache_that_was_made_for_more():
    model = tiny_model()
    stepper = DecoderStepper(model, 64, room=CacheRoom(3, 40, prompts=64, samples=64))
    stepper.add_rows(stepper.add_prompts([(1, 2, 3)]), [()])
    many = stepper.cache_use()
    stepper.limit(max_rows=8, prefill_tokens=64)
    stepper.clear()
    assert stepper.cache_use().room_bytes == 0
    stepper.add_rows(stepper.add_prompts([(1, 2, 3)]), [()])
    few = stepper.cache_use()
    assert few.room_tokens == CacheRoom(3, 40, prompts=8, samples=8).tokens(8)
    assert (few.room_tokens * 8, few.room_bytes * 8) == (many.room_tokens, many.room_bytes)


def test_weights_are_loaded_again_when_loading_ran_out(monkeypatch):
    model, other = tiny_model(seed=0), tiny_model(seed=1)
    ladder, load, calls = make_ladder(), type(model).load_weights, []

    def fails(self, weights):
        calls.append(1)
        load(self, weights)
        if len(calls) == 1:
            raise OUT_OF_MEMORY

    monkeypatch.setattr(type(model), "load_weights", fails)

    async def run():
        engine = LocalEngine(model, decode=letters, eos_ids=(EOS,), max_concurrent=4, timeout_s=30, guard=ladder)
        ladder.bind(Knob(ROWS, lambda value: engine.limit(max_concurrent=value)))
        await engine.load(list(other.named_weights()), 3)
        found = engine.fingerprint(), engine.version
        await engine.close()
        return found

    assert asyncio.run(run()) == (weights_fingerprint(other.named_weights()), 3)
    assert len(calls) == 2
    assert [change.phase for change in ladder.changes] == ["publish"]


def test_a_budget_is_looked_at_while_sampling():
    """Memory grows with the rows; the budget is for five of them."""
    expected = sampled(make_ladder(), tiny_model())
    gauge = FakeGauge()
    ladder = Ladder(Meter(gauge), settings={ROWS: ROWS_AT_FIRST, PREFILL: PREFILL_AT_FIRST}, budget_bytes=500)
    gauge.peak_bytes = lambda: 100 * ladder.settings[ROWS]
    ladder.begin(Progress())
    assert same(sampled(ladder, tiny_model()), expected)
    assert ladder.settings[ROWS] <= 5
    assert {change.phase for change in ladder.changes} == {"rollout"}
