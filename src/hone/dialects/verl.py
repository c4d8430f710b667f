"""verl's keys: Hydra overrides of `verl.trainer.main_ppo` and its relatives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from hone.dialects import shared
from hone.dialects.foreign import ForeignRun
from hone.dialects.shared import CONVERTED, ENVIRONMENT, EXPERTS, LOGGING, MEMORY, PICTURES, PIPELINE, PROFILER, RESUME
from hone.dialects.verdict import (
    Dialect,
    ForeignJob,
    KeyVerdict,
    Row,
    automatic,
    by,
    choice,
    mapped,
    missing,
    names,
    number,
    placement,
    positive,
    refused,
    rewritten,
    text,
    to,
    truth,
    whole,
    zero_if_off,
)

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_CREDITS = {
    "grpo": "group_norm",
    "grpo_vectorized": "group_norm",
    "gae": "gae",
    "rloo": "leave_one_out",
    "rloo_vectorized": "leave_one_out",
    "remax": "remax",
    "opo": "length_weighted",
    "grpo_passk": "best_of_group",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "group_mean_whitened",
}
_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gspo": {"algorithm.ratio": "sequence", "algorithm.aggregate": "sample_mean"},
    "sapo": {"algorithm.clip": "sapo"},
    "cispo": {"algorithm.clip": "cispo"},
    "clip_cov": {"algorithm.clip": "clip_cov"},
    "geo_mean": {"algorithm.clip": "geo_mean"},
    "gpg": {"algorithm.ratio": "none", "algorithm.clip": "none"},
}


def _uses_critic(job: ForeignJob) -> bool:
    return job.get("algorithm.adv_estimator", "gae") == "gae"


# ---- data


def _data(key: str):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        files = value if isinstance(value, list) else [value]
        if not files or files == [None]:
            return KeyVerdict("automatic", {}, "none")
        if len(files) == 1:
            return KeyVerdict("mapped", {key: str(files[0])})
        return KeyVerdict("mapped", {key: [str(file) for file in files]}, "rows of all files, one after the other")

    return by(read, key)


def _truncation(job: ForeignJob, value: Any) -> KeyVerdict:
    if value not in ("error", "left", "right", "middle"):
        raise ValueError("must be error, left, right or middle")
    if value == "error" or job.get("data.filter_overlong_prompts", False):
        return KeyVerdict("automatic", {}, "longer prompts are dropped and counted before anything is cut")
    if value == "right":
        return refused("cutting the end of a prompt removes the question; nearest: data.too_long: left")
    return KeyVerdict("mapped", {"data.too_long": value})


def _template_args(job: ForeignJob, value: Any) -> KeyVerdict:
    prefix = "data.apply_chat_template_kwargs"
    given = value if isinstance(value, dict) else {}
    one_by_one = {
        key.removeprefix(f"{prefix}."): job.plain(v) for key, v in job.values.items() if key.startswith(f"{prefix}.")
    }
    return KeyVerdict("mapped", {"data.template_args": {**given, **one_by_one}} if given or one_by_one else {})


def _rows(key: str):
    return by(
        lambda job, value: KeyVerdict("mapped", {} if positive(value) is None else {key: f"0:{positive(value)}"}),
        key,
        note="a slice of the rows",
    )


# ---- batch


def _prompts_per_step(job: ForeignJob) -> int:
    """Prompts of a policy update; the fully asynchronous program has no batch and counts mini-batches."""
    given = whole(job.get("data.train_batch_size", 1024))
    if given:
        return given
    mini = whole(job.get(f"{_A}.ppo_mini_batch_size", 256))
    batches = whole(job.get("async_training.require_batches", 1))
    return mini * batches * whole(job.get("async_training.trigger_parameter_sync_step", 4))


def _batch(job: ForeignJob, value: Any) -> KeyVerdict:
    if whole(value):
        return KeyVerdict("mapped", {"train.prompts_per_step": whole(value)}, "prompts, as in verl")
    note = "ppo_mini_batch_size x require_batches x trigger_parameter_sync_step: prompts between two sets of weights"
    return KeyVerdict("mapped", {"train.prompts_per_step": _prompts_per_step(job)}, note)


def _total_rollouts(job: ForeignJob, value: Any) -> KeyVerdict:
    steps = max(1, -(-whole(number(value)) // _prompts_per_step(job)))
    return KeyVerdict("mapped", {"run.steps": steps}, "prompts to policy updates")


def _mini_batch(job: ForeignJob, value: Any) -> KeyVerdict:
    group = whole(job.get(f"{_R}.n", 1))
    prompts = _prompts_per_step(job)
    verdict = shared.samples_per_step(job, prompts, group, whole(value) * group)
    return KeyVerdict(
        verdict.kind, verdict.settings, verdict.note.replace("in samples of", f"prompts x n = {group}: in samples of")
    )


def _shuffle_steps(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value) or whole(job.get(f"{_A}.ppo_mini_batch_size", 256)) >= whole(
        job.get("data.train_batch_size", 1024)
    ):
        return KeyVerdict("automatic", {}, "no order to shuffle")
    return refused("optimizer steps of an update are in the order of sampling; nearest: leave it out")


def _token_budget(job: ForeignJob, value: Any) -> KeyVerdict:
    if not job.get(f"{_A}.use_dynamic_bsz", False):
        return KeyVerdict("automatic", {}, "unused without use_dynamic_bsz")
    return KeyVerdict("mapped", {"train.tokens_per_microbatch": whole(value)}, "per device, prompt tokens counted once")


# ---- algorithm


def _credit(job: ForeignJob, value: Any) -> KeyVerdict:
    name = str(value)
    if name == "gpg":
        return KeyVerdict(
            "mapped", {"algorithm.credit": "group_mean"}, "GPG's scale of groups with a signal is left out"
        )
    if name not in _CREDITS:
        return refused(f"no advantage estimator of this kind; nearest: {', '.join(sorted(set(_CREDITS.values())))}")
    credit = _CREDITS[name]
    if credit not in ("gae", "remax", "reinforce_pp") and whole(job.get(f"{_R}.n", 1)) < 2:
        return refused("a sample has no siblings with rollout.n = 1; nearest: reinforce_pp, or rollout.group_size = 2")
    if (
        name.startswith("grpo")
        and credit == "group_norm"
        and not truth(job.get("algorithm.norm_adv_by_std_in_grpo", True))
    ):
        credit = "group_mean"
    return KeyVerdict("mapped", {"algorithm.credit": credit})


def _loss_mode(job: ForeignJob, value: Any) -> KeyVerdict:
    if value not in _LOSSES:
        return refused("no such loss here; nearest: algorithm.clip = ppo, clip_cov, sapo or cispo")
    if value == "gpg" and whole(job.get(f"{_A}.ppo_mini_batch_size", 256)) < _prompts_per_step(job):
        return refused("a loss without a ratio is biased after the first optimizer step; nearest: one step per update")
    return KeyVerdict("mapped", _LOSSES[value])


def _loss_key(key: str, *losses: str, convert=number):
    """A setting that only some losses read."""

    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if job.get(f"{_A}.policy_loss.loss_mode", "vanilla") not in losses or value is None:
            return KeyVerdict("automatic", {}, f"only read by {', '.join(losses)}")
        return KeyVerdict("mapped", {key: convert(value)})

    return by(read, key)


def _clip(job: ForeignJob, value: Any) -> KeyVerdict:
    low, high = job.get(f"{_A}.clip_ratio_low"), job.get(f"{_A}.clip_ratio_high")
    if low is not None and high is not None:
        return KeyVerdict(
            "automatic", {}, "no effect in verl at this version: clip_ratio_low and clip_ratio_high are set and win"
        )
    sides = {"algorithm.clip_low": number(value)} if low is None else {}
    return KeyVerdict("mapped", sides | ({"algorithm.clip_high": number(value)} if high is None else {}))


def _side(key: str):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        is_read = job.get(f"{_A}.policy_loss.loss_mode", "vanilla") not in ("sapo", "gpg")
        if value is None or not is_read:
            return KeyVerdict("automatic", {}, "clip_ratio is used" if value is None else "not read by this loss")
        return KeyVerdict("mapped", {key: number(value)})

    return by(read, key)


def _clip_cov(job: ForeignJob, value: Any) -> KeyVerdict:
    if job.get(f"{_A}.policy_loss.loss_mode", "vanilla") != "clip_cov":
        return KeyVerdict("automatic", {}, "only read by clip_cov")
    parts = [
        number(job.get(f"{_A}.policy_loss.{name}", other))
        for name, other in (("clip_cov_ratio", 2e-4), ("clip_cov_lb", 1.0), ("clip_cov_ub", 5.0))
    ]
    return KeyVerdict("mapped", {"algorithm.clip_cov": parts})


def _taus(job: ForeignJob, value: Any) -> KeyVerdict:
    if job.get(f"{_A}.policy_loss.loss_mode", "vanilla") != "sapo":
        return KeyVerdict("automatic", {}, "only read by sapo")
    return KeyVerdict(
        "mapped",
        {"algorithm.sapo_tau": [number(job.get(f"{_A}.tau_pos", 1.0)), number(job.get(f"{_A}.tau_neg", 1.05))]},
    )


def _aggregate(job: ForeignJob, value: Any) -> KeyVerdict:
    if job.get(f"{_A}.policy_loss.loss_mode", "vanilla") == "gspo":
        return KeyVerdict("automatic", {}, "gspo averages per sample")
    names_ = {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sample_mean",
        "seq-mean-token-sum-norm": "fixed_length",
        "token-sum": "token_sum",
    }
    if value == "seq-mean-token-sum":
        return refused(
            "a sum per sample is fixed_length times rollout.max_response_tokens: scale the learning rate by it"
        )
    if value not in names_:
        raise ValueError(f"must be one of {', '.join(names_)}")
    return KeyVerdict("mapped", {"algorithm.aggregate": names_[value]})


def _kl_loss(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return KeyVerdict("mapped", {"algorithm.kl_loss_coef": 0.0}, "no KL in the loss")
    return KeyVerdict("mapped", {"algorithm.kl_loss_coef": number(job.get(f"{_A}.kl_loss_coef", 0.001))})


def _kl_loss_coef(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(job.get(f"{_A}.use_kl_loss", False)):
        return KeyVerdict("automatic", {}, "unused without use_kl_loss")
    return KeyVerdict("mapped", {"algorithm.kl_loss_coef": number(value)})


def _kl_kind(job: ForeignJob, value: Any, used: bool, *, in_loss: bool) -> KeyVerdict:
    if not used:
        return KeyVerdict("automatic", {}, "unused: this KL is off")
    plain = str(value).removesuffix("+")
    if plain not in _ESTIMATORS:
        return refused("no such estimator; nearest: algorithm.kl_estimator = k3")
    if in_loss and _ESTIMATORS[plain] == "k1":
        return refused("k1 has no gradient on average in a loss; nearest: k3 (low_var_kl)")
    if str(value).endswith("+"):
        return refused("a gradient of k2 with the value of another estimator; nearest: algorithm.kl_estimator = k2")
    return KeyVerdict("mapped", {"algorithm.kl_estimator": _ESTIMATORS[plain]})


def _kl_loss_type(job: ForeignJob, value: Any) -> KeyVerdict:
    used = truth(job.get(f"{_A}.use_kl_loss", False)) and number(job.get(f"{_A}.kl_loss_coef", 0.001)) > 0
    return _kl_kind(job, value, used, in_loss=True)


def _in_reward(job: ForeignJob) -> bool:
    return truth(job.get("algorithm.use_kl_in_reward", False))


def _kl_reward(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return KeyVerdict("mapped", {"algorithm.kl_reward_coef": 0.0}, "no KL in the reward")
    if truth(job.get(f"{_A}.use_kl_loss", False)) and number(job.get(f"{_A}.kl_loss_coef", 0.001)) > 0:
        return refused("KL in the reward and in the loss: Hone has one of them; nearest: kl_loss_coef alone")
    return KeyVerdict("mapped", {"algorithm.kl_reward_coef": number(job.get("algorithm.kl_ctrl.kl_coef", 0.001))})


def _kl_coef(job: ForeignJob, value: Any) -> KeyVerdict:
    if not _in_reward(job):
        return KeyVerdict("automatic", {}, "KL in the reward, unused without use_kl_in_reward")
    return KeyVerdict("mapped", {"algorithm.kl_reward_coef": number(value)}, "KL in the reward, not in the loss")


def _adaptive(key: str, convert):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if not _in_reward(job) or job.get("algorithm.kl_ctrl.type", "fixed") != "adaptive":
            return KeyVerdict("automatic", {}, "only read by the adaptive control of KL in the reward")
        return KeyVerdict("mapped", {key: convert(value)})

    return by(read, key)


def _gae_only(key: str, convert=number, note: str = ""):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if not _uses_critic(job):
            return KeyVerdict("automatic", {}, "only read with adv_estimator = gae")
        return KeyVerdict("mapped", {} if value is None else {key: convert(value)}, note)

    return by(read, key)


def _groups_metric(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(job.get("algorithm.filter_groups.enable", False)) or value in (
        None,
        "acc",
        "score",
        "seq_reward",
        "seq_final_reward",
        "reward",
    ):
        return KeyVerdict("automatic", {}, "groups are compared by their rewards")
    return refused("groups are compared by their rewards only")


def _correction(job: ForeignJob, value: Any) -> KeyVerdict:
    modes = {"token": "tis", "sequence": "sequence_tis"}
    if value in (None, "null", False):
        return KeyVerdict("mapped", {"algorithm.correction": "none"}, "no correction between sampler and trainer")
    if value is True:
        value = "token"
    if value not in modes:
        return refused("must be token or sequence; nearest: algorithm.correction = tis")
    bound = job.get("algorithm.rollout_correction.rollout_is_threshold", job.get("algorithm.rollout_is_threshold", 2.0))
    settings: dict[str, Any] = {"algorithm.correction": modes[value]}
    if isinstance(bound, int | float):
        settings["algorithm.correction_high"] = number(bound)
    return KeyVerdict("mapped", settings)


def _bypass(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return KeyVerdict("automatic", {}, "the trainer computes old logprobs, as here by default")
    return KeyVerdict("mapped", {"algorithm.old_logprobs": "sampler"})


# ---- optimizer


def _optimizer(job: ForeignJob, value: Any) -> KeyVerdict:
    if str(value).lower() in (
        "adamw",
        "adam",
        "none",
        "torch.optim",
        "anyprecision_adamw",
        "adamw_bf16",
        "distributed",
    ):
        return KeyVerdict("automatic", {}, "AdamW, with float32 moments")
    return refused("the optimizer is AdamW; nearest: leave it out and tune the learning rate anew")


def _schedule(prefix: str, ours: str):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        kinds = {"constant": "constant", "cosine": "cosine", "linear": "linear", "None": None, "null": None}
        if str(value) not in kinds:
            return refused("nearest: schedule = cosine")
        kind = kinds[str(value)]
        return KeyVerdict("mapped", {} if kind is None else {ours: kind})

    return read


def _final(prefix: str, ours: str):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        kinds = [job.get(f"{prefix}.{name}") for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")]
        if value is None or not any(kind in ("cosine", "linear") for kind in kinds):
            return KeyVerdict("automatic", {}, "unused by a constant schedule")
        return KeyVerdict("mapped", {ours: number(value)})

    return read


def _min_lr(prefix: str, ours: str):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if job.get(f"{prefix}.lr_decay_style", "constant") == "constant" or value is None:
            return KeyVerdict("automatic", {}, "unused by a constant schedule")
        return KeyVerdict(
            "mapped", {ours: number(value) / number(job.get(f"{prefix}.lr", 1e-6))}, "as a fraction of lr"
        )

    return read


def _warmup(ours: str):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        return KeyVerdict(
            "mapped", {} if positive(value) is None else {ours: positive(value)}, "" if positive(value) else "none"
        )

    return read


def _warmup_frac(prefix: str, ours: str):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if positive(job.get(f"{prefix}.lr_warmup_steps", -1)) is not None or not value:
            return KeyVerdict("automatic", {}, "none, or lr_warmup_steps wins")
        return KeyVerdict("mapped", {ours: number(value)}, "of the optimizer steps")

    return read


def _decay_steps(prefix: str):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if job.get(f"{prefix}.lr_decay_style", "constant") == "constant" or positive(value) is None:
            return KeyVerdict("automatic", {}, "unused by a constant schedule")
        return refused("a schedule ends with the run; nearest: leave it out")

    return read


def _optim_rows(prefix: str, ours: str, wrap=by) -> dict[str, Row]:
    def row(read, name: str) -> Row:
        return wrap(read, f"{ours}.{name}")

    def plain(name: str, convert=number):
        return lambda job, value: KeyVerdict("mapped", {} if value is None else {f"{ours}.{name}": convert(value)})

    return {
        f"{prefix}.lr": row(plain("lr"), "lr"),
        f"{prefix}.weight_decay": row(plain("weight_decay"), "weight_decay"),
        f"{prefix}.betas": row(plain("betas", lambda value: [number(v) for v in value]), "betas"),
        f"{prefix}.eps": row(plain("eps"), "eps"),
        f"{prefix}.clip_grad": row(plain("grad_clip"), "grad_clip"),
        f"{prefix}.optimizer": row(_optimizer, "lr"),
        f"{prefix}.optimizer_impl": row(_optimizer, "lr"),
        f"{prefix}.lr_warmup_steps": row(_warmup(f"{ours}.warmup_steps"), "warmup_steps"),
        f"{prefix}.lr_warmup_steps_ratio": row(_warmup_frac(prefix, f"{ours}.warmup_frac"), "warmup_frac"),
        f"{prefix}.lr_scheduler_type": row(_schedule(prefix, f"{ours}.schedule"), "schedule"),
        f"{prefix}.warmup_style": row(_schedule(prefix, f"{ours}.schedule"), "schedule"),
        f"{prefix}.lr_decay_style": row(_schedule(prefix, f"{ours}.schedule"), "schedule"),
        f"{prefix}.min_lr_ratio": row(_final(prefix, f"{ours}.final_lr_frac"), "final_lr_frac"),
        f"{prefix}.min_lr": row(_min_lr(prefix, f"{ours}.final_lr_frac"), "final_lr_frac"),
        f"{prefix}.lr_decay_steps": row(_decay_steps(prefix), "schedule"),
        f"{prefix}.num_cycles": missing("half a cosine only", off=(0.5, None)),
        f"{prefix}.lr_warmup_init": missing("warm-up starts at 0", off=(0, 0.0, None)),
        f"{prefix}.total_training_steps": automatic("the run's own length"),
        f"{prefix}.zero_indexed_step": automatic("the first step is step 0 of the schedule"),
        f"{prefix}.override_optimizer_config.**": placement("where the optimizer's state is: cluster.trainer.offload"),
        f"{prefix}.override_optimizer_config": placement("where the optimizer's state is: cluster.trainer.offload"),
        f"{prefix}.muon_*": missing("the optimizer is AdamW", off=()),
        f"{prefix}.use_layer_wise_distributed_optimizer": placement(),
        f"{prefix}.use_checkpoint_opt_param_scheduler": automatic("a resumed run keeps its schedule"),
        f"{prefix}.lr_wsd_*": automatic("only read by the WSD schedule"),
        f"{prefix}.weight_decay_incr_style": missing("weight decay is constant", off=("constant", None)),
    }


def _critic_only(read, *about: str) -> Row:
    def checked(job: ForeignJob, value: Any) -> KeyVerdict:
        return (
            read(job, value) if _uses_critic(job) else KeyVerdict("automatic", {}, "no critic with this adv_estimator")
        )

    return by(checked, *about)


# ---- model, engines, placement


def _checkpointing(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict("mapped", {"train.activation_checkpointing": "full" if truth(value) else "none"})


def _adapter(key: str, convert):
    return shared.adapter(key, convert, lambda job: job.get(f"{_M}.lora_rank", 0) or job.get(f"{_M}.lora.rank", 0))


def _targets(value: Any) -> list[str] | None:
    if value in (None, "all-linear", "all") or value == ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]:
        return None
    return names(value)


def _offload(what: str):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        return KeyVerdict("placement", {"cluster.trainer.offload": [what]} if truth(value) else {}, MEMORY)

    return by(read, "cluster.trainer.offload", kind="placement")


def _engine(key: str, convert=whole):
    return by(
        lambda job, value: KeyVerdict(
            "mapped", {} if value is None or value == -1 else {f"cluster.engines.{key}": convert(value)}
        ),
        f"cluster.engines.{key}",
    )


def _engine_name(job: ForeignJob, value: Any) -> KeyVerdict:
    note = "" if value == "vllm" else f"{value} is not here: vLLM samples, with the same sampling settings"
    return KeyVerdict("placement", {"cluster.engines.use": "vllm"}, note)


def _sampling_cut(key: str, off: Any, ours_off: Any):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if value is None or number(value) in (off, ours_off):
            return KeyVerdict("mapped", {}, "off")
        return refused(f"{shared.CUT}{key} = {ours_off}")

    return by(read, key)


def _val_temperature(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(job.get(f"{_R}.val_kwargs.do_sample", False)):
        return KeyVerdict("mapped", {"eval.temperature": 0.0}, "greedy: do_sample is false")
    return KeyVerdict("mapped", {"eval.temperature": number(value)})


def _do_sample(job: ForeignJob, value: Any) -> KeyVerdict:
    if truth(value):
        return KeyVerdict("mapped", {"eval.temperature": number(job.get(f"{_R}.val_kwargs.temperature", 0) or 0)})
    return KeyVerdict("mapped", {"eval.temperature": 0.0}, "greedy")


def _val_samples(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(job.get(f"{_R}.val_kwargs.do_sample", False)) or not number(
        job.get(f"{_R}.val_kwargs.temperature", 0) or 0
    ):
        return KeyVerdict("automatic", {}, "greedy samples are all the same")
    return KeyVerdict("mapped", {"eval.samples": whole(value)})


def _engine_width(job: ForeignJob, value: Any) -> KeyVerdict:
    wide, per_node = whole(value), job.get("trainer.n_gpus_per_node", 8)
    fits = min(wide, whole(per_node)) if isinstance(per_node, int) else wide
    note = "" if fits == wide else f"{wide} is more than a machine has, and layers are divided within one"
    return KeyVerdict("placement", {"cluster.engines.tensor_parallel_size": fits} if fits > 1 else {}, note)


def _val_cut(key: str, convert):
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if value is None or not truth(job.get(f"{_R}.val_kwargs.do_sample", False)):
            return KeyVerdict("automatic", {}, "greedy evaluation")
        return KeyVerdict("mapped", {key: convert(value)})

    return by(read, key)


# ---- rewards


def _reward_function(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return KeyVerdict("automatic", {}, "none: the data source's own reward")
    function = next(
        (
            name
            for key in ("reward.custom_reward_function.name", "custom_reward_function.name")
            if (name := job.values.get(key))
        ),
        "compute_score",
    )
    arguments = {
        key.rpartition(".")[2]: job.plain(item)
        for key, item in job.values.items()
        if ".reward_kwargs." in key and "custom_reward_function" in key
    }
    component = {"use": f"{value}:{job.plain(function)}"} | ({"args": arguments} if arguments else {})
    return KeyVerdict("mapped", {"reward.components": [component]}, "solution_str, ground_truth: called as verl does")


def _reward_model(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return KeyVerdict("automatic", {}, "off")
    path = job.get("reward.reward_model.model_path") or job.get("reward_model.model.path")
    if job.values.get("reward.custom_reward_function.path") or job.values.get("custom_reward_function.path"):
        return refused(
            "a generative reward model with a function of your own: a `judge` with a service; see docs/rewards-judge.md"
        )
    if not path:
        return refused("no path of the reward model was given")
    return KeyVerdict("mapped", {"reward.components": [{"use": "reward_model", "args": {"path": str(path)}}]})


def _no_reward_given(job: ForeignJob) -> bool:
    keys = ("reward.custom_reward_function.path", "custom_reward_function.path")
    if any(job.given(key) and job.values[key] not in (None, "null", "") for key in keys):
        return False
    return not any(
        job.given(key) and truth(job.get(key)) for key in ("reward.reward_model.enable", "reward_model.enable")
    )


def _overlong(job: ForeignJob, value: Any) -> KeyVerdict:
    prefix = next(p for p in _OVERLONG if job.given(f"{p}.enable"))
    if not truth(value):
        return KeyVerdict("automatic", {}, "off")
    length, limit = whole(job.get(f"{prefix}.len", 0)), whole(job.get("data.max_response_length", 512))
    penalty = number(job.get(f"{prefix}.penalty_factor", 1.0))
    settings = {"algorithm.overlong_buffer_frac": length / limit, "algorithm.overlong_penalty": penalty}
    return KeyVerdict("mapped", settings, f"{length} of {limit} tokens, as a fraction")


_OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
    "reward_model.overlong_buffer_cfg",
)


def _overlong_part(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict("automatic", {}, "part of overlong_buffer's `enable`")


# ---- trainer


def _steps(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict("mapped", {} if positive(value) is None else {"run.steps": positive(value)})


def _epochs(job: ForeignJob, value: Any) -> KeyVerdict:
    if positive(job.get("trainer.total_training_steps")) is not None:
        return KeyVerdict("automatic", {}, "total_training_steps wins")
    return KeyVerdict("mapped", {"run.epochs": number(value)})


def _logger(job: ForeignJob, value: Any) -> KeyVerdict:
    loggers = names(value) if value is not None else []
    settings: dict[str, Any] = {}
    if "wandb" in loggers:
        settings["observe.wandb"] = str(job.get("trainer.project_name", "verl_examples"))
    others = [name for name in loggers if name not in ("console", "wandb", "tensorboard", "file")]
    note = f"no logger for {', '.join(others)}: metrics.jsonl and TensorBoard files have it all" if others else ""
    return KeyVerdict("mapped" if settings else "automatic", settings, note or LOGGING)


def _folder(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict("mapped", {"run.dir": str(value)} if value and "${" not in str(value) else {})


def _experiment(job: ForeignJob, value: Any) -> KeyVerdict:
    if job.given("trainer.default_local_dir"):
        return KeyVerdict("automatic", {}, "run.dir comes from default_local_dir")
    safe = "".join(char if char.isalnum() or char in "-_." else "-" for char in str(value)).strip(".")
    return KeyVerdict("mapped", {"run.dir": f"runs/{safe or 'verl'}"}, "the run's name is its folder's")


def _val_before(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict("mapped", {"eval.before_training": truth(value)})


def _devices(job: ForeignJob, value: Any) -> KeyVerdict:
    job.plain(value)
    return KeyVerdict("placement", {}, "see the line `devices`")


def _staleness(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict(
        "mapped", {"rollout.max_staleness": max(1, math.ceil(number(value)))}, "policy updates, rounded up"
    )


def _hybrid(job: ForeignJob, value: Any) -> KeyVerdict:
    return KeyVerdict(
        "placement", {}, "roles share devices" if truth(value) else "sampler and trainer have devices of their own"
    )


_MEGATRON = placement("Megatron's setting: Hone's trainer is FSDP2 with its own kernels")
_REF = placement("of the reference: placement and memory")
_CRITIC = placement("of the critic: placement and memory")

ROWS: dict[str, Row] = {
    # data
    "data.train_files": _data("data.train"),
    "data.val_files": _data("data.eval"),
    "data.prompt_key": to("data.prompt_column", text),
    "data.max_prompt_length": to("data.max_prompt_tokens", whole),
    "data.max_response_length": to("rollout.max_response_tokens", whole),
    "data.train_batch_size": by(_batch, "train.prompts_per_step", note="prompts"),
    "data.gen_batch_size": automatic("dropped groups are replaced as they are found"),
    "data.val_batch_size": automatic("evaluation is batched by the engine"),
    "data.truncation": by(_truncation, "data.too_long"),
    "data.filter_overlong_prompts": automatic("longer prompts are dropped and counted"),
    "data.filter_overlong_prompts_workers": automatic("rows are tokenised as they are read"),
    "data.dataloader_num_workers": automatic("rows are tokenised as they are read"),
    "data.shuffle": to("data.shuffle", truth),
    "data.validation_shuffle": automatic("evaluation uses every row"),
    "data.seed": by(lambda job, v: KeyVerdict("mapped", {} if v is None else {"seed": whole(v)}), "seed"),
    "data.train_max_samples": _rows("data.train_rows"),
    "data.val_max_samples": _rows("data.eval_rows"),
    "data.trust_remote_code": to("model.trust_remote_code", truth),
    "data.tokenizer": to("model.tokenizer", text),
    "data.return_raw_chat": automatic("rewards see prompt and messages"),
    "data.return_raw_input_ids": automatic("rewards see prompt and messages"),
    "data.return_full_prompt": automatic("rewards see prompt and messages"),
    "data.return_multi_modal_inputs": automatic("no images"),
    "data.reward_fn_key": automatic("one reward for all rows; data.eval and eval.by report by column"),
    "data.use_shm": automatic("data is read once"),
    "data.image_key": missing(PICTURES, off=(None,)),
    "data.video_key": missing(PICTURES, off=(None,)),
    "data.audio_key": missing(PICTURES, off=(None,)),
    "data.image_patch_size": automatic("no images"),
    "data.mm_processor_kwargs": automatic("no images"),
    "data.apply_chat_template_kwargs.*": by(_template_args, "data.template_args"),
    "data.apply_chat_template_kwargs": by(_template_args, "data.template_args"),
    "data.custom_cls.**": rewritten(
        "a data set class: write its rows to JSONL or Parquet and name them in data.train", "data.train"
    ),
    "data.sampler.**": missing(
        "order by weight or curriculum: sort the rows and set data.shuffle = false", "data.shuffle"
    ),
    "data.datagen.**": missing("generated rows: write them to a file", "data.train"),
    "data.tool_config_path": rewritten(ENVIRONMENT, "rollout.environment.use"),
    "data.function_tool_path": rewritten(ENVIRONMENT, "rollout.environment.use"),
    # actor
    **_optim_rows(f"{_A}.optim", "train.optimizer"),
    f"{_A}.grad_clip": to("train.optimizer.grad_clip", number),
    f"{_A}.ppo_mini_batch_size": by(
        _mini_batch, "train.samples_per_optimizer_step", note="prompts to samples: x rollout.n"
    ),
    f"{_A}.ppo_micro_batch_size": automatic("sequences of a pass: train.tokens_per_microbatch counts tokens"),
    f"{_A}.ppo_micro_batch_size_per_gpu": automatic("sequences of a pass: train.tokens_per_microbatch counts tokens"),
    f"{_A}.ppo_infer_micro_batch_size_per_gpu": automatic(MEMORY),
    f"{_A}.ppo_infer_max_token_len_per_gpu": automatic(MEMORY),
    f"{_A}.use_dynamic_bsz": automatic("microbatches are always filled by tokens"),
    f"{_A}.ppo_max_token_len_per_gpu": by(_token_budget, "train.tokens_per_microbatch"),
    f"{_A}.clip_ratio": by(_clip, "algorithm.clip_low", "algorithm.clip_high"),
    f"{_A}.clip_ratio_low": _side("algorithm.clip_low"),
    f"{_A}.clip_ratio_high": _side("algorithm.clip_high"),
    f"{_A}.clip_ratio_c": _loss_key("algorithm.dual_clip", "vanilla", "clip_cov"),
    f"{_A}.policy_loss.loss_mode": by(_loss_mode, "algorithm.ratio", "algorithm.clip"),
    f"{_A}.policy_loss.clip_cov_*": by(_clip_cov, "algorithm.clip_cov"),
    f"{_A}.policy_loss.tau_*": by(_taus, "algorithm.sapo_tau"),
    f"{_A}.policy_loss.kl_cov_ratio": automatic("only read by kl_cov"),
    f"{_A}.policy_loss.ppo_kl_coef": automatic("only read by kl_cov"),
    f"{_A}.policy_loss.dro_beta": automatic("only read by dro"),
    f"{_A}.tau_pos": by(_taus, "algorithm.sapo_tau"),
    f"{_A}.tau_neg": by(_taus, "algorithm.sapo_tau"),
    f"{_A}.loss_agg_mode": by(_aggregate, "algorithm.aggregate"),
    f"{_A}.loss_scale_factor": missing("fixed_length divides by rollout.max_response_tokens", "algorithm.aggregate"),
    f"{_A}.entropy_coeff": to("algorithm.entropy_coef", number),
    f"{_A}.calculate_entropy": automatic("entropy is always measured"),
    f"{_A}.calculate_sum_pi_squared": automatic("only read by optimal_token_baseline"),
    f"{_A}.use_kl_loss": by(_kl_loss, "algorithm.kl_loss_coef"),
    f"{_A}.kl_loss_coef": by(_kl_loss_coef, "algorithm.kl_loss_coef"),
    f"{_A}.kl_loss_type": by(_kl_loss_type, "algorithm.kl_estimator"),
    f"{_A}.ppo_epochs": to("train.passes_per_batch", whole),
    f"{_A}.shuffle": by(_shuffle_steps, "train.samples_per_optimizer_step"),
    f"{_A}.data_loader_seed": automatic("order follows `seed`"),
    f"{_A}.use_torch_compile": automatic("kernels of Hone's own; cluster.trainer.compile compiles layers"),
    f"{_A}.strategy": placement("the trainer is FSDP2"),
    f"{_A}.ulysses_sequence_parallel_size": shared.width("cluster.trainer.sequence_parallel"),
    f"{_A}.fsdp_config.param_offload": _offload("parameters"),
    f"{_A}.fsdp_config.optimizer_offload": _offload("optimizer"),
    f"{_A}.fsdp_config.fsdp_size": by(
        lambda job, v: KeyVerdict("placement", {} if positive(v) is None else {"cluster.trainer.shard": positive(v)}),
        "cluster.trainer.shard",
        kind="placement",
    ),
    f"{_A}.fsdp_config.ulysses_sequence_parallel_size": shared.width("cluster.trainer.sequence_parallel"),
    f"{_A}.fsdp_config.full_determinism": automatic("a synchronous run on one process repeats bit for bit"),
    f"{_A}.fsdp_config.**": placement("of FSDP: placement and memory"),
    f"{_A}.megatron.tensor_model_parallel_size": shared.width("cluster.trainer.tensor_parallel"),
    f"{_A}.megatron.context_parallel_size": shared.width("cluster.trainer.sequence_parallel"),
    f"{_A}.megatron.pipeline_model_parallel_size": placement(PIPELINE),
    f"{_A}.megatron.virtual_pipeline_model_parallel_size": placement(PIPELINE),
    f"{_A}.megatron.expert_*": placement(EXPERTS),
    f"{_A}.megatron.param_offload": _offload("parameters"),
    f"{_A}.megatron.optimizer_offload": _offload("optimizer"),
    f"{_A}.megatron.grad_offload": placement(),
    f"{_A}.megatron.*dist_checkpointing*": placement(CONVERTED),
    f"{_A}.megatron.override_transformer_config.moe_aux_loss_coeff": missing(
        "no load-balancing loss; nearest: 0, as RL of experts usually has it", off=(0, 0.0, None)
    ),
    f"{_A}.megatron.override_transformer_config.moe_z_loss_coeff": missing(
        "no router z-loss; nearest: 0", off=(0, 0.0, None)
    ),
    f"{_A}.megatron.**": _MEGATRON,
    f"{_A}.veomni.param_offload": _offload("parameters"),
    f"{_A}.veomni.optimizer_offload": _offload("optimizer"),
    f"{_A}.veomni.ulysses_parallel_size": shared.width("cluster.trainer.sequence_parallel"),
    f"{_A}.veomni.**": placement("of VeOmni: placement and memory"),
    f"{_A}.torchtitan.**": placement("of torchtitan: placement and memory"),
    f"{_A}.engine.**": placement("of the training engine: placement and memory"),
    f"{_A}.veomni.router_replay.mode": missing("router replay is not supported", off=(None, "disabled")),
    f"{_A}.router_replay.**": missing("router replay is not supported", off=(None, "disabled", False)),
    f"{_A}.checkpoint.**": automatic("checkpoints are whole, and written in the background"),
    f"{_A}.profiler.**": automatic(PROFILER),
    f"{_A}.entropy_*": automatic("logits are made in chunks"),
    f"{_A}.use_fused_kernels": automatic("logits are made in chunks"),
    f"{_A}.use_remove_padding": automatic("never padded"),
    f"{_A}.use_prefix_grouper": automatic("prompts are computed once per group"),
    f"{_A}.pad_to_length*": automatic("never padded"),
    f"{_A}.load_weight": automatic("weights are loaded"),
    f"{_A}.rollout_n": automatic("rollout.n"),
    f"{_A}.freeze_vision_tower": missing(PICTURES),
    f"{_A}.self_distillation.**": missing("distillation is not supported", off=()),
    f"{_A}.qat.**": missing("quantised training is not supported", off=(None, False)),
    f"{_A}.sum_pi_squared_checkpointing": automatic(MEMORY),
    # reference
    "actor_rollout_ref.ref.fsdp_config.param_offload": _offload("reference"),
    "actor_rollout_ref.ref.megatron.param_offload": _offload("reference"),
    "actor_rollout_ref.ref.veomni.param_offload": _offload("reference"),
    "actor_rollout_ref.ref.log_prob_*": automatic(MEMORY),
    "actor_rollout_ref.ref.profiler.**": automatic(PROFILER),
    "actor_rollout_ref.ref.model.path": missing("the reference is the policy at the start", "model.path", off=(None,)),
    "actor_rollout_ref.ref.**": _REF,
    # rollout
    f"{_R}.n": to("rollout.group_size", whole),
    f"{_R}.name": by(_engine_name, "cluster.engines.use", kind="placement"),
    f"{_R}.temperature": to("rollout.temperature", number),
    f"{_R}.top_k": _sampling_cut("rollout.top_k", -1, 0),
    f"{_R}.top_p": _sampling_cut("rollout.top_p", 1, 1),
    f"{_R}.do_sample": missing("groups need samples that differ: leave it true", off=(True, None)),
    f"{_R}.mode": automatic("requests are always asynchronous"),
    f"{_R}.dtype": _engine(
        "dtype", choice(bfloat16="bfloat16", float16="float16", float32="float32", bf16="bfloat16", auto="auto")
    ),
    f"{_R}.gpu_memory_utilization": _engine("gpu_memory_utilization", number),
    f"{_R}.tensor_model_parallel_size": by(_engine_width, "cluster.engines.tensor_parallel_size", kind="placement"),
    f"{_R}.data_parallel_size": placement("replicas = devices // tensor_parallel_size"),
    f"{_R}.pipeline_model_parallel_size": placement(PIPELINE),
    f"{_R}.expert_parallel_size": placement(EXPERTS),
    f"{_R}.max_num_batched_tokens": _engine("max_num_batched_tokens"),
    f"{_R}.max_num_seqs": _engine("max_num_seqs"),
    f"{_R}.max_model_len": _engine("max_model_len"),
    f"{_R}.enforce_eager": _engine("enforce_eager", truth),
    f"{_R}.enable_chunked_prefill": _engine("enable_chunked_prefill", truth),
    f"{_R}.enable_prefix_caching": _engine("enable_prefix_caching", truth),
    f"{_R}.disable_log_stats": _engine("disable_log_stats", truth),
    f"{_R}.cudagraph_capture_sizes": automatic("vLLM chooses; max_cudagraph_capture_size bounds it"),
    f"{_R}.free_cache_engine": automatic("engines on the trainer's devices free their memory in turn"),
    f"{_R}.multi_stage_wake_up": automatic("engines wake in stages"),
    f"{_R}.load_format": automatic("weights are published by the trainer"),
    f"{_R}.layered_summon": automatic("weights are gathered tensor by tensor"),
    f"{_R}.use_shm": automatic("weights are published by the trainer"),
    f"{_R}.ignore_eos": missing("responses end with the end-of-text token", off=(False, None)),
    f"{_R}.prompt_length": automatic("data.max_prompt_length"),
    f"{_R}.response_length": automatic("data.max_response_length"),
    f"{_R}.seed": automatic("each sample's randomness follows `seed`"),
    f"{_R}.full_determinism": automatic("each sample's randomness follows `seed`"),
    f"{_R}.calculate_log_probs": automatic("the sampler's logprobs are always kept"),
    f"{_R}.logprobs_mode": automatic("logprobs are of the distribution that was sampled from"),
    f"{_R}.log_prob_*": automatic(MEMORY),
    f"{_R}.scheduling_policy": automatic("first come, first served"),
    f"{_R}.skip_tokenizer_init": automatic("the policy's engines get token ids"),
    f"{_R}.over_sample_rate": missing("no more samples than asked for are drawn", off=(0, 0.0, None)),
    f"{_R}.repetition_penalty": missing(
        "samples must be of the policy's own distribution; nearest: 1", off=(1, 1.0, None)
    ),
    f"{_R}.quantization": missing("the trainer's weights are published as they are", off=(None,)),
    f"{_R}.quantization_config_file": missing("the trainer's weights are published as they are", off=(None,)),
    f"{_R}.val_kwargs.n": by(_val_samples, "eval.samples"),
    f"{_R}.val_kwargs.temperature": by(_val_temperature, "eval.temperature"),
    f"{_R}.val_kwargs.do_sample": by(_do_sample, "eval.temperature"),
    f"{_R}.val_kwargs.top_p": _val_cut("eval.top_p", number),
    f"{_R}.val_kwargs.top_k": _val_cut("eval.top_k", zero_if_off),
    f"{_R}.engine_kwargs.vllm.max_model_len": _engine("max_model_len"),
    f"{_R}.engine_kwargs.vllm.**": placement("of vLLM: speed and memory; keys of cluster.engines are in docs/vllm.md"),
    f"{_R}.engine_kwargs.**": placement("of another engine: vLLM samples here"),
    f"{_R}.limit_images": missing(PICTURES, off=(None, 0)),
    f"{_R}.multi_turn.enable": rewritten(ENVIRONMENT, "rollout.environment.use"),
    f"{_R}.multi_turn.tool_config_path": rewritten(ENVIRONMENT, "rollout.environment.use", off=(None,)),
    f"{_R}.multi_turn.interaction_config_path": rewritten(ENVIRONMENT, "rollout.environment.use", off=(None,)),
    f"{_R}.multi_turn.**": by(
        lambda job, v: (
            KeyVerdict("automatic", {}, "only read with multi_turn.enable")
            if not truth(job.get(f"{_R}.multi_turn.enable", False))
            else KeyVerdict("hole", {}, ENVIRONMENT)
        ),
        "rollout.environment.use",
    ),
    f"{_R}.agent.num_workers": automatic("requests are asynchronous"),
    f"{_R}.agent.default_agent_loop": rewritten(
        ENVIRONMENT, "rollout.environment.use", off=("single_turn_agent", None)
    ),
    f"{_R}.agent.**": rewritten(ENVIRONMENT, "rollout.environment.use", off=(None,)),
    f"{_R}.trace.**": automatic("samples/ has every response"),
    f"{_R}.profiler.**": automatic(PROFILER),
    f"{_R}.prometheus.**": automatic("metrics of a service: `hone serve`; a run's are in metrics.jsonl"),
    f"{_R}.enable_rollout_routing_replay": missing("router replay is not supported"),
    f"{_R}.moe_load_balance_metrics_interval": automatic(LOGGING),
    f"{_R}.checkpoint_engine.update_weights_bucket_megabytes": to("cluster.bucket_mib", number, kind="placement"),
    f"{_R}.update_weights_bucket_megabytes": to("cluster.bucket_mib", number, kind="placement"),
    f"{_R}.checkpoint_engine.**": placement("how weights are published: cluster.transport"),
    f"{_R}.nnodes": by(_devices, "cluster.pools", kind="placement"),
    f"{_R}.n_gpus_per_node": by(_devices, "cluster.pools", kind="placement"),
    f"{_R}.n_nodes": by(_devices, "cluster.pools", kind="placement"),
    f"{_R}.disaggregation.**": placement("prefill and decoding are on the same engine"),
    f"{_R}.mtp.**": missing("multi-token prediction is not supported", off=(None, False)),
    f"{_R}.qat.**": missing("quantised sampling is not supported", off=(None, False)),
    "rollout.nnodes": by(_devices, "cluster.pools", kind="placement"),
    "rollout.n_gpus_per_node": by(_devices, "cluster.pools", kind="placement"),
    "rollout.total_rollout_steps": by(_total_rollouts, "run.steps", note="prompts to policy updates"),
    "rollout.total_epochs": by(_epochs, "run.epochs"),
    "rollout.test_freq": to("eval.every", zero_if_off),
    # model
    f"{_M}.path": to("model.path", text),
    f"{_M}.tokenizer_path": to("model.tokenizer", text),
    f"{_M}.hf_config_path": missing("the config is the one beside the weights", "model.path", off=(None,)),
    f"{_M}.trust_remote_code": to("model.trust_remote_code", truth),
    f"{_M}.enable_gradient_checkpointing": by(_checkpointing, "train.activation_checkpointing"),
    f"{_M}.enable_activation_offload": placement("activations are recomputed: train.activation_checkpointing"),
    f"{_M}.lora_rank": to("lora.rank", lambda v: positive(v)),
    f"{_M}.lora.rank": to("lora.rank", lambda v: positive(v)),
    f"{_M}.lora_alpha": _adapter("lora.alpha", number),
    f"{_M}.lora.alpha": _adapter("lora.alpha", number),
    f"{_M}.target_modules": _adapter("lora.targets", _targets),
    f"{_M}.lora.target_modules": _adapter("lora.targets", _targets),
    f"{_M}.exclude_modules": missing("name the layers to adapt in lora.targets", "lora.targets", off=(None,)),
    f"{_M}.lora.exclude_modules": missing("name the layers to adapt in lora.targets", "lora.targets", off=(None,)),
    f"{_M}.lora_adapter_path": missing(
        "a run starts a new adapter; merge the old one into model.path first", "lora.rank", off=(None,)
    ),
    f"{_M}.lora.adapter_path": missing(
        "a run starts a new adapter; merge the old one into model.path first", "lora.rank", off=(None,)
    ),
    f"{_M}.lora.dropout": missing("adapters have no dropout", off=(0, 0.0, None)),
    f"{_M}.lora.**": automatic("adapters start as in the paper, and are published merged"),
    f"{_M}.use_*": automatic("Hone's kernels: never padded, logits in chunks"),
    f"{_M}.fused_kernel_options.**": automatic("logits are made in chunks"),
    f"{_M}.tiled_mlp.**": placement(),
    f"{_M}.custom_chat_template": missing(
        "write the template to a file and set model.chat_template", "model.chat_template", off=(None,)
    ),
    f"{_M}.external_lib": missing(
        "install the package, and set model.implementation = transformers", "model.implementation", off=(None,)
    ),
    f"{_M}.override_config.attn_implementation": automatic("attention is Hone's own"),
    f"{_M}.override_config.model_config.max_position_embeddings": missing(
        "edit max_position_embeddings in the model's config.json", "model.path", off=(None,)
    ),
    f"{_M}.override_config.**": missing("edit the model's config.json", "model.path", off=(None, {})),
    f"{_M}.override_config": missing("edit the model's config.json", "model.path", off=(None, {})),
    f"{_M}.mtp.**": missing("multi-token prediction is not supported", off=(None, False)),
    "actor_rollout_ref.hybrid_engine": by(_hybrid, kind="placement"),
    "actor_rollout_ref.nccl_timeout": automatic("cluster.call_timeout_s"),
    "actor_rollout_ref.*.nccl_timeout": automatic("cluster.call_timeout_s"),
    # rewards
    "reward.custom_reward_function.path": by(_reward_function, "reward.components"),
    "custom_reward_function.path": by(_reward_function, "reward.components"),
    "reward.custom_reward_function.**": automatic("part of custom_reward_function.path"),
    "custom_reward_function.**": automatic("part of custom_reward_function.path"),
    "reward.reward_model.enable": by(_reward_model, "reward.components"),
    "reward_model.enable": by(_reward_model, "reward.components"),
    "reward.reward_manager.name": missing(
        "the weighted sum of reward.components",
        "reward.components",
        off=("naive", "dapo", "batch", "prime", "rate_limited", None),
    ),
    "reward.reward_manager.source": missing(
        "name your function in reward.components", "reward.components", off=("register", None)
    ),
    "reward_model.reward_manager": missing(
        "the weighted sum of reward.components",
        "reward.components",
        off=("naive", "dapo", "batch", "prime", "rate_limited", None),
    ),
    "reward_manager.name": missing(
        "the weighted sum of reward.components", "reward.components", off=("naive", "dapo", "batch", "prime", None)
    ),
    "reward.num_workers": to("reward.workers", whole),
    **{f"{prefix}.enable": by(_overlong, "algorithm.overlong_buffer_frac") for prefix in _OVERLONG},
    **{f"{prefix}.*": by(_overlong_part, "algorithm.overlong_buffer_frac") for prefix in _OVERLONG},
    "reward.reward_kwargs.max_resp_len": automatic("rollout.max_response_tokens"),
    "reward_model.reward_kwargs.max_resp_len": automatic("rollout.max_response_tokens"),
    "reward.sandbox_fusion.url": missing(
        "code is run by `use: code`, in a sandbox of Hone's own or a remote one", "reward.components", off=(None,)
    ),
    "reward_model.sandbox_fusion.**": missing(
        "code is run by `use: code`, in a sandbox of Hone's own or a remote one", "reward.components", off=(None,)
    ),
    "reward.sandbox_fusion.**": automatic("part of sandbox_fusion.url"),
    "reward.reward_model.model_path": automatic("part of reward_model.enable"),
    "reward_model.model.**": automatic("part of reward_model.enable"),
    "reward.reward_model.**": placement("of the reward model's engine: `services` and their `engine`"),
    "reward_model.**": placement("of the reward model: placement and memory"),
    # critic
    **_optim_rows("critic.optim", "critic.optimizer", _critic_only),
    "critic.model.path": _critic_only(
        lambda job, v: KeyVerdict(
            "mapped", {} if v is None or str(v) == str(job.get(f"{_M}.path")) else {"critic.path": str(v)}
        ),
        "critic.path",
    ),
    "critic.cliprange_value": _gae_only("critic.value_clip"),
    "critic.grad_clip": _gae_only("critic.optimizer.grad_clip"),
    "critic.ppo_epochs": _critic_only(
        lambda job, v: (
            KeyVerdict("automatic", {}, "as many as the policy's")
            if v == job.get(f"{_A}.ppo_epochs", 1)
            else refused("the critic makes as many passes as the policy")
        ),
        "train.passes_per_batch",
    ),
    "critic.ppo_mini_batch_size": _critic_only(
        lambda job, v: (
            KeyVerdict("automatic", {}, "as the policy's")
            if v == job.get(f"{_A}.ppo_mini_batch_size", 256)
            else refused("the critic makes as many optimizer steps as the policy")
        ),
        "train.samples_per_optimizer_step",
    ),
    "critic.loss_agg_mode": automatic("the critic's loss is a mean over tokens"),
    "critic.enable": automatic("follows from adv_estimator"),
    "critic.**": _CRITIC,
    # algorithm
    "algorithm.adv_estimator": by(_credit, "algorithm.credit"),
    "algorithm.norm_adv_by_std_in_grpo": by(
        lambda job, v: KeyVerdict("automatic", {}, "part of adv_estimator"), "algorithm.credit"
    ),
    "algorithm.gamma": to("algorithm.gamma", number),
    "algorithm.lam": _gae_only("algorithm.gae_lambda"),
    "algorithm.use_kl_in_reward": by(_kl_reward, "algorithm.kl_reward_coef"),
    "algorithm.kl_penalty": by(
        lambda job, v: _kl_kind(job, v, _in_reward(job), in_loss=False), "algorithm.kl_estimator"
    ),
    "algorithm.kl_ctrl.kl_coef": by(_kl_coef, "algorithm.kl_reward_coef"),
    "algorithm.kl_ctrl.type": by(
        lambda job, v: mapped("") if v in ("fixed", "adaptive") else refused("must be fixed or adaptive"),
        "algorithm.kl_target",
    ),
    "algorithm.kl_ctrl.target_kl": _adaptive("algorithm.kl_target", number),
    "algorithm.kl_ctrl.horizon": _adaptive("algorithm.kl_horizon_samples", whole),
    "algorithm.filter_groups.enable": to("algorithm.drop_uninformative", truth),
    "algorithm.filter_groups.metric": by(_groups_metric, "algorithm.drop_uninformative"),
    "algorithm.filter_groups.max_num_gen_batches": by(
        lambda job, v: KeyVerdict(
            "mapped",
            {"algorithm.max_dropped_per_kept": number(v)}
            if positive(v) and truth(job.get("algorithm.filter_groups.enable", False))
            else {},
            "batches to groups dropped per group kept",
        ),
        "algorithm.max_dropped_per_kept",
    ),
    "algorithm.filter_groups.**": automatic("dropped groups are replaced as they are found"),
    "algorithm.use_pf_ppo": missing("PF-PPO's resampling is not supported"),
    "algorithm.pf_ppo.**": automatic("only read with use_pf_ppo"),
    "algorithm.rollout_is": by(_correction, "algorithm.correction"),
    "algorithm.rollout_is_level": automatic("part of rollout_is"),
    "algorithm.rollout_is_threshold": by(
        lambda job, v: KeyVerdict(
            "mapped",
            {} if v is None or not job.get("algorithm.rollout_is") else {"algorithm.correction_high": number(v)},
        ),
        "algorithm.correction_high",
    ),
    "algorithm.rollout_correction.rollout_is": by(_correction, "algorithm.correction"),
    "algorithm.rollout_correction.rollout_is_threshold": by(
        lambda job, v: KeyVerdict(
            "mapped",
            {}
            if v is None or not job.get("algorithm.rollout_correction.rollout_is")
            else {"algorithm.correction_high": number(v)},
        ),
        "algorithm.correction_high",
    ),
    "algorithm.rollout_correction.bypass_mode": by(_bypass, "algorithm.old_logprobs"),
    "algorithm.rollout_correction.rollout_rs": missing(
        "rejection by bounds; nearest: algorithm.correction = icepop or sequence_mask",
        "algorithm.correction",
        off=(None,),
    ),
    "algorithm.rollout_correction.rollout_rs_threshold*": automatic("part of rollout_rs"),
    "algorithm.rollout_correction.loss_type": missing("the ratio's loss", "algorithm.ratio", off=("ppo_clip", None)),
    "algorithm.rollout_correction.rollout_is_batch_normalize": missing(
        "weights are not normalised over the batch", "algorithm.correction"
    ),
    "algorithm.rollout_correction": missing("set its keys one by one", "algorithm.correction"),
    # trainer
    "trainer.total_training_steps": by(_steps, "run.steps"),
    "trainer.total_epochs": by(_epochs, "run.epochs"),
    "trainer.nnodes": by(_devices, "cluster.nodes", kind="placement"),
    "trainer.n_gpus_per_node": by(_devices, "cluster.devices_per_node", kind="placement"),
    "trainer.device": placement("GPUs where torch finds them"),
    "trainer.logger": by(_logger, "observe.wandb", "observe.tensorboard"),
    "trainer.project_name": by(
        lambda job, v: KeyVerdict("automatic", {}, "the project of trainer.logger's wandb"), "observe.wandb"
    ),
    "trainer.experiment_name": by(_experiment, "run.dir"),
    "trainer.default_local_dir": by(_folder, "run.dir"),
    "trainer.default_hdfs_dir": missing("copy checkpoints from the run's folder", "run.dir", off=(None,)),
    "trainer.save_freq": to("checkpoint.every", zero_if_off, "-1: only at the end"),
    "trainer.test_freq": to("eval.every", zero_if_off, "-1: only before and after"),
    "trainer.val_before_train": by(_val_before, "eval.before_training"),
    "trainer.val_only": missing("a command: `hone eval`"),
    "trainer.critic_warmup": _gae_only("critic.warmup_updates", zero_if_off),
    "trainer.max_actor_ckpt_to_keep": to("checkpoint.keep", lambda v: positive(v)),
    "trainer.max_critic_ckpt_to_keep": automatic("critic and policy are in one checkpoint"),
    "trainer.resume_mode": automatic(RESUME),
    "trainer.resume_from_path": automatic(RESUME),
    "trainer.del_local_ckpt_after_load": automatic(RESUME),
    "trainer.balance_batch": automatic("samples are divided over ranks by tokens"),
    "trainer.seed": by(lambda job, v: KeyVerdict("mapped", {} if v is None else {"seed": whole(v)}), "seed"),
    "trainer.log_val_generations": automatic(LOGGING),
    "trainer.rollout_data_dir": automatic("samples/ of the run's folder"),
    "trainer.validation_data_dir": automatic("samples/ of the run's folder"),
    "trainer.log_*": automatic(LOGGING),
    "trainer.use_v1": automatic("verl's own trainer versions"),
    "trainer.use_legacy_worker_impl": automatic("verl's own trainer versions"),
    "trainer.v1.trainer_mode": by(
        lambda job, v: (
            mapped("", rollout__max_staleness=1)
            if v in ("separate_async", "colocate_async")
            else KeyVerdict("automatic", {}, "synchronous")
        ),
        "rollout.max_staleness",
    ),
    "trainer.v1.sampler.max_off_policy_threshold": by(
        lambda job, v: (
            refused("samples are at most rollout.max_staleness updates old; set it")
            if job.get("trainer.v1.trainer_mode", "sync") not in ("sync", None)
            else KeyVerdict("automatic", {}, "synchronous")
        ),
        "rollout.max_staleness",
    ),
    "trainer.v1.**": automatic("samples above rollout.max_staleness are never made"),
    "trainer.esi_redundant_time": automatic("SIGTERM saves a checkpoint"),
    "trainer.ray_wait_register_center_timeout": automatic("cluster.start_timeout_s"),
    "trainer.npu_profile.**": automatic(PROFILER),
    "trainer.profile_*": automatic(PROFILER),
    "trainer.profiler.**": automatic(PROFILER),
    "trainer.checkpoint_callback_class": missing("read checkpoints from the run's folder", off=(None,)),
    # asynchronous programs
    "async_training.staleness_threshold": by(_staleness, "rollout.max_staleness"),
    "async_training.**": automatic("samples are used at most rollout.max_staleness updates late"),
    # the rest
    "global_profiler.**": automatic(PROFILER),
    "ray_kwargs.**": automatic(shared.RUNTIME),
    "ray_init.**": automatic(shared.RUNTIME),
    "transfer_queue.**": automatic("batches move as the loop needs them"),
    "model_engine": placement("the trainer is FSDP2"),
    "hydra.**": automatic("Hydra's own"),
    "actor@*": placement("the trainer is FSDP2"),
    "actor@actor_rollout_ref.actor": placement("the trainer is FSDP2"),
    "distillation.enabled": missing("distillation from a teacher is not supported"),
    "distillation.**": by(
        lambda job, v: (
            refused("distillation from a teacher is not supported")
            if truth(job.get("distillation.enabled", False))
            else KeyVerdict("automatic", {}, "only read with distillation.enabled")
        )
    ),
    "--config-name": by(
        lambda job, v: (
            KeyVerdict("automatic", {}, "the tool's own configuration")
            if v is None or str(v).removesuffix(".yaml") in _CONFIGS
            else KeyVerdict("hole", {}, "a configuration file of yours: import it too, and merge")
        ),
        kind="hole",
    ),
    "--config-path": by(
        lambda job, v: (
            KeyVerdict("automatic", {}, "the tool's own configuration")
            if v is None or str(v).removesuffix("/") in ("config", "./config") or "verl" in str(v)
            else KeyVerdict("hole", {}, "a configuration file of yours: import it too, and merge")
        ),
        kind="hole",
    ),
    "--config-dir": automatic("Hydra's own"),
}
_CONFIGS = (
    "ppo_trainer",
    "ppo_megatron_trainer",
    "ppo_veomni_trainer",
    "fully_async_ppo_trainer",
    "fully_async_ppo_megatron_trainer",
    "one_step_off_ppo_trainer",
    "one_step_off_ppo_megatron_trainer",
    "dapo_trainer",
    "dapo_megatron_trainer",
    "gsm8k_multiturn_grpo",
    "grpo_trainer",
)

ALIASES = {
    "custom_reward_function.overlong_buffer_cfg": "reward_model.overlong_buffer_cfg",
    "actor_rollout_ref.rollout.max_tokens": "data.max_response_length",
}

WRITTEN = (
    "data.prompt_key",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.train_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.val_kwargs.do_sample",
    "actor_rollout_ref.rollout.name",
    "algorithm.adv_estimator",
    "algorithm.lam",
    "algorithm.use_kl_in_reward",
    "algorithm.kl_penalty",
    "algorithm.rollout_correction.rollout_is",
    f"{_A}.use_kl_loss",
    f"{_A}.kl_loss_type",
    f"{_A}.policy_loss.loss_mode",
    f"{_A}.clip_ratio_low",
    f"{_A}.clip_ratio_high",
    f"{_A}.clip_ratio_c",
    f"{_A}.loss_agg_mode",
    f"{_A}.entropy_coeff",
    f"{_A}.ppo_mini_batch_size",
    f"{_A}.optim.lr",
    f"{_A}.optim.weight_decay",
    f"{_A}.optim.betas",
    f"{_A}.grad_clip",
    f"{_M}.lora_alpha",
    "critic.cliprange_value",
    "critic.optim.lr",
    "critic.optim.weight_decay",
    "critic.optim.betas",
    "trainer.total_epochs",
    "trainer.save_freq",
    "trainer.val_before_train",
)


def _program(foreign: ForeignRun) -> str | None:
    program = foreign.program
    if any(word in program for word in ("sft", "distill", "main_generation", "main_eval", "spin", "dpo", "prime.")):
        return f"{program} is not RL of a policy from a reward; stages: [sft] fine-tunes, `hone eval` evaluates"
    return None


def _whole(job: ForeignJob) -> Iterator[tuple[str, KeyVerdict]]:
    if _no_reward_given(job):
        yield "reward by data_source", _reward_by_data(job)
    yield (
        "data.answer_column",
        KeyVerdict("default", {"data.answer_column": "reward_model.ground_truth"}, "verl's rows"),
    )
    yield "data.chat", KeyVerdict("default", {"data.chat": True}, "verl's prompts are messages")
    yield "kl clamp", _clamp(job)
    yield "precision", KeyVerdict("default", {"run.precision": "bfloat16"}, "verl computes in bfloat16")
    nodes, per_node = job.get("trainer.nnodes", 1), job.get("trainer.n_gpus_per_node", 8)
    pools = None
    is_split = job.get("actor_rollout_ref.hybrid_engine", True) is False or any(
        word in job.foreign.program for word in ("one_step", "async")
    )
    if is_split and job.given("rollout.n_gpus_per_node"):
        rollout = whole(job.get("rollout.nnodes", 1)) * whole(job.get("rollout.n_gpus_per_node"))
        train = whole(nodes) * whole(per_node)
        pools = {
            "train": {"devices": train, "roles": _train_roles(job)},
            "rollout": {"devices": rollout, "roles": ["rollout"]},
        }
        nodes, per_node = _machines(
            whole(nodes),
            whole(per_node),
            whole(job.get("rollout.nnodes", 1)),
            whole(job.get("rollout.n_gpus_per_node")),
        )
    yield from shared.cluster(job, nodes, per_node, pools)
    if not job.given(f"{_R}.name"):
        yield "engine", KeyVerdict("placement", {"cluster.engines.use": "vllm"}, "samples are drawn with vLLM")
    if any(word in job.foreign.program for word in ("one_step", "fully_async")) and not job.given(
        "async_training.staleness_threshold"
    ):
        yield "program", mapped("sampling overlaps training", rollout__max_staleness=1)


def _machines(nodes: int, per_node: int, more_nodes: int, more: int) -> tuple[int, int]:
    """Machines of both pools together: side by side where they share machines."""
    return (
        (nodes, per_node + more)
        if nodes == more_nodes and per_node + more <= 8
        else (nodes + more_nodes, max(per_node, more))
    )


def _train_roles(job: ForeignJob) -> list[str]:
    roles = ["policy"]
    if _uses_critic(job):
        roles.append("critic")
    if (truth(job.get(f"{_A}.use_kl_loss", False)) and number(job.get(f"{_A}.kl_loss_coef", 0.001)) > 0) or _in_reward(
        job
    ):
        roles.append("reference")
    return roles


def _clamp(job: ForeignJob) -> KeyVerdict:
    return KeyVerdict("automatic", {}, "verl clamps low_var_kl at +-10, as algorithm.kl_clip does by default")


def _reward_by_data(job: ForeignJob) -> KeyVerdict:
    files = job.get("data.train_files")
    listed = [str(file) for file in (files if isinstance(files, list) else [files])]
    found = [shared.reward_of_data(file) for file in listed]
    first = found[0]
    if first is None or any(other is None or other[0] != first[0] for other in found):
        return KeyVerdict(
            "hole",
            {},
            "verl takes each row's reward by its data_source, which is not in the command",
        )
    return KeyVerdict("default", {"reward.components": [first[0]]}, first[1])


DIALECT = Dialect(ROWS, WRITTEN, _program, _whole, ALIASES)
