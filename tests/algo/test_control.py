"""What is carried from update to update: the KL controller by hand, running moments against all at once."""

import pytest
import torch

from hone.algo.shaping import ALARM_STEPS, normalized, observe_rewards, reward_std, steer_kl
from hone.types import Control


def steered(kl, *, coef=0.1, target=0.05, samples=256, horizon=2560):
    control = Control()
    steer_kl(control, coef=coef, kl=kl, target=target, samples=samples, horizon_samples=horizon)
    return control.kl_coef


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.05, 1.0),
        (0.055, 1.01),  # 10% too high, a tenth of the horizon
        (0.045, 0.99),
        (5.0, 1.02),  # never more than 20% per horizon
        (0.0, 0.98),
        (-1.0, 0.98),  # k1 may be negative
    ],
)
def test_the_coefficient_moves_by_hand(kl, factor):
    assert steered(kl) == pytest.approx(0.1 * factor)


def test_a_target_out_of_reach_raises_an_alarm_every_fifty_updates():
    control = Control()
    alarms = [
        step
        for step in range(1, 121)
        if steer_kl(control, coef=0.1, kl=1.0, target=0.1, samples=8, horizon_samples=1000)
    ]
    assert alarms == [ALARM_STEPS, 2 * ALARM_STEPS]


@pytest.mark.parametrize("relief", [0.1, 0.01])
def test_reaching_the_target_or_passing_it_starts_the_count_again(relief):
    control = Control(kl_missed_steps=ALARM_STEPS - 1)
    assert not steer_kl(control, coef=0.1, kl=relief, target=0.1, samples=8, horizon_samples=1000)
    assert control.kl_missed_steps == (0 if relief == 0.1 else -1)


def test_running_moments_are_those_of_all_rewards_at_once():
    generator = torch.Generator().manual_seed(0)
    parts = [5 + torch.randn(n, generator=generator, dtype=torch.float64) for n in (1, 7, 64, 3)]
    control = Control()
    for part in parts:
        observe_rewards(control, torch.cat([part, torch.tensor([torch.nan])]))  # unscored samples are none
    every = torch.cat(parts)
    assert control.reward_count == 75
    assert control.reward_mean == pytest.approx(float(every.mean()), rel=1e-12)
    assert reward_std(control) == pytest.approx(float(every.std()), rel=1e-12)


def test_normalised_by_hand():
    """Rewards 1 and 3: mean 2, unbiased std sqrt(2)."""
    control = Control()
    observe_rewards(control, torch.tensor([1.0, 3.0]))
    result = normalized(torch.tensor([1.0, 3.0, torch.nan]), control)
    assert result[:2].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)
    assert result[2].isnan()


def test_equal_rewards_are_normalised_to_zero_and_nothing_observed_changes_nothing():
    control = Control()
    observe_rewards(control, torch.full((8,), 0.1))
    assert normalized(torch.full((8,), 0.1), control).abs().max() < 1e-6
    before = control.reward_mean
    observe_rewards(control, torch.full((3,), torch.nan))
    assert (control.reward_count, control.reward_mean) == (8, before)
