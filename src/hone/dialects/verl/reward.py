"""verl's rewards: functions, models, judges, the data source's own, and the penalty of long responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from hone.dialects import shared
from hone.dialects.rows import automatic, by, each, missing, placement, to, under, when
from hone.dialects.values import number, truth, whole
from hone.dialects.verdict import ForeignJob, KeyVerdict, Row, default, nothing, put, refused, unknown
from hone.dialects.verl.job import REWARD_FUNCTIONS, REWARD_MODELS, has_judge

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
