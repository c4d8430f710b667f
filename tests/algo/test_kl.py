"""KL estimators by hand."""

import math

import pytest
import torch

from hone.algo.algorithm import Algorithm
from hone.algo.kl import absolute, k1, k2, k3
from hone.algo.loss import LossTokens
from hone.config.run import AlgorithmSection
from hone.types import Totals


def at(function, difference):
    return float(function(torch.tensor([difference], dtype=torch.float64)))


def test_estimators_by_hand():
    assert [at(f, 0.5) for f in (k1, k2, k3, absolute)] == pytest.approx([0.5, 0.125, 0.10653066, 0.5], abs=1e-8)
    assert [at(f, -1.0) for f in (k1, k2, k3, absolute)] == pytest.approx([-1.0, 0.5, 0.71828183, 1.0], abs=1e-8)


def test_k3_is_exact_near_zero_in_float32():
    difference = torch.tensor([1e-4])
    naive = (-difference).exp() - 1 + difference
    assert float(k3(difference)) == pytest.approx(5e-9, rel=0.05)
    assert float(naive) != pytest.approx(5e-9, rel=0.5), "witness: the naive form cancels"


def test_k3_stays_finite_where_exp_would_not():
    assert math.isfinite(float(k3(torch.tensor([-1e4]))))


@pytest.mark.parametrize("corrected", [True, False])
def test_with_the_ratio_the_expected_gradient_is_the_kls(corrected):
    """Of a policy that has moved since it sampled; expectations are exact sums over the vocabulary."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    logprobs, old = logits.log_softmax(0), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    ref, zeros = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log(), torch.zeros(3, dtype=torch.float64)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)
    estimator = "weighted_k3" if corrected else "k3"
    section = AlgorithmSection(kl_loss_coef=1.0, kl_estimator=estimator, aggregate="token_sum")
    found = torch.zeros_like(exact)
    for token, chance in enumerate(old.exp()):
        one = [values[token : token + 1] for values in (logprobs, zeros, old, zeros, zeros, ref)]
        tokens = LossTokens(
            logprobs_T=one[0], entropy_T=one[1], old_logprobs_T=one[2], sampler_logprobs_T=one[3], advantages_T=one[4],
            ref_logprobs_T=one[5], loss_mask_T=one[1] + 1, sample_T=torch.zeros(1, dtype=torch.int64), num_samples=1,
        )  # fmt: skip
        loss, _ = Algorithm(section).loss(tokens, Totals(1, 1))
        found += chance * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.allclose(found, exact, atol=1e-12) == corrected


@pytest.mark.parametrize("function", [k2, k3])
def test_expected_value_is_the_kl_of_two_categorical_distributions(function):
    """k3 is unbiased; k2 is close for near distributions. Expectations are exact sums over the vocabulary."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.48, 0.31, 0.21], dtype=torch.float64)
    exact = float((p * (p / q).log()).sum())
    estimate = float((p * function((p / q).log())).sum())
    assert estimate == pytest.approx(exact, rel=1e-9 if function is k3 else 0.05)
