"""Whole episodes: tokens, masks, logprobs, versions and randomness of samples that meet an environment."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch
from test_engine_numbers import reference_of
from tiny_engines import EOS, generate, letters, random_prompts, request, tiny_model

from hone.data.pack import collate
from hone.errors import DataError, EngineError
from hone.rollout.env import Observation, episode_metrics
from hone.rollout.env_pool import EnvironmentFault
from hone.rollout.episodes import EpisodeEngine, TurnBarrier
from hone.rollout.local import LocalEngine
from hone.types import Group, Sample, Turn, VersionSpan, version_spans


def tokens(text):
    """The inverse of `letters`. Raises DataError as a tokenizer does."""
    if " " in text:
        raise DataError(f"cannot spell {text!r}")
    return [ord(letter) - ord("A") for letter in text]


class Scripted:
    """Environments in this process: `answer(episode, turn number from 0, text)` says what each of them does."""

    def __init__(self, answer):
        self.answer, self.closed, self.open_episodes = answer, False, 0

    def open(self, episode):
        self.open_episodes += 1
        return ScriptedEpisode(self, episode)

    async def close(self):
        self.closed = True


class ScriptedEpisode:
    def __init__(self, pool, episode):
        self.pool, self.episode, self.turn = pool, episode, -1

    async def step(self, turn):
        self.turn += 1
        await asyncio.sleep(0.003 * random.random())  # answers come in any order
        return self.pool.answer(self.episode, self.turn, turn) or Observation()

    def close(self):
        self.pool.open_episodes -= 1


class ScriptedEngine:
    """Samples the given turns in order, one token per letter, `$` for EOS; remembers what it was asked."""

    version = 3

    def __init__(self, *turns):
        self.turns, self.asked, self.closed = list(turns), [], False

    async def generate(self, request, on_sample=None):
        self.asked.append(request)
        samples = []
        for index in range(request.first_sample, request.first_sample + request.num_samples):
            text = self.turns.pop(0)
            ids = tuple(EOS if letter == "$" else ord(letter) - ord("A") for letter in text)
            reason = "stop" if text.endswith("$") else "length"
            logprobs = tuple(-0.1 * (i + 1) for i in range(len(ids)))
            samples.append(
                Sample(
                    "p0", index, ids, logprobs, version_spans([self.version] * len(ids)), reason, text.removesuffix("$")
                )
            )
        self.version += 1
        return tuple(samples)

    async def close(self):
        self.closed = True


def played(engine, answer, *requests, max_turns=4, in_step=True):
    """All requests at once on an `EpisodeEngine`; their samples."""

    async def main():
        pool = Scripted(answer)
        episodes = EpisodeEngine(engine, pool, encode=tokens, max_turns=max_turns, in_step=in_step)
        try:
            async with asyncio.timeout(30):
                return await asyncio.gather(*(episodes.generate(r) for r in requests))
        finally:
            assert pool.open_episodes == 0, "every episode is closed"
            await episodes.close()
            assert pool.closed

    return asyncio.run(main())


def calls(engine_turns, answer, **settings):
    """One sample of a request for "BC" with room for 12 tokens; and what the engine was asked."""
    engine = ScriptedEngine(*engine_turns)
    ((sample,),) = played(engine, answer, request([1, 2], max_tokens=12), **settings)
    return sample, engine.asked


def test_a_sample_of_two_turns_by_hand():
    """The policy says `DE$`, the tool `XYZ`, the policy `F$`."""
    said = [Observation("XYZ", reward=0.25, metrics={"calls": 1.0}), Observation(None, reward=1.0)]
    sample, asked = calls(["DE$", "F$"], lambda episode, turn, text: said[turn])
    assert sample.token_ids.tolist() == [3, 4, EOS, 23, 24, 25, 5, EOS]
    assert sample.loss_mask.tolist() == [True, True, True, False, False, False, True, True]
    assert sample.sampler_logprobs == pytest.approx((-0.1, -0.2, -0.3, 0, 0, 0, -0.1, -0.2))
    assert sample.versions == ((3, 6), (4, 2)), "a tool's tokens have the version of the token before"
    assert sample.turns == (Turn(0, 3, 0.25, {"calls": 1.0}), Turn(6, 8, 1.0))
    assert (sample.text, sample.finish_reason, sample.fault) == ("DEXYZF", "stop", "")
    first, second = asked
    assert (first.first_sample, first.first_position, first.sampling.max_tokens) == (0, 0, 12)
    assert second.prompt.token_ids.tolist() == [1, 2, 3, 4, EOS, 23, 24, 25]
    assert (second.num_samples, second.first_position, second.sampling.max_tokens) == (1, 6, 6)
    assert replace(second, **{k: getattr(first, k) for k in ("prompt", "sampling", "first_position")}) == first


def test_a_sample_is_reported_when_its_episode_is_over():
    told = []

    def answer(episode, turn, text):
        return Observation("X") if episode.sample_index == 1 and turn == 0 else None

    class Engine(ScriptedEngine):
        async def generate(self, request, on_sample=None):
            told.append("turn")
            return await super().generate(request)

    async def main():
        episodes = EpisodeEngine(Engine("D$", "E$", "F$"), Scripted(answer), encode=tokens, max_turns=4, in_step=True)
        return await episodes.generate(request([1, 2], samples=2, max_tokens=12), told.append)

    first, second = asyncio.run(main())
    assert told == ["turn", first, "turn", second]
    assert (first.text, second.text) == ("D", "EXF")


def test_the_environment_sees_each_turn_and_its_own_chance():
    seen = []

    def answer(episode, turn, text):
        seen.append((episode.prompt.text, episode.sample_index, turn, text))
        return Observation("X") if turn == 0 else None

    ((first, second),) = played(ScriptedEngine("D$", "E$", "F$", "G$"), answer, request([1, 2], samples=2))
    assert sorted(seen) == [("BC", 0, 0, "D"), ("BC", 0, 1, "F"), ("BC", 1, 0, "E"), ("BC", 1, 1, "G")]
    assert (first.text, second.text, second.index) == ("DXF", "EXG", 1)


@pytest.mark.parametrize(
    ("turns", "max_turns", "tool", "text", "reason"),
    [
        (["D$"], 1, "X", "D", "stop"),
        (["D$", "E$"], 2, "X", "DXE", "stop"),
        (["D$", "E$", "F$"], 9, "XXX", "DXXXEXXXF", "length"),  # 2 + 3 + 2 + 3 + 2 = 12 tokens; no room for a tool
        (["D$"], 9, "X" * 10, "D", "length"),  # the policy could not say a word after it
        (["D$", "E"], 9, "X" * 9, "D" + "X" * 9 + "E", "length"),
    ],
)
def test_bounds_on_turns_and_on_tokens(turns, max_turns, tool, text, reason):
    sample, asked = calls(turns, lambda *_: Observation(tool, reward=1.0), max_turns=max_turns)
    assert (sample.text, sample.finish_reason, len(asked)) == (text, reason, len(turns))
    assert len(sample.token_ids) <= 12
    assert [turn.reward for turn in sample.turns] == [1.0] * len(turns), "the last turn is judged too"


def test_a_failure_ends_the_sample_and_says_why():
    def answer(episode, turn, text):
        if episode.sample_index == 0 and turn == 1:
            raise EnvironmentFault("the tool is broken")
        return Observation("un speakable" if episode.sample_index == 1 else "X") if turn < 2 else None

    engine = ScriptedEngine("D$", "D$", "D$", "E$", "E$", "F$")
    ((broken, mute, whole),) = played(engine, answer, request([1, 2], samples=3))
    assert (broken.text, broken.fault) == ("DXE", "the tool is broken")
    assert mute.text == "D" and mute.fault.startswith("gave a text without tokens: DataError: cannot spell 'un speak")
    assert (whole.text, whole.fault) == ("DXEXF", "")


def test_an_engine_that_fails_fails_the_call():
    class Failing(ScriptedEngine):
        async def generate(self, request, on_sample=None):
            if request.first_position:
                raise EngineError("out of order")
            return await super().generate(request)

    with pytest.raises(ExceptionGroup) as caught:
        played(Failing("D$", "D$"), lambda *_: Observation("X"), request([1, 2], samples=2))
    assert caught.group_contains(EngineError, match="out of order")


def test_metrics_are_means_over_samples():
    def sample(fault="", **calls):
        turns = (Turn(0, 1, metrics=calls), Turn(2, 3, metrics=calls))
        return Sample(
            "p", 0, (5, 6, 7), (0.0,) * 3, (VersionSpan(0, 3),), "stop", "", (True, False, True), turns, fault
        )

    assert episode_metrics([sample(calls=1.0), sample(), sample("broken", calls=9.0)], "rollout/") == {
        "rollout/turns_mean": 2.0,
        "rollout/tool_tokens_mean": 1.0,
        "rollout/env_calls_mean": 1.0,  # (2 + 0) / 2: the broken one says nothing
    }
    assert episode_metrics([Sample("p", 0, (5,), (0.0,), (VersionSpan(0, 1),), "stop", "")], "rollout/") == {}


# ---- with the real engine


def tool(episode, turn, text):
    """Repeats the turn's first letters; ends after a few turns that depend on the sample."""
    return Observation((text[:4] or "Q") + "R") if turn < episode.sample_index % 3 else None


