"""nanochat's flags of `scripts.chat_rl`: REINFORCE with a group's mean on GSM8K."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hone.dialects import shared
from hone.dialects.foreign import ForeignRun
from hone.dialects.rows import automatic, by, each, missing, to
from hone.dialects.values import number, whole
from hone.dialects.verdict import Dialect, ForeignJob, KeyVerdict, Row, default, nothing, put, refused, unknown

_MUON = "Muon and three learning rates; the optimizer is AdamW: tune train.optimizer.lr anew"


def _group(job: ForeignJob, value: Any) -> KeyVerdict:
    samples, passes = whole(value), whole(job.get("device_batch_size", 8))
    drawn = samples // passes * passes
    if drawn < 2:
        return refused(f"{samples} samples in passes of {passes} are {drawn}: a group's mean needs two")
    if drawn == samples:
        return put({"rollout.group_size": samples})
    fits = max(n for n in range(1, passes + 1) if samples % n == 0)
    why = f"{samples} in passes of {passes}: nanochat draws only {drawn}, silently; nearest device_batch_size: {fits}"
    return put({"rollout.group_size": drawn}, why)


def _prompts(job: ForeignJob, value: Any) -> KeyVerdict:
    prompts, processes = whole(value), shared.processes(job)
    if prompts % processes:
        return refused(f"{prompts} prompts do not divide among {processes} processes, which ends nanochat")
    return put({"train.prompts_per_step": prompts})


ROWS: dict[str, Row] = {
    "run": by(
        lambda job, v: nothing("off") if v == "dummy" else put({"observe.wandb": "nanochat-rl"}), "observe.wandb"
    ),
    "source": by(
        lambda job, v: unknown(
            f"nanochat's own checkpoint ({v}): export it with Transformers' nanochat classes and name it"
        ),
        "model.path",
        kind="hole",
    ),
    "device_batch_size": automatic(
        "sequences of a pass: train.tokens_per_microbatch counts tokens, and a group need not be divisible by it"
    ),
    "examples_per_step": by(_prompts, "train.prompts_per_step", note="prompts of all processes"),
    "num_samples": by(_group, "rollout.group_size"),
    "max_new_tokens": to("rollout.max_response_tokens", whole),
    "temperature": to("rollout.temperature", number),
    "top_k": to("rollout.top_k", whole, "without a ratio, as there"),
    **each("matrix_lr unembedding_lr embedding_lr init_lr_frac", missing(_MUON, "train.optimizer.lr", off=())),
    "weight_decay": to("train.optimizer.weight_decay", number),
    "num_epochs": to("run.epochs", number),
    "save_every": to("checkpoint.every", whole, "policy updates"),
    "eval_every": to("eval.every", whole, "policy updates"),
    "eval_examples": shared.slice_of_rows("data.eval_rows"),
    "num_processes": shared.DEVICES,
    **each("device_type dtype", automatic("run.device and run.precision")),
    "model_tag": automatic("part of source"),
    "model_step": automatic("part of source"),
}
WRITTEN = (
    *("source", "examples_per_step", "num_samples", "max_new_tokens", "top_k", "matrix_lr", "weight_decay"),
    *("num_epochs", "save_every", "eval_every", "eval_examples"),
)
ALGORITHM = {
    "algorithm.credit": "group_mean",
    "algorithm.ratio": "none",
    "algorithm.clip": "none",
    "algorithm.aggregate": "token_mean",
    "train.optimizer.schedule": "linear",
}
GSM8K = {
    "data.train": "openai/gsm8k:main",
    "data.eval": "openai/gsm8k:main",
    "data.eval_split": "test",
    "data.prompt_column": "question",
    "data.answer_column": "answer",
    "data.chat": True,
}


def _program(foreign: ForeignRun) -> str | None:
    if "chat_rl" in foreign.program:
        return None
    return f"{foreign.program} is not RL; stages: [sft] fine-tunes here"


def _whole(job: ForeignJob) -> Iterator[tuple[str, KeyVerdict]]:
    yield "algorithm", default(ALGORITHM, "REINFORCE with a group's mean; nanochat averages each pass by itself")
    yield "task", default(GSM8K, "its only task")
    yield "reward", default({"reward.components": [{"use": "gsm8k"}]}, "the number after ####")
    yield "precision", default({"run.precision": "bfloat16"}, "nanochat computes in bfloat16")
    samples = {"eval.samples": whole(job.get("device_batch_size", 8)), "eval.temperature": 1.0}
    yield "eval", default(samples, "pass@k, with as many samples as a pass has")
    yield from shared.cluster(1, shared.processes(job))


DIALECT = Dialect(ROWS, WRITTEN, _program, _whole, {})
