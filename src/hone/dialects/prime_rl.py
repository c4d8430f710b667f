"""prime-rl's TOML. Its tasks are of the `verifiers` package, which Hone does not run: they are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hone.dialects import shared
from hone.dialects.foreign import ForeignRun
from hone.dialects.shared import EXPERTS, LOGGING, MEMORY, PICTURES, PROFILER, RESUME
from hone.dialects.verdict import (
    Dialect,
    ForeignJob,
    KeyVerdict,
    Row,
    automatic,
    by,
    mapped,
    missing,
    names,
    number,
    placement,
    refused,
    text,
    to,
    whole,
)

_TASK = (
    "a task of the `verifiers` package: write its rows to JSONL and its reward as a function; see docs/environments.md"
)


def _batch(job: ForeignJob, value: Any) -> KeyVerdict:
    group = whole(job.get("orchestrator.group_size", 1))
    samples = whole(value)
    if samples % group:
        return refused(f"{samples} samples are no multiple of group_size = {group}")
    return mapped("samples / group_size", train__prompts_per_step=samples // group)


def _task(job: ForeignJob, value: Any) -> KeyVerdict:
    return refused(_TASK)


def _algorithm(job: ForeignJob, value: Any) -> KeyVerdict:
    if value != "grpo":
        return refused(f"{value} is not here; nearest: grpo")
    return mapped("no division by the standard deviation", algorithm__credit="group_mean")


def _optimizer(job: ForeignJob, value: Any) -> KeyVerdict:
    return (
        KeyVerdict("automatic", {}, "AdamW") if value == "adamw" else refused("the optimizer is AdamW; nearest: adamw")
    )


def _engine(key: str, convert=whole) -> Row:
    return to(f"cluster.engines.{key}", convert)


ROWS: dict[str, Row] = {
    "model.name": to("model.path", text),
    "orchestrator.model.name": to("model.path", text),
    "trainer.model.name": to("model.path", text),
    "inference.vllm.model": automatic("model.name"),
    "model": to("model.path", text),
    "max_steps": to("run.steps", whole, "policy updates"),
    "seq_len": automatic("the sum of prompt and response"),
    "*.seq_len": automatic("the sum of prompt and response"),
    "*.model.seq_len": automatic("the sum of prompt and response"),
    "output_dir": to("run.dir", text),
    "seed": to("seed", whole),
    "orchestrator.batch_size": by(_batch, "train.prompts_per_step"),
    "orchestrator.group_size": to("rollout.group_size", whole),
    "orchestrator.max_off_policy_steps": to("rollout.max_staleness", whole, "policy updates"),
    "orchestrator.algo.type": by(_algorithm, "algorithm.credit"),
    "orchestrator.algo.**": missing(
        "of another algorithm than grpo, or a length penalty: write a reward of your own",
        "algorithm.credit",
        off=(None, False),
    ),
    "orchestrator.train.sampling.max_completion_tokens": to("rollout.max_response_tokens", whole),
    "orchestrator.train.sampling.temperature": to("rollout.temperature", number),
    "orchestrator.eval.sampling.max_completion_tokens": automatic("rollout.max_response_tokens, for both"),
    "orchestrator.eval.sampling.temperature": to("eval.temperature", number),
    "orchestrator.eval.interval": to("eval.every", whole, "policy updates"),
    "orchestrator.eval.num_examples": by(
        lambda job, v: KeyVerdict("mapped", {"data.eval_rows": f"0:{whole(v)}"}), "data.eval_rows"
    ),
    "orchestrator.eval.group_size": to("eval.samples", whole),
    "orchestrator.train.**": by(_task, "data.train", "reward.components", kind="refused"),
    "orchestrator.eval.**": by(_task, "data.eval", kind="refused"),
    "eval.**": by(_task, "data.eval", kind="refused"),
    "orchestrator.renderer.**": automatic("the tokenizer's chat template"),
    "renderer.**": automatic("the tokenizer's chat template"),
    "orchestrator.concurrency.**": automatic("rollout.max_concurrent_samples bounds an engine"),
    "orchestrator.**": missing("not read by Hone", off=(None, False, {})),
    "orchestrator.model.lora.name": automatic("adapters are published merged"),
    "trainer.optim.lr": to("train.optimizer.lr", number),
    "trainer.optim.weight_decay": to("train.optimizer.weight_decay", number),
    "trainer.optim.max_norm": to("train.optimizer.grad_clip", number),
    "trainer.optim.type": by(_optimizer, "train.optimizer.lr"),
    "trainer.model.cp": shared.width("cluster.trainer.sequence_parallel"),
    "trainer.model.tp": shared.width("cluster.trainer.tensor_parallel"),
    "trainer.model.ep": placement(EXPERTS),
    "trainer.model.lora.rank": to("lora.rank", whole),
    "trainer.model.lora.alpha": to("lora.alpha", number),
    "trainer.model.lora.target_modules": to("lora.targets", names),
    "model.lora.rank": to("lora.rank", whole),
    "model.lora.alpha": to("lora.alpha", number),
    "model.lora.target_modules": to("lora.targets", names),
    "trainer.model.ac": by(
        lambda job, v: mapped("", train__activation_checkpointing="full"), "train.activation_checkpointing"
    ),
    "trainer.model.ac.**": by(
        lambda job, v: mapped("", train__activation_checkpointing="full"), "train.activation_checkpointing"
    ),
    "trainer.model.ac_offloading.**": placement(MEMORY),
    "trainer.model.**": placement("of the trainer: placement, memory and kernels"),
    "trainer.enable_router_replay": missing("router replay is not supported"),
    "trainer.ckpt.**": automatic("checkpoints are whole"),
    "trainer.**": placement("of the trainer: placement and memory"),
    "trainer": automatic("nothing set"),
    "model.vlm.**": missing(PICTURES, off=()),
    "model.**": placement("of the trainer: placement, memory and kernels"),
    "inference": automatic("engines start with the run"),
    "inference.vllm.tensor_parallel_size": shared.width("cluster.engines.tensor_parallel_size"),
    "inference.vllm.gpu_memory_utilization": _engine("gpu_memory_utilization", number),
    "inference.vllm.max_model_len": _engine("max_model_len"),
    "inference.vllm.enable_prefix_caching": _engine("enable_prefix_caching", bool),
    "inference.vllm.quantization": missing("the trainer's weights are published as they are", off=(None,)),
    "inference.vllm.enable_return_routed_experts": missing("router replay is not supported"),
    "inference.**": placement("of the engine: placement and memory"),
    "deployment.**": placement("cluster.nodes, cluster.pools"),
    "weight_broadcast.quantize_in_weight_transfer": missing("weights are published as they are"),
    "weight_broadcast.**": placement("how weights are published: cluster.transport"),
    "slurm.**": placement("docs/slurm.md has a script"),
    "ckpt.interval": to("checkpoint.every", whole, "policy updates"),
    "ckpt.keep_last": to("checkpoint.keep", whole),
    "ckpt.**": automatic("checkpoints are whole"),
    "ckpt": automatic("checkpoint.every"),
    "resume.**": automatic(RESUME),
    "resume": automatic(RESUME),
    "monitors.wandb.project": to("observe.wandb", text),
    "monitors.**": automatic(LOGGING),
    "log.**": automatic(LOGGING),
    "env_vars.**": automatic(shared.RUNTIME),
    "bench": automatic(PROFILER),
    "dist_timeout_seconds": automatic("cluster.call_timeout_s"),
    "data.**": missing("data of fine-tuning: data.train and stages: [sft]", "data.train", off=()),
    "optim.**": missing("of fine-tuning: sft.optimizer and stages: [sft]", "sft.optimizer.lr", off=()),
    "ckpt.resume_step": automatic(RESUME),
}
WRITTEN = ("orchestrator.group_size", "orchestrator.batch_size", "max_steps")


def _program(foreign: ForeignRun) -> str | None:
    tops = {re.split(r"[.\[]", key.key)[0] for key in foreign.keys}
    if "orchestrator" in tops:
        return None
    return "a file without [orchestrator] is one part of a run (a trainer, a server, fine-tuning): import rl.toml"


def _whole(job: ForeignJob) -> Iterator[tuple[str, KeyVerdict]]:
    yield "data.train", KeyVerdict("hole", {}, _TASK)
    yield "data.chat", KeyVerdict("default", {"data.chat": True}, "prompts are messages")


DIALECT = Dialect(ROWS, WRITTEN, _program, _whole, {})
