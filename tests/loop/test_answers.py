import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hone.config.run import RewardSection
from hone.loop.answers import NUM_PROMPTS, Answers
from hone.reward.pool import RewardPool
from hone.reward.rewards import Component, Rewards
from hone.types import Fault, Group, Prompt, Sample, Score, VersionSpan


def trainer(logprob_of):
    def logprobs(batch, *, temperature):
        assert temperature == 1.0, "whatever the run samples at"
        return torch.tensor([logprob_of(int(t)) for t in batch.token_ids_T])

    return SimpleNamespace(logprobs=logprobs)


def groups_of(prompts, *samples):
    return [Group(prompt, samples) for prompt in prompts]


def test_the_policys_own_responses_are_measured_as_the_answers_are():
    """By hand, over a vocabulary of 8: of six tokens one is an environment's, three are sure and two are guesses."""
    sure = Sample("p", 0, (1, 2), (0.0, 0.0), (VersionSpan(0, 2),), "stop", "")
    other = Sample("p", 1, (1, 2, 3, 4), (0.0, math.nan, *[-math.log(8)] * 2), (VersionSpan(0, 4),), "stop", "")
    other = replace(other, loss_mask=np.array([True, False, True, True]))
    prompt = Prompt("p", 0, "", (7,), answer="yes")
    answers = Answers(lambda some: [[1]], vocab_size=8)
    found = answers.surprise(trainer(lambda token: 0.0), groups_of([prompt], sure, other))
    assert found["rollout/response_surprise"] == pytest.approx(2 / 5)


def test_surprise_is_one_for_a_guess_and_by_hand_otherwise():
    prompts = [Prompt("p", i, "", (7,), answer=i) for i in range(3)]
    answers = Answers(lambda some: [[prompt.answer, 5] for prompt in some], vocab_size=8)
    found = answers.surprise(trainer(lambda token: -math.log(8)), groups_of(prompts))
    assert found == {"rollout/answer_surprise": pytest.approx(1.0), "rollout/answer_tokens_mean": 2.0}
    found = answers.surprise(trainer(lambda token: -math.log(8) if token == 5 else 0.0), groups_of(prompts))
    assert found["rollout/answer_surprise"] == pytest.approx(0.5)


def test_only_answers_that_can_be_written_count_and_only_some_of_them():
    asked = []

    def encode(prompts):
        asked.extend(prompts)
        return [[1] if prompt.answer == "yes" else [] for prompt in prompts]

    answers, sure = Answers(encode, vocab_size=4), trainer(lambda token: 0.0)
    unanswered, unwritable = Prompt("p", 0, "", (7,)), Prompt("p", 1, "", (7,), answer="é")
    assert answers.surprise(sure, groups_of([unanswered, unwritable])) == {} and asked == [unwritable]
    asked.clear()
    assert answers.surprise(sure, groups_of(Prompt("p", i, "", (7,), answer="yes") for i in range(99)))
    assert len(asked) == NUM_PROMPTS


def test_of_answers_beyond_the_limit_only_the_length_counts(tmp_path):
    """Lengths 1, 2, 3 with a limit of 2: the third is neither measured nor scored."""

    class Known:
        async def score(self, group):
            return (Score(float(len(group.samples[0].token_ids))),)

    prompts = [Prompt("p", i, "", (7,), answer=i) for i in range(1, 4)]
    answers = Answers(lambda some: [[5] * p.answer for p in some], 8, str, limit_tokens=2)
    guess = trainer(lambda token: -math.log(8))
    found = answers.surprise(guess, groups_of(prompts))
    assert found == {"rollout/answer_surprise": pytest.approx(1.0), "rollout/answer_tokens_mean": 2.0}
    assert answers.surprise(guess, groups_of(prompts[2:])) == {"rollout/answer_tokens_mean": 3.0}
    pool = RewardPool(num_workers=1, folder=tmp_path)
    rewards = Rewards([Component("known", 1.0, Known())], RewardSection(), window_samples=10, pool=pool)
    judged = asyncio.run(answers.judged(rewards, prompts, threshold=2.0))
    assert judged == {"rollout/answer_pass_rate": 0.5}


def test_answers_are_scored_as_the_responses_that_rewards_expect(tmp_path):
    """Of the answers that can be written, those in the reward's own form; a reward that says nothing counts nowhere."""

    class Boxed:
        async def score(self, group):
            right = group.samples[0].text == f"[{group.prompt.answer}]"
            return (Score(None, Fault.DATA, "odd") if group.prompt.answer == 1 else Score(float(right)),)

    prompts = [Prompt("p", i, "", (7,), answer=i) for i in range(4)]
    pool = RewardPool(num_workers=1, folder=tmp_path)
    rewards = Rewards([Component("boxed", 1.0, Boxed())], RewardSection(), window_samples=10, pool=pool)

    def found(text):
        def encode(some):
            return [() if prompt.answer == 0 else (1, 5) for prompt in some]

        return asyncio.run(Answers(encode, 8, text).judged(rewards, prompts, threshold=1.0))

    assert found(lambda answer: f"[{answer}]") == {"rollout/answer_pass_rate": 1.0}
    assert found(lambda answer: f"[{min(answer, 2)}]") == {"rollout/answer_pass_rate": 0.5}
    assert found(str) == {"rollout/answer_pass_rate": 0.0} and found(None) == {}
    assert rewards.summary() == "0 of 0 samples could not be scored"
