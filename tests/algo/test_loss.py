"""The loss by hand, against autograd of the plain formula on padded tensors, and its invariances in float64."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from hone.algo.algorithm import Algorithm
from hone.algo.correction import CORRECTION, icepop, sequence_mask, sequence_truncated, truncated
from hone.algo.loss import (
    AGGREGATE,
    CLIP,
    RATIO,
    Bounds,
    LossTokens,
    cispo_clip,
    geo_mean_clip,
    kl_cov,
    log_ratio,
    ppo_clip,
    sapo_gate,
    sequence_ratio,
    token_ratio,
    tv_mask,
)
from hone.algo.measures import MEASURES
from hone.config.algorithm import AlgorithmSection
from hone.types import Totals

MAX_TOKENS = 8
ROWS = {
    "grpo": AlgorithmSection(kl_loss_coef=0.04),
    "dr_grpo": AlgorithmSection(credit="group_mean", aggregate="fixed_length"),
    "dapo": AlgorithmSection(aggregate="token_mean", clip_high=0.28),
    "reinforce": AlgorithmSection(credit="group_mean", ratio="none", clip="none", aggregate="token_mean"),
    "gspo": AlgorithmSection(ratio="sequence", clip_low=0.1, clip_high=0.1),
    "cispo": AlgorithmSection(clip="cispo", clip_high=0.3, aggregate="token_mean"),
    "gmpo": AlgorithmSection(clip="geo_mean", clip_low=0.33, clip_high=0.49),
    "sapo": AlgorithmSection(clip="sapo", sapo_tau=(1.0, 1.5)),
    "dual clip": AlgorithmSection(dual_clip=1.3, aggregate="token_sum"),
    "kl_cov": AlgorithmSection(clip="kl_cov", kl_cov=(0.25, 0.7), aggregate="token_mean"),
    "dppo": AlgorithmSection(clip="tv_mask", clip_low=0.02, clip_high=0.03, dual_clip=1.2, aggregate="token_mean"),
    "tis": AlgorithmSection(aggregate="token_mean", correction="tis", correction_high=1.1),
    "sequence tis": AlgorithmSection(correction="sequence_tis", correction_high=1.1),
    "icepop": AlgorithmSection(correction="icepop", correction_low=0.8, correction_high=1.2),
    "sequence mask": AlgorithmSection(correction="sequence_mask", correction_low=0.95, correction_high=1.2),
    "everything": AlgorithmSection(
        ratio="token", clip="none", aggregate="sample_mean", kl_loss_coef=0.3, kl_estimator="k2", entropy_coef=0.1
    ),
    "absolute kl": AlgorithmSection(aggregate="token_mean", kl_loss_coef=0.3, kl_estimator="abs"),
}


def tokens_of(logprobs, advantages, *, old=None, mask=None, sample=None, **columns) -> LossTokens:
    logprobs_T = torch.as_tensor(logprobs, dtype=torch.float64)
    sample_T = torch.zeros(len(logprobs_T), dtype=torch.int64) if sample is None else torch.as_tensor(sample)
    defaults = dict.fromkeys(("entropy_T", "sampler_logprobs_T", "ref_logprobs_T"), torch.zeros_like(logprobs_T))
    return LossTokens(
        logprobs_T=logprobs_T,
        old_logprobs_T=torch.zeros_like(logprobs_T) if old is None else torch.as_tensor(old, dtype=torch.float64),
        advantages_T=torch.as_tensor(advantages, dtype=torch.float64),
        loss_mask_T=torch.ones_like(logprobs_T) if mask is None else torch.as_tensor(mask, dtype=torch.float64),
        sample_T=sample_T,
        num_samples=int(sample_T.max()) + 1,
        **(defaults | columns),
    )


# ---- by hand ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "low", "high"),
    [
        (1.0, 2.0, 2.0, False, False),
        (1.5, 2.0, 2.4, False, True),  # no more reward beyond 1 + 0.2
        (1.5, -2.0, -3.0, False, False),  # a ratio that moved the wrong way is pulled back in full
        (0.5, 2.0, 1.0, False, False),
        (0.5, -2.0, -1.6, True, False),  # no more reward below 1 - 0.2
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, expected, low, high):
    tokens = tokens_of([0.0], [advantage])
    objective = ppo_clip(torch.tensor([ratio], dtype=torch.float64), tokens, Bounds(0.2, 0.2))
    assert float(objective.value_T) == pytest.approx(expected, rel=1e-12)
    assert (bool(objective.clipped_low_T), bool(objective.clipped_high_T)) == (low, high)


def test_dual_clip_by_hand():
    """rho = 6 against A = -1: the loss is 6 without, 4 with a dual clip of 4; a positive advantage is not touched."""
    ratio_T, tokens = torch.tensor([6.0, 6.0], dtype=torch.float64), tokens_of([0.0, 0.0], [-1.0, 1.0])
    assert ppo_clip(ratio_T, tokens, Bounds(0.2, 0.2)).value_T.tolist() == [-6, 1.2]
    objective = ppo_clip(ratio_T, tokens, Bounds(0.2, 0.2, dual=4.0))
    assert objective.value_T.tolist() == [-4, 1.2]
    assert objective.clipped_dual_T.tolist() == [True, False]


def test_sequence_ratio_is_the_geometric_mean_over_the_policys_own_tokens():
    """Log ratios 0.2, 0.4 and a masked 9; then a sample of one token."""
    tokens = tokens_of([0.2, 9.0, 0.4, -1.0], [1.0] * 4, mask=[1, 0, 1, 1], sample=[0, 0, 0, 1])
    ratio_T = sequence_ratio(tokens)
    assert ratio_T[[0, 2, 3]].tolist() == pytest.approx([math.exp(0.3), math.exp(0.3), math.exp(-1.0)])


def test_cispo_by_hand():
    """A clipped token keeps its gradient: stop_gradient(1.3) * A * grad log pi."""
    logprobs_T = torch.tensor([math.log(2.0), -0.5], dtype=torch.float64, requires_grad=True)
    tokens = tokens_of(logprobs_T, [3.0, 2.0], old=[0.0, -0.5])
    objective = cispo_clip(token_ratio(tokens), tokens, Bounds(0.2, 0.3))
    objective.value_T.sum().backward()
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == pytest.approx([1.3 * 3, 1.0 * 2])
    assert objective.clipped_high_T.tolist() == [True, False]


def test_geo_mean_by_hand():
    """Ratios 2 and 0.5, bounds 0.5 and 1.5. A > 0 bounds above: sqrt(1.5 * 0.5); A < 0 below: sqrt(2 * 0.5)."""
    for advantage, expected in ((1.0, math.sqrt(0.75)), (-1.0, -1.0)):
        tokens = tokens_of([math.log(2.0), math.log(0.5)], [advantage] * 2)
        value_T = geo_mean_clip(token_ratio(tokens), tokens, Bounds(0.5, 0.5)).value_T
        assert value_T.tolist() == pytest.approx([expected] * 2)


def test_sapo_gate_has_slope_one_at_ratio_one_and_flattens_away_from_it():
    ratio_T = torch.tensor([1.0, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    tokens = tokens_of([0.0] * 3, [1.0, -1.0, 1.0])
    value_T = sapo_gate(ratio_T, tokens, Bounds(0.2, 0.2, sapo_tau=(1.0, 2.0))).value_T
    value_T.sum().backward()
    assert value_T[:2].tolist() == pytest.approx([2.0, -1.0])  # 4 / tau * sigmoid(0)
    assert ratio_T.grad is not None
    sigmoid = 1 / (1 + math.exp(-2.0))
    assert ratio_T.grad.tolist() == pytest.approx([1.0, -1.0, 4 * sigmoid * (1 - sigmoid)])


def test_tv_mask_by_hand():
    """Probabilities 0.5 -> 0.6 with bounds of 0.05, and 0.001 -> 0.004, a ratio of 4: only the first has moved far."""
    now, old = [math.log(0.6), math.log(0.004)], [math.log(0.5), math.log(0.001)]
    tokens = tokens_of(now, [2.0, 2.0], old=old)
    objective = tv_mask(token_ratio(tokens), tokens, Bounds(0.05, 0.05, dual=3.0))
    assert objective.value_T.tolist() == pytest.approx([0.0, 3 * 2 * math.log(0.004)])
    assert objective.clipped_high_T.tolist() == [True, False]
    pulled_back = tv_mask(token_ratio(tokens), replace(tokens, advantages_T=-tokens.advantages_T), Bounds(0.05, 0.05))
    assert pulled_back.value_T.tolist() == pytest.approx([1.2 * -2 * math.log(0.6), 4 * -2 * math.log(0.004)])


def test_kl_cov_by_hand():
    """rho = 2 and A = 3: 6, less 0.5 log 2 where the token was taken."""
    tokens = tokens_of([math.log(2.0)] * 2, [3.0, 3.0], outlier_T=torch.tensor([1.0, 0.0]))
    objective = kl_cov(token_ratio(tokens), tokens, Bounds(0.2, 0.2, kl_coef=0.5))
    assert objective.value_T.tolist() == pytest.approx([6 - 0.5 * math.log(2.0), 6.0])


def weights_of(function, log_weights, low, high, **changes):
    tokens = tokens_of([0.0] * len(log_weights), [1.0] * len(log_weights), old=log_weights, **changes)
    return function(tokens, low, high).tolist()


def test_corrections_by_hand():
    logs = [math.log(w) for w in (0.2, 1.5, 4.0)]
    assert weights_of(truncated, logs, 0.5, 2.0) == pytest.approx([0.2, 1.5, 2.0])
    assert weights_of(icepop, logs, 0.5, 2.0) == pytest.approx([0.0, 1.5, 0.0])
    # Products: 0.2 * 1.5 * 4.0 with the middle one masked is 0.8; 4.0 by itself is cut.
    masked = {"mask": [1, 0, 1, 1], "sample": [0, 0, 0, 1]}
    assert weights_of(sequence_truncated, [*logs, logs[2]], 0.5, 2.0, **masked) == pytest.approx([0.8, 0.8, 0.8, 2.0])
    # Geometric means: sqrt(0.2 * 1.5) = 0.55 stays with its tokens cut at 2, 4.0 goes.
    assert weights_of(sequence_mask, logs, 0.5, 2.0, sample=[0, 0, 1]) == pytest.approx([0.2, 1.5, 0.0])


@pytest.mark.parametrize("function", [truncated, sequence_truncated, icepop, sequence_mask])
def test_corrections_are_finite_where_the_weight_is_not(function):
    weights = weights_of(function, [5000.0, -5000.0, 0.0], 0.5, 2.0, sample=[0, 1, 2])
    assert all(math.isfinite(w) for w in weights)
    assert weights[2] == 1


def test_the_log_ratio_is_kept_within_20():
    assert log_ratio(torch.tensor([100.0, -100.0, 1.0]), torch.zeros(3)).tolist() == [20, -20, 1]


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("token_mean", (1 + 1 + 1 + 4) / 4),
        ("sample_mean", (1 + 4) / 2),
        ("fixed_length", (1 + 1 + 1 + 4) / (2 * MAX_TOKENS)),
    ],
)
def test_aggregation_by_hand(aggregate, expected):
    """Two samples of 3 and 1 tokens, token losses 1, 1, 1 and 4."""
    algorithm = Algorithm(AlgorithmSection(aggregate=aggregate, clip="none"), max_response_tokens=MAX_TOKENS)
    tokens = tokens_of([0.0] * 4, [-1.0, -1.0, -1.0, -4.0], sample=[0, 0, 0, 1])
    loss, _ = algorithm.loss(tokens, Totals(loss_tokens=4, samples=2))
    assert float(loss) == pytest.approx(expected, rel=1e-12)


def test_kl_and_entropy_terms_by_hand():
    """No advantage: what is left is 0.5 * k3(0.5) - 0.1 * 2."""
    algorithm = Algorithm(AlgorithmSection(kl_loss_coef=0.5, entropy_coef=0.1))
    tokens = tokens_of([-1.0], [0.0], old=[-1.0], ref_logprobs_T=torch.tensor([-1.5]), entropy_T=torch.tensor([2.0]))
    loss, _ = algorithm.loss(tokens, Totals(1, 1))
    assert float(loss) == pytest.approx(0.5 * 0.10653066 - 0.2, abs=1e-8)


def test_reinforce_is_the_weighted_log_likelihood():
    loss, _ = Algorithm(ROWS["reinforce"]).loss(tokens_of([-0.5, -2.0], [1.0, 1.0]), Totals(2, 1))
    assert float(loss) == 1.25


def test_measures_by_hand():
    algorithm = Algorithm(AlgorithmSection(aggregate="token_mean", kl_loss_coef=1.0, kl_estimator="k2"))
    tokens = tokens_of(
        [math.log(0.5), math.log(2.0), math.log(3.0), 7.0],
        [-1.0, 1.0, -1.0, 5.0],
        mask=[1, 1, 1, 0],
        sampler_logprobs_T=torch.tensor([0.0, 0.5, -0.5, 9.0], dtype=torch.float64),
        ref_logprobs_T=torch.tensor([math.log(0.5), math.log(2.0) - 3, math.log(3.0), 0.0], dtype=torch.float64),
        entropy_T=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64),
    )
    loss, measured = algorithm.loss(tokens, Totals(3, 1))
    metrics = algorithm.summarize([measured.tolist()], optimizer_steps=1)
    assert float(loss) == pytest.approx((0.8 - 1.2 + 3.0 + 4.5) / 3)
    expected = {
        "loss": float(loss),
        "kl_ref": 4.5 / 3,
        "kl_clipped_frac": 0,
        "tokens": 3,
        "entropy": 2,
        "clip_low_frac": 1 / 3,
        "clip_high_frac": 1 / 3,
        "ratio_clipped_mean": (0.8 + 1.2 + 1.2) / 3,
        "ratio_mean": (0.5 + 2 + 3) / 3,  # raw: the clip does not hide that the policy has moved
        "ratio_max": 3,
        "mismatch_gap": 1 / 3,
        "mismatch_ratio_mean": (1 + math.exp(-0.5) + math.exp(0.5)) / 3,
        "mismatch_kl": (math.exp(-0.5) - 0.5 + math.exp(0.5) - 1.5) / 3,
        "mismatch_max": 0.5,
        "mismatch_outside_frac": 2 / 3,
    }
    mean, square = expected["mismatch_ratio_mean"], (1 + math.exp(-1) + math.exp(1)) / 3  # of the importance weights
    expected["importance_ess_frac"] = mean**2 / square
    expected["importance_std"] = math.sqrt(square - mean**2)
    expected["importance_chi2"] = square - 1
    assert metrics == pytest.approx({f"train/{name}": value for name, value in expected.items()}, rel=1e-9)


def test_mismatch_of_each_engine_is_that_of_its_tokens():
    """Over three microbatches, one of them without a loss token; of what no named engine drew nothing is said."""
    algorithm, chance = Algorithm(ROWS["grpo"]), torch.Generator().manual_seed(0)
    trainer, sampler = torch.randn(2, 40, generator=chance, dtype=torch.float64) / 5 - 1
    engine, mask = torch.randint(0, 4, (40,), generator=chance), torch.rand(40, generator=chance) < 0.8
    parts = [slice(0, 25), slice(25, 27), slice(27, 40)]
    mask[parts[1]] = False
    rows = []
    for part in parts:
        tokens = tokens_of(
            trainer[part].tolist(),
            [1.0] * len(trainer[part]),
            old=trainer[part],
            mask=mask[part].float().tolist(),
            sampler_logprobs_T=sampler[part],
            engine_T=engine[part].double(),
            num_engines=3,
        )
        rows.append(algorithm.loss(tokens, Totals(float(mask.sum()), 1))[1].tolist())
    names = ("a", "b", "c")
    found = algorithm.summarize(rows, 1, names)
    alone = algorithm.summarize([row[: len(MEASURES)] for row in rows], 1)
    assert {name: value for name, value in found.items() if name.startswith("train/")} == alone
    for place, name in enumerate(names):
        gaps = [float(t - s) for t, s, e, m in zip(trainer, sampler, engine, mask, strict=True) if m and e == place]
        expected = {
            "gap": sum(map(abs, gaps)) / len(gaps),
            "kl": sum(math.exp(gap) - 1 - gap for gap in gaps) / len(gaps),
            "max": max(map(abs, gaps)),
            "outside_frac": sum(not 0.9 <= math.exp(gap) <= 1.1 for gap in gaps) / len(gaps),
        }
        assert {key: found[f"engine/{name}_mismatch_{key}"] for key in expected} == pytest.approx(expected, rel=1e-9)
    assert len(found) == len(alone) + 3 * 4
    nothing = algorithm.summarize([[*row[: len(MEASURES)], *[0.0] * 15] for row in rows], 1, names)
    assert nothing == alone


def test_nothing_is_said_of_tokens_where_none_was_trained():
    algorithm = Algorithm(ROWS["dapo"])
    loss, measured = algorithm.loss(tokens_of([-1.0], [1.0], mask=[0]), Totals(0, 0))
    assert float(loss) == 0
    nothing = {"train/loss": 0, "train/tokens": 0}
    assert algorithm.summarize([measured.tolist()], 1) == algorithm.summarize([], 1) == nothing


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_fully_masked_microbatch_has_loss_and_gradient_zero(row):
    logprobs_T = torch.full((3,), -1.0, dtype=torch.float64, requires_grad=True)
    tokens = tokens_of(logprobs_T, [1.0, 2.0, 3.0], mask=[0, 0, 0], outlier_T=torch.ones(3))
    loss, _ = Algorithm(row, max_response_tokens=MAX_TOKENS).loss(tokens, Totals(0, 0))
    loss.backward()
    assert float(loss.detach()) == 0
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == [0, 0, 0]


# ---- against autograd of the plain formula on padded tensors ------------------------------------------------------


def random_case(seed: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Logits (T, V) in float64 and token columns of 6 samples of 0 to 5 tokens; some masked, one sample entirely."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 5, 0, 1, 4, 2])
    num_tokens = int(lengths.sum())

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = normal(num_tokens, 5)
    token_T = torch.randint(0, 5, (num_tokens,), generator=generator)
    now = logits.log_softmax(-1).gather(1, token_T[:, None])[:, 0]
    mask_T = (torch.rand(num_tokens, generator=generator) > 0.2).double()
    mask_T[-2:] = 0
    columns = {
        "token_T": token_T,
        "old_logprobs_T": now + 0.3 * normal(num_tokens),
        "sampler_logprobs_T": now + 0.1 * normal(num_tokens),
        "ref_logprobs_T": now + 0.5 * normal(num_tokens),
        "advantages_T": normal(len(lengths)).repeat_interleave(lengths),
        "loss_mask_T": mask_T,
        "outlier_T": (torch.arange(num_tokens) % 4 == 0).double(),
    }
    return logits, columns, lengths


def ours(logits: Tensor, columns: dict[str, Tensor], lengths: Tensor, algorithm: Algorithm, parts: list[list[int]]):
    """Loss and gradient of all samples, summed over microbatches `parts` of sample numbers in any order."""
    start = lengths.cumsum(0) - lengths
    sample_T = torch.arange(len(lengths)).repeat_interleave(lengths)
    mask_T = columns["loss_mask_T"]
    with_loss = sum(bool(mask_T[sample_T == s].any()) for s in range(len(lengths)))
    totals = Totals(float(mask_T.sum()), with_loss)
    logits = logits.clone().requires_grad_()
    total = 0.0
    for part in parts:
        index = torch.cat([torch.arange(int(start[s]), int(start[s] + lengths[s])) for s in part])
        local_T = torch.arange(len(part)).repeat_interleave(lengths[torch.tensor(part)])
        log_probs = logits[index].log_softmax(-1)
        picked = {name: column[index] for name, column in columns.items()}
        tokens = LossTokens(
            logprobs_T=log_probs.gather(1, picked.pop("token_T")[:, None])[:, 0],
            entropy_T=-(log_probs.exp() * log_probs).sum(-1),
            sample_T=local_T,
            num_samples=len(part),
            **picked,
        )
        loss, _ = algorithm.loss(tokens, totals)
        loss.backward()
        total += float(loss.detach())
    return total, logits.grad


def plain(logits: Tensor, columns: dict[str, Tensor], lengths: Tensor, row: AlgorithmSection):
    """The same, written naively: padded (S, L) tensors, loops over samples, no shared code."""
    logits = logits.clone().requires_grad_()
    num_samples, longest = len(lengths), int(lengths.max())

    def pad(flat: Tensor) -> Tensor:
        rows = torch.zeros(num_samples, longest, *flat.shape[1:], dtype=flat.dtype)
        start = 0
        for s, length in enumerate(lengths.tolist()):
            rows[s, :length] = flat[start : start + length]
            start += length
        return rows

    log_probs = pad(logits).log_softmax(-1)
    now = log_probs.gather(2, pad(columns["token_T"])[..., None])[..., 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    advantage, mask = pad(columns["advantages_T"]), pad(columns["loss_mask_T"])
    ratio = torch.exp(now - pad(columns["old_logprobs_T"]))
    difference = now - pad(columns["ref_logprobs_T"])
    counts = mask.sum(1)
    if row.ratio == "sequence":
        rows = [(ratio[s].log() * mask[s]).sum() / counts[s].clamp(min=1) for s in range(num_samples)]
        # The paper's own form: every token carries the sequence ratio, its gradient is that token's.
        ratio = torch.stack([r.detach().exp() for r in rows])[:, None] * torch.exp(now - now.detach())
    weighted = (now if row.ratio == "none" else ratio) * advantage
    low, high = 1 - row.clip_low, 1 + row.clip_high
    if row.clip == "ppo":
        weighted = torch.min(weighted, torch.clamp(ratio, low, high) * advantage)
        if row.dual_clip:
            weighted = torch.where(advantage < 0, torch.max(weighted, row.dual_clip * advantage), weighted)
    elif row.clip == "cispo":
        weighted = torch.clamp(ratio.detach(), max=high) * advantage * now
    elif row.clip == "sapo":
        tau = torch.where(advantage > 0, row.sapo_tau[0], row.sapo_tau[1])
        weighted = torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
    elif row.clip == "geo_mean":
        bounded = torch.where(advantage > 0, ratio.clamp(max=high), ratio.clamp(min=low))
        product = torch.stack([bounded[s][mask[s] > 0].prod() for s in range(num_samples)])
        weighted = product[:, None] ** (1 / counts[:, None].clamp(min=1)) * advantage
    elif row.clip == "kl_cov":
        weighted = weighted - row.kl_cov[1] * ratio.log().abs() * pad(columns["outlier_T"])
    elif row.clip == "tv_mask":
        change = now.exp() - pad(columns["old_logprobs_T"]).exp()
        inside = torch.where(advantage > 0, change <= row.clip_high, change >= -row.clip_low).detach()
        assert 0 < (inside * mask).sum() < mask.sum(), "the bounds mask some tokens and leave others"
        weighted = ratio.detach().clamp(max=row.dual_clip) * advantage * now * inside
    importance = torch.exp(pad(columns["old_logprobs_T"] - columns["sampler_logprobs_T"]))
    if row.correction == "tis":
        weighted = weighted * importance.clamp(max=row.correction_high)
    elif row.correction == "sequence_tis":
        products = [importance[s][mask[s] > 0].prod().clamp(max=row.correction_high) for s in range(num_samples)]
        weighted = weighted * torch.stack(products)[:, None]
    elif row.correction == "icepop":
        weighted = weighted * importance * (importance >= row.correction_low) * (importance <= row.correction_high)
    elif row.correction == "sequence_mask":
        for s in range(num_samples):
            mean = importance[s][mask[s] > 0].log().mean().exp()
            if not row.correction_low <= mean <= row.correction_high:
                importance[s] = 0
        weighted = weighted * importance.clamp(max=row.correction_high)
    kl = {
        "k2": difference**2 / 2,
        "k3": torch.exp(-difference) - 1 + difference,
        "abs": difference.abs(),
    }[row.kl_estimator]
    token_loss = (-weighted + row.kl_loss_coef * kl - row.entropy_coef * entropy) * mask
    if row.aggregate == "token_mean":
        loss = token_loss.sum() / mask.sum()
    elif row.aggregate == "sample_mean":
        loss = torch.stack([token_loss[s].sum() / counts[s] for s in range(num_samples) if counts[s] > 0]).mean()
    elif row.aggregate == "token_sum":
        loss = token_loss.sum()
    else:
        loss = token_loss.sum() / (int((counts > 0).sum()) * MAX_TOKENS)
    loss.backward()
    return float(loss.detach()), logits.grad


def assert_same(a, b):
    assert a[0] == pytest.approx(b[0], rel=1e-9, abs=1e-12)
    torch.testing.assert_close(a[1], b[1], rtol=1e-6, atol=1e-12)
    assert a[1].abs().max() > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_loss_and_gradient_equal_the_plain_formula(row, seed):
    algorithm = Algorithm(row, max_response_tokens=MAX_TOKENS)
    case = random_case(seed)
    assert_same(ours(*case, algorithm, [[0, 1, 2, 3, 4, 5]]), plain(*case, row))


@pytest.mark.parametrize("parts", [[[0], [1], [2], [3], [4], [5]], [[5, 0, 3], [2, 4, 1]], [[1, 4], [2, 3, 0, 5]]])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_loss_and_gradient_ignore_microbatch_split_and_order(row, parts):
    algorithm = Algorithm(row, max_response_tokens=MAX_TOKENS)
    case = random_case(7)
    assert_same(ours(*case, algorithm, parts), ours(*case, algorithm, [[0, 1, 2, 3, 4, 5]]))


REFUSED = {("none", clip) for clip in CLIP if clip != "none"} | {("sequence", "geo_mean")}
"""Ratio and clip that the rules of the configuration do not let through."""


@pytest.mark.parametrize("correction", CORRECTION)
@pytest.mark.parametrize(("ratio", "clip"), [pair for pair in product(RATIO, CLIP) if pair not in REFUSED])
def test_any_combination_is_finite_and_ignores_the_microbatch_split(ratio, clip, correction):
    """With every aggregation."""
    logits, columns, lengths = random_case(5)
    for aggregate in AGGREGATE:
        row = AlgorithmSection(ratio=ratio, clip=clip, aggregate=aggregate, correction=correction, kl_loss_coef=0.1)
        algorithm = Algorithm(row, max_response_tokens=MAX_TOKENS)
        split = ours(logits, columns, lengths, algorithm, [[5, 0], [3, 2], [4, 1]])
        assert split[1].isfinite().all()
        assert_same(split, ours(logits, columns, lengths, algorithm, [[0, 1, 2, 3, 4, 5]]))
