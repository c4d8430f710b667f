"""From batch to advantages, whole rows: KL in the reward, critics, greedy baselines, shaping in its order."""

import math
from statistics import fmean, stdev

import pytest
import torch

from hone.algo.advantage import CREDIT
from hone.algo.algorithm import Algorithm
from hone.algo.kl import KL as KL_TABLE
from hone.algo.loss import LossTokens, covariance_outliers
from hone.config.algorithm import AlgorithmSection
from hone.types import Batch, Control, Totals

NAN = math.nan


def batch_of(rewards, lengths, *, prompt_S=None, mask=None, **columns) -> Batch:
    total = sum(lengths)
    prompts = prompt_S or [0] * len(lengths)
    return Batch(
        prompts=((1,),) * (max(prompts) + 1),
        prompt_S=torch.tensor(prompts),
        length_S=torch.tensor(lengths),
        token_ids_T=torch.zeros(total, dtype=torch.int64),
        loss_mask_T=torch.ones(total, dtype=torch.float64) if mask is None else torch.tensor(mask, dtype=torch.float64),
        sampler_logprobs_T=torch.zeros(total, dtype=torch.float64),
        reward_S=torch.tensor(rewards, dtype=torch.float64),
        columns={name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()},
    )


def advantages(section: AlgorithmSection, batch: Batch, **options) -> list[float]:
    return Algorithm(section, **options).assign(batch)[0].columns["advantages_T"].tolist()


# ---- KL in the reward ---------------------------------------------------------------------------------------------

KL = {"old_logprobs_T": [0.0, 0.0, 0.0, 0.0], "ref_logprobs_T": [-1.0, -2.0, 3.0, -1.0]}
"""k1 of 1, 2, -3 and 1 nats."""


def test_kl_in_the_reward_is_paid_from_each_token_on():
    """Rewards 4 and 0, baseline 2, coefficient 0.1: first sample 2 - 0.1 x (1 + 2) and 2 - 0.1 x 2."""
    section = AlgorithmSection(credit="group_mean", kl_reward_coef=0.1, kl_estimator="k1")
    assert advantages(section, batch_of([4.0, 0.0], [2, 2], **KL)) == pytest.approx([1.7, 1.8, -1.8, -2.1])


def test_the_discount_is_per_token():
    section = AlgorithmSection(credit="group_mean", gamma=0.5, kl_reward_coef=0.1, kl_estimator="k1")
    assert advantages(section, batch_of([4.0, 0.0], [2, 2], **KL)) == pytest.approx(
        [-0.1 + 0.5 * 1.8, 1.8, 0.3 + 0.5 * -2.1, -2.1]
    )


def test_masked_tokens_pay_nothing_and_are_no_steps():
    section = AlgorithmSection(credit="group_mean", gamma=0.5, kl_reward_coef=0.1, kl_estimator="k1")
    batch = batch_of([4.0, 0.0], [3, 1], mask=[1, 0, 1, 1], **KL)
    assert advantages(section, batch) == pytest.approx([-0.1 + 0.5 * (2 + 0.3), 0, 2.3, -2 - 0.1])


def test_reinforce_pp_by_hand():
    """Returns 3.7, 3.8 and 0.2, -0.1; whitened: mean 1.9, then their unbiased std."""
    section = AlgorithmSection(credit="reinforce_pp", kl_reward_coef=0.1, kl_estimator="k1")
    returns = torch.tensor([3.7, 3.8, 0.2, -0.1])
    expected = ((returns - 1.9) / (returns.std() + 1e-6)).tolist()
    assert advantages(section, batch_of([4.0, 0.0], [2, 2], **KL)) == pytest.approx(expected, rel=1e-5)


def test_what_kl_costs_is_measured_and_the_trainers_logprobs_are_asked_for():
    section = AlgorithmSection(credit="group_mean", kl_reward_coef=0.1, kl_estimator="abs")
    algorithm = Algorithm(section)
    batch, metrics = algorithm.assign(batch_of([4.0, 0.0], [2, 2], **KL))
    assert metrics["train/kl_ref"] == (1 + 2 + 3 + 1) / 4
    assert {"policy_logprobs", "ref_logprobs"} <= algorithm.needs
    more, alarm = algorithm.after_update(batch, metrics)
    assert more == {"train/kl_coef": 0.1, "train/kl_ref_sequence": 3.5}
    assert alarm is None


