"""The gradient noise scale against gradients whose signal and noise are known, and in a real update."""

import numpy as np
import pytest

from hone.train.policy import gradient_noise, mean_noise


def test_without_noise_the_small_gradient_is_the_whole_one():
    """Half of 8 samples add half of the gradient, of norm 3."""
    found = gradient_noise(1.5, 3.0, 0.5, 8)
    assert (found.signal, found.noise) == pytest.approx((9.0, 0.0))


def test_averages_recover_signal_and_noise():
    """|G|^2 = 4 and tr(S) = 100 x 0.25: 100 weights, each sample's gradient with variance 0.25."""
    random = np.random.default_rng(0)
    truth = np.full(100, 0.2)
    found = []
    for _ in range(2000):
        samples = truth + 0.5 * random.standard_normal((16, 100))
        small, whole = samples[:4].sum(0) / 16, samples.mean(0)
        found.append(gradient_noise(float(np.linalg.norm(small)), float(np.linalg.norm(whole)), 0.25, 16))
    mean = mean_noise(found)
    assert mean["train/gradient_signal"] == pytest.approx(4.0, rel=0.05)
    assert mean["train/gradient_noise"] == pytest.approx(25.0, rel=0.05)


def test_nothing_is_logged_where_nothing_was_measured():
    assert mean_noise([]) == {}
