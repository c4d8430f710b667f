"""Rules about what an update leads to: collapse, spikes, length, no progress; and other stages."""

from __future__ import annotations

from hone.doctor.history import RECENT, History
from hone.doctor.rule import AlarmRule, Cause, Limit, above, below, both, either, grows, outside, spikes, when
from hone.doctor.rules.common import (
    CORRELATION,
    ENTROPY,
    ENTROPY_BONUS_TOO_LARGE,
    GAP,
    KL_UPDATE,
    LENGTH,
    LOWER_LR,
    NORM,
    OURS,
    PASS,
    PRIME,
    READ_SAMPLES,
    REWARD,
    TOO_FAST,
    TOO_MANY_STEPS,
    TRUNCATED,
    USUAL,
    VERL_FAQ,
    WEIGHT_DECAY_TOO_LARGE,
    is_flat,
    is_rising_by_std,
)


def _lost_at_once(h: History) -> bool:
    """Accuracy fell below a fifth of that of the first three steps by step 15, and has not come back since."""
    values = h.recent(PASS, RECENT)
    if not h.count(PASS) == len(values) >= 7:
        return False
    first, early = sum(values[:3]) / 3, values[:15][-5:]
    return first > 0.05 and max(sum(early) / 5, h.mean(PASS, 5)) < 0.2 * first


