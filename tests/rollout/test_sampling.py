"""Draws of single tokens: the right frequencies, the right truncation, randomness that depends on its key alone."""

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hone.rollout.sampling import Controls, request_key, row_keys, sample, truncate_, uniforms


def controls(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The same settings for every row."""
    settings = np.full(rows, temperature), np.full(rows, top_k), np.full(rows, top_p), np.full(rows, min_p)
    return Controls(*settings)


def test_the_draw_is_the_inverse_of_the_cumulative_distribution():
    logits = torch.tensor([0.5, 0.0, 0.3, 0.2]).log().expand(6, 4).clone()
    tokens, logprobs = sample(logits, controls(6), np.array([0.0, 0.49, 0.51, 0.79, 0.81, 1 - 2**-53]))
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]
    assert logprobs.exp().tolist() == pytest.approx([0.5, 0.5, 0.3, 0.3, 0.2, 0.2])


@pytest.mark.parametrize("vocab", [2, 63, 64, 65, 200, 1000])
def test_frequencies_match_probabilities_at_every_vocabulary_size(vocab):
    probs = torch.softmax(torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)), 0)
    rows = 20_000
    evenly = (np.arange(rows) + 0.5) / rows
    tokens, _ = sample(probs.log().expand(rows, vocab).clone(), controls(rows), evenly)
    counts = torch.bincount(tokens, minlength=vocab)
    assert (counts - probs * rows).abs().max() <= 2  # one unit of rounding at either end of the token's interval


def test_impossible_tokens_are_never_drawn_at_the_ends_of_the_interval():
    logits = torch.full((3, 130), -torch.inf)
    logits[:, 70] = 1.0
    tokens, logprobs = sample(logits, controls(3), np.array([0.0, 0.5, 1 - 2**-53]))
    assert tokens.tolist() == [70, 70, 70]
    assert logprobs.tolist() == [0.0, 0.0, 0.0]


def test_temperature_divides_the_logits():
    logits = torch.tensor([[2.0, 0.0]])
    _, logprobs = sample(logits.clone(), controls(1, temperature=2.0), np.array([0.1]))
    assert logprobs.item() == pytest.approx(torch.tensor([1.0, 0.0]).log_softmax(0)[0].item())


def test_greedy_rows_take_the_argmax_under_the_plain_softmax_whatever_their_neighbours_do():
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    mixed = Controls(np.array([0.0, 0.5]), np.array([1, 0]), np.array([0.1, 1.0]), np.array([0.5, 0.0]))
    tokens, logprobs = sample(logits.clone(), mixed, np.array([0.999, 0.0]))
    assert tokens.tolist() == [1, 0]
    assert logprobs[0].item() == pytest.approx(logits[0].log_softmax(0)[1].item())


@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 0.01])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_truncation_keeps_what_transformers_keeps(top_k, top_p, min_p):
    logits = 2 * torch.randn(16, 100, generator=torch.Generator().manual_seed(0))
    expected = logits
    if top_k:
        expected = TopKLogitsWarper(min(top_k, 100))(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    truncate_(logits, controls(16, top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.equal(logits, expected)


def test_each_row_is_truncated_by_its_own_settings():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(4, 1)
    truncate_(logits, Controls(np.ones(4), np.array([0, 2, 0, 0]), np.array([1, 1, 0.5, 1]), np.array([0, 0, 0, 0.2])))
    assert logits.isfinite().sum(1).tolist() == [4, 2, 1, 2]  # e^-1 = 0.37 of the likeliest, e^-2 = 0.14


def test_randomness_depends_on_every_part_of_its_key():
    base = request_key(1, "train", 5)
    assert len({base, request_key(2, "train", 5), request_key(1, "eval", 5), request_key(1, "train", 6)}) == 4
    keys = row_keys(base, np.arange(4))
    assert keys[2] == row_keys(base, np.array([2]))[0]
    draws = uniforms(np.repeat(keys, 1000), np.tile(np.arange(1000), 4))
    assert len(set(draws.tolist())) == 4000
    assert ((draws >= 0) & (draws < 1)).all()


def test_randomness_is_uniform_and_uncorrelated_between_neighbours():
    keys = row_keys(request_key(0, "train", 0), np.arange(200))
    draws = uniforms(np.repeat(keys, 500), np.tile(np.arange(500), 200)).reshape(200, 500)
    histogram = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert abs(histogram / 5000 - 1).max() < 0.06  # 4 standard deviations of 5000 +- 69
    for left, right in ((draws[:, 1:], draws[:, :-1]), (draws[1:], draws[:-1])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.015


def test_the_hash_never_changes():  # or resumed and repeated runs would sample something else
    assert request_key(0, "train", 0) == 15417496214868192855
    assert uniforms(row_keys(1, np.arange(2)), np.array([0, 3])).tolist() == [0.7497482413580301, 0.7774369184800852]
