"""Rules about trainer and sampler: whether they give the same tokens the same probabilities."""

from __future__ import annotations

import math

from hone.doctor.history import History
from hone.doctor.rule import AlarmRule, Cause, Limit, above, below, either, outside, when
from hone.doctor.rules.common import (
    ENTROPY,
    GAP,
    KL_UPDATE,
    NORM,
    OPENCLAW,
    OURS,
    PRIME,
    VERL_CORRECTION,
    VERL_FAQ,
    is_sampling_truncated,
    is_stale,
)


def _one_engine_differs(h: History) -> bool:
    """The gap of one engine is five times that of every other one."""
    *others, largest = sorted(h.mean(name, 5) for name in h.names("engine/<engine>_mismatch_gap")) or [math.nan]
    return bool(others) and largest > max(0.03, 5 * others[-1])


def _weights_fall_behind(h: History) -> bool:
    """The gap has grown fivefold although no sample is old; or it is ten times what as many updates as the samples are
    old move the policy by (a KL grows at most with the square of their number). Of the last ten measured updates the
    largest counts: they are measured on few prompts, every tenth step, and the learning rate may have risen since."""
    if is_stale(h):
        age = h.mean("rollout/staleness_mean", 10)
        largest = max(h.recent(KL_UPDATE, 10), default=math.nan)
        return h.mean("train/mismatch_kl", 3) > 10 * max(age, 1) ** 2 * largest
    first = h.base(GAP) if h.count(GAP) > 10 else h.first(GAP)
    return h.mean(GAP, 3) > 5 * first and not is_sampling_truncated(h)


def _is_masked_without_reason(h: History) -> bool:
    """Tokens are out of the loss although the policy wrote all of them and every sample was scored."""
    is_masked_by_settings = h.key("algorithm.mask_truncated") or h.key("algorithm.rejection") not in (None, "none")
    has_environment = bool(h.names("rollout/turns_mean"))
    is_unscored = h.mean("rollout/unscored_frac", 5) > 0
    return h.mean("train/masked_frac", 5) > 0.02 and not (is_masked_by_settings or has_environment or is_unscored)


