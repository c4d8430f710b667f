"""Rules about the critic, of algorithms that have one."""

from __future__ import annotations

from hone.doctor.history import History
from hone.doctor.rule import AlarmRule, Cause, above, below, either, grows, when
from hone.doctor.rules.common import USUAL


def _is_worse_than_nothing(h: History) -> bool:
    """The loss, half of the mean squared error, is above four times that of a critic which says 0 of everything."""
    square = h.mean("rollout/reward_mean", 5) ** 2 + h.mean("rollout/reward_std", 5) ** 2
    return h.mean("critic/loss", 5) > 2 * square > 0


CRITIC = (
    AlarmRule(
        name="critic_useless",
        level="optimisation",
        pattern="the critic explains nothing of the returns",
        metrics=("critic/explained_variance", "critic/loss"),
        when=below("critic/explained_variance", -0.05, mean=5),
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
            Cause(
                name="critic_untrained",
                what="the critic has not learnt yet.",
                change="critic.warmup_updates: 20; critic.optimizer.lr: larger",
                confirm="critic/explained_variance rises slowly.",
                reads=("critic.warmup_updates", "critic.optimizer.lr"),
            ),
        ),
        source="near 0 after its warm-up it is of no use; -0.05 ours",
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
