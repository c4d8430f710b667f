"""The closed form of `hone plan` against traces of the real classes: peak memory of a device, point by point.

    python -m benchmarks.plan_trace [--every 1] [--json FILE]

A point is a model, a way to shard it, checkpointing, a loss and a number of tokens. `sharded` points are Transformers'
classes (and Hone's decoder) under FSDP2; `local` points are Hone's trainer in one process. Baseline is the trace; a
point loses when the closed form is more than 5 % off. `--every 10` takes every tenth point. Nothing is timed but the
whole; neighbours do not matter.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from hone.assemble.trace import compared, full_microbatch, over_depth, trace_plan
from hone.config.load import load_config
from hone.plan.activations import Pass
from hone.plan.cluster import Trained, update_moments
from hone.plan.families import architecture_from
from hone.plan.hardware import find_hardware
from hone.plan.known_models import named_config
from hone.plan.planner import plan
from hone.train.tracing.local import with_layers
from hone.train.tracing.sharded import trace_sharded

BOUND = 0.05
MODELS = (
    "llama-3.2-1b",
    "llama-3.1-8b",
    "mistral-7b-v0.3",
    "qwen2.5-0.5b",
    "qwen2.5-7b",
    "qwen2.5-32b",
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-32b",
    "phi-3-mini-4k",
    "gemma-2-2b",
    "mixtral-8x7b-v0.1",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
)
SHARDED = ((1, 2048), (8, 8192), (64, 32768))
"""Devices and tokens of a microbatch."""
LONGEST, SHARE, GROUP = 4096, 0.75, 8
"""Tokens of a sample, and the share of tokens that have logits."""
LOCAL_MODELS = ("llama-3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b", "mistral-7b-v0.3")
LOCAL_TOKENS = 8192
TENSOR_MODELS = ("llama-3.1-8b", "qwen3-0.6b", "qwen3-32b")
TENSOR, TENSOR_SHARD = (2, 8), 16
"""Devices that each layer is divided over, by the number that train."""


@dataclass(frozen=True)
class Case:
    """One point of the lattice."""

    model: str
    implementation: Literal["hone", "transformers"]
    placement: str
    """`sharded` or `local`."""
    shard: int
    tokens: int
    checkpointing: Literal["none", "selective", "full"]
    loss: Literal["naive", "chunked"]
    precision: str = "bfloat16"
    tensor: int = 1

    @property
    def name(self) -> str:
        how = f"{self.placement} over {self.shard}" if self.placement == "sharded" else f"local {self.precision}"
        how += f" in layers of {self.tensor}" if self.tensor > 1 else ""
        return (
            f"{self.model} {self.implementation}, {how}, {self.tokens} tokens, checkpointing {self.checkpointing}, "
            f"{self.loss}"
        )


def lattice() -> Iterator[Case]:
    """All points."""
    for model, (shard, tokens) in product(MODELS, SHARDED):
        for checkpointing, loss in product(("none", "full"), ("naive", "chunked")):
            yield Case(model, "transformers", "sharded", shard, tokens, checkpointing, loss)
    for model, checkpointing, loss in product(LOCAL_MODELS, ("none", "full"), ("naive", "chunked")):
        yield Case(model, "hone", "sharded", 8, 8192, checkpointing, loss)
    for model, checkpointing, precision in product(LOCAL_MODELS, ("none", "full"), ("float32", "bfloat16")):
        for implementation in ("hone", "transformers"):
            yield Case(model, implementation, "local", 1, LOCAL_TOKENS, checkpointing, "chunked", precision)
    for model in LOCAL_MODELS:
        yield Case(model, "hone", "sharded", 8, 8192, "selective", "chunked")
    for model, tensor, checkpointing in product(TENSOR_MODELS, TENSOR, ("none", "selective", "full")):
        yield Case(model, "hone", "sharded", TENSOR_SHARD, 8192, checkpointing, "chunked", tensor=tensor)
    for tensor, checkpointing in product(TENSOR, ("none", "full")):
        name = TENSOR_MODELS[0]
        yield Case(name, "transformers", "sharded", TENSOR_SHARD, 8192, checkpointing, "chunked", tensor=tensor)


def measure(case: Case) -> tuple[int, int]:
    """(closed form, trace) of the device's peak in an update, in bytes of tensors."""
    points = _sharded(case) if case.placement == "sharded" else _local(case)
    peaks = [point for point in points if point.moment == "peak"]
    return max(point.planned for point in peaks), max(point.traced for point in peaks)


def _sharded(case: Case):
    keys = named_config(case.model, Path(), "model")
    arch = architecture_from(keys)
    prompt = round(LONGEST * (1 - SHARE))
    batch = full_microbatch(case.tokens, max_prompt=prompt, max_response=LONGEST - prompt, group=1)
    responses = int(batch.length_S.sum())
    work = Pass(
        arch,
        case.implementation,
        2,
        case.tokens,
        responses,
        min(LONGEST, case.tokens),
        checkpointing=case.checkpointing,
        loss=case.loss,
        tensor_parallel=case.tensor,
        on_cuda=True,
        fused=True,
    )
    trained = Trained("", work, case.shard, accumulates=False)
    traced = over_depth(
        lambda layers: trace_sharded(trained, with_layers(keys, layers), batch, forward=False),
        arch.layers,
        dense_layers=arch.dense_layers,
    )
    return compared("", update_moments(trained, []), traced)


def _local(case: Case):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text("data: {train: a/b, answer_column: answer}\nreward: {components: [{use: exact}]}\n")
        words = [
            f"model.path={case.model}",
            f"model.implementation={case.implementation}",
            f"run.precision={case.precision}",
            f"train.activation_checkpointing={case.checkpointing}",
            f"train.tokens_per_microbatch={case.tokens}",
            f"data.max_prompt_tokens={LONGEST // 8}",
            f"rollout.max_response_tokens={LONGEST // 8}",
            f"rollout.group_size={GROUP}",
        ]
        config = load_config(file, words).config
        found = plan(config, find_hardware("H200-141G"))
        return trace_plan(found, Path(folder), lambda _: None).points


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="take every N-th point")
    parser.add_argument("--json", type=Path, help="write all points to this file")
    arguments = parser.parse_args()
    started = time.monotonic()
    rows, lost = [], []
    for case in [*lattice()][:: arguments.every]:
        planned, traced = measure(case)
        error = planned / traced - 1
        rows.append({"case": case.name, "planned_bytes": planned, "traced_bytes": traced, "error": error})
        lost += [rows[-1]] if abs(error) > BOUND else []
        print(f"{case.name:95} {planned / 2**30:8.2f} {traced / 2**30:8.2f} GiB {100 * error:+6.1f} %", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    errors = sorted(row["error"] for row in rows)
    print(
        f"\n{len(rows)} points in {time.monotonic() - started:.0f} s, {len(rows) - len(lost)} within {BOUND:.0%}; "
        f"errors {100 * errors[0]:+.1f} to {100 * errors[-1]:+.1f} %, median {100 * errors[len(errors) // 2]:+.2f} %"
    )
    for row in lost:
        print(f"lost: {row['case']}: {100 * row['error']:+.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
