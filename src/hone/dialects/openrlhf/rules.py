"""Rules of OpenRLHF's keys that look at other keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hone.dialects import shared
from hone.dialects.foreign import ForeignRun
from hone.dialects.rows import automatic, by, missing, table, to, under, where
from hone.dialects.shared import ENVIRONMENT
from hone.dialects.values import names, number, numbers, pair, truth, whole
from hone.dialects.verdict import ForeignJob, KeyVerdict, Row, default, nothing, placed, put, refused, unknown

CREDITS = {
    "gae": "gae",
    "reinforce": "reinforce_pp",
    "rloo": "leave_one_out",
    "reinforce_baseline": "group_mean_whitened",
    "group_norm": "group_norm",
    "grpo": "group_norm",
    "dr_grpo": "group_mean",
}
CORRECTIONS = {"tis": "tis", "icepop": "icepop", "seq-mask-tis": "sequence_mask"}
LEVELS = {
    ("token", "clip"): "tis",
    ("token", "mask"): "icepop",
    ("seq", "clip"): "sequence_tis",
    ("seq", "mask"): "sequence_mask",
}
REWARDS = ("reward.remote_url", "reward.model_name_or_path", "train.agent_func_path")

uses_critic = where("algo.advantage.estimator", "gae", other="gae")
kl_in_loss = where("algo.kl.use_loss")
colocates_all = where("train.colocate_all")


def evaluates(job: ForeignJob) -> bool:
    return bool(job.get("eval.dataset"))


def has_kl(job: ForeignJob) -> bool:
    return number(job.get("algo.kl.init_coef", 0.01)) > 0


# ---- algorithm


def std_norm(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return nothing("off")
    if job.get("algo.advantage.estimator", "gae") == "group_norm":
        return put({"algorithm.credit": "group_mean"}, "no division by the standard deviation")
    return refused("advantages of this estimator are always whitened; nearest: algorithm.credit = group_mean")


def kl_coef(job: ForeignJob, value: Any) -> KeyVerdict:
    if kl_in_loss(job):
        return put({"algorithm.kl_loss_coef": number(value)}, "in the loss, because of use_loss")
    return put({"algorithm.kl_reward_coef": number(value)}, "KL in the reward")


def kl_estimator(job: ForeignJob, value: Any) -> KeyVerdict:
    if value == "k1" and kl_in_loss(job):
        return refused(shared.NO_K1)
    return put({"algorithm.kl_estimator": value}) if value in ("k1", "k2", "k3") else refused("must be k1, k2 or k3")


def clip(job: ForeignJob, value: Any) -> KeyVerdict:
    if job.get("actor.eps_clip_low_high") is not None:
        return nothing("eps_clip_low_high wins")
    return put(shared.both_bounds(value))


def clips(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return nothing("eps_clip is used")
    low, high = pair(value)
    return put({"algorithm.clip_low": low, "algorithm.clip_high": high})


def correction(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return nothing("off")
    if truth(job.values.get("algo.advantage.use_icepop", False)):
        return _corrected(job, "icepop")
    return _corrected(job, CORRECTIONS[str(job.get("algo.advantage.is_correction_type", "tis"))])


def icepop(job: ForeignJob, value: Any) -> KeyVerdict:
    """A flag between 0.9.4 and 0.9.10, where is_correction_type replaced it."""
    if not truth(value) or not truth(job.get("algo.advantage.is_correction_enable", False)):
        return nothing("off")
    return _corrected(job, "icepop")


def correction_level(job: ForeignJob, value: Any) -> KeyVerdict:
    if value == "off":
        return nothing("off")
    if job.get("algo.advantage.is_correction_gating", "ratio") != "ratio":
        return refused("bounds of the ratio only; nearest: is_correction_gating = ratio")
    return _corrected(job, LEVELS[(str(value), str(job.get("algo.advantage.is_correction_mode", "mask")))])


def _corrected(job: ForeignJob, kind: str) -> KeyVerdict:
    if job.get("actor.policy_loss_type", "ppo") != "ppo":
        return put({"algorithm.correction": "none"}, "only read with policy_loss_type = ppo")
    bounds = numbers(job.get("algo.advantage.is_correction_threshold", [0.5, 5.0]))
    low, high = bounds if len(bounds) == 2 else (0.0, bounds[0])
    settings: dict[str, Any] = {"algorithm.correction": kind, "algorithm.correction_high": high}
    if kind == "tis":
        return put(settings, f"weights below {low} are raised to it in OpenRLHF, and kept here" if low else "")
    return put(settings | {"algorithm.correction_low": low})


def filter_range(job: ForeignJob, value: Any) -> KeyVerdict:
    low, high = pair(value)
    if (low, high) != (0, 1):
        return refused("groups with equal rewards are dropped, not those outside bounds; nearest: 0 1")
    return nothing("drops groups whose rewards are all equal, which for rewards of 0 and 1 is the same")


# ---- rewards


def reward_url(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return nothing("none")
    if job.values.get("train.agent_func_path"):
        return unknown(ENVIRONMENT)
    urls = names(value)
    if len(urls) == 1 and urls[0].split(":")[0].endswith(".py"):
        path = urls[0] if ":" in urls[0] else f"{urls[0]}:reward_func"
        return put({"reward.components": [{"use": path}]}, "queries, prompts, labels: called as OpenRLHF does")
    return unknown("what answers at the address is not in the command: name its function, file.py:reward_func")


def reward_model(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None or job.values.get("reward.remote_url") or job.values.get("train.agent_func_path"):
        return nothing("reward.remote_url is used")
    scaled = {"normalize": True} if truth(job.get("reward.normalize_enable", False)) else {}
    return put(
        {"reward.components": [{"use": "reward_model", "args": {"path": path} | scaled} for path in names(value)]}
    )


def normalized(job: ForeignJob, value: Any) -> KeyVerdict:
    """By the reward model's own mean and deviation, once and for all: not by those of the run's rewards."""
    if not truth(value):
        return nothing("off")
    if job.values.get("reward.remote_url") or not job.values.get("reward.model_name_or_path"):
        return nothing("of a reward model: rewards of a function stay as they are")
    why = "mean and std of the reward model's config.json; one without them OpenRLHF leaves as it is: normalize: false"
    return put(reward_model(job, job.get("reward.model_name_or_path")).settings, why)


def overlong(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return nothing("off")
    limit = job.get("rollout.max_new_tokens")
    if limit is None:
        return refused("needs rollout.max_new_tokens: the buffer is a share of it")
    return shared.overlong(value, limit, job.get("reward.overlong_penalty_factor", 1))


def truncated(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return nothing("off")
    if number(value) < 0:
        return refused("a fixed penalty; nearest: truncated_reward_factor = 0")
    return put({"algorithm.truncated_reward_factor": number(value)})


def logs(job: ForeignJob) -> bool:
    """Whether W&B's key, or true, was given."""
    return job.values.get("logger.wandb.key") not in (None, "", False, "False", "None")


