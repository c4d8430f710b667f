"""Rules about rewards, and about the critic that predicts them."""

from __future__ import annotations

from hone.doctor.history import RECENT, History
from hone.doctor.rule import AlarmRule, Cause, above, below, either, grows, when
from hone.doctor.rules.common import (
    ANSWERS_PASS,
    CORRELATION,
    LENGTH,
    OF_COMPONENTS,
    OURS,
    PASS,
    REWARD,
    USUAL,
    is_flat,
    pays_length,
)

SPREAD, EXPLAINED = "rollout/reward_std", "critic/explained_variance"
CANARY, FLAG = "reward/<component>_canary_<name>_mean", "reward/<component>_flag_<name>_mean"


def _became_constant(h: History) -> bool:
    """The standard deviation of the rewards fell to 0 at once, not little by little in the ten steps before."""
    values = h.recent(SPREAD, RECENT)
    still = next((place for place, value in enumerate(reversed(values)) if value), len(values))
    before = values[-still - 10 : len(values) - still]
    return still >= 3 and len(before) == 10 and min(before) > 0.4 * max(before)


def _flag_has_grown(h: History, flag: str) -> float:
    """A flag's share of the last ten steps over what is usual; `boxed` is none, for a task may ask for it."""
    return 0.0 if "_flag_boxed_" in flag else h.mean(flag, 10) / max(0.1, 2 * h.first(flag))


