"""Rules about the policy's update: its size, clipping, entropy, KL."""

from __future__ import annotations

from dataclasses import replace

from hone.doctor.history import RECENT, History
from hone.doctor.rule import AlarmRule, Cause, Limit, above, below, outside, when
from hone.doctor.rules.common import (
    ENTROPY,
    ENTROPY_BONUS_TOO_LARGE,
    EVAL,
    KL_UPDATE,
    LOWER_LR,
    NORM,
    OURS,
    PASS,
    REWARD,
    SILENT,
    TINKER,
    TOO_FAST,
    TOO_MANY_STEPS,
    TRL,
    TRUNCATED,
    USUAL,
    WEIGHT_DECAY_TOO_LARGE,
    is_rising_by_std,
    moves_far,
)

SPREAD = "rollout/reward_std"


def _kl_dominates(h: History) -> bool:
    spread, coefficient = h.mean("train/advantage_std", 5), h.now("train/kl_coef")
    is_large = h.mean("train/kl_ref", 5) * coefficient > 0.3 * spread
    is_held = coefficient > 3 * spread and h.count(REWARD) >= 20 and not is_rising_by_std(h)
    return spread > 0 and (is_large or is_held)


def _is_overused(h: History) -> bool:
    """Many optimizer steps for each batch move the policy, and the reward of the last ten steps is not above that of
    the first five."""
    rewards = h.recent(REWARD, RECENT)
    if h.count(REWARD) == len(rewards):
        rise = h.mean(REWARD, 10) - sum(rewards[:5]) / 5
        is_rising = rise > 0.2 * h.base("rollout/reward_std")
    else:
        is_rising = is_rising_by_std(h)
    return h.now("train/optimizer_steps") > 8 and h.mean(KL_UPDATE, 10) > 0.03 and not is_rising


