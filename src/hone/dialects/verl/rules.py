"""Rules of verl's keys that look at other keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

from hone.config.algorithm import AlgorithmSection
from hone.config.derived import overridden
from hone.dialects import shared
from hone.dialects.foreign import ForeignRun
from hone.dialects.rows import automatic, by, missing, placement, table, to, under, when, where
from hone.dialects.values import names, number, positive, truth, whole
from hone.dialects.verdict import ForeignJob, KeyVerdict, Row, default, nothing, placed, put, refused, unknown

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
CREDITS = {
    "grpo": "group_norm",
    "grpo_vectorized": "group_norm",
    "gae": "gae",
    "gpg": "group_mean",
    "rloo": "leave_one_out",
    "rloo_vectorized": "leave_one_out",
    "remax": "remax",
    "opo": "length_weighted",
    "grpo_passk": "best_of_group",
    "gdpo": "gdpo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "group_mean_whitened",
}
REJECTIONS = get_args(AlgorithmSection.model_fields["rejection"].annotation)[1:]
ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gspo": {"algorithm.ratio": "sequence", "algorithm.aggregate": "sample_mean"},
    "sapo": {"algorithm.clip": "sapo"},
    "cispo": {"algorithm.clip": "cispo"},
    "clip_cov": {"algorithm.clip": "clip_cov"},
    "kl_cov": {"algorithm.clip": "kl_cov"},
    "dppo_tv": {"algorithm.clip": "tv_mask"},
    "geo_mean": {"algorithm.clip": "geo_mean"},
    "gpg": {"algorithm.ratio": "none", "algorithm.clip": "none"},
}
SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear", "None": None}
OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
    "reward_model.overlong_buffer_cfg",
)
REWARD_FUNCTIONS = ("reward.custom_reward_function", "custom_reward_function")
REWARD_MODELS = ("reward.reward_model", "reward_model")

uses_critic = where("algorithm.adv_estimator", "gae", other="gae")
in_reward = where("algorithm.use_kl_in_reward")
samples_evaluation = where(f"{ROLLOUT}.val_kwargs.do_sample")


def loss_mode(job: ForeignJob) -> str:
    return job.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")


def in_loss(job: ForeignJob) -> bool:
    return truth(job.get(f"{ACTOR}.use_kl_loss", False)) and number(job.get(f"{ACTOR}.kl_loss_coef", 0.001)) > 0


def has_adapter(job: ForeignJob) -> bool:
    return bool(job.get(f"{MODEL}.lora_rank", 0) or job.get(f"{MODEL}.lora.rank", 0))


def is_asynchronous(job: ForeignJob) -> bool:
    return any(word in job.foreign.program for word in ("one_step", "async"))


def of_loss(row: Row, *losses: str) -> Row:
    """A row that only some losses read."""
    return when(lambda job: loss_mode(job) in losses, f"only read by {', '.join(losses)}", row)


# ---- data and batches


def files(key: str) -> Row:
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        listed = [str(file) for file in (value if isinstance(value, list) else [value]) if file is not None]
        if not listed:
            return nothing("none")
        return put({key: listed[0]}) if len(listed) == 1 else put({key: listed}, "rows of all files, one after another")

    return by(read, key)


def truncation(job: ForeignJob, value: Any) -> KeyVerdict:
    if value not in ("error", "left", "right", "middle"):
        return refused("must be error, left, right or middle")
    if value == "error" or job.get("data.filter_overlong_prompts", False):
        return nothing("longer prompts are dropped and counted before anything is cut")
    if value == "right":
        return refused("cutting the end of a prompt removes the question; nearest: data.too_long: left")
    return put({"data.too_long": value})


def template_args(job: ForeignJob, value: Any) -> KeyVerdict:
    prefix = "data.apply_chat_template_kwargs."
    found = dict(value) if isinstance(value, dict) else {}
    found |= {key.removeprefix(prefix): job.plain(v) for key, v in job.values.items() if key.startswith(prefix)}
    return put({"data.template_args": found} if found else {})


def override(job: ForeignJob, value: Any) -> KeyVerdict:
    """All of `override_config` as one mapping; verl has two spellings of it."""
    prefix = f"{MODEL}.override_config"
    found: dict[str, Any] = {}
    for key, given in job.values.items():
        if key == prefix or key.startswith(f"{prefix}."):
            plain, parts = job.plain(given), [part for part in key.removeprefix(prefix).split(".") if part]
            for part in reversed(parts):
                plain = {part: plain}
            found = overridden(found, plain if isinstance(plain, dict) else {})
    found = overridden(found, found.pop("model_config", {}))
    ours = ("attn_implementation", "moe_config")
    return put({"model.override": kept} if (kept := {k: v for k, v in found.items() if k not in ours}) else {})


def prompts_per_step(job: ForeignJob) -> int:
    """Prompts of a policy update; the fully asynchronous program has no batch and counts mini-batches."""
    if given := whole(job.get("data.train_batch_size", 1024)):
        return given
    mini = whole(job.get(f"{ACTOR}.ppo_mini_batch_size", 256))
    batches = whole(job.get("async_training.require_batches", 1))
    return mini * batches * whole(job.get("async_training.trigger_parameter_sync_step", 4))


def batch(job: ForeignJob, value: Any) -> KeyVerdict:
    steps = "ppo_mini_batch_size x require_batches x trigger_parameter_sync_step: prompts between two sets of weights"
    return put({"train.prompts_per_step": prompts_per_step(job)}, "prompts, as in verl" if whole(value) else steps)


def mini_batch(job: ForeignJob, value: Any) -> KeyVerdict:
    group = whole(job.get(f"{ROLLOUT}.n", 1))
    note = f"prompts x n = {group}: "
    return shared.samples_per_step(prompts_per_step(job), group, whole(value) * group, note)


def one_step_per_update(job: ForeignJob) -> bool:
    return whole(job.get(f"{ACTOR}.ppo_mini_batch_size", 256)) >= prompts_per_step(job)


def total_rollouts(job: ForeignJob, value: Any) -> KeyVerdict:
    return put({"run.steps": max(1, -(-whole(value) // prompts_per_step(job)))}, "prompts to policy updates")


# ---- algorithm


def credit(job: ForeignJob, value: Any) -> KeyVerdict:
    if value not in CREDITS:
        return refused(f"no advantage estimator of this kind; nearest: {', '.join(sorted(set(CREDITS.values())))}")
    found = CREDITS[value]
    if found not in ("gae", "remax", "reinforce_pp", "group_mean") and whole(job.get(f"{ROLLOUT}.n", 1)) < 2:
        return refused("a sample has no siblings with rollout.n = 1; nearest: reinforce_pp, or rollout.group_size = 2")
    if found == "group_norm" and not truth(job.get("algorithm.norm_adv_by_std_in_grpo", True)):
        found = "group_mean"
    note = "GPG's scale of groups with a signal is left out" if value == "gpg" else ""
    return put({"algorithm.credit": found}, note)


def loss(job: ForeignJob, value: Any) -> KeyVerdict:
    if value not in LOSSES:
        return refused("no such loss here; nearest: algorithm.clip = ppo, clip_cov, sapo or cispo")
    if value == "gpg" and not one_step_per_update(job):
        return refused("a loss without a ratio is biased after the first optimizer step; nearest: one step per update")
    return put(LOSSES[value])


def clip(job: ForeignJob, value: Any) -> KeyVerdict:
    open_sides = [side for side in ("low", "high") if job.get(f"{ACTOR}.clip_ratio_{side}") is None]
    if not open_sides:
        return nothing("no effect in verl at this version: clip_ratio_low and clip_ratio_high are set and win")
    return put({f"algorithm.clip_{side}": number(value) for side in open_sides})


def side(key: str) -> Row:
    return when(lambda job: loss_mode(job) not in ("sapo", "gpg", "kl_cov"), "not read by this loss", to(key, number))


def clip_cov(job: ForeignJob, value: Any) -> KeyVerdict:
    parts = (("clip_cov_ratio", 2e-4), ("clip_cov_lb", 1.0), ("clip_cov_ub", 5.0))
    return put({"algorithm.clip_cov": [number(job.get(f"{ACTOR}.policy_loss.{name}", other)) for name, other in parts]})


def kl_cov(job: ForeignJob, value: Any) -> KeyVerdict:
    parts = (("kl_cov_ratio", 2e-4), ("ppo_kl_coef", 1.0))
    return put({"algorithm.kl_cov": [number(job.get(f"{ACTOR}.policy_loss.{name}", other)) for name, other in parts]})


def taus(job: ForeignJob, value: Any) -> KeyVerdict:
    parts = (("tau_pos", 1.0), ("tau_neg", 1.05))
    return put({"algorithm.sapo_tau": [number(job.get(f"{ACTOR}.{name}", other)) for name, other in parts]})


AGGREGATES = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sample_mean",
    "seq-mean-token-sum-norm": "fixed_length",
    "token-sum": "token_sum",
}


def aggregate(job: ForeignJob, value: Any) -> KeyVerdict:
    if loss_mode(job) == "gspo":
        return nothing("gspo averages per sample")
    if value == "seq-mean-token-sum":
        return refused("a sum per sample is fixed_length x rollout.max_response_tokens: scale the learning rate by it")
    if value not in AGGREGATES:
        return refused(f"must be one of {', '.join(AGGREGATES)}")
    return put({"algorithm.aggregate": AGGREGATES[value]})


def kl_loss(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return put({"algorithm.kl_loss_coef": 0.0}, "no KL in the loss")
    return put({"algorithm.kl_loss_coef": number(job.get(f"{ACTOR}.kl_loss_coef", 0.001))})


def kl_kind(job: ForeignJob, value: Any, in_loss: bool) -> KeyVerdict:
    kind = ESTIMATORS.get(str(value).removesuffix("+"))
    if kind is None:
        return refused("no such estimator; nearest: algorithm.kl_estimator = k3")
    if in_loss and kind == "k1":
        return refused(shared.NO_K1)
    if str(value).endswith("+"):
        return refused("a gradient of k2 with the value of another estimator; nearest: algorithm.kl_estimator = k2")
    return put({"algorithm.kl_estimator": kind})


def kl_reward(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return put({"algorithm.kl_reward_coef": 0.0}, "no KL in the reward")
    if in_loss(job):
        return refused("KL in the reward and in the loss: Hone has one of them; nearest: kl_loss_coef alone")
    return put({"algorithm.kl_reward_coef": number(job.get("algorithm.kl_ctrl.kl_coef", 0.001))})


def adaptive(row: Row) -> Row:
    why = "only read by the adaptive control of KL in the reward"
    return when(lambda job: in_reward(job) and job.get("algorithm.kl_ctrl.type", "fixed") == "adaptive", why, row)


def groups_metric(job: ForeignJob, value: Any) -> KeyVerdict:
    rewards = (None, "acc", "score", "seq_reward", "seq_final_reward", "reward")
    if value in rewards or not truth(job.get("algorithm.filter_groups.enable", False)):
        return nothing("groups are compared by their rewards")
    return refused("groups are compared by their rewards only")


def correction(job: ForeignJob, value: Any) -> KeyVerdict:
    kinds = {"None": "none", "False": "none", "True": "tis", "token": "tis", "sequence": "sequence_tis"}
    if str(value) not in kinds:
        return refused("must be token or sequence; nearest: algorithm.correction = tis")
    settings: dict[str, Any] = {"algorithm.correction": kinds[str(value)]}
    bound = job.get("algorithm.rollout_correction.rollout_is_threshold", job.get("algorithm.rollout_is_threshold", 2.0))
    if settings["algorithm.correction"] == "none":
        return put(settings, "no correction between sampler and trainer")
    return put(settings | ({"algorithm.correction_high": number(bound)} if isinstance(bound, int | float) else {}))


def correction_rows(prefix: str, key: str) -> dict[str, Row]:
    bound = when(lambda job: job.get(key), "unused without rollout_is", to("algorithm.correction_high", number))
    return {key: by(correction, "algorithm.correction"), f"{prefix}.rollout_is_threshold": bound}


OLDER_REJECTIONS = {"token": "token_k1", "sequence": "sample_sum_k1", "geometric": "sample_mean_k1"}
"""Of verl 0.6, whose ratio is the trainer's over the sampler's."""


def rejection(job: ForeignJob, value: Any) -> KeyVerdict:
    """`rollout_rs` with its thresholds; k1's are of the ratio sampler / trainer, as here."""
    if value in (None, "null", "None"):
        return nothing("nothing is rejected")
    name = OLDER_REJECTIONS.get(str(value), str(value).replace("seq_", "sample_"))
    if name not in REJECTIONS:
        return refused(f"one of {', '.join(REJECTIONS)} at a time")
    prefix = "algorithm.rollout_correction.rollout_rs_threshold"
    bounds = [number(part) for part in str(job.get(prefix, 2.0)).split("_")]
    low, high = job.get(f"{prefix}_lower", bounds[0] if len(bounds) > 1 else None), bounds[-1]
    settings: dict[str, Any] = {"algorithm.rejection": name}
    if not name.endswith("k1"):
        return put(settings | {"algorithm.rejection_high": high})
    low = 1 / high if low is None else number(low)
    if value in OLDER_REJECTIONS:
        low, high = 1 / high, 1 / low
    return put(settings | {"algorithm.rejection_low": low, "algorithm.rejection_high": high})


