"""What the record gets of tokens: advantages where they differ, mismatch and entropy where the trainer
computed them."""

import math
from types import SimpleNamespace

import torch
from observed import make_group

from hone.data.pack import collate
from hone.loop.policy import with_trainer_columns
from hone.loop.run import token_figures


def batch_of(advantages_T):
    """Two prompts with two samples each, of two and three tokens."""
    batch = collate([make_group(0), make_group(1)])
    return batch.with_column("advantages_T", torch.tensor(advantages_T))


def movement_of(batch):
    """Measured on the first prompt."""
    return SimpleNamespace(before_T=batch.sampler_logprobs_T[:5] - 0.25, entropy_T=torch.arange(5.0))


def test_advantages_of_tokens_are_kept_where_they_differ_within_a_sample():
    batch = batch_of([1.0, 1.0, -1.0, -1.0, -1.0, 0.5, 0.25, 2.0, 9.0, 2.0])
    batch.loss_mask_T[8] = 0  # not the policy's token
    found = [figures.advantages_T for figures in token_figures(batch, [0, 1])]
    assert [None if values is None else values.tolist() for values in found] == [None, None, [0.5, 0.25], None]


def test_mismatch_is_of_the_samples_whose_logprobs_the_trainer_computed():
    batch = batch_of([0.0] * 10)
    assert with_trainer_columns(batch, None) is batch
    assert all(figures.mismatch_T is None for figures in token_figures(batch, [0, 1]))
    measured = with_trainer_columns(batch, movement_of(batch))
    found = [figures.mismatch_T for figures in token_figures(measured, [0, 1])]
    assert [None if values is None else values.tolist() for values in found] == [[0.25] * 2, [0.25] * 3, None, None]
    assert math.isnan(measured.columns["trainer_logprobs_T"][5])
    every = with_trainer_columns(batch.with_column("old_logprobs_T", batch.sampler_logprobs_T + 0.5), None)
    found = [figures.mismatch_T for figures in token_figures(every, [0, 1])]
    assert [values.tolist() for values in found] == [[-0.5] * n for n in (2, 3, 2, 3)]


def test_entropy_is_of_the_samples_that_the_movement_is_measured_on():
    batch = batch_of([0.0] * 10)
    batch.loss_mask_T[1] = 0  # not the policy's token
    for needed in (batch, batch.with_column("old_logprobs_T", batch.sampler_logprobs_T)):
        found = [
            figures.entropy_T for figures in token_figures(with_trainer_columns(needed, movement_of(batch)), [0, 1])
        ]
        assert found[2] is None and found[3] is None and math.isnan(found[0][1])
        assert [found[0][0], *found[1]] == [0.0, 2.0, 3.0, 4.0]
    assert all(figures.entropy_T is None for figures in token_figures(with_trainer_columns(batch, None), [0, 1]))


def test_figures_are_of_the_chosen_prompts_alone():
    batch = batch_of([1.0, 2.0, 1.0, 2.0, 3.0, 1.0, 1.0, 4.0, 5.0, 6.0])
    found = [figures.advantages_T for figures in token_figures(batch, [1])]
    assert [None if values is None else values.tolist() for values in found] == [None, [4.0, 5.0, 6.0]]
    assert token_figures(batch, []) == []
