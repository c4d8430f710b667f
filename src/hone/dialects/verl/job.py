"""What rows of verl's keys look at: prefixes of its sections, and facts of a job that several sections need."""

from __future__ import annotations

from hone.dialects.rows import where
from hone.dialects.values import number, truth, whole
from hone.dialects.verdict import ForeignJob

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
REWARD_FUNCTIONS = ("reward.custom_reward_function", "custom_reward_function")
REWARD_MODELS = ("reward.reward_model", "reward_model")
uses_critic = where("algorithm.adv_estimator", "gae", other="gae")
in_reward = where("algorithm.use_kl_in_reward")


def loss_mode(job: ForeignJob) -> str:
    return job.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")


def in_loss(job: ForeignJob) -> bool:
    return truth(job.get(f"{ACTOR}.use_kl_loss", False)) and number(job.get(f"{ACTOR}.kl_loss_coef", 0.001)) > 0


def has_adapter(job: ForeignJob) -> bool:
    return bool(job.get(f"{MODEL}.lora_rank", 0) or job.get(f"{MODEL}.lora.rank", 0))


def has_judge(job: ForeignJob) -> bool:
    """A generative reward model: one with functions that write its prompt and read its answer."""
    return bool(job.get("reward_model.data_processor_config.path")) and truth(job.get("reward_model.enable", False))


def is_asynchronous(job: ForeignJob) -> bool:
    return any(word in job.foreign.program for word in ("one_step", "async"))


def prompts_per_step(job: ForeignJob) -> int:
    """Prompts of a policy update; the fully asynchronous program has no batch and counts mini-batches."""
    if given := whole(job.get("data.train_batch_size", 1024)):
        return given
    mini = whole(job.get(f"{ACTOR}.ppo_mini_batch_size", 256))
    batches = whole(job.get("async_training.require_batches", 1))
    return mini * batches * whole(job.get("async_training.trigger_parameter_sync_step", 4))


def optimizer_steps_per_update(job: ForeignJob) -> int:
    mini = whole(job.get(f"{ACTOR}.ppo_mini_batch_size", 256))
    return max(1, prompts_per_step(job) // max(1, mini)) * whole(job.get(f"{ACTOR}.ppo_epochs", 1))


def bypasses(job: ForeignJob) -> bool:
    """Whether the ratio is of the sampler's log probabilities, which the asynchronous programs have by default."""
    keys = ("algorithm.rollout_correction.bypass_mode", f"{ACTOR}.use_rollout_log_probs")
    return any(truth(job.get(key, False)) for key in keys)