def real(model, requests, *, in_step=True, max_concurrent=64):
    engine = LocalEngine(model, decode=letters, eos_ids=(EOS,), max_concurrent=max_concurrent, timeout_s=30)
    return played(engine, tool, *requests, in_step=in_step)


def some_requests(count=5):
    prompts = random_prompts(count)
    stops = {"stop_token_ids": tuple(range(8)), "max_tokens": 30}
    return [request(prompt, index=i, samples=6, **stops) for i, prompt in enumerate(prompts)]


def test_logprobs_equal_a_full_forward_pass():
    """Of the policy's tokens, conditioned on everything before them: the tool's tokens too."""
    model, requests = tiny_model(), some_requests()
    hf, num_tools = reference_of(model), 0
    for asked, group in zip(requests, real(model, requests), strict=True):
        prompt = list(asked.prompt.token_ids)
        for sample in group:
            with torch.no_grad():
                logits = hf(torch.tensor([prompt + list(sample.token_ids)])).logits[0, len(prompt) - 1 : -1]
            target = torch.tensor(sample.token_ids)
            expected = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
            mask = torch.tensor(sample.loss_mask)
            got = torch.tensor(sample.sampler_logprobs)
            assert (got - expected)[mask].abs().max() < 1e-5
            assert (got[~mask] == 0).all()
            assert [i for t in sample.turns for i in range(t.start, t.end)] == mask.nonzero()[:, 0].tolist()
            num_tools += int((~mask).sum())
            assert not sample.fault
    assert num_tools > 50


