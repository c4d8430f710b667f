"""A step with trainer and engines in Ray's processes (`cluster.backend: ray`) against one process, at equal threads.

    python benchmarks/cluster_step.py                 # about 10 minutes
    python benchmarks/cluster_step.py --quick

One run file, whose `cluster` section alone differs, at two sizes of model and 32 x 8 samples of about 60 tokens. In a
synchronous run trainer and engines take turns, so each layout has all threads in each half of a step: one rank and one
engine have all of them each, two and two have half. A step is the median without the first ones; the ratio is to the
one process of the same run. Start is from the command to the first step, imports included.

Moved is what crosses between processes in a step: what was counted on the loopback (calls, samples, gloo), and what
lies in shared memory, weights and batch. The least possible is the weights once, and each token's number and logprob to
the run and with its advantage and mask to a rank. What several ranks exchange of weights and gradients is in the first
figure alone, and so is whatever else talks on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from _runs import DIGITS, QUIET, ROOT, lines_of

CHARACTERS = "0123456789+=" + "".join(map(chr, range(0x4E00, 0x4E00 + 488)))
"""So many that a model without training seldom ends a response before its 64 tokens."""
SIZES = {"0.8M": (128, 4), "5M": (256, 6)}
"""Hidden size and layers."""
PROMPTS, GROUP = 32, 8
FIRST_STEPS = 3
ALL = ["policy", "rollout", "reference"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "local": {},
    "1 rank, 1 engine": {"all": {"devices": 1, "roles": ALL}},
    "1 rank, 1 engine, apart": {
        "trainer": {"devices": 1, "roles": ["policy", "reference"]},
        "engine": {"devices": 1, "roles": ["rollout"]},
    },
    "2 ranks, 2 engines": {"all": {"devices": 2, "roles": ALL}},
}
SHARED_PER_TOKEN, LEAST_PER_TOKEN = 20, 24
"""Bytes. The batch: token (8), mask, logprob, advantage. At least: token and logprob; those, mask and advantage."""


@dataclass(frozen=True)
class Measured:
    """One run."""

    step_s: float
    start_s: float
    moved_mib: float
    least_mib: float
    parts: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--rounds", type=int, default=2, help="sides take turns")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "cluster-step")
    parser.add_argument("--quick", action="store_true", help="the smaller size, one round of 6 steps: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rounds, options.steps = ["0.8M"], 1, FIRST_STEPS + 3
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    for size in options.sizes:
        found: dict[str, list[Measured]] = {layout: [] for layout in options.layouts}
        for number in range(options.rounds):
            for layout in options.layouts:
                found[layout].append(measure(size, layout, number, options))
                print(f"{size}, {layout}: {found[layout][-1].step_s:.3f} s a step", flush=True)
        print_table(size, found)


def measure(size: str, layout: str, number: int, options: argparse.Namespace) -> Measured:
    """One run in a process of its own."""
    folder = options.folder / f"{size}-{list(LAYOUTS).index(layout)}-{number}-{int(time.time())}"
    folder.mkdir(parents=True)
    rows = ({"prompt": f"{n % 90 + 10}+{n % 80 + 10}="} for n in range(PROMPTS * options.steps))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(DIGITS)
    (folder / "run.yaml").write_text(json.dumps(run_file(size, layout, options)))
    command = [sys.executable, "-m", "hone.cli.main", "train", str(folder / "run.yaml"), *QUIET]
    started, arrived, metrics = time.monotonic(), [], folder / "run" / "metrics.jsonl"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if metrics.is_file() and metrics.read_bytes().count(b"\n") > len(arrived):
                arrived.append((time.monotonic(), sent_bytes()))
            time.sleep(0.02)
    if process.returncode:
        sys.exit(f"{folder}: exit {process.returncode}\n{(folder / 'log').read_text()[-2000:]}")
    lines = lines_of(folder / "run")
    later = lines[FIRST_STEPS:]
    (_, before), (_, after) = arrived[FIRST_STEPS - 1], arrived[-1]
    tokens = PROMPTS * GROUP * statistics.mean(line["rollout/response_tokens_mean"] for line in later)
    weights = (folder / "run" / "hf" / "model.safetensors").stat().st_size // 2  # exported in float32
    apart = layout != "local"
    shared, least = apart * (weights + tokens * SHARED_PER_TOKEN), apart * (weights + tokens * LEAST_PER_TOKEN)
    return Measured(
        step_s=statistics.median(line["time/step_s"] for line in later),
        start_s=arrived[0][0] - started - lines[0]["time/step_s"],
        moved_mib=((after - before) / (len(arrived) - FIRST_STEPS) + shared) / 2**20,
        least_mib=least / 2**20,
        parts={
            part: statistics.median(line.get(f"time/{part}_s", 0.0) for line in later)
            for part in ("generate", "train", "publish")
        },
    )


def run_file(size: str, layout: str, options: argparse.Namespace) -> dict[str, Any]:
    hidden, layers = SIZES[size]
    architecture = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    pools = LAYOUTS[layout]
    processes = max((pool["devices"] for pool in pools.values()), default=1)
    threads = max(1, options.threads // processes)
    return {
        "run": {"dir": "run", "steps": options.steps, "device": "cpu", "precision": "bfloat16", "threads": threads},
        "model": {"characters": CHARACTERS, "init": architecture},
        "data": {"train": "prompts.jsonl", "max_prompt_tokens": 16},
        "reward": {"components": [{"use": "reward.py:digits"}]},
        "rollout": {"group_size": GROUP, "max_response_tokens": 64},
        "train": {"prompts_per_step": PROMPTS, "optimizer": {"lr": 1e-5}},
        "checkpoint": {"every": 0},
        "cluster": {"backend": "ray", "pools": pools} if pools else {},
    }


def sent_bytes() -> int:
    """Over the loopback, by all processes of the machine."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def print_table(size: str, found: dict[str, list[Measured]]) -> None:
    def median(runs: list[Measured], value: str) -> float:
        return statistics.median(getattr(run, value) for run in runs)

    base = median(next(iter(found.values())), "step_s")
    print(f"\n{size}, {PROMPTS} x {GROUP} samples; ratio to {next(iter(found))}, target at 5M with one engine: 1.1")
    print("| | step s | ratio | generate s | train s | publish s | start s | moved MiB/step | least MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for layout, runs in found.items():
        step_s, moved, least = (median(runs, value) for value in ("step_s", "moved_mib", "least_mib"))
        parts = " | ".join(
            f"{statistics.median(run.parts[part] for run in runs):.3f}" for part in ("generate", "train", "publish")
        )
        start_s = median(runs, "start_s")
        print(
            f"| {layout} | {step_s:.3f} | {step_s / base:.2f} | {parts} | {start_s:.1f} | {moved:.2f} | {least:.2f} |"
        )
    print()


if __name__ == "__main__":
    main()