@pytest.mark.parametrize(("estimator", "clip", "expected"), [("k1", 2.5, -2.5), ("k1", None, -3), ("k2", 4, 4)])
def test_a_tokens_kl_in_the_reward_is_bounded_and_counted(estimator, clip, expected):
    """k1 of 1, 2, -3 and 1 nats: only the third is outside; it is paid by the second sample's first token."""
    section = AlgorithmSection(credit="group_mean", kl_reward_coef=0.1, kl_estimator=estimator, kl_clip=clip)
    batch, metrics = Algorithm(section).assign(batch_of([4.0, 0.0], [2, 2], **KL))
    third, fourth = batch.columns["advantages_T"].tolist()[2:]
    assert third - fourth == pytest.approx(-0.1 * expected)
    assert metrics["train/kl_clipped_frac"] == (0 if clip is None else 0.25)


@pytest.mark.parametrize(("estimator", "d"), [("k3", -15.0), ("k2", 15.0), ("abs", -15.0)])
def test_one_unlikely_token_cannot_outweigh_the_loss(estimator, d):
    """At d = -15 k3 is 3.3 million: with the default bound it adds 10 times the coefficient, and has no gradient."""
    algorithm = Algorithm(AlgorithmSection(aggregate="token_sum", kl_loss_coef=0.01, kl_estimator=estimator))
    zeros = torch.zeros(2, dtype=torch.float64)
    logprobs_T = zeros.clone().requires_grad_()
    tokens = LossTokens(
        logprobs_T=logprobs_T,
        entropy_T=zeros,
        old_logprobs_T=zeros,
        sampler_logprobs_T=zeros,
        advantages_T=zeros,
        ref_logprobs_T=torch.tensor([-d, 1.0], dtype=torch.float64),
        loss_mask_T=zeros + 1,
        sample_T=torch.zeros(2, dtype=torch.int64),
        num_samples=1,
    )
    loss, measured = algorithm.loss(tokens, Totals(2, 1))
    loss.backward()
    alone = float(KL_TABLE[estimator].function(zeros[:1] - 1))
    assert loss.item() == pytest.approx(0.01 * (10 + alone))
    assert logprobs_T.grad[0] == 0 and logprobs_T.grad[1] != 0
    assert algorithm.summarize([measured.tolist()], 1)["train/kl_clipped_frac"] == 0.5


# ---- steering -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("unit", "factor"), [("per_token", 1 + 0.2 * 2 / 10), ("per_sequence", 1 - 0.125 * 2 / 10)])
def test_a_steered_coefficient_is_used_by_the_next_update_and_knows_the_unit_of_its_target(unit, factor):
    """1.75 nats per token and 3.5 per sequence; target 4."""
    target = 1.0 if unit == "per_token" else 4.0
    section = AlgorithmSection(
        credit="group_mean",
        kl_reward_coef=0.1,
        kl_estimator="abs",
        kl_target=target,
        kl_target_unit=unit,
        kl_horizon_samples=10,
    )
    control = Control()
    algorithm = Algorithm(section, control=control)
    batch, metrics = algorithm.assign(batch_of([4.0, 0.0], [2, 2], **KL))
    algorithm.after_update(batch, metrics)
    assert control.kl_coef is None, "the policy did not learn: a critic is warming up"
    more, _ = algorithm.after_update(batch, metrics | {"train/loss": 0.0})
    assert more["train/kl_coef"] == 0.1, "what the update was made with"
    assert control.kl_coef == algorithm.kl_coef == pytest.approx(0.1 * factor)
    resumed = Algorithm(section, control=Control(kl_coef=control.kl_coef))
    again = resumed.assign(batch)[0].columns["advantages_T"]
    assert again.tolist() == pytest.approx(
        [2 - 0.1 * factor * 3, 2 - 0.1 * factor * 2, -2 - 0.4 * factor, -2 - 0.1 * factor]
    )