# ---- optimizers


def optimizer(prefix: str, ours: str) -> dict[str, Row]:
    """Rows of an `optim` section."""

    def decays(job: ForeignJob) -> bool:
        kinds = ("lr_scheduler_type", "warmup_style", "lr_decay_style")
        return any(job.get(f"{prefix}.{name}") in ("cosine", "linear") for name in kinds)

    adamw = ["adamw", "adam", "none", "torch.optim", "anyprecision_adamw", "adamw_bf16", "distributed"]
    kind = by(
        lambda job, v: nothing("AdamW, with float32 moments") if str(v).lower() in adamw else refused(shared.ADAMW),
        f"{ours}.lr",
    )
    schedule = table(SCHEDULES, f"{ours}.schedule", nearest="schedule = cosine")

    def no_steps(job: ForeignJob) -> bool:
        return positive(job.get(f"{prefix}.lr_warmup_steps", -1)) is None

    decay = missing("a schedule ends with the run; nearest: leave it out", f"{ours}.schedule", off=(None, -1, 0))
    state = placement("where the optimizer's state is: cluster.trainer.offload")
    rows = {
        "lr": to(f"{ours}.lr", number),
        "weight_decay": to(f"{ours}.weight_decay", number),
        "betas": to(f"{ours}.betas", lambda value: [number(beta) for beta in value]),
        "eps": to(f"{ours}.eps", number),
        "clip_grad": to(f"{ours}.grad_clip", number),
        "optimizer": kind,
        "optimizer_impl": kind,
        "lr_warmup_steps": to(f"{ours}.warmup_steps", positive),
        "lr_warmup_steps_ratio": when(
            no_steps,
            "lr_warmup_steps wins",
            to(f"{ours}.warmup_frac", lambda value: number(value) or None, "of the optimizer steps"),
        ),
        "lr_scheduler_type": schedule,
        "warmup_style": schedule,
        "lr_decay_style": schedule,
        "min_lr_ratio": when(decays, shared.CONSTANT, to(f"{ours}.final_lr_frac", number)),
        "min_lr": when(decays, shared.CONSTANT, shared.floor(f"{prefix}.lr", f"{ours}.final_lr_frac")),
        "lr_decay_steps": when(decays, shared.CONSTANT, decay),
        "num_cycles": missing("half a cosine only", off=(0.5, None)),
        "lr_warmup_init": missing("warm-up starts at 0"),
        "total_training_steps": automatic("the run's own length"),
        "zero_indexed_step": automatic("the first step is step 0 of the schedule"),
        "override_optimizer_config": state,
        "override_optimizer_config.**": state,
        "muon_*": missing(shared.ADAMW, off=()),
        "use_layer_wise_distributed_optimizer": placement(),
        "use_checkpoint_opt_param_scheduler": automatic("a resumed run keeps its schedule"),
        "lr_wsd_*": automatic("only read by the WSD schedule"),
        "weight_decay_incr_style": missing("weight decay is constant", off=("constant", None)),
    }
    return under(prefix, rows)