TRUNCATED_SAMPLING = Cause(
    name="truncated_sampling",
    what="the sampler draws from a truncated distribution (top_p, top_k, min_p) and the trainer does not.",
    change="rollout.top_p: 1.0, rollout.top_k: 0, rollout.min_p: 0; no sampling defaults in generation_config.json",
    confirm="train/mismatch_ratio_mean is below 1 by about the probability that is cut off, from step 1 (TRL issue "
    "6789), and no token is likelier to the trainer. At another temperature some are.",
    applies=is_sampling_truncated,
    reads=("rollout.top_p", "rollout.top_k", "rollout.min_p", "train/mismatch_ratio_mean", "train/mismatch_kl"),
)
FEW_TOKENS_DIFFER = Cause(
    name="few_tokens_differ",
    what="single tokens have very different probabilities in trainer and sampler.",
    change="algorithm.correction: icepop",
    confirm="train/mismatch_gap is small while the spread is large: rare tokens, not a shift of all.",
    reads=(GAP,),
)
MISMATCH = (
    AlarmRule(
        name="tokens_masked",
        level="data",
        pattern="tokens that the policy wrote are left out of the loss",
        metrics=("train/masked_frac", "rollout/unscored_frac", "rollout/turns_mean"),
        when=when(
            "above 0.02 on average of five, without an environment, unscored samples or a setting that masks",
            _is_masked_without_reason,
        ),
        causes=(
            Cause(
                name="mask_shifted",
                what="the loss mask does not belong to the tokens beside it: shifted by one, of another chat template, "
                "or without the end token.",
                change="what makes the mask (Sample.loss_mask, a patch, a callback): one entry per response token, "
                "true where the policy wrote it",
                confirm="train/masked_frac is about 1 / rollout/response_tokens_mean where one token of each response "
                "is missing. Without what makes the mask it is 0.",
                reads=("rollout/response_tokens_mean",),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="mismatch",
        level="optimisation",
        pattern="trainer and sampler give the same tokens different probabilities",
        metrics=(GAP, "train/mismatch_ratio_mean", "train/mismatch_kl"),
        when=when(
            "above 0.03, or above 0.2 where samples are old and updates explain it",
            lambda h: h.mean(GAP, 3) > (0.2 if is_stale(h) and not _weights_fall_behind(h) else 0.03),
            Limit(GAP, high=0.03),
        ),
        causes=(
            Cause(
                name="one_engine_differs",
                what="one engine of several has other weights or settings than the others: a publish that it did not "
                "take, or another version of its software.",
                change="cluster.canary_every: 1, which names it and excludes it; restart that engine",
                confirm="Its engine/<engine>_mismatch_gap alone is large. If all engines have the gap, it is staleness "
                "or a setting.",
                applies=_one_engine_differs,
                reads=("engine/<engine>_mismatch_gap",),
            ),
            Cause(
                name="weights_stale",
                what="the sampler's weights fall behind: the gap is larger than the age of the samples explains.",
                change="cluster.canary_every: 1, which names the replica that did not take the weights",
                confirm="The gap returns to its first value after a restart. With one replica of several, its "
                "samples alone have it.",
                applies=_weights_fall_behind,
                reads=("rollout/staleness_mean", KL_UPDATE),
            ),
            Cause(
                name="off_policy",
                what="samples are several updates old and the policy has moved since.",
                change="rollout.max_staleness: 1 or 0; algorithm.correction: tis; or a lower learning rate",
                confirm="At rollout.max_staleness 0 the gap vanishes. If it stays, it is not staleness.",
                applies=is_stale,
                reads=("rollout/staleness_mean", "algorithm.correction", KL_UPDATE),
            ),
            TRUNCATED_SAMPLING,
            Cause(
                name="tokens_misaligned",
                what="logprobs differ by more than the entropy, so they do not belong to the tokens beside them: "
                "shifted by one, another tokenizer, another chat template or other weights.",
                change="model.tokenizer and model.chat_template: the same for engine and trainer",
                confirm="gate.enabled: true stops such a run before its first update. A wrong temperature gives a "
                "smaller gap that vanishes with rollout.temperature corrected.",
                applies=lambda h: h.mean(GAP, 5) > min(0.5, h.mean(ENTROPY, 5)),  # NaN leaves 0.5
                reads=(ENTROPY,),
            ),
            Cause(
                name="sampler_settings_differ",
                what="the sampler's temperature or another sampling setting is not the one that the trainer assumes.",
                change="rollout.temperature: the engine's own; no sampling defaults in generation_config.json",
                confirm="gate.enabled: true compares at other temperatures and names the one that fits.",
                reads=("rollout.temperature", ENTROPY),
            ),
        ),
        source=f"mean probability difference above 0.01: {VERL_FAQ}; 0.2 to 0.4 nats is broken: {OPENCLAW}",
    ),
    AlarmRule(
        name="mismatch_precision",
        level="optimisation",
        pattern="trainer and sampler differ by more than float32 rounding",
        metrics=(GAP, "train/mismatch_kl"),
        when=when(
            "above 0.0003 on average of three with run.precision float32 and fresh samples",
            lambda h: h.mean(GAP, 3) > 3e-4 and h.key("run.precision") == "float32" and not is_stale(h),
        ),
        silenced_by=("mismatch",),
        causes=(
            TRUNCATED_SAMPLING,
            Cause(
                name="dtype_differs",
                what="the sampler computes in another precision than the trainer, or with other kernels.",
                change="cluster.engines.dtype: float32, or algorithm.correction: tis",
                confirm="With both in float32 the gap falls below 1e-4. A gap that grows with the steps is stale "
                "weights.",
                reads=("run.precision",),
            ),
        ),
        source="half precision of one side gives 0.005 to 0.02: "
        + VERL_FAQ
        + "; 0.0003 ours (float32 itself: below 1e-5)",
    ),
    AlarmRule(
        name="mismatch_grows",
        level="optimisation",
        pattern="trainer and sampler differ more and more",
        metrics=(GAP, NORM),
        when=when(
            "above 0.01 on average of ten and twice its mean of steps 5 to 20, with fresh samples",
            lambda h: h.mean(GAP, 10) > max(0.01, 2 * h.base(GAP)) and not is_stale(h),
        ),
        of=(5, 5),
        after=25,
        silenced_by=("mismatch",),
        causes=(
            Cause(
                name="gradient_follows_mismatch",
                what="the gradient grows with the difference: the two compute with other precision or kernels, and the "
                "update corrects for what the policy did not do.",
                change="algorithm.correction: tis; cluster.engines.dtype: the trainer's precision",
                confirm="With algorithm.correction train/grad_norm stays where it was. If the difference is the same "
                "right after a restart, it is precision; if it is small then, weights.",
                applies=lambda h: h.mean(NORM, 10) > 2 * h.base(NORM),
                reads=("algorithm.correction", "run.precision"),
            ),
            Cause(
                name="weights_stale",
                what="the sampler's weights fall behind little by little, or the policy has become so sharp that "
                "rounding counts more.",
                change="cluster.canary_every: 1, which names a replica that did not take the weights",
                confirm="After a restart the difference is small again: weights. If not, and train/entropy has fallen: "
                "rounding, for which algorithm.correction: tis is enough.",
                reads=(ENTROPY, "cluster.canary_every"),
            ),
        ),
        source=f"a growing mismatch is an early warning: {PRIME}; above 0.01 with a rising gradient norm: {VERL_FAQ}",
    ),
    AlarmRule(
        name="importance_weights",
        level="optimisation",
        pattern="importance weights between trainer and sampler are widely spread",
        metrics=("train/importance_ess_frac", "train/importance_std", "train/importance_chi2", "train/mismatch_kl"),
        when=either(
            below("train/importance_ess_frac", 0.3),
            above("train/importance_std", 1),
            above("train/importance_chi2", 1),
            outside("train/mismatch_kl", -0.1, 0.1),
        ),
        silenced_by=("mismatch",),
        causes=(
            Cause(
                name="off_policy",
                what="samples are too old for this learning rate.",
                change="rollout.max_staleness: lower; algorithm.correction: tis",
                confirm="At rollout.max_staleness 0 the effective sample size is near 1.",
                applies=is_stale,
                reads=("rollout/staleness_mean", "algorithm.correction"),
            ),
            FEW_TOKENS_DIFFER,
        ),
        source=f"effective sample size below 0.3, std above 1, chi-square above 1, a KL beyond 0.1: {VERL_CORRECTION}",
    ),
    AlarmRule(
        name="correction_drops_tokens",
        level="optimisation",
        pattern="the off-policy correction removes many tokens",
        metrics=("train/correction_dropped_frac", GAP),
        when=above("train/correction_dropped_frac", 0.1),
        silenced_by=("mismatch",),
        causes=(
            Cause(
                name="off_policy",
                what="samples are too old for this learning rate.",
                change="rollout.max_staleness: lower",
                confirm="The share falls with rollout.max_staleness.",
                reads=("rollout/staleness_mean",),
            ),
        ),
        source="10 % ours",
    ),
    AlarmRule(
        name="correction_weights",
        level="optimisation",
        pattern="importance weights are far from 1 on average",
        metrics=("train/mismatch_ratio_mean", "train/correction_mean"),
        when=either(outside("train/mismatch_ratio_mean", 0.5, 2.0), outside("train/correction_mean", 0.5, 2.0)),
        silenced_by=("mismatch", "importance_weights"),
        causes=(
            Cause(
                name="off_policy",
                what="trainer and sampler have become different policies.",
                change="rollout.max_staleness: lower",
                confirm="The mean returns to 1 at rollout.max_staleness 0.",
                applies=is_stale,
                reads=("rollout/staleness_mean", GAP),
            ),
            FEW_TOKENS_DIFFER,
        ),
        source=f"mean within 0.5 to 2: {VERL_CORRECTION}",
    ),
)