def test_an_unreachable_target_is_reported_with_its_unit():
    section = AlgorithmSection(kl_loss_coef=0.1, kl_target=0.5)
    algorithm = Algorithm(section, control=Control(kl_missed_steps=-49))
    _, alarm = algorithm.after_update(batch_of([4.0, 0.0], [2, 2]), {"train/kl_ref": 0.01, "train/loss": 0.0})
    assert alarm is not None
    assert "below algorithm.kl_target = 0.5 nats per token for 50 updates (now 0.01" in alarm


# ---- PPO ----------------------------------------------------------------------------------------------------------


def test_ppo_advantages_are_whitened_and_its_returns_are_not():
    """V = 0.5 everywhere, lambda 1: advantages 0.5, 0.5 and -0.5, -0.5; returns 1, 1 and 0, 0."""
    algorithm = Algorithm(AlgorithmSection(credit="gae", gae_lambda=1.0))
    batch, metrics = algorithm.assign(batch_of([1.0, 0.0], [2, 2], value_T=[0.5, 0.5, 0.5, 0.5]))
    std = (4 * 0.25 / 3) ** 0.5
    expected = [0.5 / std, 0.5 / std, -0.5 / std, -0.5 / std]
    assert batch.columns["advantages_T"].tolist() == pytest.approx(expected, rel=1e-5)
    assert batch.columns["return_T"].tolist() == [1, 1, 0, 0]
    assert metrics == pytest.approx(
        {"critic/explained_variance": 0.0, "train/advantage_std": 0.5 / std, "train/advantage_positive_frac": 0.5},
        rel=1e-4,
    )


def test_an_unscored_sample_has_no_advantage_and_no_return():
    algorithm = Algorithm(AlgorithmSection(credit="gae"))
    batch, _ = algorithm.assign(batch_of([1.0, NAN], [1, 2], mask=[1, 0, 0], value_T=[0.5, 3.0, 7.0]))
    assert batch.columns["advantages_T"].tolist() == [0, 0, 0]
    assert batch.columns["return_T"].tolist() == [1, 0, 0]


# ---- rewards of single turns --------------------------------------------------------------------------------------


def test_ppo_learns_from_a_turns_reward_up_to_that_turn_only():
    """Two turns of one token with a tool's token between; 1 of the reward of 3 was given to the first."""
    section = AlgorithmSection(credit="gae", gae_lambda=1.0)
    batch = batch_of([3.0], [3], mask=[1, 0, 1], value_T=[0.5, 9.0, 0.25], turn_reward_T=[1.0, 0.0, 0.0])
    assert Algorithm(section).assign(batch)[0].columns["return_T"].tolist() == [3, 0, 2]


def test_reinforce_pp_discounts_a_turns_reward_from_where_it_was_given():
    """gamma 0.5: returns 1 + 2 / 2, 2 and 1.5, whitened: deviations 1/6, 1/6, -1/3, std 1 / sqrt(12)."""
    section = AlgorithmSection(credit="reinforce_pp", gamma=0.5)
    placed = batch_of([3.0, 1.5], [2, 1], turn_reward_T=[1.0, 0.0, 0.0])
    assert advantages(section, placed) == pytest.approx([3**-0.5, 3**-0.5, -2 * 3**-0.5], rel=1e-5)


@pytest.mark.parametrize("name", sorted(set(CREDIT) - {"gae", "reinforce_pp"}))
def test_a_baseline_of_whole_samples_reads_their_sum(name):
    columns = {"greedy_reward_N": [1.0], "greedy_length_N": [3.0], "greedy_truncated_N": [0.0]}
    columns |= {"score/a_S": [3.0, 1.0]}
    section = AlgorithmSection(credit=name, gamma=0.5)
    plain = batch_of([3.0, 1.0], [2, 2], **columns)
    placed = batch_of([3.0, 1.0], [2, 2], turn_reward_T=[1.0, 2.0, 1.0, 0.0], **columns)
    found = advantages(section, placed, weights={"a": 1.0})
    assert found == advantages(section, plain, weights={"a": 1.0}) and found[0] > 0


def test_an_unscored_sample_has_no_rewards_of_turns_either():
    section = AlgorithmSection(credit="gae", gae_lambda=1.0)
    batch = batch_of([1.0, NAN], [1, 2], mask=[1, 0, 0], value_T=[0.5, 3.0, 7.0], turn_reward_T=[0.0, 5.0, 5.0])
    assert Algorithm(section).assign(batch)[0].columns["return_T"].tolist() == [1, 0, 0]