REWARDS = (
    AlarmRule(
        name="answers_fail",
        level="data",
        pattern="the data's own answers do not earn the reward",
        metrics=(ANSWERS_PASS, PASS),
        when=below(ANSWERS_PASS, 0.9),
        of=(1, 1),
        causes=(
            Cause(
                name="some_answers_fail",
                what="some of the data's answers do not earn the reward: these rows are wrong, or the reward does not "
                "know their form.",
                change="hone check RUN.yaml names the rows: repair or remove them, or have the reward's parser read "
                "them",
                confirm="Solve three of these rows by hand. If their answers are right, the reward is wrong, unless it "
                "is not about being right.",
                applies=lambda h: h.now(ANSWERS_PASS) >= 0.1,
            ),
            Cause(
                name="weight_negative",
                what="a component that measures success has a negative weight, so success is punished.",
                change="reward.components: the sign of its weight",
                confirm="hone check RUN.yaml: with a positive weight the gold answers score above others.",
                applies=lambda h: any(weight < 0 for weight in _weights(h).values()),
                reads=("reward/<component>_mean",),
            ),
            Cause(
                name="reward_inverted",
                what="responses of the policy earn the reward that right answers do not: it pays for what is wrong.",
                change="reward.components: a score that is higher for right answers",
                confirm="hone check RUN.yaml: other rows' answers score above the gold ones.",
                applies=lambda h: h.now(PASS) > 0.2,
            ),
            Cause(
                name="reward_broken",
                what="the reward, its parser or the answers are wrong, a right response has more than the answer, or "
                "eval.threshold is out of reach.",
                change="reward.components: make hone check RUN.yaml score the gold answers 1; eval.threshold",
                confirm="hone check RUN.yaml names rows whose gold answer scores below 1.",
            ),
        ),
        source="right answers score 1; a tenth of wrong rows ours",
    ),
    AlarmRule(
        name="reward_constant",
        level="data",
        pattern="from one step to the next, all samples have the same reward",
        metrics=(SPREAD, REWARD),
        when=when(
            "exactly 0 in three steps, and in the ten before them never below 0.4 of the largest", _became_constant
        ),
        of=(1, 1),
        after=12,
        causes=(
            Cause(
                name="reward_constant",
                what="the reward has changed, not the policy: its service, its parser, a threshold or a file that it "
                "reads. A policy loses or learns a task in more than one step.",
                change="reward.components: what changed at that step; hone check RUN.yaml scores real rows",
                confirm="Score a right and a wrong response: the scores are equal. If they differ, compare the "
                "responses in samples/ before and after that step.",
                reads=("reward/<component>_mean", "reward/<component>_std"),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="reward_pays_length",
        level="data",
        pattern="longer responses earn more, and responses grow",
        metrics=(CORRELATION, LENGTH, OF_COMPONENTS),
        when=when(
            "above 0.3 on average of ten, or above 0.5 for one component of several, with responses 1.2 times as long "
            "as in the first step",
            lambda h: pays_length(h, 0.3) and h.mean(LENGTH, 5) > 1.2 * h.first(LENGTH),
        ),
        of=(5, 10),
        after=8,
        causes=(
            Cause(
                name="reward_pays_length",
                what="the reward rises with length: a component (a judge, often) prefers long responses.",
                change="reward.components: a lower weight for it; algorithm.overlong_buffer_frac: 0.2",
                confirm="reward/<component>_length_corr names the component. If right answers themselves need more "
                "tokens (rollout/right_tokens_mean above wrong_tokens_mean and eval/accuracy rising), it is healthy.",
                reads=("reward/<component>_variance_share", "rollout/right_tokens_mean", "rollout/wrong_tokens_mean"),
            ),
        ),
        source="length bias of judges and of rewards: Dr. GRPO (arXiv:2503.20783); limits ours",
    ),
    AlarmRule(
        name="judge_deceived",
        level="data",
        pattern="a judge gives worthless responses a high score",
        metrics=(CANARY,),
        when=above(CANARY, 0.5, mean=3),
        of=(2, 3),
        causes=(
            Cause(
                name="judge_can_be_gamed",
                what="a response without an answer earns what a good one does, so the policy can learn to please the "
                "judge without answering.",
                change="the judge: a larger model, a reference in its template, penalties; beside it a component that "
                "cannot be talked into anything",
                confirm="hone eval-judge on pairs with nonsense in them: canary_<name> is as high there. If it is low, "
                "the template of the run differs.",
                reads=(FLAG,),
            ),
        ),
        source="canary_threshold 0.5 (docs/rewards-judge.md); ours",
    ),
    AlarmRule(
        name="responses_flatter",
        level="data",
        pattern="more and more responses speak to the judge instead of answering",
        metrics=(FLAG,),
        when=when(
            "above 0.1 and twice its first value, on average of ten",
            lambda h: any(_flag_has_grown(h, flag) > 1 for flag in h.names(FLAG)),
        ),
        worst=_flag_has_grown,
        of=(4, 5),
        after=9,
        causes=(
            Cause(
                name="reward_exploited",
                what="ratings of themselves, orders to the judge or hidden characters earn reward, and the policy has "
                "found them.",
                change="penalties of the judge for that flag; a stronger judge; beside it a component that cannot be "
                "talked into anything",
                confirm="With the penalty the flag's share falls. If it stays, samples/ shows whether the task asks "
                "for such words.",
                reads=(CANARY,),
            ),
        ),
        source="what policies have learnt of judges (docs/rewards-judge.md); limits ours",
    ),
    AlarmRule(
        name="reward_random",
        level="data",
        pattern="the reward is as high for one prompt as for another, and does not move",
        metrics=("rollout/reward_prompt_frac", REWARD),
        when=when(
            "within 0.03 of 0 on average of thirty, and the reward within 0.05 standard deviations of its mean of "
            "steps 5 to 20",
            lambda h: abs(h.mean("rollout/reward_prompt_frac", 30)) < 0.03 and is_flat(h, 30),
        ),
        of=(5, 5),
        after=40,
        silenced_by=("rewards_fail", "no_signal", "all_wrong", "all_right", "truncation", "mismatch"),
        causes=(
            Cause(
                name="reward_is_noise",
                what="the reward depends neither on the prompt nor on what the policy has learnt: it is mostly chance.",
                change="reward.components: what the score is made of; votes of a judge: more",
                confirm="Score the same response twice, and a right and a wrong answer: if the scores differ as much "
                "in both cases, the reward is noise. If not, every prompt is as hard as the others.",
                reads=("rollout/reward_std",),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="component_silent",
        level="data",
        pattern="a weighted reward component gives every sample the same score",
        metrics=("reward/<component>_std",),
        when=when("exactly 0 in 10 steps, with other components", lambda h: bool(_silent_components(h))),
        of=(5, 5),
        after=9,
        silenced_by=("rewards_fail",),
        causes=(
            Cause(
                name="component_constant",
                what="the component has no influence: its parser finds nothing, or its threshold is out of reach.",
                change="reward.components: its args; hone check RUN.yaml shows its scores on real rows",
                confirm="hone check RUN.yaml: the gold answer and a wrong one must score differently.",
                reads=("reward/<component>_variance_share",),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="reward_sign",
        level="data",
        pattern="the reward rises while a component with a negative weight falls",
        metrics=(REWARD,),
        when=when("rising, and the component below half of its first value", lambda h: _sign_is_wrong(h)),
        of=(3, 5),
        after=4,
        causes=(
            Cause(
                name="weight_negative",
                what="a component that measures success has a negative weight, so success is punished.",
                change="reward.components: the sign of its weight",
                confirm="The component's mean is what you want to rise. If it is a penalty, this is as intended.",
                reads=("reward/<component>_mean", "reward/<component>_variance_share"),
            ),
        ),
        source=OURS,
    ),
)


def _silent_components(h: History) -> list[str]:
    weights = _weights(h)
    pattern = "reward/<component>_std"
    return [
        name
        for name in h.names(pattern)
        if len(weights) > 1 and weights.get(h.part(pattern, name)) and max(map(abs, h.recent(name, 10))) == 0
    ]


def _weights(h: History) -> dict[str, float]:
    """Weight of each component by its name in metrics."""
    found = h.key("reward.components") or ()
    return {part.get("name") or part["use"].rpartition(":")[2]: part.get("weight", 1.0) for part in found}


def _sign_is_wrong(h: History) -> bool:
    """Compared with the first step, for a punished success is lost within a few."""
    negative = [f"reward/{name}_mean" for name, weight in _weights(h).items() if weight < 0]
    is_better = h.mean(REWARD, 5) > h.first(REWARD) + 0.2 * h.first("rollout/reward_std")
    return is_better and any(h.mean(name, 5) < 0.5 * h.first(name) for name in negative)


def _is_worse_than_nothing(h: History) -> bool:
    """The loss, half of the mean squared error, is above four times that of a critic which says 0 of everything."""
    square = h.mean("rollout/reward_mean", 5) ** 2 + h.mean("rollout/reward_std", 5) ** 2
    return h.mean("critic/loss", 5) > 2 * square > 0


def _explains_nothing(h: History) -> bool:
    """On average of twenty, and thirty updates or more after its warm-up, the values are no better than their mean."""
    warmup = h.number("critic.warmup_updates")
    is_trained = h.count(EXPLAINED) >= 30 + (warmup if warmup > 0 else 0)
    return is_trained and h.mean(EXPLAINED, 20) < 0.02 and h.mean(SPREAD, 20) > 0


CRITIC_UNTRAINED = Cause(
    name="critic_untrained",
    what="the critic does not distinguish good responses from bad ones yet.",
    change="critic.warmup_updates: 20; critic.optimizer.lr: larger",
    confirm="With a larger critic.optimizer.lr critic/explained_variance rises. If it does not, the reward "
    "may not be predictable; algorithm.credit: group_norm needs no critic.",
    reads=("critic.warmup_updates", "critic.optimizer.lr"),
)
CRITIC = (
    AlarmRule(
        name="critic_useless",
        level="optimisation",
        pattern="the critic explains nothing of the returns",
        metrics=(EXPLAINED, "critic/loss"),
        when=below(EXPLAINED, -0.05, mean=5),
        of=(5, 10),
        after=15,
        silenced_by=("mismatch", "all_wrong", "all_right"),
        causes=(
            Cause(
                name="critic_learning_rate_too_high",
                what="the critic overshoots: its learning rate is too high.",
                change="critic.optimizer.lr: a tenth of it",
                confirm="critic/loss is above the variance of the reward. If it falls slowly instead, it needs "
                "critic.warmup_updates.",
                applies=lambda h: h.mean("critic/loss", 5) > 0.5 * h.mean("rollout/reward_std", 5) ** 2,
                reads=("rollout/reward_std", "critic.optimizer.lr"),
            ),
            CRITIC_UNTRAINED,
        ),
        source="near 0 after its warm-up it is of no use; -0.05 ours",
    ),
    AlarmRule(
        name="critic_idle",
        level="tuning",
        pattern="long after its warm-up the critic still explains nothing of the returns",
        metrics=(EXPLAINED, SPREAD),
        when=when(
            "below 0.02 on average of twenty, 30 updates or more after critic.warmup_updates, while rewards differ",
            _explains_nothing,
        ),
        of=(10, 10),
        silenced_by=("critic_useless", "critic_loss", "mismatch", "all_wrong", "all_right"),
        causes=(CRITIC_UNTRAINED,),
        source="near 0 after its warm-up it is of no use; 0.02 and 30 updates ours",
    ),
    AlarmRule(
        name="critic_loss",
        level="optimisation",
        pattern="the critic's loss is far above its usual value",
        metrics=("critic/loss",),
        when=either(
            above("critic/loss", 10),
            grows("critic/loss", 5, mean=5),
            when("above twice the mean square of the reward, on average of five", _is_worse_than_nothing),
        ),
        of=(3, 10),
        after=1,
        silenced_by=("critic_useless", "mismatch"),
        causes=(
            Cause(
                name="reward_scale",
                what="the rewards are large, so the critic's errors are.",
                change="algorithm.normalize_rewards: true",
                confirm="rollout/reward_std is above 3.",
                applies=lambda h: h.mean("rollout/reward_std", 10) > 3,
                reads=("rollout/reward_std",),
            ),
            Cause(
                name="critic_learning_rate_too_high",
                what="the critic diverges: its learning rate is too high.",
                change="critic.optimizer.lr: a tenth of it",
                confirm="With a tenth of it the loss falls from the first step.",
                reads=("critic.optimizer.lr",),
            ),
        ),
        source=f"value loss 0 to 10: {USUAL}; relative to the reward ours",
    ),
    AlarmRule(
        name="critic_clipped",
        level="optimisation",
        pattern="many of the critic's values are clipped",
        metrics=("critic/clip_frac",),
        when=above("critic/clip_frac", 0.3, mean=5),
        of=(5, 5),
        after=10,
        silenced_by=("critic_useless", "critic_loss"),
        causes=(
            Cause(
                name="critic_moves_too_fast",
                what="the critic moves further within an update than critic.value_clip allows.",
                change="critic.optimizer.lr: half of it; critic.value_clip in the unit of the rewards",
                confirm="rollout/reward_std far above critic.value_clip means that the bound is too narrow.",
                reads=("critic.value_clip", "rollout/reward_std"),
            ),
        ),
        source="0.3 ours",
    ),
)