# ---- engines and evaluation


def engine_width(job: ForeignJob, value: Any) -> KeyVerdict:
    wide, per_node = whole(value), job.get("trainer.n_gpus_per_node", 8)
    fits = min(wide, whole(per_node)) if isinstance(per_node, int) else wide
    note = "" if fits == wide else f"{wide} is more than a machine has, and layers are divided within one"
    return placed({"cluster.engines.tensor_parallel_size": fits} if fits > 1 else {}, note)


def engine_name(job: ForeignJob, value: Any) -> KeyVerdict:
    note = "" if value == "vllm" else f"{value} is not here: vLLM samples, with the same sampling settings"
    return placed({"cluster.engines.use": "vllm"}, note)


def evaluation_temperature(job: ForeignJob, value: Any) -> KeyVerdict:
    if not samples_evaluation(job):
        return put({"eval.temperature": 0.0}, "greedy: do_sample is false")
    return put({"eval.temperature": number(job.get(f"{ROLLOUT}.val_kwargs.temperature", 0) or 0)})


def evaluation_samples(job: ForeignJob, value: Any) -> KeyVerdict:
    if not samples_evaluation(job) or not number(job.get(f"{ROLLOUT}.val_kwargs.temperature", 0) or 0):
        return nothing("greedy samples are all the same")
    return put({"eval.samples": whole(value)})


