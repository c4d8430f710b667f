"""prime-rl's TOML. Its tasks are of the `verifiers` package, which Hone does not run: they are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hone.dialects import shared
from hone.dialects.foreign import ForeignRun
from hone.dialects.rows import automatic, by, each, missing, placement, rewritten, table, to
from hone.dialects.shared import EXPERTS, LOGGING, MEMORY, PROFILER, RESUME
from hone.dialects.values import names, number, numbers, positive, text, truth, whole
from hone.dialects.verdict import HOLE, Dialect, ForeignJob, KeyVerdict, Row, default, nothing, put, refused, unknown

_TASK = (
    "a task of the `verifiers` package: write its rows to JSONL and its reward as a function; see docs/environments.md"
)


def _batch(job: ForeignJob, value: Any) -> KeyVerdict:
    group, samples = whole(job.get("orchestrator.group_size", 1)), whole(value)
    if samples % group:
        return refused(f"{samples} samples are not a multiple of group_size = {group}")
    return put({"train.prompts_per_step": samples // group}, "samples / group_size")


_TRAINER = placement("of the trainer: placement, memory and kernels")
_RENDERER = automatic("the tokenizer's chat template")
_LENGTH = automatic("the sum of prompt and response")


def _bounds(job: ForeignJob, value: Any) -> KeyVerdict:
    low, high = (job.get(f"orchestrator.buffer.{name}_threshold") for name in ("hard", "easy"))
    if low is None and high is None:
        return nothing("none")
    if low is None or high is None:
        return refused("one threshold alone; nearest: data.order: pass_rate, which has both bounds")
    bounds = [max(0.0, number(low)), min(1.0, number(high))]
    return put({"data.order": "pass_rate", "data.pass_rate_bounds": bounds}, "of the pass rate, not of the mean reward")


def _ratios(job: ForeignJob, value: Any) -> KeyVerdict:
    """Shares of environments are weights of sources, whose files only the author knows."""
    named = [str(job.plain(item)) for key, item in job.values.items() if re.search(_SOURCE_NAME, key)]
    weights = numbers(value)
    if len(named) != len(weights):
        return refused(f"{len(weights)} ratios and {len(named)} environments with a name")
    sources = [{"path": HOLE, "name": name, "weight": weight} for name, weight in zip(named, weights, strict=True)]
    return KeyVerdict(
        "hole", {"data.train": sources}, "shares of environments as weights: name the file of each one's rows"
    )


_MASK: dict[str, Any] = {
    "algorithm.clip": "tv_mask",
    "algorithm.old_logprobs": "sampler",
    "algorithm.aggregate": "token_mean",
}
"""The default loss: DPPO's mask by total variation against the sampler, a mean over all tokens."""
_LOSS = "trainer.loss"
_PULL = "a square of the log ratio to the sampler"


def _pull(job: ForeignJob, value: Any) -> KeyVerdict:
    if number(value) > 1e-3:
        return refused(f"{_PULL}; nearest: a smaller algorithm.clip_low and clip_high")
    return nothing(f"{_PULL}: left out, the mask bounds the change" if value else "off")


_FLOOR = shared.floor("trainer.optim.lr", "train.optimizer.final_lr_frac")
_LOSS_ROWS: dict[str, Row] = {
    f"{_LOSS}.type": table({"default": _MASK}, "algorithm.clip", nearest="default"),
    f"{_LOSS}.dppo_mask_low": to("algorithm.clip_low", number, "of the probability"),
    f"{_LOSS}.dppo_mask_high": to("algorithm.clip_high", number, "of the probability"),
    f"{_LOSS}.kl_tau": by(_pull),
    f"{_LOSS}.adv_tau": missing("advantages are not scaled: scale the rewards", off=(1, None)),
    f"{_LOSS}.**": missing("of another loss than the default one", "algorithm.clip"),
    "trainer.scheduler.type": table(
        {name: name for name in ("constant", "linear", "cosine")}, "train.optimizer.schedule", nearest="cosine"
    ),
    "trainer.scheduler.warmup_steps": to("train.optimizer.warmup_steps", positive),
    "trainer.scheduler.decay_steps": missing("a schedule ends with the run; nearest: leave it out"),
    "trainer.scheduler.min_lr": _FLOOR,
    **each(
        "trainer.optim.betas1 trainer.optim.betas2",
        shared.several("train.optimizer.betas", ("trainer.optim.betas1", 0.9), ("trainer.optim.betas2", 0.999)),
    ),
    **each(
        "max_async_level trainer.max_async_level orchestrator.max_async_level",
        to("rollout.max_staleness", whole, "policy updates"),
    ),
}
_SOURCE_NAME = r"^orchestrator\.train\.(source|env)\[\d*\]\.name$"