def test_the_clip_bounds_what_is_still_to_come_after_every_turn():
    """Turns of 5, 5, -20 in [0, 1] give 1, 0, -1; the sample's sum of -10 becomes 0, so nothing is left."""
    section = AlgorithmSection(credit="gae", gae_lambda=1.0, reward_clip=(0, 1))
    values = [0.0] * 4
    batch = batch_of([-10.0, 0.5], [3, 1], value_T=values, turn_reward_T=[5.0, 5.0, -20.0, 0.5])
    assert Algorithm(section).assign(batch)[0].columns["return_T"].tolist() == [0, -1, -1, 0.5]


def test_normalising_scales_a_turns_reward_and_moves_the_sample_only():
    """Rewards 1 and 3: mean 2, std sqrt(2). The second sample's first turn was given 1 of its 3."""
    section = AlgorithmSection(credit="gae", gae_lambda=1.0, normalize_rewards=True)
    batch = batch_of([1.0, 3.0], [1, 2], value_T=[0.0] * 3, turn_reward_T=[0.0, 1.0, 0.0])
    half = 0.5**0.5
    found = Algorithm(section).assign(batch)[0].columns["return_T"].tolist()
    assert found == pytest.approx([-half, half, 0.0], abs=1e-5)


# ---- ReMax --------------------------------------------------------------------------------------------------------


def test_remax_compares_with_the_greedy_sample_of_the_prompt():
    columns = {"greedy_reward_N": [1.0, NAN], "greedy_length_N": [3.0, 3.0], "greedy_truncated_N": [0.0, 0.0]}
    batch = batch_of([1.0, 4.0, 9.0, NAN], [1, 1, 1, 1], prompt_S=[0, 0, 1, 1], mask=[1, 1, 1, 0], **columns)
    assert advantages(AlgorithmSection(credit="remax"), batch) == [0, 3, 0, 0]


def test_the_greedy_reward_is_shaped_as_the_others_are():
    """Clipped to 2, halved when cut, and 1 less at the length limit of 4 with a buffer of 2."""
    columns = {"greedy_reward_N": [9.0], "greedy_length_N": [4.0], "greedy_truncated_N": [1.0], "truncated_S": [0.0]}
    section = AlgorithmSection(
        credit="remax", reward_clip=(-1, 2), truncated_reward_factor=0.5, overlong_buffer_frac=0.5
    )
    assert advantages(section, batch_of([1.5], [1], **columns), max_response_tokens=4) == [1.5 - (1 - 1)]


# ---- GDPO ---------------------------------------------------------------------------------------------------------


def gdpo_plainly(groups, weights):
    """Scores by component and group -> advantages of the samples, by the statistics module alone."""
    sums = [0.0] * sum(map(len, groups[0]))
    for of_component, weight in zip(groups, weights, strict=True):
        place = 0
        for group in of_component:
            known = [score for score in group if not math.isnan(score)]
            std = stdev(known) if len(known) > 1 else 0.0
            for score in group:
                if not math.isnan(score) and std:
                    sums[place] += weight * (score - fmean(known)) / (std + 1e-6)
                place += 1
    return [(value - fmean(sums)) / (stdev(sums) + 1e-6) for value in sums]


def test_gdpo_normalises_each_component_by_itself():
    """The second component has a hundred times the spread, and does not apply to the second group."""
    right, long = [[1.0, 0.0, 0.0], [0.0, 1.0]], [[300.0, 100.0, 200.0], [NAN, NAN]]
    weights = {"right": 1.0, "long": -0.5}
    columns = {"score/right_S": [*right[0], *right[1]], "score/long_S": [*long[0], *long[1]]}
    rewards = [-149.0, -50.0, -100.0, 0.0, 1.0]
    batch = batch_of(rewards, [1] * 5, prompt_S=[0, 0, 0, 1, 1], **columns)
    found = advantages(AlgorithmSection(credit="gdpo"), batch, weights=weights)
    assert found == pytest.approx(gdpo_plainly([right, long], weights.values()), rel=1e-9)
    assert found[0] > 0 > found[1], "right and long is better than wrong; the sum has it the other way round"


