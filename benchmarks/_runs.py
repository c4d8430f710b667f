"""Runs of `hone train` for a benchmark: quiet, in a process of their own, ended by a deadline, gone on with later."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
QUIET = ["observe.console=quiet", "observe.tensorboard=false", "observe.trace=false", "observe.samples_max_mib=0"]
DIGITS = """
from hone.reward import reward


@reward(minimum=0.0, maximum=1.0)
def digits(group):
    return [sum(c.isdigit() for c in sample.text) / max(len(sample.text), 1) for sample in group.samples]
"""
"""reward.py with something to learn from the first step of a random model: write digits."""
STOP_TIMEOUT_S = 120
"""Until a run that was asked to stop has saved where it is."""


def lines_of(run: Path) -> list[dict[str, Any]]:
    """What a run logged; nothing if it has not begun."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.is_file() else []


def train_until(deadline: float, run_file: Path, run: Path, settings: Sequence[str]) -> bool:
    """Make a run, or resume it, until it is done or `deadline` (of `time.monotonic`) is there.

    Returns whether it is done. A run that fails ends this process.
    """
    if (run / "hf").is_dir():
        return True
    if time.monotonic() > deadline:
        return False
    command = [sys.executable, "-m", "hone.cli.main", "train", str(run_file), f"run.dir={run}", *QUIET, *settings]
    process = subprocess.Popen([*command, *(["--resume"] if run.exists() else [])], cwd=ROOT)
    try:
        code = process.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_TIMEOUT_S)
        return False
    if code:
        sys.exit(f"the run in {run} failed")
    return True
