"""verl's `algorithm`, `critic` and rewards: advantages, KL in the reward, correction and rejection; functions, models,
judges, the data source's own reward, and the penalty of long responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

from hone.config.algorithm import AlgorithmSection
from hone.dialects import shared
from hone.dialects.rows import automatic, by, each, missing, placement, rewritten, table, to, under, when, where
from hone.dialects.values import number, positive, truth, whole
from hone.dialects.verdict import ForeignJob, KeyVerdict, Row, default, nothing, put, refused, unknown
from hone.dialects.verl.actor import kl_kind
from hone.dialects.verl.job import (
    ACTOR,
    MODEL,
    REWARD_FUNCTIONS,
    REWARD_MODELS,
    ROLLOUT,
    bypasses,
    has_judge,
    in_loss,
    in_reward,
    uses_critic,
)

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
OLDER_REJECTIONS = {"token": "token_k1", "sequence": "sample_sum_k1", "geometric": "sample_mean_k1"}
"""Of verl 0.6, whose ratio is the trainer's over the sampler's."""


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
    if bypasses(job):
        return put({"algorithm.correction": "none"}, "the ratio is of the sampler already: bypass_mode")
    settings: dict[str, Any] = {"algorithm.correction": kinds[str(value)]}
    bound = job.get("algorithm.rollout_correction.rollout_is_threshold", job.get("algorithm.rollout_is_threshold", 2.0))
    if settings["algorithm.correction"] == "none":
        return put(settings, "no correction between sampler and trainer")
    return put(settings | ({"algorithm.correction_high": number(bound)} if isinstance(bound, int | float) else {}))


def correction_rows(prefix: str, key: str) -> dict[str, Row]:
    bound = when(
        lambda job: job.get(key) and not bypasses(job),
        "unused without rollout_is, or with bypass_mode",
        to("algorithm.correction_high", number),
    )
    return {key: by(correction, "algorithm.correction"), f"{prefix}.rollout_is_threshold": bound}


def rejection(job: ForeignJob, value: Any) -> KeyVerdict:
    """`rollout_rs` with its thresholds; k1's are of the ratio sampler / trainer, as here."""
    if value in (None, "null", "None"):
        return nothing("nothing is rejected")
    if bypasses(job):
        return refused("by the ratio of the trained policy, in bypass_mode; nearest: bypass_mode = False")
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


def as_the_policys(key: str, default: int, ours: str, note: str, what: str) -> Row:
    """A key of the critic that has to be what the policy's is."""

    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if value == job.get(f"{ACTOR}.{key}", default):
            return nothing(note)
        return refused(f"the critic makes as many {what} as the policy")

    return by(read, ours)


CRITIC: dict[str, Row] = {
    "model.path": by(
        lambda job, v: put({} if v in (None, job.get(f"{MODEL}.path")) else {"critic.path": str(v)}), "critic.path"
    ),
    "cliprange_value": to("critic.value_clip", number),
    "grad_clip": to("critic.optimizer.grad_clip", number),
    "ppo_epochs": as_the_policys("ppo_epochs", 1, "train.passes_per_batch", "as many as the policy's", "passes"),
    "ppo_mini_batch_size": as_the_policys(
        "ppo_mini_batch_size", 256, "train.samples_per_optimizer_step", "as the policy's", "optimizer steps"
    ),
    "loss_agg_mode": automatic("the critic's loss is a mean over tokens"),
    "enable": automatic("follows from adv_estimator"),
    "**": placement("of the critic: placement and memory"),
}

_FILTERS = where("algorithm.filter_groups.enable")
_BOUND = "algorithm.correction"
_VETO = missing("one token does not reject a sample; nearest: algorithm.rejection = token_k1", "algorithm.rejection")