LEARNING = (
    AlarmRule(
        name="accuracy_lost",
        level="optimisation",
        pattern="accuracy falls to nearly nothing within the first steps",
        metrics=(PASS, KL_UPDATE),
        when=when("below a fifth of that of the first three steps by step 15, on average of five", _lost_at_once),
        of=(2, 2),
        silenced_by=("mismatch", "update_too_large", "reward_sign", "clip_fraction"),
        causes=(
            TOO_MANY_STEPS,
            WEIGHT_DECAY_TOO_LARGE,
            ENTROPY_BONUS_TOO_LARGE,
            Cause(
                name="reward_exploited",
                what="the reward rises while accuracy falls: the reward pays for something else than being right.",
                change="reward.components: the weights; hone check RUN.yaml",
                confirm=READ_SAMPLES,
                applies=lambda h: h.mean(REWARD, 5) > h.first(REWARD) + 0.2 * h.first("rollout/reward_std"),
                reads=(REWARD, "reward/<component>_variance_share"),
            ),
            Cause(
                name="learning_rate_too_high",
                what="the first updates destroy what the policy knew.",
                change=LOWER_LR + "; train.optimizer.warmup_steps: 20",
                confirm="With a tenth of the learning rate accuracy stays in the first ten steps. If it does not, "
                "compare what the sampler draws with evaluation before training.",
                reads=("train.optimizer.lr", NORM),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="reward_collapse",
        level="optimisation",
        pattern="accuracy has fallen to less than half of its best",
        metrics=(PASS, REWARD),
        when=when(
            "below half of its best mean of ten steps",
            lambda h: h.mean(PASS, 10) < 0.5 * h.best(PASS) and h.best(PASS) > 0.1,
        ),
        of=(5, 5),
        after=15,
        silenced_by=(
            "mismatch",
            "update_too_large",
            "accuracy_lost",
            "entropy_explosion",
            "entropy_collapse",
            "reward_sign",
            "truncation",
            "clip_fraction",
            "kl_high",
            "reward_pays_length",
            "importance_weights",
            "critic_useless",
            "reward_constant",
        ),
        causes=(
            TOO_FAST,
            WEIGHT_DECAY_TOO_LARGE,
            ENTROPY_BONUS_TOO_LARGE,
            Cause(
                name="reward_exploited",
                what="the reward rises while accuracy falls: the reward pays for something else than being right.",
                change="reward.components: the weights; hone check RUN.yaml",
                confirm=READ_SAMPLES,
                applies=is_rising_by_std,
                reads=("reward/<component>_variance_share",),
            ),
            Cause(
                name="learning_rate_too_high",
                what="training has become unstable; a learning rate that is too high is the most frequent reason.",
                change=LOWER_LR + "; resume from the best checkpoint",
                confirm="The first of train/grad_norm, train/entropy, response length and train/mismatch_gap to leave "
                "its range says where it began.",
                reads=("train.optimizer.lr", NORM, ENTROPY, LENGTH, GAP),
            ),
        ),
        source="GRPO collapses near steps 60 to 160: Search-R1 issues 88 and 92; half ours",
    ),
    AlarmRule(
        name="gradient_spike",
        level="optimisation",
        pattern="the gradient norm is far above its usual value",
        metrics=(NORM,),
        when=both(spikes(NORM, 10), above(NORM, 1)),
        of=(1, 1),
        after=15,
        silenced_by=("mismatch", "update_too_large", "reward_collapse", "entropy_explosion"),
        causes=(
            Cause(
                name="reward_outlier",
                what="a reward of this batch is far larger than the others.",
                change="algorithm.reward_clip, algorithm.advantage_clip",
                confirm="rollout/reward_std spiked in the same step; samples/ has the sample.",
                applies=lambda h: h.now("rollout/reward_std") > 3 * h.median("rollout/reward_std", 50),
                reads=("rollout/reward_std",),
            ),
            TOO_FAST,
            Cause(
                name="bad_batch",
                what="one batch had a gradient of unusual size; it was clipped to train.optimizer.grad_clip.",
                change="none for a single spike; " + LOWER_LR + " where they return",
                confirm="A single one passes. If spikes return, lower the learning rate; if they grow with "
                "train/mismatch_gap, that is the cause.",
                reads=("train.optimizer.grad_clip", GAP),
            ),
        ),
        source=f"spikes precede divergence: {PRIME}; 10 times the median of 50 steps ours",
    ),
    AlarmRule(
        name="gradient_rises",
        level="optimisation",
        pattern="the gradient norm rises steadily and the reward does not",
        metrics=(NORM, REWARD),
        when=when(
            "above 5 times its mean of steps 5 to 20 on average of twenty, and above 1, while the reward does not rise",
            lambda h: h.mean(NORM, 20) > max(5 * h.base(NORM), 1) and not is_rising_by_std(h),
            Limit(NORM, high=5, of_baseline=True),
        ),
        of=(5, 5),
        after=40,
        silenced_by=(
            "mismatch",
            "mismatch_grows",
            "update_too_large",
            "accuracy_lost",
            "entropy_explosion",
            "entropy_collapse",
            "reward_collapse",
            "reward_scale",
            "kl_high",
            "truncation",
            "all_wrong",
            "no_signal",
        ),
        causes=(
            TOO_FAST,
            Cause(
                name="training_unstable",
                what="each update leaves more to correct than the one before: a learning rate near the limit of what "
                "is stable, or few samples with a large advantage.",
                change="train.optimizer.lr: half of it; algorithm.advantage_clip: 5",
                confirm="With half the learning rate the norm stays. If it does not, look at the samples with the "
                "largest advantages.",
                reads=("train/advantage_std", "train.optimizer.lr", "train.optimizer.grad_clip"),
            ),
        ),
        source=f"a steady rise goes before divergence: {VERL_FAQ}, {PRIME}; factor ours",
    ),
    AlarmRule(
        name="reward_scale",
        level="optimisation",
        pattern="rewards, and so the loss, are large",
        metrics=("rollout/reward_std", "train/loss"),
        when=either(above("rollout/reward_std", 10), outside("train/loss", -5, 5)),
        of=(5, 5),
        after=5,
        causes=(
            Cause(
                name="reward_scale",
                what="a reward component has a large scale.",
                change="reward.components: weights so that rewards are about 1; algorithm.normalize_rewards: true",
                confirm="reward/<component>_std names the component.",
                reads=("reward/<component>_std",),
            ),
        ),
        source=f"policy loss within 0.5: {USUAL}; ten times that ours, because sums over tokens are legitimate",
    ),
    AlarmRule(
        name="length_explosion",
        level="optimisation",
        pattern="responses become much longer and the reward does not rise",
        metrics=(LENGTH, REWARD),
        when=when(
            "above 2 times its mean of steps 5 to 20 while the reward does not rise",
            lambda h: h.mean(LENGTH, 10) > 2 * h.base(LENGTH) and not is_rising_by_std(h),
            Limit(LENGTH, high=2, of_baseline=True),
        ),
        of=(5, 10),
        after=15,
        silenced_by=("reward_pays_length", "entropy_explosion", "truncation", "update_too_large", "mismatch"),
        causes=(
            Cause(
                name="length_bias",
                what="wrong responses grow: the mean over a sample's tokens punishes long ones less.",
                change="algorithm.aggregate: token_mean or fixed_length (Dr. GRPO)",
                confirm="rollout/wrong_tokens_mean grows faster than rollout/right_tokens_mean.",
                applies=lambda h: h.mean("rollout/wrong_tokens_mean", 10) > h.mean("rollout/right_tokens_mean", 10),
                reads=("rollout/wrong_tokens_mean", "rollout/right_tokens_mean", "algorithm.aggregate"),
            ),
            Cause(
                name="policy_degenerates",
                what="responses repeat themselves or do not end.",
                change=LOWER_LR + "; algorithm.overlong_buffer_frac: 0.2",
                confirm=READ_SAMPLES,
                reads=(TRUNCATED, ENTROPY),
            ),
        ),
        source="length bias of the sample mean: Dr. GRPO (arXiv:2503.20783); factor ours",
    ),
    AlarmRule(
        name="length_collapse",
        level="optimisation",
        pattern="responses become much shorter and the reward does not rise",
        metrics=(LENGTH, REWARD),
        when=when(
            "below 0.5 times its mean of steps 5 to 20 while the reward does not rise",
            lambda h: h.mean(LENGTH, 10) < 0.5 * h.base(LENGTH) and not is_rising_by_std(h),
            Limit(LENGTH, low=0.5, of_baseline=True),
        ),
        of=(5, 10),
        after=15,
        silenced_by=("update_too_large", "mismatch", "reward_collapse"),
        causes=(
            Cause(
                name="length_punished",
                what="short responses earn more: a length penalty, or a reward that gives up early.",
                change="algorithm.overlong_penalty: smaller; the component with a negative correlation",
                confirm="rollout/length_reward_corr is below 0.",
                reads=(CORRELATION,),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="no_progress",
        level="optimisation",
        pattern="the reward does not move although groups have signal, and updates are small",
        metrics=(REWARD, KL_UPDATE),
        when=when(
            "within 0.05 standard deviations of its mean of steps 5 to 20, with train/update_kl below 1e-4",
            lambda h: is_flat(h, 30) and h.mean(KL_UPDATE, 5) < 1e-4,
        ),
        of=(5, 5),
        after=50,
        silenced_by=(
            "update_too_small",
            "update_too_large",
            "mismatch",
            "all_wrong",
            "all_right",
            "no_signal",
            "truncation",
            "reward_collapse",
            "rewards_fail",
            "mismatch_precision",
            "clip_fraction",
        ),
        causes=(
            Cause(
                name="clip_range_too_narrow",
                what="the clip range cuts off almost every change.",
                change="algorithm.clip_low: 0.2, algorithm.clip_high: 0.2",
                confirm="With the usual range train/update_kl rises.",
                applies=lambda h: (
                    max(h.number("algorithm.clip_low"), h.number("algorithm.clip_high")) < 0.01
                    and h.key("algorithm.ratio") == "token"
                    and h.now("train/optimizer_steps") > 1
                ),
                reads=("algorithm.clip_low", "algorithm.clip_high"),
            ),
            Cause(
                name="learning_rate_too_low",
                what="updates are small for this task.",
                change="train.optimizer.lr: three times it",
                confirm="With three times the learning rate the reward moves within 50 steps. If not, it is noise.",
                reads=("train.optimizer.lr",),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="reward_flat",
        level="tuning",
        pattern="the reward does not move although groups have signal and updates are of usual size",
        metrics=(REWARD, KL_UPDATE),
        when=when(
            "within 0.05 standard deviations of its mean of steps 5 to 20 on average of fifty",
            lambda h: is_flat(h, 50),
        ),
        of=(10, 10),
        after=110,
        silenced_by=(
            "no_progress",
            "update_too_small",
            "update_too_large",
            "mismatch",
            "all_wrong",
            "all_right",
            "no_signal",
            "truncation",
            "reward_collapse",
            "rewards_fail",
            "mismatch_precision",
            "clip_fraction",
            "kl_dominates",
        ),
        causes=(
            Cause(
                name="reward_is_noise",
                what="updates are of usual size and the reward does not follow: the reward is mostly noise, or more "
                "samples per step are needed.",
                change="train.prompts_per_step: larger; the reward",
                confirm="Score the same response twice: if the scores differ as much as those of different responses, "
                "the reward is noise. Otherwise see the advice on samples per step.",
                reads=("train/gradient_noise", "train/gradient_signal"),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="sft_diverges",
        level="optimisation",
        pattern="the supervised loss rises",
        metrics=("sft/loss", "sft/grad_norm"),
        when=either(
            grows("sft/loss", 1.3, mean=10),
            when("above 1.5 times its first value", lambda h: h.mean("sft/loss", 3) > 1.5 * h.first("sft/loss")),
        ),
        of=(3, 5),
        after=3,
        causes=(
            Cause(
                name="learning_rate_too_high",
                what="the learning rate of the supervised stage is too high.",
                change="sft.optimizer.lr: a tenth of it; sft.optimizer.warmup_steps: 20",
                confirm="With a tenth of it the loss falls from the first step.",
                reads=("sft.optimizer.lr",),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="reward_model_at_chance",
        level="optimisation",
        pattern="the reward model is no better than chance on held-out pairs",
        metrics=("rm/eval_accuracy", "rm/accuracy"),
        when=below("rm/eval_accuracy", 0.55),
        of=(2, 2),
        after=1,
        causes=(
            Cause(
                name="preferences_memorised",
                what="it has memorised its pairs.",
                change="rm.epochs: 1; more pairs",
                confirm="rm/accuracy on the training pairs is far above 0.5.",
                applies=lambda h: h.mean("rm/accuracy", 20) > 0.75,
            ),
            Cause(
                name="preferences_are_noise",
                what="chosen and rejected do not differ for the reward model, or are swapped.",
                change="rm.chosen_column, rm.rejected_column",
                confirm="Read ten pairs.",
            ),
        ),
        source="0.5 is chance; 0.55 ours",
    ),
)
