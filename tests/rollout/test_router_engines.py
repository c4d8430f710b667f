"""Two real engines behind the router: one dies in the middle of its groups, and nobody can tell from the samples."""

import asyncio
from contextlib import nullcontext

import numpy as np
import pytest
from tiny_engines import EOS, letters, random_prompts, request, tiny_model

from hone.rollout.local import LocalEngine
from hone.rollout.router import Router

NAMES = ("engine-0", "engine-1")


class Witness:
    def __init__(self):
        self.events = []

    def event(self, kind, **fields):
        self.events.append((kind, fields))

    def during(self, role, what):
        return nullcontext()

    def all(self, kind):
        return [fields for found, fields in self.events if found == kind]


def new_engine(decode=letters):
    return LocalEngine(tiny_model(seed=9), decode=decode, eos_ids=(EOS,), max_concurrent=64, timeout_s=30.0)


def dies_after(samples):
    """A `decode` that fails once a number of samples are finished: the engine's worker ends with it."""
    left = [samples]

    def decode(token_ids):
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("planted")
        return letters(token_ids)

    return decode


def draw(weights, requests, *, decode=letters, bound=0):
    """All requests at once over two engines, the first of which decodes with `decode`."""
    witness = Witness()

    async def restart(name):
        return new_engine()

    async def run():
        engines = {NAMES[0]: new_engine(decode), NAMES[1]: new_engine()}
        router = Router(
            engines, witness, silence_s=30, call_s=30, patience_s=30, restart=restart if bound else None, restarts=bound
        )
        handed = []
        try:
            await router.load(weights, 0)
            groups = await asyncio.gather(*(router.generate(r, handed.append) for r in requests))
            assert sorted((s.prompt_id, s.index) for s in handed) == sorted(
                (s.prompt_id, s.index) for group in groups for s in group
            ), "each sample is handed on once"
            if bound:
                async with asyncio.timeout(30):
                    while len(witness.all("published")) < 3:
                        await asyncio.sleep(0.05)
                assert router.fingerprint() == new_engine_fingerprint(weights)
            return groups
        finally:
            await router.close()

    async def within_a_minute():
        async with asyncio.timeout(60):
            return await run()

    return asyncio.run(within_a_minute()), witness


def new_engine_fingerprint(weights):
    engine = new_engine()
    engine._model.load_weights(weights)
    return engine.fingerprint()


@pytest.fixture(scope="module")
def weights():
    return [(name, weight.detach().clone()) for name, weight in tiny_model(seed=1).named_weights()]


@pytest.fixture(scope="module")
def requests():
    return [request(prompt, index=i, samples=5) for i, prompt in enumerate(random_prompts(6))]


@pytest.fixture(scope="module")
def calm(weights, requests):
    groups, witness = draw(weights, requests)
    assert {sample.engine for group in groups for sample in group} == set(NAMES)
    assert not witness.all("replica_down") and {e["replica"] for e in witness.all("sampled")} == set(NAMES)
    return groups


@pytest.mark.parametrize("finished", [0, 1, 7, 14])
def test_samples_are_those_of_a_run_in_which_nothing_dies(weights, requests, calm, finished):
    groups, witness = draw(weights, requests, decode=dies_after(finished))
    (down,), requeued = witness.all("replica_down"), witness.all("requeued")
    assert down["replica"] == NAMES[0] and "planted" in down["why"] and requeued, "the fault really happened"
    for ours, theirs in zip(groups, calm, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.index, a.versions, a.finish_reason) == (b.index, b.versions, b.finish_reason)
            assert a.token_ids.tolist() == b.token_ids.tolist()
            np.testing.assert_allclose(a.sampler_logprobs, b.sampler_logprobs, atol=1e-5)


def test_the_dead_one_is_replaced_and_given_the_weights(weights, requests, calm):
    groups, witness = draw(weights, requests, decode=dies_after(3), bound=1)
    ours, theirs = ([[s.token_ids.tolist() for s in group] for group in drawn] for drawn in (groups, calm))
    assert ours == theirs
    kinds = [kind for kind, fields in witness.events if fields.get("replica") == NAMES[0] and kind != "requeued"]
    assert [kind for kind in kinds if kind not in ("sampled", "replica_state")] == [
        "replica_up", "published", "replica_down", "replica_restarting", "replica_up", "published"
    ]  # fmt: skip
    assert len({fields["fingerprint"] for fields in witness.all("published")}) == 1
