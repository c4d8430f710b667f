"""Time to the first step of `hone train` against bare imports, and of light commands against bare Python.

    python benchmarks/startup.py
    python benchmarks/startup.py --quick

Every measurement is a process of its own, from its start; commands take turns, medians of rounds, after one round that
fills the page cache. `hone train` runs the arithmetic example until its first line of metrics.jsonl is there, once as
it stands (a supervised step of 256 rows) and once from RL on, without the evaluation that comes before (32 x 8 samples
generated and scored, and one update). Set against it is `import torch, transformers`, which nothing that trains such a
model can do without; most of Transformers is loaded only with the model class that is used, so that stands there too.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN_FILE = ROOT / "examples" / "gsm8k-arithmetic" / "run.yaml"
HONE = [sys.executable, "-m", "hone.cli.main"]
DEADLINE_S = 300.0

BARE_PYTHON = "python -c pass"
BARE_IMPORT = "import torch, transformers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one round, and none before it: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    train = ["train", str(RUN_FILE), f"run.threads={options.threads}"]
    from_rl = ["stages=[rl]", "data.eval=null", "eval.by=null", "eval.every=0"]
    explain = ["explain", str(RUN_FILE), "rollout.group_size"]
    planned = ["plan", str(RUN_FILE), "--hardware", "8xH100-80G"]
    light: dict[str, Callable[[], float]] = {
        BARE_PYTHON: partial(until_exit, [sys.executable, "-c", "pass"], code=0),
        "hone --help": partial(until_exit, [*HONE, "--help"], code=0),
        "hone explain RUN.yaml KEY": partial(until_exit, [*HONE, *explain], code=0),
        "hone plan RUN.yaml": partial(until_exit, [*HONE, *planned], code=0),
        "hone plan RUN.yaml --preset": partial(until_exit, [*HONE, *planned, "--preset", "recommended"], code=0),
        "hone check, unknown key": partial(until_exit, [*HONE, "check", str(RUN_FILE), "rollout.group_siz=8"], code=2),
    }
    heavy: dict[str, Callable[[], float]] = {
        BARE_IMPORT: partial(until_exit, [sys.executable, "-c", BARE_IMPORT], code=0),
        "... and Qwen3ForCausalLM": partial(
            until_exit, [sys.executable, "-c", f"{BARE_IMPORT}; transformers.Qwen3ForCausalLM"], code=0
        ),
        "hone train, first supervised step": partial(until_first_step, [*HONE, *train]),
        "hone train, first RL step": partial(until_first_step, [*HONE, *train, *from_rl]),
    }
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    for baseline, sides in ((BARE_PYTHON, light), (BARE_IMPORT, heavy)):
        seconds = measure(sides, options.rounds, warm_up=not options.quick)
        print(f"\n| | s | times `{baseline}` |\n|---|---|---|")
        for name, side_s in seconds.items():
            print(f"| {name} | {side_s:.2f} | {side_s / seconds[baseline]:.2f} |", flush=True)


def measure(sides: dict[str, Callable[[], float]], rounds: int, *, warm_up: bool) -> dict[str, float]:
    """Median seconds of each side, rounds interleaved."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + warm_up):
        for name, side in sides.items():
            found[name].append(side())
    return {name: statistics.median(values[warm_up:]) for name, values in found.items()}


def until_exit(command: list[str], *, code: int) -> float:
    """Seconds from start to end. Exits when the command does something else than is to be measured."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    seconds = time.perf_counter() - started
    if done.returncode != code:
        sys.exit(f"{command}: exit {done.returncode}, expected {code}\n{done.stderr[-2000:]}")
    return seconds


def until_first_step(command: list[str]) -> float:
    """Seconds until the first line of metrics is in the run's folder; the run is then stopped."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log.txt").open("w") as log:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        started = time.perf_counter()
        process = subprocess.Popen([*command, f"run.dir={metrics.parent}"], stdout=log, stderr=log)
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None or time.perf_counter() - started > DEADLINE_S:
                process.kill()
                sys.exit(f"{command}: no first step\n{Path(log.name).read_text()[-2000:]}")
            time.sleep(0.005)
        seconds = time.perf_counter() - started
        process.send_signal(signal.SIGTERM)  # it drops the step in flight and saves
        process.wait(DEADLINE_S)
    return seconds


if __name__ == "__main__":
    main()
