"""The Hone side: `hone train RUN_FILE ... --fresh`, the clock read after every step; one JSON line, as of `bare.py`.

    python benchmarks/trl/run_hone.py runs/trl/hone-0.8M-0.yaml run.fused_kernels=true

Processor time is that of this process and of those that it started, which score samples.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path

from hone.cli.main import main as hone
from hone.cli.main import spin_count

os.environ.setdefault("GOMP_SPINCOUNT", spin_count())  # as the command does, before it loads torch
from hone.loop.run import PolicyRun

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """Processor seconds of this process and of all below it that are alive."""
    return time.process_time() + sum(map(_ticks, _below(os.getpid()))) / TICKS_PER_S


def _below(pid: int) -> list[int]:
    try:
        parts = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended
        return []
    children = [int(child) for part in parts for child in part]
    return children + [each for child in children for each in _below(child)]


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def main() -> int:
    clocks: list[tuple[float, float]] = []
    log_step = PolicyRun.log_step

    def log_and_read_clocks(run: PolicyRun, metrics: dict[str, float], *, seconds: float) -> None:
        log_step(run, metrics, seconds=seconds)
        clocks.append((time.perf_counter(), cpu_s()))

    PolicyRun.log_step = log_and_read_clocks
    if code := hone(["train", *sys.argv[1:], "--fresh"]):
        return code
    pairs = list(itertools.pairwise(clocks))
    wall_s, step_cpu_s = ([later[i] - before[i] for before, later in pairs] for i in (0, 1))
    print(json.dumps({"step_s": wall_s, "step_cpu_s": step_cpu_s}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