def test_gdpo_gives_an_unscored_sample_nothing():
    columns = {"score/a_S": [1.0, 0.0, 0.5], "score/b_S": [1.0, 0.0, NAN]}
    batch = batch_of([2.0, 0.0, NAN], [1, 1, 1], mask=[1, 1, 0], **columns)
    half = 0.5**0.5
    found = advantages(AlgorithmSection(credit="gdpo"), batch, weights={"a": 1.0, "b": 1.0})
    assert found == pytest.approx([half, -half, 0.0], abs=1e-5)


# ---- tokens of high entropy, and an entropy to keep -----------------------------------------------------------------


@pytest.mark.parametrize(("frac", "seed"), [(0.2, 0), (0.5, 1), (0.33, 2), (0.01, 3)])
def test_only_the_tokens_with_the_highest_entropy_get_their_advantage(frac, seed):
    generator = torch.Generator().manual_seed(seed)
    entropy_T = torch.rand(23, generator=generator, dtype=torch.float64)
    mask = (torch.rand(23, generator=generator) > 0.3).double()
    batch = batch_of([0.0], [23], mask=mask.tolist(), advantages_T=[1.0] * 23)
    algorithm = Algorithm(AlgorithmSection(top_entropy_frac=frac))
    found = algorithm.keep_uncertain(batch, entropy_T).columns["advantages_T"]
    bound = torch.quantile(entropy_T[mask > 0], 1 - frac)
    assert found.tolist() == ((entropy_T >= bound) & (mask > 0)).double().tolist()
    assert found.sum() >= 1
    assert algorithm.picks_by_entropy and not Algorithm(AlgorithmSection()).picks_by_entropy


def test_the_entropy_bonus_is_on_below_its_target_and_its_coefficient_follows():
    """Target 1, steps of 0.1 from 0.2, at most 0.3."""
    section = AlgorithmSection(entropy_coef=0.2, entropy_target=1.0, entropy_coef_step=0.1, entropy_coef_max=0.3)
    algorithm, batch = Algorithm(section, control=Control()), batch_of([1.0, 0.0], [1, 1])
    used = []
    for entropy in (2.0, 1.0, 0.5, 0.5, 1.5, 0.9):
        assert not algorithm.only_advantage_has_gradient
        assert algorithm.entropy_has_gradient == (algorithm.entropy_coef > 0)
        more, _ = algorithm.after_update(batch, {"train/entropy": entropy})
        used.append(more["train/entropy_coef"])
    assert used == pytest.approx([0.0, 0.0, 0.2, 0.3, 0.3, 0.0])
    assert algorithm.entropy_coef == pytest.approx(0.3)
    resumed = Algorithm(section, control=Control(entropy_coef=algorithm.control.entropy_coef, entropy_is_low=True))
    assert resumed.entropy_coef == algorithm.entropy_coef


# ---- shaping ------------------------------------------------------------------------------------------------------


def test_a_truncated_sample_keeps_a_fraction_of_a_positive_reward_only():
    section = AlgorithmSection(credit="group_mean", truncated_reward_factor=0.25)
    batch = batch_of([4.0, 4.0, -3.0], [1, 1, 1], truncated_S=[0.0, 1.0, 1.0])
    assert advantages(section, batch) == pytest.approx([4 - 2 / 3, 1 - 2 / 3, -3 - 2 / 3])


def test_rewards_are_clipped_before_they_are_normalised_and_penalised_after():
    """Clipped to 1 and 3: mean 2, std sqrt(2). Lengths 1 and 4 of 4 with a buffer of 2: the second loses 1."""
    section = AlgorithmSection(
        credit="group_mean", reward_clip=(1, 3), normalize_rewards=True, overlong_buffer_frac=0.5
    )
    control = Control()
    algorithm = Algorithm(section, max_response_tokens=4, control=control)
    batch, metrics = algorithm.assign(batch_of([-9.0, 9.0], [1, 4]))
    half = 0.5**0.5
    expected = (2 * half - 1) / 2
    assert batch.columns["advantages_T"].tolist() == pytest.approx([-expected] + [expected] * 4, rel=1e-5)
    assert (control.reward_count, control.reward_mean) == (2, 2.0)
    assert metrics["train/reward_running_std"] == pytest.approx(2**0.5)
    assert metrics["train/overlong_penalty_mean"] == pytest.approx(-0.5)


