"""verl's `trainer` and what is of the whole job: its length, its devices, its program."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from hone.dialects import shared
from hone.dialects.foreign import ForeignRun
from hone.dialects.rows import automatic, by, each, missing, placement, to, when, where
from hone.dialects.shared import LOGGING, PROFILER, RESUME
from hone.dialects.values import names, number, positive, truth, whole, zero_if_off
from hone.dialects.verdict import ForeignJob, KeyVerdict, Row, default, nothing, placed, put, unknown
from hone.dialects.verl.actor import _FSDP
from hone.dialects.verl.algorithm import reward_by_data
from hone.dialects.verl.job import (
    ROLLOUT,
    has_judge,
    in_loss,
    in_reward,
    is_asynchronous,
    prompts_per_step,
    uses_critic,
)

CONFIGS = (
    *("config", "./config", "gsm8k_multiturn_grpo", "grpo_trainer", "dapo_trainer", "dapo_megatron_trainer"),
    *(f"{name}_trainer" for name in ("ppo", "fully_async_ppo", "one_step_off_ppo")),
    *(f"{name}_megatron_trainer" for name in ("ppo", "fully_async_ppo", "one_step_off_ppo")),
    "ppo_veomni_trainer",
)


def epochs(job: ForeignJob, value: Any) -> KeyVerdict:
    if positive(job.get("trainer.total_training_steps")) is not None:
        return nothing("total_training_steps wins")
    return put({"run.epochs": number(value)})


def logger(job: ForeignJob, value: Any) -> KeyVerdict:
    listed = names(value) if value is not None else []
    return shared.loggers(listed, lambda: job.get("trainer.project_name", "verl_examples"))


def own_config(job: ForeignJob, value: Any) -> KeyVerdict:
    name = str(value).removesuffix(".yaml").removesuffix("/")
    if value is None or name in CONFIGS or "verl" in name:
        return nothing("the tool's own configuration")
    return unknown("a configuration file of yours: import it too, and merge")


def own_defaults(job: ForeignJob, value: Any) -> KeyVerdict:
    """The list of a YAML file's own parts, by Hydra: the tool's, or files of the author's."""
    listed = value if isinstance(value, list) else [value]
    parts = [part for one in listed for part in (one.values() if isinstance(one, dict) else [one])]
    others = [str(part) for part in parts if part not in (*CONFIGS, "_self_", None)]
    return (
        unknown(f"configuration files of yours, {', '.join(others)}: merge them") if others else nothing("verl's own")
    )


def program(foreign: ForeignRun) -> str | None:
    others = ("sft", "distill", "main_generation", "main_eval", "spin", "dpo", "prime.")
    if any(word in foreign.program for word in others):
        return f"{foreign.program} is not RL of a policy from a reward; stages: [sft] fine-tunes, `hone eval` evaluates"
    return None


def whole_command(job: ForeignJob) -> Iterator[tuple[str, KeyVerdict]]:
    yield from reward_by_data(job)
    yield "data.answer_column", default({"data.answer_column": "reward_model.ground_truth"}, "verl's rows")
    yield "data.chat", default({"data.chat": True}, "verl's prompts are messages")
    yield "kl clamp", nothing("verl clamps low_var_kl at +-10, as algorithm.kl_clip does by default")
    yield "precision", default({"run.precision": "bfloat16"}, "verl computes in bfloat16")
    if not job.given(f"{ROLLOUT}.name"):
        yield "engine", shared.VLLM
    if is_asynchronous(job) and not job.given("async_training.staleness_threshold"):
        yield "program", put({"rollout.max_staleness": 1}, "sampling overlaps training")
    nodes, per_node = job.get("trainer.nnodes", 1), job.get("trainer.n_gpus_per_node", 8)
    is_split = job.get("actor_rollout_ref.hybrid_engine", True) is False or is_asynchronous(job)
    if not is_split or not job.given("rollout.n_gpus_per_node"):
        yield from _together(job, nodes, per_node)
        return
    nodes, per_node = whole(nodes), whole(per_node)
    more_nodes, more = whole(job.get("rollout.nnodes", 1)), whole(job.get("rollout.n_gpus_per_node"))
    pools = {
        "train": {"devices": nodes * per_node, "roles": _train_roles(job)},
        "rollout": {"devices": more_nodes * more, "roles": ["rollout"]},
    }
    if nodes == more_nodes and per_node + more <= 8:  # side by side on the same machines
        yield from shared.cluster(nodes, per_node + more, pools)
    else:
        yield from shared.cluster(nodes + more_nodes, max(per_node, more), pools)


def _together(job: ForeignJob, nodes: Any, per_node: Any) -> Iterator[tuple[str, KeyVerdict]]:
    """One pool of all roles; services of the script may have further devices of the machine."""
    further = [device for service in job.foreign.services for device in service.devices]
    if not (has_judge(job) or further) or not isinstance(nodes, int) or not isinstance(per_node, int):
        yield from shared.cluster(nodes, per_node)
        return
    roles = [*_train_roles(job), "rollout", *(["judge"] if has_judge(job) else [])]
    pools = {"all": {"devices": nodes * per_node, "roles": roles}}
    yield from shared.cluster(nodes, max(per_node, *(device + 1 for device in further), 1), pools)


