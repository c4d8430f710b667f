"""docs/reference/algorithms.md: every number written there by hand is computed here, ours by the code itself."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from hone.algo.advantage import (
    CREDIT,
    STD_FLOOR,
    Outcomes,
    discounted_returns,
    gae,
    group_mean,
    group_norm,
    token_rewards,
    whiten,
)
from hone.algo.algorithm import Algorithm
from hone.algo.kl import KL, MAX_LOG_RATIO
from hone.algo.loss import LossTokens, covariance_outliers
from hone.algo.shaping import ALARM_STEPS, MAX_KL_ERROR, clip_rewards, keep_fraction, overlong_penalty, steer_kl
from hone.config.algorithm import AlgorithmSection
from hone.config.layers import preset_names
from hone.tools.algorithm_page import algorithms_page
from hone.types import Batch, Control, Totals

PAGE = algorithms_page()


def float64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def credit(function, rewards) -> list[float]:
    """Advantages of one group."""
    reward_S = torch.as_tensor(rewards, dtype=torch.float64)
    return function(reward_S, torch.zeros(len(reward_S), dtype=torch.int64), 1).tolist()


def listed(values, form="{:g}") -> str:
    return " and ".join(form.format(value + 0.0) for value in values)


def section(title: str) -> str:
    """What stands under a heading, on one line."""
    text = PAGE.partition(f"# {title}\n")[2]
    assert text, f"no heading {title!r} on the page"
    return " ".join(re.split(r"^#", text, maxsplit=1, flags=re.MULTILINE)[0].split())


# ---- each returns the sentences, or parts of them, that its numbers are in ----------------------------------------


def tools():
    tool_tokens, value, lam = 200, 0.5, 0.95
    total = tool_tokens + 2
    reward_T, value_T, mask_T = torch.zeros(3, total, dtype=torch.float64)
    value_T[[0, -1]], mask_T[[0, -1]], reward_T[-1] = value, 1.0, value
    sample_T = torch.zeros(total, dtype=torch.int64)
    ours = gae(reward_T, value_T, sample_T, mask_T, gamma=1.0, lam=lam)[0]
    advantage, following = 0.0, 0.0
    for t in reversed(range(total)):  # values and rewards are already 0 where the tool wrote
        advantage = float(reward_T[t] + following - value_T[t]) + lam * advantage
        following = float(value_T[t])
    yield f"reads {tool_tokens} tokens of a tool"
    yield f"the critic says {value:g} before both, and the reward is {value:g}"
    yield f"the advantage of the first token is exactly {float(ours):g}"
    yield f"it is {advantage:.2f} at lambda {lam:g}"


def turns():
    first, answer = 1.0, 2.0
    own = {"sample_T": torch.zeros(2, dtype=torch.int64), "mask_T": torch.ones(2)}
    total = float64(first + answer)
    placed = token_rewards(total, None, **own, turn_reward_T=float64(first, 0))
    ours = discounted_returns(placed, **own, gamma=1.0).tolist()
    summed = discounted_returns(token_rewards(total, None, **own), **own, gamma=1.0).tolist()
    assert summed[0] == summed[1] == ours[0]
    yield f"gives {first:g} for the first of two turns, and the answer earns {answer:g} at the end"
    yield f"the returns are {ours[0]:g} before the first turn and {ours[1]:g} before the second"
    yield f"With the sum at the end both are {summed[1]:g}"


def clips():
    rewards, bounds = [100.0, 0.0], (0.0, 1.0)
    clipped_first = credit(group_mean, clip_rewards(float64(*rewards), bounds))
    clipped_last = clip_rewards(float64(*credit(group_mean, rewards)), bounds).tolist()
    row = AlgorithmSection(credit="group_mean", reward_clip=bounds)
    batch, _ = Algorithm(row).assign(batch_of(rewards))
    assert batch.columns["advantages_T"].tolist() == clipped_first
    yield f"Rewards of {listed(rewards)} with `reward_clip: [0, 1]` have advantages of {listed(clipped_first)}."
    yield f"they are {listed(clipped_last)}:"


def group_of_one():
    reward = 7.0
    peer = (reward - 0) / (1 + 1e-6)
    ours = {value for name in ("group_norm", "group_mean", "leave_one_out") for value in alone(name, reward)}
    assert len(ours) == 1
    yield f"with a reward of {reward:g} its advantage is {ours.pop():g}"
    yield f"a mean of 0 and a deviation of 1 for such a group, and the advantage is {peer:.0f}"


def alone(name: str, reward: float) -> list[float]:
    zero = torch.zeros(1, dtype=torch.int64)
    return CREDIT[name].function(Outcomes(float64(reward), zero, 1, zero + 1, float64(1))).tolist()


def equal_rewards():
    reward, count = np.float32(0.1), 8
    total = np.float32(0)
    for _ in range(count):
        total += reward
    deviation = float(reward - total / np.float32(count))
    std = (count * deviation**2 / (count - 1)) ** 0.5
    ours = group_norm(torch.full((count,), float(reward)), torch.zeros(count, dtype=torch.int64), 1)
    assert set(ours.tolist()) == {0}
    yield f"Eight float32 rewards of {reward:g} differ from their mean by {deviation:.1e}"
    yield f"of {deviation / (std + 1e-9):.2f} with OpenRLHF's floor of {1e-9:.0e}"
    yield f"of {deviation / (std + STD_FLOOR):.4f} with {STD_FLOOR:.0e}"
    yield f"the advantage is exactly {float(ours[0]) + 0.0:g}"


def unscored():
    ours = credit(group_norm, [1.0] * 7 + [torch.nan])
    *siblings, unscored = credit(group_norm, [1.0] * 7 + [0.0])
    assert set(ours) == {0}
    yield f"all advantages are {ours[0]:g}"
    yield f"Given a reward of 0 instead, it has {unscored:.2f} and its siblings {siblings[0]:.2f}"


def unit_of_the_target():
    per_token, length, samples, horizon, updates = 0.03, 200, 256, 10_000, 200
    per_sequence = per_token * length
    factors = []
    for kl in (per_sequence, per_token):
        control = Control(kl_coef=1.0)
        for _ in range(updates):
            coef = control.kl_coef
            steer_kl(control, coef=coef, kl=kl, target=per_sequence, samples=samples, horizon_samples=horizon)
        factors.append(control.kl_coef)
    assert factors[0] == 1
    yield f"A KL of {per_token:g} nats per token is {per_sequence:g} per sequence of {length} tokens."
    yield f"With `kl_target: {per_sequence:g}` and `kl_target_unit: per_sequence` the coefficient stays as it is"
    yield f"after {updates} updates of {samples} samples, at a horizon of {horizon:,}"
    yield f"the coefficient is {factors[1]:.2f} of what it was"


def denominators():
    algorithm = Algorithm(AlgorithmSection(aggregate="token_mean", clip="none"))
    parts = [tokens_of(10, loss=1.0), tokens_of(90, loss=0.0)]
    ours = sum(float(algorithm.loss(part, Totals(100, 2))[0]) for part in parts)
    each = [float(algorithm.loss(part, Totals(part.num_samples * len(part.loss_mask_T), 1))[0]) for part in parts]
    yield f"{len(parts[0].loss_mask_T)} tokens with a loss of {each[0]:g} each"
    yield f"{len(parts[1].loss_mask_T)} tokens with a loss of {each[1]:g}."
    yield f"Their token mean is {(10 * 1 + 90 * 0) / 100:g}, the mean of the means of both is {sum(each) / 2:g}."
    yield f"Here it is {ours:g} however the step is divided"


def tokens_of(count: int, *, loss: float) -> LossTokens:
    zeros = torch.zeros(count, dtype=torch.float64)
    names = ("logprobs_T", "entropy_T", "old_logprobs_T", "sampler_logprobs_T")
    columns = dict.fromkeys(names, zeros) | {"advantages_T": zeros - loss, "loss_mask_T": zeros + 1}
    return LossTokens(**columns, sample_T=torch.zeros(count, dtype=torch.int64), num_samples=1)


def k1_in_the_loss():
    probs, uniform = float64(0.7, 0.2, 0.1), 1 / 3
    logits = probs.log().requires_grad_()

    def gradient(value: torch.Tensor) -> str:
        (found,) = torch.autograd.grad(value, logits)
        return ", ".join(f"{x:.2f}" for x in (found.round(decimals=6) + 0.0).tolist())

    def in_a_loss(name: str) -> str:
        """Of the expectation over tokens drawn from the policy: drawing them has no gradient."""
        logprobs = logits.log_softmax(0)
        return gradient((probs * KL[name].function(logprobs - np.log(uniform))).sum())

    exact = logits.log_softmax(0)
    exact = gradient((exact.exp() * (exact - np.log(uniform))).sum())
    reversed_kl = gradient((uniform * (np.log(uniform) - logits.log_softmax(0))).sum())
    assert in_a_loss("k3") == reversed_kl
    yield "and so 0: it adds noise"
    yield "a policy of 0.7, 0.2 and 0.1"
    yield f"the KL has the gradient {exact} in the logits"
    yield f"In a loss, k1 has {in_a_loss('k1')} on average; k2 has {in_a_loss('k2')}; k3 has {in_a_loss('k3')}, that of"


def truncated():
    factor = 0.5
    good, bad = keep_fraction(float64(3, -3), float64(1, 1), factor).tolist()
    yield f"`truncated_reward_factor: {factor:g}` makes {good:g} of a reward of 3, and leaves {bad:g} as it is"


def dual_clip():
    ratio, advantage, preset = 6.0, -1.0, AlgorithmSection().model_copy(update={"dual_clip": 3.0})
    found = {}
    for dual in (None, preset.dual_clip):
        tokens = replace(tokens_of(1, loss=-advantage), logprobs_T=float64(np.log(ratio)))
        algorithm = Algorithm(AlgorithmSection(aggregate="token_sum", dual_clip=dual))
        found[dual] = float(algorithm.loss(tokens, Totals(1, 1))[0])
    yield f"a ratio of {ratio:g} and an advantage of {advantage:g} has a loss of {found[None]:g}."
    yield f"With `dual_clip: {preset.dual_clip}`, which `algorithm/ppo` sets, it has {found[3.0]:g} and no gradient."
    yield f"verl has this bound of {3:g} in every row"
    assert "`dual_clip: 3.0`" in section("`algorithm/ppo`")
    assert PAGE.count("`, `dual_clip: 3.0`") == 1, "one row"


def rejected():
    count, coef, nats = 10, 0.1, 1.0
    kept, gone = (tokens_of(count, loss=1.0) for _ in range(2))
    gone = replace(gone, sampler_logprobs_T=gone.sampler_logprobs_T - 5)  # a weight of exp(5)
    means = {}
    for kl_coef in (0.0, coef):
        row = AlgorithmSection(aggregate="token_mean", clip="none", kl_loss_coef=kl_coef, kl_estimator="abs")
        algorithm = Algorithm(row.model_copy(update={"correction": "icepop"}))
        parts = [replace(part, ref_logprobs_T=part.logprobs_T - nats) for part in (kept, gone)]
        ours = sum(float(algorithm.loss(part, Totals(2 * count, 2))[0]) for part in parts)
        means[kl_coef] = ours, float(algorithm.loss(parts[0], Totals(count, 1))[0])
    (ours, theirs), (ours_kl, theirs_kl) = means.values()
    yield "by a weight of 0 on"
    yield f"Of two samples of {count} tokens with a loss of 1 each one is rejected: the token mean is {ours:g}."
    yield f"With a KL of {nats:g} nat per token at `kl_loss_coef: {coef:g}` it is {ours_kl:g}."
    yield f"its means are {theirs:g} and {theirs_kl:g}"


def kl_after_baseline():
    rewards, kl, coef = [1.0, 0.0], float64(2, 4), 0.1
    row = AlgorithmSection(credit="group_mean", kl_reward_coef=coef, kl_estimator="k1")
    batch = batch_of(rewards).with_column("old_logprobs_T", kl).with_column("ref_logprobs_T", kl * 0)
    ours = Algorithm(row).assign(batch)[0].columns["advantages_T"].tolist()
    theirs = credit(group_mean, float64(*rewards) - coef * kl)
    yield f"Rewards of {listed(rewards)}, with {listed(kl.tolist())} nats of KL at `kl_reward_coef: {coef:g}`"
    yield f"the advantages are {listed(ours)}."
    yield f"and the mean of the group then: {listed(theirs)}."


def deviations():
    rewards, tokens = [1.0] + [0.0] * 7, 4096
    deviation = float64(*rewards) - 1 / 8
    yield f"has an advantage of {credit(group_norm, rewards)[0]:.2f} with `group_norm`"
    yield f"with the biased deviation (over n, not n - 1) it would be {deviation[0] / deviation.std(correction=0):.2f}"
    values = torch.arange(tokens, dtype=torch.float64)
    ratio = whiten(values, values * 0 + 1)[-1] / ((values - values.mean()) / values.std(correction=0))[-1]
    yield f"makes no difference: {1 / ratio:.4f} in {tokens:,} tokens"
    yield f"To either deviation `std_floor` is added, {STD_FLOOR:.0e} by default"
    assert AlgorithmSection().std_floor == STD_FLOOR
    yield f"TRL adds {1e-4:.0e}. verl adds {1e-8:.0e} to the variance"


def outliers():
    total, (share, low, high) = 100_000, AlgorithmSection().clip_cov
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = torch.randn(2, total, generator=generator, dtype=torch.float64)
    taken = [
        int(
            covariance_outliers(
                logprobs[:n], advantages[:n], logprobs[:n] * 0 + 1, share=share, low=low, high=high
            ).sum()
        )
        for n in (total, 100)
    ]
    assert taken[1] == 1
    yield f"{taken[0]} of {total:,} tokens with the preset's share of {share:g}, and at least one"


def overlong():
    limit, share = 100, 0.2
    lengths = [80, 90, 100, 110]
    ours = overlong_penalty(float64(*lengths), max_tokens=limit, buffer_frac=share, factor=1.0).tolist()
    buffer = share * limit
    theirs = min(-(lengths[3] - (limit - buffer)) / buffer, 0)
    assert ours[2] == ours[3]
    yield f"With a limit of {limit} tokens and `overlong_buffer_frac: {share:g}` the penalty is {ours[0] + 0.0:g} up to"
    yield f" {lengths[0]} tokens, {ours[1]:g} at {lengths[1]} and {ours[2]:g} at {lengths[2]}."
    yield f"would still be {ours[3]:g}, as in the paper"
    yield f"it grows on: {theirs:g} at {lengths[3]}"


def estimators():
    at = {
        d: [float(entry.function(float64(d))) for name, entry in KL.items() if name != "weighted_k3"]
        for d in (0.5, -1.0)
    }
    assert list(KL) == ["k1", "k2", "k3", "abs", "weighted_k3"]
    for d, values in at.items():
        *some, last = (f"{round(value, 5):g}" for value in values)
        yield f"d = {d:g} gives {', '.join(some)} and {last}"
    yield f"within +-`kl_clip`, {AlgorithmSection().kl_clip:g} by default"
    yield f"at d = -15, k3 is {float(KL['k3'].function(float64(-15))):,.0f}"
    yield f"coef *= 1 + clip(KL / target - 1, -{MAX_KL_ERROR:g}, {MAX_KL_ERROR:g})"
    yield f"{ALARM_STEPS} updates in a row beyond +-{MAX_KL_ERROR:.0%} on one side"


def correction():
    yield f"its log bounded to +-{MAX_LOG_RATIO:g} first"


def batch_of(rewards) -> Batch:
    ones = torch.ones(len(rewards), dtype=torch.int64)
    column = torch.ones(len(rewards), dtype=torch.float64)
    return Batch(((1,),), ones - 1, ones, ones, column, column * 0, float64(*rewards))


SAID = {
    "Tool tokens are not time steps": tools,
    "A turn's reward is not paid to later turns": turns,
    "The reward is clipped, not what a baseline left of it": clips,
    "A group of one says nothing": group_of_one,
    "Equal rewards say nothing, to the last bit": equal_rewards,
    "An unscored sample is not a bad sample": unscored,
    "The KL target says its unit": unit_of_the_target,
    "Denominators are counts of the whole optimizer step": denominators,
    "k1 is refused in the loss": k1_in_the_loss,
    "A truncated sample is never better off": truncated,
    "Dual clip is on in one row only": dual_clip,
    "A rejected sample stays in the denominators": rejected,
    "The KL in the reward comes after the group's baseline": kl_after_baseline,
    "Standard deviations are unbiased": deviations,
    "Clip-Cov decides by the batch alone": outliers,
    "The length penalty ends at the limit": overlong,
    "KL": estimators,
    "Off-policy correction": correction,
}
NAMES = re.compile(r"\b(?:weighted_)?k[123]\b|\|.*\|")
"""What has a digit and is no number: estimators, and tables, which are made from the code."""


@pytest.mark.parametrize("title", SAID)
def test_every_number_of_the_page_is_computed(title):
    rest = section(title)
    for sentence in SAID[title]():
        assert sentence in rest, f"{title}: not as computed: {sentence}"
        rest = rest.replace(sentence, "")
    assert not re.search(r"\d", NAMES.sub("", rest)), f"a number that nothing computes: {rest}"


def test_every_difference_is_among_them():
    differences = PAGE.partition("## Where ours differs\n")[2]
    assert set(re.findall(r"^### (.*)$", differences, flags=re.MULTILINE)) <= set(SAID)


def test_every_preset_stands_there_with_its_paper_and_its_numbers():
    for name in preset_names():
        if name.startswith("algorithm/"):
            text = section(f"`{name}`")
            assert "credit A = " in text and "aggregate loss = " in text
            assert "arxiv.org/abs/" in text or name == "algorithm/reinforce"
    assert "`clip_low: 0.2`, `clip_high: 0.28`" in section("`algorithm/dapo`")
    assert "r_t = R at the last token, less 0.02 KL_t" in section("`algorithm/ppo`")
    assert "of -J + 0.04 KL" in section("`algorithm/grpo`")
    assert "a critic" in section("`algorithm/ppo`") and "a critic" not in section("`algorithm/grpo`")