ROWS: dict[str, Row] = {
    **each("model.name orchestrator.model.name model", to("model.path", text)),
    "trainer.model.name": to("model.path", text),
    "inference.vllm.model": automatic("model.name"),
    "max_steps": to("run.steps", whole, "policy updates"),
    **each("seq_len *.seq_len *.model.seq_len", _LENGTH),
    "output_dir": to("run.dir", text),
    "seed": to("seed", whole),
    "orchestrator.batch_size": by(_batch, "train.prompts_per_step"),
    **each("orchestrator.group_size orchestrator.rollouts_per_example", to("rollout.group_size", whole)),
    "orchestrator.max_off_policy_steps": to("rollout.max_staleness", whole, "policy updates"),
    "orchestrator.algo.type": table({"grpo": "group_mean"}, "algorithm.credit", nearest="grpo"),
    "orchestrator.algo.**": missing(
        "of another algorithm than grpo, or a length penalty: write a reward of your own",
        "algorithm.credit",
        off=(None, False),
    ),
    **each(
        "orchestrator.buffer.easy_threshold orchestrator.buffer.hard_threshold", by(_bounds, "data.pass_rate_bounds")
    ),
    **each(
        "orchestrator.buffer.easy_fraction orchestrator.buffer.hard_fraction",
        automatic("rows out of bounds come back in one of four rounds"),
    ),
    "orchestrator.buffer.env_ratios": by(_ratios, "data.train", kind="hole"),
    "orchestrator.buffer.online_difficulty_filtering": to("algorithm.drop_uninformative", truth),
    **each(
        "orchestrator.train.sampling.max_completion_tokens orchestrator.sampling.max_tokens",
        to("rollout.max_response_tokens", whole),
    ),
    **each(
        "orchestrator.train.sampling.temperature orchestrator.sampling.temperature", to("rollout.temperature", number)
    ),
    "orchestrator.eval.sampling.max_completion_tokens": automatic("rollout.max_response_tokens, for both"),
    "orchestrator.eval.sampling.temperature": to("eval.temperature", number),
    "orchestrator.eval.interval": to("eval.every", whole, "policy updates"),
    "orchestrator.eval.num_examples": shared.slice_of_rows("data.eval_rows"),
    "orchestrator.eval.group_size": to("eval.samples", whole),
    "orchestrator.train.*.env.taskset.dataset_name": to("data.train", text, "of the task's rows"),
    "orchestrator.env*.**": missing(_TASK, "data.train", "reward.components", off=()),
    "orchestrator.train.**": missing(_TASK, "data.train", "reward.components", off=()),
    **each("orchestrator.eval.** eval.**", missing(_TASK, "data.eval", off=())),
    **each("orchestrator.renderer.** renderer.**", _RENDERER),
    "orchestrator.concurrency.**": automatic("rollout.max_concurrent_samples bounds an engine"),
    "orchestrator.**": missing("not read by Hone", off=(None, False, {})),
    "orchestrator.model.lora.name": automatic("adapters are published merged"),
    "trainer.optim.lr": to("train.optimizer.lr", number),
    "trainer.optim.weight_decay": to("train.optimizer.weight_decay", number),
    "trainer.optim.max_norm": to("train.optimizer.grad_clip", number),
    **_LOSS_ROWS,
    "trainer.optim.type": missing(shared.ADAMW, "train.optimizer.lr", off=("adamw",)),
    "trainer.model.cp": shared.width("cluster.trainer.sequence_parallel"),
    "trainer.model.tp": shared.width("cluster.trainer.tensor_parallel"),
    "trainer.model.ep": placement(EXPERTS),
    **each("trainer.model.lora.rank model.lora.rank", to("lora.rank", positive)),
    **each("trainer.model.lora.alpha model.lora.alpha", to("lora.alpha", number)),
    **each("trainer.model.lora.target_modules model.lora.target_modules", to("lora.targets", names)),
    **each("trainer.model.ac trainer.model.ac.**", to("train.activation_checkpointing", lambda value: "full")),
    "trainer.model.ac_offloading.**": placement(MEMORY),
    "trainer.model.**": _TRAINER,
    "trainer.enable_router_replay": to("algorithm.replay_routing", truth),
    "trainer.ckpt.**": automatic("checkpoints are whole"),
    "trainer.**": placement("of the trainer: placement and memory"),
    "trainer": automatic("nothing set"),
    "model.vlm.**": rewritten("which column has the pictures: name it", "data.image_columns", off=()),
    "model.**": _TRAINER,
    "inference": automatic("engines start with the run"),
    "inference.vllm.tensor_parallel_size": shared.width("cluster.engines.tensor_parallel_size"),
    "inference.vllm.gpu_memory_utilization": shared.engine("gpu_memory_utilization", number),
    "inference.vllm.max_model_len": shared.engine("max_model_len"),
    "inference.vllm.enable_prefix_caching": shared.engine("enable_prefix_caching", bool),
    "inference.vllm.quantization": missing(shared.AS_THEY_ARE),
    "inference.vllm.enable_return_routed_experts": automatic(shared.ROUTER),
    "inference.**": placement("of the engine: placement and memory"),
    "deployment.**": placement("cluster.nodes, cluster.pools"),
    "weight_broadcast.quantize_in_weight_transfer": missing(shared.AS_THEY_ARE),
    "weight_broadcast.**": placement("how weights are published: cluster.transport"),
    "slurm.**": placement("docs/slurm.md has a script"),
    "ckpt.interval": to("checkpoint.every", whole, "policy updates"),
    "ckpt.keep_last": to("checkpoint.keep", whole),
    "ckpt.**": automatic("checkpoints are whole"),
    "ckpt": automatic("checkpoint.every"),
    **each("resume.** resume ckpt.resume_step", automatic(RESUME)),
    **each("monitors.wandb.project wandb.project", to("observe.wandb", text)),
    **each("monitors.wandb.name wandb.name", shared.run_name()),
    "monitors.wandb.group": to("run.group", text),
    "monitors.wandb.tags": to("run.tags", names),
    **each("monitors.** wandb.** log.**", automatic(LOGGING)),
    "env_vars.**": automatic(shared.RUNTIME),
    "bench": automatic(PROFILER),
    "dist_timeout_seconds": automatic("cluster.call_timeout_s"),
    "data.**": missing("data of fine-tuning: data.train and stages: [sft]", "data.train", off=()),
    "optim.**": missing("of fine-tuning: sft.optimizer and stages: [sft]", "sft.optimizer.lr", off=()),
}
WRITTEN = (
    *("orchestrator.group_size", "orchestrator.batch_size", "orchestrator.algo.type", "max_async_level", "max_steps"),
    *(f"{_LOSS}.{name}" for name in ("type", "dppo_mask_low", "dppo_mask_high", "kl_tau")),
    *(f"trainer.optim.{name}" for name in ("lr", "weight_decay", "betas2", "max_norm")),
    "trainer.scheduler.type",
)


def _program(foreign: ForeignRun) -> str | None:
    tops = {re.split(r"[.\[]", key.key)[0] for key in foreign.keys}
    if "orchestrator" in tops:
        return None
    return "a file without [orchestrator] is one part of a run (a trainer, a server, fine-tuning): import rl.toml"


def _whole(job: ForeignJob) -> Iterator[tuple[str, KeyVerdict]]:
    if not any(key.endswith((".taskset.dataset_name", ".env_ratios")) for key in job.values):
        yield "data.train", unknown(_TASK)
    yield "data.chat", default({"data.chat": True}, "prompts are messages")


DIALECT = Dialect(ROWS, WRITTEN, _program, _whole, {})