def _train_roles(job: ForeignJob) -> list[str]:
    roles = {"policy": True, "critic": uses_critic(job), "reference": in_loss(job) or in_reward(job)}
    return [role for role, is_there in roles.items() if is_there]


_DISTILLATION = "distillation from a teacher is not supported"

TRAINER: dict[str, Row] = {
    "total_training_steps": to("run.steps", positive),
    "total_epochs": when(
        lambda job: not job.given("rollout.total_epochs"), "rollout.total_epochs counts", by(epochs, "run.epochs")
    ),
    **each("nnodes n_gpus_per_node", shared.DEVICES),
    "device": placement("GPUs where torch finds them"),
    "logger": by(logger, "observe.wandb", "observe.tensorboard"),
    "project_name": by(lambda job, v: nothing("the project of trainer.logger's wandb"), "observe.wandb"),
    "experiment_name": shared.run_name(),
    "default_local_dir": shared.folder(),
    "default_hdfs_dir": missing("copy checkpoints from the run's folder", "run.dir"),
    "save_freq": shared.every("checkpoint.every", "only at the end"),
    "test_freq": shared.every("eval.every", "only before and after"),
    "val_before_train": to("eval.before_training", truth),
    "val_only": missing("a command: `hone eval`"),
    "critic_warmup": when(uses_critic, shared.NO_CRITIC, to("critic.warmup_updates", zero_if_off)),
    "max_actor_ckpt_to_keep": to("checkpoint.keep", positive),
    "max_critic_ckpt_to_keep": automatic("critic and policy are in one checkpoint"),
    **each("resume_mode resume_from_path del_local_ckpt_after_load", automatic(RESUME)),
    "balance_batch": automatic("samples are divided over ranks by tokens"),
    "seed": to("seed", whole),
    "log_val_generations": to("observe.tracker_samples", positive, "of training, at each update"),
    "val_generations_to_log_to_wandb": to("observe.tracker_samples", positive, "of training, at each update"),
    "remove_previous_ckpt_in_save": to("checkpoint.keep", lambda value: 1 if truth(value) else None),
    "log_*": automatic(LOGGING),
    **each("rollout_data_dir validation_data_dir", automatic("samples/ of the run's folder")),
    **each("use_v1 use_legacy_worker_impl", automatic("verl's own trainer versions")),
    "v1.trainer_mode": by(
        lambda job, v: (
            put({"rollout.max_staleness": 1}) if v in ("separate_async", "colocate_async") else nothing("synchronous")
        ),
        "rollout.max_staleness",
    ),
    "v1.sampler.max_off_policy_*": automatic(
        "samples are at most rollout.max_staleness updates old, which is stricter"
    ),
    "v1.**": automatic("samples above rollout.max_staleness are never made"),
    "esi_redundant_time": automatic("SIGTERM saves a checkpoint"),
    "ray_wait_register_center_timeout": automatic("cluster.start_timeout_s"),
    **each("npu_profile.** profile_* profiler.** *_nsight_options.**", automatic(PROFILER)),
    "checkpoint_callback_class": missing("read checkpoints from the run's folder"),
}

OTHERS: dict[str, Row] = {
    "actor_rollout_ref.hybrid_engine": by(
        lambda job, v: placed(
            {}, "roles share devices" if truth(v) else "sampler and trainer have devices of their own"
        ),
        kind="placement",
    ),
    **each("actor_rollout_ref.nccl_timeout actor_rollout_ref.*.nccl_timeout", automatic("cluster.call_timeout_s")),
    **each("rollout.nnodes rollout.n_gpus_per_node", shared.DEVICES),
    "rollout.total_rollout_steps": by(
        lambda job, v: put({"run.steps": max(1, -(-whole(v) // prompts_per_step(job)))}, "prompts to policy updates"),
        "run.steps",
        note="prompts to policy updates",
    ),
    "rollout.total_epochs": by(epochs, "run.epochs"),
    "rollout.test_freq": to("eval.every", zero_if_off),
    "async_training.staleness_threshold": by(
        lambda job, v: put({"rollout.max_staleness": max(1, math.ceil(number(v)))}, "policy updates, rounded up"),
        "rollout.max_staleness",
    ),
    "async_training.**": automatic("samples are used at most rollout.max_staleness updates late"),
    **each("global_profiler.** actor_rollout_ref.profiler.**", automatic(PROFILER)),
    "rollout.n": automatic("actor_rollout_ref.rollout.n counts"),
    "skip.*.enable": missing("samples of an earlier run in place of new ones; nearest: leave it out"),
    "skip.**": automatic("only read by skipping"),
    **each("ray_kwargs.** ray_init.**", automatic(shared.RUNTIME)),
    "transfer_queue.**": automatic("batches move as the loop needs them"),
    **each("model_engine actor@* actor@actor_rollout_ref.actor", _FSDP),
    "distillation.enabled": missing(_DISTILLATION),
    "distillation.**": when(
        where("distillation.enabled"), "only read with distillation.enabled", missing(_DISTILLATION, off=())
    ),
    **each("--config-name --config-path", by(own_config, kind="hole")),
    "defaults": by(own_defaults, kind="hole"),
    **each("hydra.** --config-dir", automatic("Hydra's own")),
}
