"""Reward shaping by hand, and its order: clip of the raw reward, length penalty, baseline."""

import math

import pytest
import torch

from hone.algo.algorithm import Algorithm
from hone.algo.shaping import clip_rewards, informative, overlong_penalty
from hone.config.algorithm import AlgorithmSection
from hone.types import Batch


def batch_of(rewards, lengths, prompt_S=None):
    num_tokens = sum(lengths)
    return Batch(
        prompts=((1,), (2,)),
        prompt_S=torch.tensor(prompt_S or [0] * len(lengths)),
        length_S=torch.tensor(lengths),
        token_ids_T=torch.zeros(num_tokens, dtype=torch.int64),
        loss_mask_T=torch.ones(num_tokens),
        sampler_logprobs_T=torch.zeros(num_tokens),
        reward_S=torch.tensor(rewards),
    )


def test_clip_keeps_rewards_in_bounds_and_unscored_unscored():
    clipped = clip_rewards(torch.tensor([-5.0, 0.5, 9.0, math.nan]), (-1.0, 1.0))
    assert clipped[:3].tolist() == [-1.0, 0.5, 1.0]
    assert clipped[3].isnan()


def test_overlong_penalty_grows_linearly_over_the_buffer():
    penalty = overlong_penalty(torch.tensor([10, 80, 90, 100, 110]), max_tokens=100, buffer_frac=0.2, factor=2.0)
    assert penalty.tolist() == pytest.approx([0, 0, -1, -2, -2])


@pytest.mark.parametrize(
    ("rewards", "bounds", "expected"),
    [
        ([0.0, 1.0], None, True),
        ([1.0, 1.0, None], None, False),
        ([None, None], None, False),
        ([3.0, 7.0], (0.0, 2.0), False),
        ([1.0], None, False),
    ],
)
def test_a_group_is_informative_when_its_clipped_rewards_differ(rewards, bounds, expected):
    assert informative(rewards, bounds) is expected


def test_the_clip_acts_on_the_raw_reward_and_so_bounds_it():
    algorithm = Algorithm(AlgorithmSection(credit="group_mean", reward_clip=(0.0, 1.0)))
    batch, metrics = algorithm.assign(batch_of([100.0, 0.0], [1, 1]))
    assert batch.columns["advantages_T"].tolist() == [0.5, -0.5]  # a clip after the baseline would give 1 and 0
    assert metrics["train/reward_clipped_frac"] == 0.5 and metrics["train/advantage_std"] == 0.5


def test_the_length_penalty_comes_after_the_clip_and_before_the_baseline():
    section = AlgorithmSection(
        credit="group_mean", reward_clip=(0.0, 1.0), overlong_buffer_frac=0.5, overlong_penalty=1.0
    )
    batch, metrics = Algorithm(section, max_response_tokens=4).assign(batch_of([5.0, 5.0], [4, 2]))
    assert batch.columns["advantages_T"].tolist() == [-0.5] * 4 + [0.5] * 2  # rewards 1 - 1 and 1 - 0
    assert metrics["train/overlong_penalty_mean"] == -0.5


def test_tokens_that_the_policy_did_not_write_get_no_advantage():
    batch = batch_of([1.0, 0.0], [2, 1])
    batch.loss_mask_T[1] = 0
    assigned, _ = Algorithm(AlgorithmSection(credit="group_mean")).assign(batch)
    assert assigned.columns["advantages_T"].tolist() == [0.5, 0, -0.5]