KL_COEFFICIENT_VANISHED = Cause(
    name="kl_coefficient_vanished",
    what="the adaptive KL coefficient has fallen to nearly 0.",
    change="algorithm.kl_target: within reach, and its unit (algorithm.kl_target_unit)",
    confirm="train/kl_coef fell before train/kl_ref rose.",
    applies=lambda h: h.now("train/kl_coef") < 0.1 * h.first("train/kl_coef"),
    reads=("algorithm.kl_target",),
)
DRIFT = Cause(
    name="drift_without_gain",
    what="the policy drifts from the reference and the reward does not rise.",
    change=LOWER_LR + "; algorithm.kl_loss_coef: larger",
    confirm="With a tenth of the learning rate the KL at the same reward is smaller.",
    reads=(REWARD, "train.optimizer.lr"),
)
POLICY = (
    AlarmRule(
        name="update_too_large",
        level="optimisation",
        pattern="one update moves the policy far",
        metrics=(KL_UPDATE,),
        when=when(
            "above 2, or on average of three above 1 (0.3 after the first ten steps)",
            moves_far,
            Limit(KL_UPDATE, high=0.3),
        ),
        of=(1, 10),
        silenced_by=("mismatch",),
        causes=(
            Cause(
                name="temperature_too_low",
                what="at a low temperature logprobs move 1 / temperature times as far as the model's own.",
                change="rollout.temperature: 1.0",
                confirm="At temperature 1 the same learning rate moves the policy less. If not, lower it.",
                applies=lambda h: h.number("rollout.temperature") < 0.7,
                reads=("rollout.temperature", "train.optimizer.lr"),
            ),
            TOO_MANY_STEPS,
            Cause(
                name="learning_rate_too_high",
                what=TOO_FAST.what,
                change=LOWER_LR,
                confirm=TOO_FAST.confirm,
                reads=("train.optimizer.lr", NORM),
            ),
        ),
        source=f"below 0.01 per update is stable: {TINKER}; 2, 1 and 0.3 ours: Adam's first step moves a tiny model by "
        "0.4, which then learns well",
    ),
    AlarmRule(
        name="update_too_small",
        level="optimisation",
        pattern="updates hardly change the policy, and the reward does not rise",
        metrics=(KL_UPDATE, REWARD),
        when=when(
            "below 2e-6 while the reward does not rise",
            lambda h: h.mean(KL_UPDATE, 5) < 2e-6 and not is_rising_by_std(h),
            Limit(KL_UPDATE, low=2e-6),
        ),
        of=(4, 5),
        after=7,
        silenced_by=("all_wrong", "all_right", "no_signal", "truncation", "rewards_fail"),
        causes=(
            Cause(
                name="warmup_too_long",
                what="the warm-up is so long that the learning rate is still below a tenth of its value.",
                change="train.optimizer.warmup_steps: 20, or 5 % of the run's optimizer steps",
                confirm="train/lr and train/update_kl rise in every step. If train/lr is constant, it is too low.",
                applies=lambda h: (
                    h.now("train/lr") < 0.1 * h.number("train.optimizer.lr")
                    and h.step < h.number("train.optimizer.warmup_steps")
                ),
                reads=("train/lr", "train.optimizer.lr", "train.optimizer.warmup_steps"),
            ),
            Cause(
                name="learning_rate_too_low",
                what="the learning rate is too low for the observed change of logprobs.",
                change="train.optimizer.lr: ten times it (1e-6 suits billions of parameters, 1e-4 an adapter, 1e-3 a "
                "million)",
                confirm="With ten times the learning rate train/update_kl rises about a hundredfold and the reward "
                "begins to move. If it does not, look at groups without signal.",
                reads=("train.optimizer.lr", NORM, SILENT),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="batch_overused",
        level="optimisation",
        pattern="many optimizer steps for each batch move the policy, and the reward does not rise",
        metrics=(KL_UPDATE, "train/optimizer_steps", REWARD),
        when=when(
            "above 0.03 on average of the last ten measured, with more than 8 optimizer steps, and a reward that has "
            "not risen since the first five steps",
            _is_overused,
        ),
        of=(1, 1),
        after=10,
        silenced_by=("mismatch", "update_too_large", "accuracy_lost", "all_wrong", "all_right"),
        causes=(replace(TOO_MANY_STEPS, applies=lambda _: True),),
        source=f"below 0.01 per update is stable: {TINKER}; 0.03 and 8 steps ours",
    ),
    AlarmRule(
        name="clip_fraction",
        level="optimisation",
        pattern="many tokens are clipped",
        metrics=("train/clip_high_frac", "train/clip_low_frac"),
        when=when(
            "both sides together above 0.3, with a ratio of tokens",
            lambda h: (
                h.now("train/clip_high_frac") + h.now("train/clip_low_frac") > 0.3
                and h.key("algorithm.ratio") != "sequence"
            ),
            Limit("train/clip_high_frac", high=0.3),
            Limit("train/clip_low_frac", high=0.3),
        ),
        silenced_by=("mismatch", "update_too_large"),
        causes=(
            Cause(
                name="clip_range_too_narrow",
                what="the clip range is so narrow that almost every change is cut off.",
                change="algorithm.clip_low: 0.2, algorithm.clip_high: 0.2 (GSPO: 3e-4 and 4e-4)",
                confirm="train/update_kl is small although many tokens are clipped. If it is large, the learning rate "
                "is too high.",
                applies=lambda h: (
                    max(h.number("algorithm.clip_low"), h.number("algorithm.clip_high")) < 0.05
                    and h.key("algorithm.ratio") == "token"
                ),
                reads=("algorithm.clip_low", "algorithm.clip_high", KL_UPDATE),
            ),
            TOO_MANY_STEPS,
            Cause(
                name="learning_rate_too_high",
                what="the policy moves beyond the clip range within an update.",
                change=LOWER_LR + "; train.passes_per_batch: 1",
                confirm="With half the learning rate the share falls. If it does not, samples are too old.",
                reads=("train.optimizer.lr", "train/optimizer_steps", "train.passes_per_batch"),
            ),
        ),
        source=f"0.1 to 0.3 is usual: {USUAL}",
    ),
    AlarmRule(
        name="policy_ratio",
        level="optimisation",
        pattern="the policy ratio leaves its usual range",
        metrics=("train/ratio_mean", "train/ratio_max"),
        when=outside("train/ratio_mean", 0.5, 2.0),
        silenced_by=("mismatch", "update_too_large", "clip_fraction"),
        causes=(
            Cause(
                name="learning_rate_too_high",
                what="updates are too drastic: learning rate, or passes times optimizer steps.",
                change=LOWER_LR + "; train.passes_per_batch: 1",
                confirm="The ratio is 1 in the first optimizer step and leaves it later in the update.",
                reads=("train.optimizer.lr", "train/optimizer_steps"),
            ),
        ),
        source=f"around 1; 2.0 or 0.1 is too drastic: {TRL}",
    ),
    AlarmRule(
        name="entropy_collapse",
        level="optimisation",
        pattern="the policy's entropy collapses while accuracy does not rise",
        metrics=(ENTROPY, SPREAD, PASS),
        when=when(
            "below 0.2 times its mean of steps 5 to 20 with rollout/reward_std below its own, or below 0.01, while the "
            "reward is not rising",
            lambda h: (
                (
                    (h.mean(ENTROPY, 10) < 0.2 * h.base(ENTROPY) and h.mean(SPREAD, 10) < h.base(SPREAD))
                    or h.mean(ENTROPY, 10) < 0.01
                )
                and not is_rising_by_std(h)
                and h.mean(PASS, 10) < 0.9
            ),
            Limit(ENTROPY, low=0.2, of_baseline=True),
            Limit(ENTROPY, low=0.01),
        ),
        of=(8, 10),
        after=10,
        silenced_by=("mismatch", "update_too_large"),
        causes=(
            Cause(
                name="temperature_too_low",
                what="sampling below temperature 1 narrows what the policy learns from.",
                change="rollout.temperature: 1.0",
                confirm="At temperature 1 entropy and rollout/reward_std rise at once.",
                applies=lambda h: h.number("rollout.temperature") < 0.7,
                reads=("rollout.temperature",),
            ),
            TOO_FAST,
            Cause(
                name="exploration_lost",
                what="updates favour what is likely already: no clip-higher, groups too small, or training too long.",
                change="algorithm.clip_high: 0.28; rollout.group_size: larger; algorithm.entropy_coef: 0.001",
                confirm="If accuracy in evaluation still rises, a low entropy is healthy.",
                reads=("algorithm.clip_high", EVAL),
            ),
        ),
        source="entropy spent is reward gained, and none is left near 0 (arXiv:2505.22617); 20 % of the baseline ours",
    ),
    AlarmRule(
        name="entropy_explosion",
        level="optimisation",
        pattern="entropy rises while the reward falls",
        metrics=(ENTROPY, REWARD),
        when=when(
            "above 1.5 times its mean of steps 5 to 20 and the reward falling",
            lambda h: (
                h.mean(ENTROPY, 5) > 1.5 * h.base(ENTROPY)
                and h.mean(ENTROPY, 5) > 0.1
                and h.mean(REWARD, 5) < h.base(REWARD) - 0.1 * h.base("rollout/reward_std")
            ),
            Limit(ENTROPY, high=1.5, of_baseline=True),
        ),
        of=(4, 5),
        after=10,
        silenced_by=("mismatch", "update_too_large"),
        causes=(
            ENTROPY_BONUS_TOO_LARGE,
            WEIGHT_DECAY_TOO_LARGE,
            Cause(
                name="truncation_punished",
                what="responses that are cut off are punished, and the policy moves away from all of them.",
                change="algorithm.overlong_buffer_frac: 0.2; rollout.max_response_tokens: larger",
                confirm="rollout/truncated_frac rose before the entropy did.",
                applies=lambda h: h.mean(TRUNCATED, 10) > 0.3 and h.mean(TRUNCATED, 10) > 2 * h.base(TRUNCATED),
                reads=(TRUNCATED,),
            ),
            Cause(
                name="learning_rate_too_high",
                what="updates destroy more than they teach.",
                change=LOWER_LR,
                confirm=TOO_FAST.confirm,
                reads=("train.optimizer.lr", KL_UPDATE, NORM),
            ),
        ),
        source="rising entropy with falling reward: verl issue 2738, rllm issue 116; factor ours",
    ),
    AlarmRule(
        name="kl_high",
        level="optimisation",
        pattern="the policy is far from the reference",
        metrics=("train/kl_ref", "train/kl_coef"),
        when=when(
            "above 0.5 on average of twenty while the reward does not rise",
            lambda h: h.mean("train/kl_ref", 20) > 0.5 and not is_rising_by_std(h),
            Limit("train/kl_ref", high=0.5),
        ),
        of=(5, 5),
        after=20,
        silenced_by=("mismatch", "update_too_large", "entropy_explosion", "critic_loss"),
        causes=(
            KL_COEFFICIENT_VANISHED,
            DRIFT,
        ),
        source=f"up to 0.5: {USUAL}; open-r1 issue 257",
    ),
    AlarmRule(
        name="kl_dominates",
        level="optimisation",
        pattern="the KL penalty outweighs the advantages, so the reward hardly counts",
        metrics=("train/kl_ref", "train/kl_coef", "train/advantage_std"),
        when=when(
            "times train/kl_coef above 0.3 times train/advantage_std, or train/kl_coef alone above 3 times it while "
            "the reward has not risen by step 20",
            _kl_dominates,
        ),
        of=(5, 5),
        after=4,
        silenced_by=("mismatch", "update_too_large", "kl_high"),
        causes=(
            Cause(
                name="kl_coefficient_too_large",
                what="the KL coefficient is too large for rewards of this scale.",
                change="algorithm.kl_loss_coef or kl_reward_coef: 0.01 to 0.1, or 0",
                confirm="With a tenth of the coefficient the reward rises. If it does not, see no_progress.",
                reads=("algorithm.kl_loss_coef", "algorithm.kl_reward_coef", "rollout/reward_std"),
            ),
        ),
        source="a coefficient of 0.1 is usual where a run does not converge (common guides); the best policy under a "
        "coefficient b is the reference times exp(advantage / b) (arXiv:2305.18290): beyond 3 standard deviations one "
        "of them changes no probability by more than exp(1/3); limits ours",
    ),
    AlarmRule(
        name="kl_estimate_clipped",
        level="optimisation",
        pattern="estimates of the KL are clipped, so its gradient is wrong",
        metrics=("train/kl_clipped_frac",),
        when=above("train/kl_clipped_frac", 0.01),
        silenced_by=("mismatch", "kl_high", "update_too_large"),
        causes=(
            KL_COEFFICIENT_VANISHED,
            replace(DRIFT, applies=lambda h: h.mean("train/kl_ref", 5) > 0.5 and not is_rising_by_std(h)),
            Cause(
                name="reference_differs",
                what="some tokens are far likelier in one of policy and reference.",
                change="algorithm.kl_clip: larger; or a lower learning rate",
                confirm="At step 1 it is 0 where policy and reference are the same weights.",
            ),
        ),
        source="1 % ours",
    ),
    AlarmRule(
        name="kl_negative",
        level="optimisation",
        pattern="the estimated KL to the reference is negative",
        metrics=("train/kl_ref",),
        when=below("train/kl_ref", -0.01, mean=10),
        silenced_by=("mismatch",),
        causes=(
            Cause(
                name="not_sampled_from_policy",
                what="the samples are not drawn from the policy: generation settings or padding are wrong.",
                change="rollout.temperature, rollout.top_p, rollout.top_k as the trainer assumes",
                confirm="train/mismatch_ratio_mean differs from 1. With algorithm.kl_estimator k3 it cannot be "
                "negative.",
                reads=("algorithm.kl_estimator", "train/mismatch_ratio_mean"),
            ),
        ),
        source="a negative KL means wrong generation settings: TRL's warning, TRL issue 351",
    ),
)
