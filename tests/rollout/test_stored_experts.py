"""Records of routing that are elsewhere: fetched where tokens are laid out, and otherwise like arrays."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_env_episodes import played
from test_routing import batch_of, model_of, sampled, trainer_of
from tiny_engines import EOS, letters, random_prompts, request

from hone.algo.algorithm import Algorithm
from hone.config.algorithm import AlgorithmSection
from hone.data.pack import first_prompts
from hone.experts import UNRECORDED, ExpertSpan, StoredExperts, joined_experts, split_experts, unrecorded
from hone.rollout.env import Observation
from hone.rollout.local import LocalEngine
from hone.train.trainer import PreparedBatch, fetched_routing

LAYERS, TOP = 3, 2


@dataclass(eq=False)
class Elsewhere:
    """A record, and how often it was fetched."""

    record: np.ndarray
    count: int = 0

    def __call__(self):
        self.count += 1
        return self.record


def stored(record):
    return None if record is None else StoredExperts((ExpertSpan(Elsewhere(record), 0, len(record)),))


def put_away(groups):
    """The same groups, with records that are elsewhere."""
    return [
        replace(
            group,
            samples=tuple(
                replace(s, routing=stored(s.routing), prompt_routing=stored(s.prompt_routing)) for s in group.samples
            ),
        )
        for group in groups
    ]


def sources_of(batch):
    return [source for experts in (batch.routing_T, *batch.prompt_routing) for source in experts.sources()]


def record_of(tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 100, (tokens, LAYERS, TOP), dtype=np.int8)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6), st.data())
def test_parts_and_cuts_are_those_of_arrays(parts, data):
    arrays = [record_of(n, seed) if known else unrecorded(n, record_of(0)) for seed, (n, known) in enumerate(parts)] + [
        record_of(2, 99)
    ]
    elsewhere = [
        stored(array) if known else unrecorded(len(array), stored(array))
        for array, (_, known) in zip(arrays, [*parts, (2, True)], strict=True)
    ]
    whole, reference = joined_experts(elsewhere), joined_experts(arrays)
    assert len(whole) == len(reference) and np.array_equal(whole.get(), reference)
    start, end = sorted((data.draw(st.integers(0, len(reference))), data.draw(st.integers(0, len(reference)))))
    cut = whole[start:end].get()
    if cut is None:
        assert (reference[start:end] == UNRECORDED).all()
    else:
        assert np.array_equal(cut, reference[start:end])
    lengths = [start, end - start, len(reference) - end]
    for found, expected in zip(split_experts(whole, lengths), split_experts(reference, lengths), strict=True):
        assert len(found) == len(expected)
        assert (array := found.get()) is None or np.array_equal(array, expected)


def test_arrays_and_records_elsewhere_join():
    here, there = record_of(3), record_of(2, 1)
    assert np.array_equal(joined_experts([here, stored(there)]).get(), np.concatenate([here, there]))


def test_what_is_learnt_is_the_same_to_the_last_bit():
    groups, found = sampled(model_of("qwen3_moe")), []
    for some in (groups, put_away(groups)):
        model, batch = model_of("qwen3_moe"), batch_of(some)
        assert isinstance(batch.routing_T, StoredExperts) == (some is not groups)
        shifted = replace(batch, routing_T=shifted_by_one(batch.routing_T))
        trainer = trainer_of(model, tokens=40)
        logprobs_T = trainer.logprobs(shifted)
        metrics = trainer.update(shifted, Algorithm(AlgorithmSection()), [np.arange(12)])
        found.append((logprobs_T, metrics, dict(model.named_weights())))
    (logprobs_T, metrics, weights), (others_T, other_metrics, other_weights) = found
    assert torch.equal(logprobs_T, others_T) and metrics == other_metrics
    assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())
    assert not torch.equal(logprobs_T, trainer_of(model_of("qwen3_moe")).logprobs(batch_of(groups))), "it is replayed"


def shifted_by_one(experts):
    """To other experts, so that it shows whether they are replayed."""
    if isinstance(experts, StoredExperts):
        return experts.with_sources(lambda source: Elsewhere(shifted_by_one(source())))
    return np.where(experts < 0, experts, (experts + 1) % 4)


def test_only_the_records_of_a_microbatch_are_fetched():
    batch = batch_of(put_away(sampled(model_of("qwen3_moe"))))
    prepared = PreparedBatch.of(batch, [], torch.float32, torch.device("cpu"))
    assert not any(source.count for source in sources_of(batch))
    found = fetched_routing(prepared, np.array([4, 6]))
    assert found is not None and list(found[1]) == [1], "both are of the second prompt"
    assert len(found[0]) == int(batch.length_S[[4, 6]].sum())
    assert [number for number, source in enumerate(sources_of(batch)) if source.count] == [4, 6, 12 + 1]
    few = first_prompts(batch, 1)
    assert len(few.routing_T) == len(few.token_ids_T) and len(few.prompt_routing) == 1


@pytest.mark.parametrize("lost", ["one sample", "all"])
def test_tokens_without_a_record_are_routed_by_the_trainer(lost):
    model = model_of("qwen3_moe")
    groups = sampled(model)
    batch, kept, trainer = batch_of(put_away(groups)), batch_of(groups), trainer_of(model)
    length = int(batch.length_S[0])
    if lost == "one sample":
        first = batch.routing_T.spans[0].source
        gone = replace(batch, routing_T=batch.routing_T.with_sources(lambda s: None if s is first else s))
        expected = replace(
            kept, routing_T=np.concatenate([np.full_like(kept.routing_T[:length], -1), kept.routing_T[length:]])
        )
    else:
        without = [experts.with_sources(lambda _: None) for experts in (batch.routing_T, *batch.prompt_routing)]
        gone, expected = (
            replace(batch, routing_T=without[0], prompt_routing=tuple(without[1:])),
            replace(kept, routing_T=None),
        )
    assert torch.equal(trainer.logprobs(gone), trainer.logprobs(expected))


class Away(LocalEngine):
    """Its records are elsewhere, but what the caller knows of a prompt."""

    async def generate(self, request, on_sample=None):
        found = await super().generate(request)
        self.known.append(request.num_routed)
        samples = []
        for sample in found:
            of_prompt = stored(sample.prompt_routing)
            if request.num_routed:
                of_prompt = joined_experts([unrecorded(request.num_routed, of_prompt), of_prompt[request.num_routed :]])
            samples.append(replace(sample, routing=stored(sample.routing), prompt_routing=of_prompt))
            if on_sample is not None:
                on_sample(samples[-1])
        return tuple(samples)


def test_samples_that_meet_an_environment_have_the_same_records():
    def answer(_, turn, __):
        return Observation("XY") if turn < 2 else None

    stops = {"max_tokens": 14, "stop_token_ids": (7, 8, 9, 10, 11)}
    requests = [request(p, index=i, samples=2, **stops) for i, p in enumerate(random_prompts(3))]
    found = []
    for kind in (LocalEngine, Away):
        engine = kind(
            model_of("qwen3_moe"), decode=letters, eos_ids=(EOS,), max_concurrent=8, timeout_s=30, records_routing=True
        )
        engine.known = []
        found.append(
            played(engine, lambda _, turn, __: Observation("XY") if turn < 2 else None, *requests, max_turns=3)
        )
    assert max(len(sample.turns) for group in found[0] for sample in group) > 2, "the environment must have answered"
    assert any(engine.known), "later turns ask for less"
    for here, there in zip(*found, strict=True):
        for sample, other in zip(here, there, strict=True):
            assert np.array_equal(sample.token_ids, other.token_ids)
            assert isinstance(other.routing, StoredExperts)
            assert np.array_equal(other.routing.get(), sample.routing)