ALGORITHM: dict[str, Row] = {
    "adv_estimator": by(credit, "algorithm.credit"),
    "norm_adv_by_std_in_grpo": by(lambda job, v: nothing("part of adv_estimator"), "algorithm.credit"),
    "gamma": when(
        lambda job: job.get("algorithm.adv_estimator", "gae") in ("gae", "reinforce_plus_plus"),
        "not read by this estimator",
        to("algorithm.gamma", number),
    ),
    "lam": when(uses_critic, shared.NO_CRITIC, to("algorithm.gae_lambda", number)),
    "use_kl_in_reward": by(kl_reward, "algorithm.kl_reward_coef"),
    "kl_penalty": when(
        in_reward,
        "unused: no KL in the reward",
        by(lambda job, v: kl_kind(v, in_loss=False), "algorithm.kl_estimator"),
    ),
    "kl_ctrl.kl_coef": when(
        in_reward,
        "KL in the reward, unused without use_kl_in_reward",
        to("algorithm.kl_reward_coef", number, "KL in the reward, not in the loss"),
    ),
    "kl_ctrl.type": table({"fixed": None, "adaptive": None}, "algorithm.kl_target"),
    "kl_ctrl.target_kl": adaptive(to("algorithm.kl_target", number)),
    "kl_ctrl.horizon": adaptive(to("algorithm.kl_horizon_samples", whole)),
    "filter_groups.enable": to("algorithm.drop_uninformative", truth),
    "filter_groups.metric": by(groups_metric, "algorithm.drop_uninformative"),
    "filter_groups.max_num_gen_batches": when(
        _FILTERS,
        "only read with filter_groups.enable",
        to("algorithm.max_dropped_per_kept", positive, "batches to groups dropped per group kept"),
    ),
    "filter_groups.**": automatic("dropped groups are replaced as they are found"),
    "use_pf_ppo": missing("PF-PPO's resampling is not supported"),
    "pf_ppo.**": automatic("only read with use_pf_ppo"),
    "rollout_is_level": automatic("part of rollout_is"),
    "rollout_correction.bypass_mode": to("algorithm.old_logprobs", lambda value: "sampler" if truth(value) else None),
    "rollout_correction.rollout_rs": by(rejection, "algorithm.rejection", "algorithm.rejection_high"),
    "gdpo_*": rewritten("parts of the score: give each a component of its own, with its weight", "reward.components"),
    "rollout_correction.rollout_rs_threshold*": automatic("part of rollout_rs"),
    "rollout_correction.loss_type": missing("the ratio's loss", "algorithm.ratio", off=("ppo_clip", None)),
    "rollout_correction.rollout_is_batch_normalize": when(
        lambda job: not bypasses(job),
        "unused in bypass_mode",
        missing("weights are not normalised over the batch", _BOUND),
    ),
    "rollout_correction.use_policy_gradient": missing(
        "a loss without a ratio; nearest: algorithm.ratio = none", _BOUND
    ),
    **each(
        "rollout_correction.rollout_token_veto_threshold rollout_token_veto_threshold rollout_is_veto_threshold", _VETO
    ),
    "rollout_correction": missing("set its keys one by one", _BOUND),
}

# ---- rewards

OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
    "reward_model.overlong_buffer_cfg",
)


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
    if value is None or not truth(value):
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


_MANAGERS = (None, "naive", "dapo", "batch", "prime", "rate_limited")
_MANAGER = missing("the weighted sum of reward.components", "reward.components", off=_MANAGERS)
_SANDBOX = missing("code is run by `use: code`, in a sandbox of Hone's own or a remote one", "reward.components")
_PART_OF_OVERLONG = automatic("part of overlong_buffer's `enable`")
_PART_OF_MODEL = automatic("part of reward_model.enable")

_JUDGE: dict[str, Row] = {
    "tensor_model_parallel_size": of_judge("tensor_parallel_size"),
    "gpu_memory_utilization": of_judge("gpu_memory_utilization", number),
    **{key: of_judge(key) for key in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")},
    **{key: of_judge(key, truth) for key in ("enable_chunked_prefill", "enable_prefix_caching", "enforce_eager")},
    **each("prompt_length response_length", _PART_OF_MODEL),
}

REWARDS: dict[str, Row] = {
    **under("reward_model.rollout", _JUDGE),
    **under("reward_model", _JUDGE),
    **each("reward_model.sampling_config.** reward_model.data_processor_config.**", _PART_OF_MODEL),
    **{f"{prefix}.path": by(reward_function, "reward.components") for prefix in REWARD_FUNCTIONS},
    **{f"{prefix}.**": automatic("part of custom_reward_function.path") for prefix in REWARD_FUNCTIONS},
    **{f"{prefix}.enable": by(reward_model, "reward.components") for prefix in REWARD_MODELS},
    **each("reward.reward_manager.name reward_model.reward_manager reward_manager.name", _MANAGER),
    "reward.reward_manager.source": missing(
        "name your function in reward.components", "reward.components", off=("register", None)
    ),
    "reward.num_workers": to("reward.workers", whole),
    **{f"{prefix}.enable": overlong(prefix) for prefix in OVERLONG},
    **{f"{prefix}.*": _PART_OF_OVERLONG for prefix in OVERLONG},
    **each(
        "reward.reward_kwargs.max_resp_len reward_model.reward_kwargs.max_resp_len",
        automatic("rollout.max_response_tokens"),
    ),
    **each("reward.sandbox_fusion.url reward_model.sandbox_fusion.url sandbox_fusion.url", _SANDBOX),
    **each(
        "reward.sandbox_fusion.** reward_model.sandbox_fusion.** sandbox_fusion.**",
        automatic("part of sandbox_fusion.url"),
    ),
    "reward.reward_manager.module.path": missing("a reward manager of yours: name its function", "reward.components"),
    "reward.reward_manager.module.name": automatic("part of reward_manager.module.path"),
    **each("reward.reward_model.model_path reward_model.model.**", _PART_OF_MODEL),
    "reward.reward_model.**": placement("of the reward model's engine: `services` and their `engine`"),
    "reward_model.**": placement("of the reward model: placement and memory"),
}