def test_a_crowd_changes_no_token():
    model, requests = tiny_model(), some_requests()
    together = real(model, requests)
    crowded = real(model, requests, max_concurrent=4, in_step=False)
    alone = [group for asked in requests for group in real(model, [asked])]
    assert ids(together) == ids(crowded) == ids(alone)


def test_a_repeated_run_is_identical_to_the_last_bit():
    """Environments answer in any order; in step, what is decoded together is the same all the same."""
    model, requests = tiny_model(), some_requests()
    assert real(model, requests) == real(model, requests)


def test_a_sample_cut_in_two_requests_continues_as_if_it_were_one():
    """Randomness is of the position in the sample, not in the request."""
    model, (whole_request, *_) = tiny_model(), some_requests()
    (whole,) = generate(model, [whole_request])
    for sample in whole:
        head = sample.token_ids[: len(sample.token_ids) // 2]
        prompt = replace(whole_request.prompt, token_ids=(*whole_request.prompt.token_ids, *head))
        rest = replace(
            whole_request,
            prompt=prompt,
            num_samples=1,
            first_sample=sample.index,
            first_position=len(head),
            sampling=replace(whole_request.sampling, max_tokens=30 - len(head)),
        )
        ((tail,),) = generate(model, [rest])
        assert (tail.index, [*head, *tail.token_ids]) == (sample.index, sample.token_ids.tolist())


def test_collate_gives_loss_to_what_the_policy_wrote():
    model, requests = tiny_model(), some_requests(1)
    (group,) = real(model, requests)
    batch = collate([Group(requests[0].prompt, group, rewards=(1.0,) * 5 + (None,))])
    masks = [mask for sample in group[:5] for mask in sample.loss_mask]
    assert batch.loss_mask_T.tolist() == [*map(float, masks), *[0.0] * len(group[5].token_ids)]


def ids(groups):
    return [[tuple(sample.token_ids) for sample in group] for group in groups]


# ---- rounds


def test_rounds_wake_all_in_order_when_the_last_one_waits():
    async def main():
        rounds, woken = TurnBarrier(in_step=True), []

        async def group(order, delay, turns):
            with rounds.playing():
                for _ in range(turns):
                    await asyncio.sleep(delay)
                    await rounds.next(("train", order, 1))
                    woken.append(order)

        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            for order, delay, turns in ((2, 0.0, 3), (0, 0.02, 1), (1, 0.01, 2)):
                tasks.create_task(group(order, delay, turns))
        return woken

    assert asyncio.run(main()) == [0, 1, 2, 1, 2, 2]


def test_no_call_waits_for_a_group_that_was_cancelled():
    async def main():
        rounds = TurnBarrier(in_step=True)

        async def group(order, delay):
            with rounds.playing():
                await asyncio.sleep(delay)
                await rounds.next(("train", order, 1))

        waits, never, waits_too = (asyncio.create_task(group(i, delay)) for i, delay in enumerate((0, 60, 0)))
        await asyncio.sleep(0.01)
        waits_too.cancel()
        never.cancel()
        async with asyncio.timeout(5):
            await waits

    asyncio.run(main())
