"""Advice on memory, samples per step and bounds of the loss: nothing is wrong, something could be better."""

from __future__ import annotations

from hone.doctor.history import History
from hone.doctor.rule import AlarmRule, Cause, above, below, when
from hone.doctor.rules.common import (
    KL_UPDATE,
    OURS,
    USUAL,
    noise_scale,
    samples_per_step,
)

CLIPPED = ("train/clip_high_frac", "train/clip_low_frac")


def _is_clip_idle(h: History) -> bool:
    """No token was clipped in the last twenty steps, of several optimizer steps each."""
    return min(h.recent("train/optimizer_steps", 20), default=0) > 1 and all(
        h.count(name) >= 20 and not any(h.recent(name, 20)) for name in CLIPPED
    )


TUNING = (
    AlarmRule(
        name="evaluation_seen",
        level="tuning",
        pattern="the evaluation asks what training asks",
        metrics=("eval/seen_frac", "eval/accuracy"),
        when=above("eval/seen_frac", 0.9),
        of=(1, 1),
        causes=(
            Cause(
                name="evaluation_rows_in_training",
                what="nearly all evaluation prompts are training prompts too: accuracy says nothing of others, and "
                "memorised answers look like progress.",
                change="data.eval: rows that data.train does not have",
                confirm="hone check RUN.yaml counts them. On other rows accuracy may be lower.",
                reads=("data.train", "data.eval"),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="gradient_noisy",
        level="tuning",
        pattern="the gradient is mostly noise at this number of samples per step",
        metrics=("train/gradient_noise", "train/gradient_signal"),
        when=when(
            "noise scale above 10 times the samples per step", lambda h: noise_scale(h) > 10 * samples_per_step(h)
        ),
        of=(20, 20),
        after=50,
        causes=(
            Cause(
                name="few_samples_per_step",
                what="more samples per step would make each update better almost in proportion.",
                change="train.prompts_per_step: twice as many, and train.optimizer.lr: 1.4 times (square root, AdamW)",
                confirm="noise scale = mean(train/gradient_noise) / mean(train/gradient_signal), in samples; below it "
                "more samples pay, far above it they do not.",
                reads=("train.prompts_per_step", "rollout.group_size"),
            ),
        ),
        source="gradient noise scale: McCandlish et al. 2018, arXiv:1812.06162",
    ),
    AlarmRule(
        name="gradient_clean",
        level="tuning",
        pattern="many more samples per step are drawn than the gradient needs",
        metrics=("train/gradient_signal", "train/gradient_noise"),
        when=when(
            "noise scale below a tenth of the samples per step", lambda h: noise_scale(h) < 0.1 * samples_per_step(h)
        ),
        of=(20, 20),
        after=50,
        causes=(
            Cause(
                name="many_samples_per_step",
                what="fewer samples per step would cost little of each update's quality.",
                change="train.prompts_per_step: half as many, and train.optimizer.lr: 0.7 times (square root, AdamW)",
                confirm="noise scale = mean(train/gradient_noise) / mean(train/gradient_signal), in samples.",
                reads=("train.prompts_per_step", "rollout.group_size"),
            ),
        ),
        source="gradient noise scale: McCandlish et al. 2018, arXiv:1812.06162",
    ),
    AlarmRule(
        name="memory_nearly_full",
        level="tuning",
        pattern="more of the device's memory is used than leaves room for a longer batch",
        metrics=("memory/device_frac",),
        when=above("memory/device_frac", 0.85),
        causes=(
            Cause(
                name="memory_tight",
                what="the next longer batch may not fit.",
                change="train.tokens_per_microbatch: smaller; plan.autotune: true",
                confirm="hone plan RUN_DIR --compare shows which phase is largest.",
                reads=("train.tokens_per_microbatch",),
            ),
        ),
        source="75 to 85 % is well used (docs/memory.md)",
    ),
    AlarmRule(
        name="memory_unused",
        level="tuning",
        pattern="half of the device's memory or more is never used",
        metrics=("memory/device_frac",),
        when=below("memory/device_frac", 0.5, mean=20),
        of=(20, 20),
        after=20,
        causes=(
            Cause(
                name="batches_small",
                what="more could be computed at once with the same result, and faster.",
                change="hone plan RUN.yaml: its recommended settings (train.tokens_per_microbatch and "
                "rollout.max_concurrent_samples larger, less recomputation)",
                confirm="time/step_s falls with them and memory/device_frac is 0.75 to 0.85. More prompts per step "
                "would change the algorithm, not the memory.",
                reads=("train.tokens_per_microbatch", "rollout.max_concurrent_samples"),
            ),
        ),
        source="75 to 85 % is well used (docs/memory.md); 50 % ours",
    ),
    AlarmRule(
        name="memory_ran_out",
        level="tuning",
        pattern="settings were lowered after running out of memory",
        metrics=("memory/rungs", "memory/redone"),
        when=above("memory/rungs", 0),
        of=(1, 1),
        causes=(
            Cause(
                name="memory_tight",
                what="the run file asks for more memory than there is.",
                change="the lowered settings, which memory.json lists; hone plan RUN.yaml finds others",
                confirm="hone plan RUN_DIR --compare.",
            ),
        ),
        source="0 ours",
    ),
    AlarmRule(
        name="clip_idle",
        level="tuning",
        pattern="an update has several optimizer steps and no token is ever clipped",
        metrics=("train/clip_high_frac", "train/clip_low_frac", "train/optimizer_steps"),
        when=when("0 on both sides in twenty steps, with several optimizer steps", _is_clip_idle),
        of=(5, 5),
        after=30,
        causes=(
            Cause(
                name="steps_too_small",
                what="the policy hardly moves within an update, so that the clip range has no effect.",
                change="train.optimizer.lr: larger; or a larger train.samples_per_optimizer_step, whose gradient is "
                "less noisy",
                confirm="train/ratio_max stays close to 1. With one optimizer step per update 0 is right.",
                reads=("train/ratio_max", KL_UPDATE, "train.optimizer.lr"),
            ),
        ),
        source=f"0.1 to 0.3 is usual: {USUAL}",
    ),
    AlarmRule(
        name="advantages_clipped",
        level="tuning",
        pattern="many advantages are clipped",
        metrics=("train/advantage_clipped_frac", "train/advantage_std"),
        when=above("train/advantage_clipped_frac", 0.05, mean=5),
        of=(5, 5),
        causes=(
            Cause(
                name="advantages_not_normalised",
                what="advantages are large because rewards are, and nothing divides them by their spread.",
                change="algorithm.credit: group_norm; or algorithm.normalize_rewards: true",
                confirm="train/advantage_std becomes about 1. If it was so before, the bound is too narrow.",
                applies=lambda h: h.mean("train/advantage_std", 5) > 3,
                reads=("rollout/reward_std", "algorithm.credit", "algorithm.normalize_rewards"),
            ),
            Cause(
                name="advantage_bound_too_narrow",
                what="algorithm.advantage_clip is narrow for the spread of the advantages.",
                change="algorithm.advantage_clip: 5 times train/advantage_std",
                confirm="Compare train/advantage_std with the bound.",
                reads=("algorithm.advantage_clip",),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="covariance_clip",
        level="tuning",
        pattern="clip_cov removes the gradient of many tokens",
        metrics=("train/clip_cov_frac",),
        when=above("train/clip_cov_frac", 0.1),
        causes=(
            Cause(
                name="covariance_bounds_too_wide",
                what="the bounds of algorithm.clip_cov are wide for this task.",
                change="algorithm.clip_cov: a smaller share",
                confirm="The share is at most the first number of algorithm.clip_cov otherwise.",
                reads=("algorithm.clip_cov",),
            ),
        ),
        source="10 % ours",
    ),
)