# ---- data and batches


def prompts(job: ForeignJob, value: Any) -> KeyVerdict:
    paths = [part.rpartition("@")[2] for part in _parts(value)]
    probs = job.get("data.prompt_probs")
    if probs is not None and len(paths) == len(numbers(probs)) > 1:
        shares = zip(paths, numbers(probs), strict=True)
        return put({"data.train": [{"path": path, "weight": weight} for path, weight in shares]})
    return put({"data.train": paths[0] if len(paths) == 1 else paths})


def weights(job: ForeignJob, value: Any) -> KeyVerdict:
    paths = _parts(job.get("data.prompt_dataset", ""))
    if value is None or len(paths) == 1:
        return nothing("one data set" if len(paths) == 1 else "none")
    found = numbers(value)
    if len(found) != len(paths):
        return refused(f"{len(found)} weights for {len(paths)} data sets")
    return put(prompts(job, job.get("data.prompt_dataset")).settings, "shares of the prompts")


def _parts(value: Any) -> list[str]:
    return names(value) if isinstance(value, list) or "," in str(value) else [str(value)]


def template(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None or "{}" not in str(value):
        return nothing("none")
    if truth(job.get("data.apply_chat_template", False)):
        return nothing("unused with apply_chat_template")
    written = str(job.values["data.input_template"])  # with its blanks
    return put({"data.template": written.replace("\\n", "\n").replace("{}", "{prompt}")}, "{} to {prompt}")


def lengths(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return nothing("the sum of both limits")
    if job.given("data.prompt_max_len"):
        return nothing("prompt_max_len and the length of a response are limited apart")
    new, total = job.get("rollout.max_new_tokens"), whole(value)
    if new is None:
        both = {"data.max_prompt_tokens": total // 2, "rollout.max_response_tokens": total - total // 2}
        return put(both, "one limit for both: half for each, as nothing else is said")
    left = total - whole(new)
    if left < 1:
        return refused(f"leaves no tokens for the prompt: {total} - {new}")
    return put({"data.max_prompt_tokens": left}, f"{total} - max_new_tokens = {left}")


def train_batch(job: ForeignJob, value: Any) -> KeyVerdict:
    group = whole(job.get("rollout.n_samples_per_prompt", 1))
    return shared.samples_per_step(whole(job.get("rollout.batch_size", 1024)), group, whole(value))


def asynchronous(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return nothing("off, as here")
    return put({"rollout.max_staleness": max(1, whole(job.get("train.async_queue_size", 1)))}, "policy updates")


def optimizer(prefix: str, ours: str) -> dict[str, Row]:
    """Rows of the actor's or the critic's optimizer."""

    def schedule(job: ForeignJob, value: Any) -> KeyVerdict:
        if value in ("cosine_with_min_lr", "cosine"):
            final = number(job.get(f"{prefix}.min_lr_ratio", 0.1)) if value == "cosine_with_min_lr" else 0.0
            return put({f"{ours}.schedule": "cosine", f"{ours}.final_lr_frac": final})
        if value in ("constant", "constant_with_warmup", "linear"):
            return put({f"{ours}.schedule": value.split("_")[0]})
        return refused("nearest: constant, linear or cosine")

    rows = {
        "adam.lr": to(f"{ours}.lr", number),
        "adam.betas": to(f"{ours}.betas", numbers),
        "adam.eps": to(f"{ours}.eps", number),
        "adam.weight_decay": to(f"{ours}.weight_decay", number),
        "max_norm": to(f"{ours}.grad_clip", number),
        "lr_warmup_ratio": to(f"{ours}.warmup_frac", number),
        "lr_scheduler": by(schedule, f"{ours}.schedule"),
        "min_lr_ratio": automatic("part of lr_scheduler"),
        "optim": missing(shared.ADAMW, f"{ours}.lr", off=("adam", None)),
        "muon.*": automatic("only read with optim = muon"),
    }
    return under(prefix, rows)


def second_group(job: ForeignJob, value: Any) -> KeyVerdict:
    if truth(value) and colocates_all(job):
        why = "beside colocate_all OpenRLHF asks for a second set of devices and waits for it: here all roles share one"
        return placed({}, why)
    return placed({}, "see the line `devices`")


# ---- the command as a whole


def program(foreign: ForeignRun) -> str | None:
    if any(word in foreign.program for word in ("ppo", "grpo", "reinforce")):
        return None
    return f"{foreign.program} is not RL of a policy from a reward; stages: [sft] and [reward_model] train these here"


def corrects(job: ForeignJob) -> bool:
    level = job.get("algo.advantage.is_correction_level", "off")
    return truth(job.get("algo.advantage.is_correction_enable", False)) or level != "off"


def whole_command(job: ForeignJob) -> Iterator[tuple[str, KeyVerdict]]:
    if not corrects(job):
        yield "correction", shared.NO_CORRECTION
    if job.get("actor.loss_agg_mode") is None:
        yield "aggregate", default({"algorithm.aggregate": "token_mean"}, "a mean over all tokens")
    if not job.get("ds.param_dtype") and not job.given("ds.bf16"):
        yield "precision", default({"run.precision": "bfloat16"}, "the tool computes in bfloat16")
    if not any(job.values.get(key) for key in REWARDS):
        yield "reward", unknown("the command names no reward: set reward.components")
    if job.get("algo.advantage.estimator") == "group_norm":
        yield "std_floor", default({"algorithm.std_floor": 1e-9}, "OpenRLHF adds 1e-9 to the standard deviation")
    yield "cluster.engines.use", shared.VLLM
    per_node = whole(job.get("actor.num_gpus_per_node", 8))
    if colocates_all(job) and not truth(job.get("train.async_enable", False)):
        yield from shared.cluster(max(1, _devices(job, "actor") // per_node), per_node)
        return
    pools = _pools(job)
    total = sum(pool["devices"] for pool in pools.values())
    if total <= 8:  # groups that fit one machine are there, as Ray packs them
        yield from shared.cluster(1, total, pools)
    else:
        yield from shared.cluster(-(-total // max(8, per_node)), max(8, per_node), pools)


def _devices(job: ForeignJob, role: str) -> int:
    return whole(job.get(f"{role}.num_nodes", 1)) * whole(job.get(f"{role}.num_gpus_per_node", 8))


def _pools(job: ForeignJob) -> dict[str, Any]:
    """Pools as the flags place the roles: together, in pairs, or each on its own."""
    engines = whole(job.get("vllm.num_engines") or 0) * whole(job.get("vllm.tensor_parallel_size", 1))
    pools: dict[str, Any] = {"policy": {"devices": _devices(job, "actor"), "roles": ["policy"]}}
    if has_kl(job):
        if truth(job.get("train.colocate_actor_ref", False)) or colocates_all(job):
            pools["policy"]["roles"].append("reference")
        else:
            pools["reference"] = {"devices": _devices(job, "ref"), "roles": ["reference"]}
    if uses_critic(job):
        pools["critic"] = {"devices": _devices(job, "critic"), "roles": ["critic"]}
    if job.values.get("reward.model_name_or_path") and not job.values.get("reward.remote_url"):
        if "critic" in pools and truth(job.get("train.colocate_critic_reward", False)):
            pools["critic"]["roles"].append("reward_model")
        else:
            pools["reward"] = {"devices": _devices(job, "reward"), "roles": ["reward_model"]}
    if engines:
        pools["rollout"] = {"devices": engines, "roles": ["rollout"]}
    else:
        pools["policy"]["roles"].insert(1, "rollout")
    return pools


LOSSES = {"ppo": {}, "gspo": {"algorithm.ratio": "sequence", "algorithm.aggregate": "sample_mean"}}
loss = table(LOSSES, "algorithm.ratio", nearest="ppo or gspo")
