"""How much of a step is not model arithmetic, for each case of the comparison with TRL.

    python benchmarks/step_share.py                       # about 2 minutes; the target is 15% at most
    python benchmarks/step_share.py --cases 5M --threads 1 2
    python benchmarks/step_share.py --quick

Each case is a run as in `trl_compare.py`, in this process: some plain steps, then as many under torch.profiler.

outside ops     1 - (time in which at least one thread runs a tensor operation) / (wall time of the profiled steps). An
                operation is an `aten` one, a node of the autograd graph or a custom autograd Function, whatever calls
                it: model, sampling, loss, optimizer or bookkeeping in tensors. All else is outside: Python between
                two operations, NumPy, rewards, tokens to text, metrics, samples and trace on the disk, waiting.
... aten alone  the same with `aten` operations only, so that Python inside Hone's own autograd Functions is outside.
outside phases  1 - (time/generate_s + time/train_s) / time/step_s of the plain steps, as the metrics tell it.

Profiling lengthens what is between operations and what is inside them; the last column says by how much in all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_overlap import ROOT, TRL, starting_point
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from trl_compare import hone_run

from hone import assemble
from hone.config.load import load_config
from hone.loop.run import PolicyRun

sys.path.insert(0, str(TRL))
from cases import CASES, write_prompts

FIRST_STEPS = 5
TARGET = 0.15
PYTHON_MARKS = ("Optimizer.", "ProfilerStep")
"""Intervals that Python code opens around other things: no operations."""


@dataclass(frozen=True)
class Share:
    """What a run spent outside, as fractions of a step's time."""

    plain_step_s: float
    profiled_step_s: float
    outside_ops: float
    outside_aten: float
    outside_phases: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=20, help="plain ones, and again as many under the profiler")
    parser.add_argument("--threads", nargs="+", type=int, default=[2])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "step-share")
    parser.add_argument("--quick", action="store_true", help="3 steps: does it run?")
    options = parser.parse_args()
    steps = 3 if options.quick else options.steps
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(TRL)}  # for the processes that score
    options.folder.mkdir(parents=True, exist_ok=True)
    models = {name: starting_point(name) for name in options.cases}
    print("| case | threads | step ms | outside ops | ... aten alone | outside phases | slower when profiled |")
    print("|---|---|---|---|---|---|---|")
    for name, model in models.items():
        for threads in options.threads:
            share = measure(name, model, steps, threads, options.folder)
            mark = "" if share.outside_ops <= TARGET else f" (target {TARGET:.0%})"
            slower = share.profiled_step_s / share.plain_step_s - 1
            print(
                f"| {name} | {threads} | {1000 * share.plain_step_s:.1f} | {share.outside_ops:.1%}{mark} | "
                f"{share.outside_aten:.1%} | {share.outside_phases:.1%} | {slower:.0%} |",
                flush=True,
            )


def measure(name: str, model: Path, steps: int, threads: int, folder: Path) -> Share:
    """Train one case here, and watch the ends of its steps."""
    prompts, run_dir, run_file = folder / f"{name}.jsonl", folder / name, folder / f"{name}.yaml"
    total = FIRST_STEPS + 2 * steps + 1  # the last step is not looked at: it ends with the run
    write_prompts(prompts, seed=0, steps=total)
    tree = hone_run(CASES[name], model, prompts, run_dir, 0, total)
    tree["run"]["threads"] = threads
    tree["observe"] = {"console": "quiet"}
    run_file.write_text(json.dumps(tree, indent=1))  # is YAML too
    watch = Watch(plain_from=FIRST_STEPS, profiled_from=FIRST_STEPS + steps, until=FIRST_STEPS + 2 * steps)
    shutil.rmtree(run_dir, ignore_errors=True)
    with watch:
        assemble.train(load_config(run_file, []))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    plain = [row for row in rows if "time/step_s" in row][FIRST_STEPS : FIRST_STEPS + steps]
    inside_s = sum(row["time/generate_s"] + row["time/train_s"] for row in plain)
    operations = [event for event in watch.events() if not event.name().startswith(PYTHON_MARKS)]
    aten = [operation for operation in operations if operation.name().startswith("aten::")]
    return Share(
        plain_step_s=watch.plain_s / steps,
        profiled_step_s=watch.profiled_s / steps,
        outside_ops=1 - covered_s(operations) / watch.profiled_s,
        outside_aten=1 - covered_s(aten) / watch.profiled_s,
        outside_phases=1 - inside_s / sum(row["time/step_s"] for row in plain),
    )


class Watch:
    """Profiles from the end of step `profiled_from` to that of `until`, and times both stretches, while entered."""

    def __init__(self, *, plain_from: int, profiled_from: int, until: int) -> None:
        self._plain_from, self._profiled_from, self._until = plain_from, profiled_from, until
        # Arithmetic is done on a thread of the run, steps end on another.
        all_threads = _ExperimentalConfig(profile_all_threads=True)
        self._profile = profile(activities=[ProfilerActivity.CPU], experimental_config=all_threads)
        self._log_step = PolicyRun.log_step
        self.plain_s = self.profiled_s = 0.0

    def __enter__(self) -> Watch:
        log_step, step_ended = self._log_step, self._step_ended

        def log_and_watch(self: PolicyRun, metrics: dict[str, float], *, seconds: float) -> None:
            log_step(self, metrics, seconds=seconds)
            step_ended(self.progress.step)

        PolicyRun.log_step = log_and_watch
        return self

    def __exit__(self, *error: object) -> None:
        PolicyRun.log_step = self._log_step

    def _step_ended(self, step: int) -> None:
        if step == self._plain_from:
            self._started = time.perf_counter()
        elif step == self._profiled_from:
            self.plain_s = time.perf_counter() - self._started
            self._profile.start()
            self._started = time.perf_counter()
        elif step == self._until:
            self.profiled_s = time.perf_counter() - self._started
            self._profile.stop()

    def events(self) -> Sequence[Any]:
        """Everything that the profiler saw, as it came: names, starts and durations in nanoseconds."""
        assert self._profile.profiler is not None and self._profile.profiler.kineto_results is not None
        return self._profile.profiler.kineto_results.events()


def covered_s(operations: Iterable[Any]) -> float:
    """Seconds in which at least one of them runs, on whichever thread."""
    covered_ns = end_ns = 0
    for start, stop in sorted((op.start_ns(), op.start_ns() + op.duration_ns()) for op in operations):
        if stop > end_ns:
            covered_ns += stop - max(start, end_ns)
            end_ns = stop
    return covered_ns / 1e9


if __name__ == "__main__":
    main()