def test_advantages_are_bounded_last_of_all():
    """Rewards 4, 1 and 1: 2, -1 and -1 after the mean; within 1.5 the first is 1.5, on one of three tokens."""
    section = AlgorithmSection(credit="group_mean", advantage_clip=1.5)
    batch, metrics = Algorithm(section).assign(batch_of([4.0, 1.0, 1.0], [1, 1, 1]))
    assert batch.columns["advantages_T"].tolist() == [1.5, -1, -1]
    assert metrics == pytest.approx(
        {
            "train/advantage_clipped_frac": 1 / 3,
            "train/advantage_std": ((1.5**2 + 1 + 1) / 3) ** 0.5,
            "train/advantage_positive_frac": 1 / 3,
        }
    )


def test_a_critic_learns_what_was_not_bounded():
    section = AlgorithmSection(credit="gae", gae_lambda=1.0, advantage_clip=0.1)
    batch, _ = Algorithm(section).assign(batch_of([1.0, 0.0], [1, 1], value_T=[0.5, 0.5]))
    assert batch.columns["advantages_T"].tolist() == pytest.approx([0.1, -0.1])
    assert batch.columns["return_T"].tolist() == [1, 0]


# ---- off-policy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "auto", "in_use"), [("auto", "tis", True), ("auto", "none", False), ("tis", None, True)]
)
def test_auto_is_what_the_run_makes_of_it(chosen, auto, in_use):
    algorithm = Algorithm(AlgorithmSection(correction=chosen), correction=auto)
    assert ("dropped" in algorithm._token_means) == in_use


def test_with_the_sampler_as_old_policy_no_logprobs_are_asked_for():
    algorithm = Algorithm(AlgorithmSection(old_logprobs="sampler", kl_reward_coef=0.1))
    assert "policy_logprobs" not in algorithm.needs
    batch, _ = algorithm.assign(batch_of([1.0, 0.0], [1, 1], ref_logprobs_T=[0.0, 0.0]))
    assert torch.equal(batch.columns["old_logprobs_T"], batch.sampler_logprobs_T)


# ---- Clip-Cov -----------------------------------------------------------------------------------------------------


def test_covariance_outliers_by_hand():
    """Means 0 and 0 over the unmasked: covariances 4, 9, 2, 1; of those inside (1, 9) the largest half of four."""
    logprobs_T = torch.tensor([2.0, -3.0, 2.0, -1.0, 50.0])
    advantages_T = torch.tensor([2.0, -3.0, 1.0, -1.0, 50.0]) + 0.25
    mask_T = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])

    def found(share, low, high):
        return covariance_outliers(logprobs_T, advantages_T, mask_T, share=share, low=low, high=high).tolist()

    covariance = ((logprobs_T[:4] - logprobs_T[:4].mean()) * (advantages_T[:4] - advantages_T[:4].mean())).tolist()
    assert covariance == pytest.approx([4.5, 8.25, 2.5, 0.75])
    assert found(0.5, 1.0, 9.0) == [1, 1, 0, 0, 0]
    assert found(0.5, 1.0, 8.0) == [1, 0, 1, 0, 0]  # the largest is outside, as in the paper
    assert found(0.0001, 1.0, 9.0) == [0, 1, 0, 0, 0]  # at least one
    assert found(0.5, 10.0, 20.0) == [0] * 5


@pytest.mark.parametrize("name", CREDIT)
def test_every_credit_is_zero_for_a_sample_of_no_length_and_finite_for_a_batch_of_nothing(name):
    columns = {"greedy_reward_N": [1.0], "greedy_length_N": [3.0], "greedy_truncated_N": [0.0]}
    columns |= {"score/a_S": [1.0, 0.0]}
    section, weights = AlgorithmSection(credit=name), {"a": 1.0}
    some = batch_of([1.0, 0.0], [0, 2], value_T=[0.0, 0.0], **columns)
    assert all(math.isfinite(value) for value in advantages(section, some, weights=weights))
    nothing = batch_of([1.0, 0.0], [0, 0], value_T=[], **columns)
    assert advantages(section, nothing, weights=weights) == []