# ---- rewards


def reward_function(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return nothing("none: the data source's own reward")
    given = (job.values.get(f"{prefix}.name") for prefix in REWARD_FUNCTIONS)
    function = next((name for name in given if name), "compute_score")
    arguments = {
        key.rpartition(".")[2]: job.plain(item)
        for key, item in job.values.items()
        if ".reward_kwargs." in key and "custom_reward_function" in key
    }
    component = {"use": f"{value}:{job.plain(function)}"} | ({"args": arguments} if arguments else {})
    return put({"reward.components": [component]}, "solution_str, ground_truth: called as verl does")


def reward_model(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return nothing("off")
    path = job.get("reward.reward_model.model_path") or job.get("reward_model.model.path")
    if any(job.values.get(f"{prefix}.path") for prefix in REWARD_FUNCTIONS):
        return refused(
            "a generative reward model with a function of your own: a `judge` with a service; see docs/rewards-judge.md"
        )
    if not path:
        return refused("no path of the reward model was given")
    if has_judge(job):
        return _judge(job, path)
    return put({"reward.components": [{"use": "reward_model", "args": {"path": str(path)}}]})


def has_judge(job: ForeignJob) -> bool:
    """A generative reward model: one with functions that write its prompt and read its answer."""
    return bool(job.get("reward_model.data_processor_config.path")) and truth(job.get("reward_model.enable", False))


def of_judge(key: str, convert: Callable[[Any], Any] = whole) -> Row:
    """A setting of the judge's engine."""
    row = to(f"services.judge.engine.{key}", convert)
    return when(has_judge, "placement of the reward model's engine", replace(row, to=(f"services.*.engine.{key}",)))


def _judge(job: ForeignJob, path: Any) -> KeyVerdict:
    """The engine is a service of the run; lengths, functions and sampling are the reward's arguments."""
    prefixes = ("reward_model.rollout", "reward_model")
    args: dict[str, Any] = {"service": "judge"}
    for name in ("prompt_length", "response_length", "max_model_len"):
        value = next((found for p in prefixes if (found := job.get(f"{p}.{name}")) is not None), None)
        args |= {} if value is None else {name: whole(value)}
    for section in ("sampling_config", "data_processor_config"):
        start = f"reward_model.{section}."
        found = {key.removeprefix(start): job.plain(v) for key, v in job.values.items() if key.startswith(start)}
        args |= {section: found} if found else {}
    settings = {"services.judge.policy": str(path), "reward.components": [{"use": "judge", "args": args}]}
    return put(settings, "a judge: its engine is a service of the run, its functions are called as verl does")


def reward_by_data(job: ForeignJob) -> Iterator[tuple[str, KeyVerdict]]:
    """The reward that the rows' data_source implies, where the command names no other."""
    functions = any(job.values.get(f"{prefix}.path") not in (None, "null", "") for prefix in REWARD_FUNCTIONS)
    if functions or any(job.given(key) and truth(job.get(key)) for key in (f"{p}.enable" for p in REWARD_MODELS)):
        return
    paths = job.get("data.train_files")
    found = [shared.reward_of_data(str(path)) for path in (paths if isinstance(paths, list) else [paths])]
    first = found[0]
    if first is None or any(other is None or other[0] != first[0] for other in found):
        verdict = unknown("verl takes each row's reward by its data_source, which is not in the command")
    else:
        verdict = default({"reward.components": [first[0]]}, first[1])
    yield "reward by data_source", verdict


def overlong(prefix: str) -> Row:
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if not truth(value):
            return nothing("off")
        limit, penalty = job.get("data.max_response_length", 512), job.get(f"{prefix}.penalty_factor", 1.0)
        return shared.overlong(job.get(f"{prefix}.len", 0), limit, penalty)

    return by(read, "algorithm.overlong_buffer_frac")


# ---- trainer


def epochs(job: ForeignJob, value: Any) -> KeyVerdict:
    if positive(job.get("trainer.total_training_steps")) is not None:
        return nothing("total_training_steps wins")
    return put({"run.epochs": number(value)})


def logger(job: ForeignJob, value: Any) -> KeyVerdict:
    listed = names(value) if value is not None else []
    return shared.loggers(listed, lambda: job.get("trainer.project_name", "verl_examples"))


def folder(job: ForeignJob, value: Any) -> KeyVerdict:
    return put({"run.dir": str(value)} if value and "${" not in str(value) else {})


def staleness(job: ForeignJob, value: Any) -> KeyVerdict:
    return put({"rollout.max_staleness": max(1, math.ceil(number(value)))}, "policy updates, rounded up")


def trainer_mode(job: ForeignJob, value: Any) -> KeyVerdict:
    overlaps = value in ("separate_async", "colocate_async")
    return put({"rollout.max_staleness": 1}) if overlaps else nothing("synchronous")


def hybrid(job: ForeignJob, value: Any) -> KeyVerdict:
    return placed({}, "roles share devices" if truth(value) else "sampler and trainer have devices of their own")


CONFIGS = (
    *("config", "./config", "gsm8k_multiturn_grpo", "grpo_trainer", "dapo_trainer", "dapo_megatron_trainer"),
    *(f"{name}_trainer" for name in ("ppo", "fully_async_ppo", "one_step_off_ppo")),
    *(f"{name}_megatron_trainer" for name in ("ppo", "fully_async_ppo", "one_step_off_ppo")),
    "ppo_veomni_trainer",
)


def own_config(job: ForeignJob, value: Any) -> KeyVerdict:
    name = str(value).removesuffix(".yaml").removesuffix("/")
    if value is None or name in CONFIGS or "verl" in name:
        return nothing("the tool's own configuration")
    return unknown("a configuration file of yours: import it too, and merge")


# ---- the command as a whole


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
    yield from _placed(job)
    if not job.given(f"{ROLLOUT}.name"):
        yield "engine", shared.VLLM
    if is_asynchronous(job) and not job.given("async_training.staleness_threshold"):
        yield "program", put({"rollout.max_staleness": 1}, "sampling overlaps training")


def _placed(job: ForeignJob) -> Iterator[tuple[str, KeyVerdict]]:
    """All roles together, or the sampler on machines of its own."""
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
