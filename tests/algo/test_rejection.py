"""What is rejected, against loops over samples with no shared code; and what rejection leaves of a batch."""

import math
from statistics import fmean

import pytest
import torch

from hone.algo.algorithm import Algorithm
from hone.algo.correction import REJECTION
from hone.config.algorithm import AlgorithmSection
from hone.types import Batch

ESTIMATES = {"k1": lambda r: r, "k2": lambda r: r * r / 2, "k3": lambda r: math.exp(-r) - 1 + r}
LEVELS = {"sum": math.fsum, "mean": fmean, "max": max}
LOW, HIGH = 0.8, 1.15


def plainly(name, old, sampler, mask, lengths):
    """By loops over the samples."""
    level, _, kind = name.rpartition("_")
    kept, start = [], 0
    for length in lengths:
        places = range(start, start + length)
        found = {t: ESTIMATES[kind](sampler[t] - old[t]) for t in places if mask[t]}
        if level != "token" and found:
            found = dict.fromkeys(found, LEVELS[level.removeprefix("sample_")](found.values()))
        for t in places:
            value = found.get(t, 0.0)
            inside = LOW <= math.exp(value) <= HIGH if kind == "k1" else value <= 0.02
            kept.append(inside and bool(mask[t]))
        start += length
    return kept


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [name for name in REJECTION if name != "none"])
def test_each_equals_the_loops(name, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 5, 0, 1, 4, 2, 6, 2, 1, 1, 3, 2, 7, 1, 1]
    total = sum(lengths)
    old = torch.randn(total, generator=generator, dtype=torch.float64)
    sampler = old + 0.2 * torch.randn(total, generator=generator, dtype=torch.float64)
    mask = (torch.rand(total, generator=generator) > 0.2).double()
    sample_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    low, high = (LOW, HIGH) if name.endswith("k1") else (None, 0.02)
    kept_T = REJECTION[name].function(old, sampler, mask, sample_T, len(lengths), low, high) & (mask > 0)
    assert kept_T.tolist() == plainly(name, old.tolist(), sampler.tolist(), mask.tolist(), lengths)
    assert 0 < int(kept_T.sum()) < int(mask.sum())


def test_without_a_lower_bound_it_is_the_inverse_of_the_upper_one():
    old, sampler = torch.zeros(4), torch.tensor([math.log(0.51), math.log(0.49), math.log(1.99), math.log(2.01)])
    ones, sample_T = torch.ones(4), torch.arange(4)
    assert REJECTION["token_k1"].function(old, sampler, ones, sample_T, 4, None, 2.0).tolist() == [
        True,
        False,
        True,
        False,
    ]


def test_a_rejected_sample_leaves_the_loss_and_stays_in_the_baseline():
    """Rewards 3 and 1; the second's tokens were 4 times as likely when they were sampled."""
    batch = Batch(
        prompts=((1,),),
        prompt_S=torch.tensor([0, 0]),
        length_S=torch.tensor([1, 2]),
        token_ids_T=torch.zeros(3, dtype=torch.int64),
        loss_mask_T=torch.ones(3),
        sampler_logprobs_T=torch.tensor([0.0, math.log(4.0), math.log(4.0)]),
        reward_S=torch.tensor([3.0, 1.0]),
        columns={"old_logprobs_T": torch.zeros(3)},
    )
    section = AlgorithmSection(credit="group_mean", rejection="sample_mean_k1")
    algorithm = Algorithm(section)
    assert "policy_logprobs" in algorithm.needs
    found, metrics = algorithm.assign(batch)
    assert found.loss_mask_T.tolist() == [1, 0, 0]
    assert found.columns["advantages_T"].tolist() == [1, 0, 0]
    assert metrics["train/rejected_frac"] == pytest.approx(2 / 3)
