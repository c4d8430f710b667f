"""Generating and training at the same time (`rollout.max_staleness: 1`) against taking turns (0), at equal threads.

    python benchmarks/async_overlap.py                 # about 5 minutes
    python benchmarks/async_overlap.py --quick

Two run files that differ in that one key, on the long case of the comparison with TRL (`trl/cases.py`: 0.8M parameters,
32 x 8 samples of 64 tokens), so that generating and training both take a real share of a step. Sides take turns, each
run a process of its own. Taking turns, each half has both threads; at the same time, each has one: overlapping can win
no more than what a second thread fails to bring. A step is the time from one update's end to the next one's, and the
ratio is of medians over all rounds, without the first steps. Reward curves stand side by side, because a faster step
that learns less is not a gain.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from trl_compare import curve_points, hone_run, run_measured

ROOT = Path(__file__).resolve().parent.parent
TRL = ROOT / "benchmarks" / "trl"
sys.path.insert(0, str(TRL))
from cases import CASES, write_prompts  # noqa: E402

CASE = "0.8M-64-tokens"
FIRST_STEPS = 3
"""They count for the reward curve but not for the time."""
PARTS = ("step", "generate", "reward", "train", "publish")

Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1], help="the first is what others are held to")
    parser.add_argument("--rounds", type=int, default=3, help="each with a seed of its own")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "async-overlap")
    parser.add_argument("--quick", action="store_true", help="one round of 6 steps: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, FIRST_STEPS + 3
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(TRL)}
    options.folder.mkdir(parents=True, exist_ok=True)
    model = starting_point(CASE)
    found: dict[int, list[list[Row]]] = {staleness: [] for staleness in options.staleness}
    for seed in range(options.rounds):
        for staleness in options.staleness:
            rows = run(model, staleness, seed, options)
            found[staleness].append(rows)
            step_s = median_s(rows[FIRST_STEPS:], "step")
            print(f"seed {seed}, max_staleness {staleness}: {step_s:.3f} s a step", flush=True)
    print_tables(found)


def starting_point(name: str) -> Path:
    """The model directory that a case of the comparison with TRL starts from; made where it is not there yet."""
    model = ROOT / "runs" / "trl" / name
    if not (model / "tokenizer.json").exists():  # written last
        subprocess.run([sys.executable, TRL / "prepare.py", "--case", name, "--folder", model], check=True)
    return model


def run(model: Path, staleness: int, seed: int, options: argparse.Namespace) -> list[Row]:
    """One training run; the metrics of its steps."""
    prompts = options.folder / f"prompts-{seed}.jsonl"
    # As many again as are trained on: an asynchronous run starts groups that it does not use.
    write_prompts(prompts, seed=seed, steps=2 * options.steps)
    name = f"staleness-{staleness}-{seed}"
    tree = hone_run(CASES[CASE], model, prompts, options.folder / name, seed, options.steps)
    tree["run"]["threads"] = options.threads
    tree["rollout"]["max_staleness"] = staleness
    run_file = options.folder / f"{name}.yaml"
    run_file.write_text(json.dumps(tree, indent=1))  # is YAML too
    command = [sys.executable, "-m", "hone.cli.main", "train", run_file]
    shutil.rmtree(options.folder / name, ignore_errors=True)
    run_measured(command, options.folder / f"{name}.txt")
    lines = (options.folder / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "time/step_s" in row]


def median_s(rows: list[Row], part: str) -> float:
    """Median seconds of a part of these steps; 0 where a step has no such part."""
    return statistics.median(row.get(f"time/{part}_s", 0.0) for row in rows)


def print_tables(found: dict[int, list[list[Row]]]) -> None:
    """Medians over all rounds, the ratio of steps, then the reward curves."""
    sides = {staleness: [row for rows in runs for row in rows[FIRST_STEPS:]] for staleness, runs in found.items()}
    base_s = median_s(next(iter(sides.values())), "step")
    print(f"\n| max_staleness | {' | '.join(f'{part} s' for part in PARTS)} | staleness of tokens | steps/s, ratio |")
    print("|" + "---|" * (len(PARTS) + 3))
    for staleness, rows in sides.items():
        cells = " | ".join(f"{median_s(rows, part):.3f}" for part in PARTS)
        lag = statistics.fmean(row["rollout/staleness_mean"] for row in rows)
        print(f"| {staleness} | {cells} | {lag:.2f} | {base_s / median_s(rows, 'step'):.2f} |")
    print("`generate` and `reward` are what a step waits for them.")
    print("\nmean reward over each tenth of the run, and its range over rounds")
    for staleness, runs in found.items():
        curves = [[row["rollout/reward_mean"] for row in rows] for rows in runs]
        print(f"{staleness:<4}", "  ".join(curve_points(curves)))


if __name__ == "__main__":
    main()
