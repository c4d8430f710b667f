"""verl's dialect: the tables of its sections. A key that is in no table falls to its section's last pattern."""

from __future__ import annotations

from hone.dialects import shared
from hone.dialects.rows import listed, under
from hone.dialects.verdict import Dialect, Row
from hone.dialects.verl.actor import ACTOR_ROWS, MODEL_ROWS, REFERENCE, optimizer
from hone.dialects.verl.algorithm import ALGORITHM, CRITIC, correction_rows
from hone.dialects.verl.data import DATA
from hone.dialects.verl.job import ACTOR, MODEL, ROLLOUT, uses_critic
from hone.dialects.verl.reward import REWARDS
from hone.dialects.verl.rollout import ROLLOUT_ROWS
from hone.dialects.verl.trainer import OTHERS, TRAINER, program, whole_command

ROWS: dict[str, Row] = {
    **under("data", DATA),
    **under(ACTOR, ACTOR_ROWS),
    **optimizer(f"{ACTOR}.optim", "train.optimizer"),
    **under("actor_rollout_ref.ref", REFERENCE),
    **under(ROLLOUT, ROLLOUT_ROWS),
    **under(MODEL, MODEL_ROWS),
    **REWARDS,
    **shared.critic_rows(uses_critic, under("critic", CRITIC) | optimizer("critic.optim", "critic.optimizer")),
    **under("algorithm", ALGORITHM),
    **correction_rows("algorithm", "algorithm.rollout_is"),
    **correction_rows("algorithm.rollout_correction", "algorithm.rollout_correction.rollout_is"),
    **under("trainer", TRAINER),
    **OTHERS,
}

ALIASES = {
    "custom_reward_function.overlong_buffer_cfg": "reward_model.overlong_buffer_cfg",
    f"{ROLLOUT}.max_tokens": "data.max_response_length",
}

WRITTEN = listed(
    {
        "data": "prompt_key max_prompt_length max_response_length train_batch_size",
        ROLLOUT: "n temperature val_kwargs.do_sample name",
        "algorithm": "adv_estimator lam use_kl_in_reward kl_penalty rollout_correction.rollout_is "
        "rollout_correction.bypass_mode",
        ACTOR: "use_kl_loss kl_loss_type policy_loss.loss_mode clip_ratio_low clip_ratio_high clip_ratio_c "
        "loss_agg_mode entropy_coeff ppo_mini_batch_size optim.lr optim.weight_decay optim.betas grad_clip "
        "freeze_vision_tower",
        MODEL: "lora_alpha",
        "critic": "cliprange_value optim.lr optim.weight_decay optim.betas",
        "trainer": "total_epochs save_freq val_before_train",
    }
)

DIALECT = Dialect(ROWS, WRITTEN, program, whole_command, ALIASES)
