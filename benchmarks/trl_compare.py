"""A GRPO step of Hone against TRL 1.16's GRPOTrainer and against a bare loop: samples per second, memory, learning.

    python -m benchmarks.trl_compare                                # every case, three seeds: about 15 minutes
    python -m benchmarks.trl_compare --cases 0.8M --steps 60 --seeds 0
    python -m benchmarks.trl_compare --sides hone,bare              # needs no TRL; about 4 minutes
    python -m benchmarks.trl_compare --hone run.fused_kernels=true

All sides start from one warmed-up model directory and take the same prompts in the same order, 32 x 8 samples a step,
with the same reward, learning rate, clip and loss, on two threads (`trl/cases.py`), in bfloat16 unless `--precision`
says float32, which is faster on CPUs without instructions for bfloat16. `best` is the fastest
setting of TRL that we found, `newcomer` what the documentation's first example leads to, and `bare` the same update
in plain PyTorch with no product around it (`trl/bare.py`). Each run is a process of its own, and the sides take turns.
TRL lives in `.venv-trl`, made on the first call that asks for it.

Speed is the median step after the warm-up steps, everything between two steps included. Hone writes its metrics,
samples and trace as always; the others log nothing. Memory is the largest resident set of the training process. Where
other programs run, the clock says little: the columns of processor time, with `--threads 1`, still compare.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
TRL = ROOT / "benchmarks" / "trl"
sys.path.insert(0, str(TRL))
from cases import (  # noqa: E402
    BETAS,
    CASES,
    GROUP_SIZE,
    LEARNING_RATE,
    PROMPTS_PER_STEP,
    WARMUP_STEPS,
    Case,
    write_prompts,
)

VENV = ROOT / ".venv-trl"
STEPS = {"0.8M": 100, "0.8M-64-tokens": 50, "5M": 80}
STEPS_WITHOUT_TRL = {"0.8M": 60, "0.8M-64-tokens": 30, "5M": 40}
NEWCOMER_STEPS = 25
SIDES = ["hone", "bare", "best", "newcomer"]
TRL_SIDES = {"best", "newcomer"}
TARGETS = {"0.8M": 2.5, "0.8M-64-tokens": 2.5, "5M": 3.0}
"""Times TRL's best that Hone is to reach."""


@dataclass(frozen=True)
class Outcome:
    """One run of one side."""

    case: str
    side: str
    seed: int
    samples_per_s: float
    samples_per_cpu_s: float
    """Per second of processor time, all threads and all processes of the side."""
    peak_rss_gib: float
    response_tokens_mean: float
    rewards: list[float]
    """Mean reward of each step's samples."""
    outside_frac: float | None = None
    """Share of the steps' time outside generating and training (Hone only: TRL does not say)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="instead of each case's own number")
    parser.add_argument("--sides", type=sides_of, default=SIDES, help=f"some of {','.join(SIDES)}")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "trl")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--hone", nargs="+", default=[], metavar="KEY=VALUE", help="what Hone's run sets besides")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    has_trl = not TRL_SIDES.isdisjoint(options.sides)
    if has_trl:
        make_environment()
    outcomes = []
    for name in options.cases:
        model = starting_point(name, options.folder)
        steps = options.steps or (STEPS if has_trl else STEPS_WITHOUT_TRL)[name]
        for seed in options.seeds:
            prompts = options.folder / f"prompts-{seed}-{steps}.jsonl"
            write_prompts(prompts, seed=seed, steps=steps)
            for side in options.sides:
                if side == "newcomer" and seed != options.seeds[0]:
                    continue  # for the record only
                if side == "hone":
                    outcome = run_hone(name, model, prompts, seed, steps, options)
                elif side == "bare":
                    outcome = run_bare(name, model, prompts, seed, steps, options)
                else:
                    side_steps = min(steps, NEWCOMER_STEPS) if side == "newcomer" else steps
                    outcome = run_trl(name, model, prompts, side, seed, side_steps, options)
                outcomes.append(outcome)
                print(json.dumps(asdict(outcome)), flush=True)
    print_tables(outcomes)


def sides_of(text: str) -> list[str]:
    """Names of sides, separated by commas."""
    sides = text.split(",")
    if unknown := set(sides) - set(SIDES):
        raise argparse.ArgumentTypeError(f"no side {', '.join(sorted(unknown))}; there are {', '.join(SIDES)}")
    return sides


def make_environment() -> None:
    """TRL's own virtual environment; the stamp is written last, so that an interrupted set-up is done again."""
    stamp = VENV / ".installed"
    if stamp.exists():
        return
    print("making .venv-trl (about 2 GB) ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    # torch first and exactly: TRL's own range would take another build of it.
    for packages in (["torch==2.13.0"], ["trl==1.16.0", "torch==2.13.0"]):
        subprocess.run([VENV / "bin" / "python", "-m", "pip", "install", "-q", *packages], check=True)
    stamp.touch()


def starting_point(name: str, folder: Path) -> Path:
    """The warmed-up model directory of a case, made once."""
    model = folder / name
    if not (model / "tokenizer.json").exists():  # written last
        command = [sys.executable, TRL / "prepare.py", "--case", name, "--folder", model]
        subprocess.run(command, check=True)
    return model


def run_trl(
    name: str, model: Path, prompts: Path, side: str, seed: int, steps: int, options: argparse.Namespace
) -> Outcome:
    command = [VENV / "bin" / "python", TRL / "run_trl.py", "--case", name, "--model", model, "--prompts", prompts]
    command += ["--settings", side, "--seed", str(seed), "--steps", str(steps), "--threads", str(options.threads)]
    if side == "best":
        command += ["--set", json.dumps({"bf16": options.precision == "bfloat16"})]
    return clocked(name, f"TRL {side}", seed, command, options.folder / f"log-{side}-{name}-{seed}.txt")


def run_bare(name: str, model: Path, prompts: Path, seed: int, steps: int, options: argparse.Namespace) -> Outcome:
    command = [sys.executable, TRL / "bare.py", "--case", name, "--model", model, "--prompts", prompts]
    command += ["--seed", str(seed), "--steps", str(steps), "--threads", str(options.threads)]
    command += ["--precision", options.precision]
    return clocked(name, "bare loop", seed, command, options.folder / f"log-bare-{name}-{seed}.txt")


def clocked(name: str, side: str, seed: int, command: list[Any], log: Path) -> Outcome:
    """Run a program that prints, last of all, the times of its steps as JSON."""
    peak_rss_gib = run_measured(command, log)
    found = json.loads(log.read_text().splitlines()[-1])
    speed = speed_of(found.pop("step_s"), found.pop("step_cpu_s"))
    return Outcome(name, side, seed, *speed, peak_rss_gib=peak_rss_gib, **found)


def speed_of(step_s: list[float], step_cpu_s: list[float]) -> tuple[float, float]:
    """Samples per second and per second of processor time, from those of every step."""
    samples = PROMPTS_PER_STEP * GROUP_SIZE
    return samples / statistics.median(step_s[WARMUP_STEPS:]), samples / statistics.median(step_cpu_s[WARMUP_STEPS:])


def run_hone(name: str, model: Path, prompts: Path, seed: int, steps: int, options: argparse.Namespace) -> Outcome:
    folder = options.folder
    run_file = folder / f"hone-{name}-{seed}.yaml"
    run_dir = folder / f"hone-{name}-{seed}"
    tree = hone_run(CASES[name], model, prompts, run_dir, seed, steps)
    tree["run"] |= {"threads": options.threads, "precision": options.precision}
    run_file.write_text(json.dumps(tree, indent=1))  # is YAML too
    log = folder / f"log-hone-{name}-{seed}.txt"
    peak_rss_gib = run_measured([sys.executable, TRL / "run_hone.py", run_file, *options.hone], log)
    clocks = json.loads(log.read_text().splitlines()[-1])
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "time/step_s" in row]
    timed = rows[WARMUP_STEPS:]
    step_s = [row["time/step_s"] for row in timed]
    inside_s = [row["time/generate_s"] + row["time/train_s"] for row in timed]
    return Outcome(
        name,
        "Hone",
        seed,
        *speed_of(clocks["step_s"], clocks["step_cpu_s"]),
        peak_rss_gib=peak_rss_gib,
        response_tokens_mean=statistics.fmean(row["rollout/response_tokens_mean"] for row in rows),
        rewards=[round(row["rollout/reward_mean"], 4) for row in rows],
        outside_frac=1 - sum(inside_s) / sum(step_s),
    )


def hone_run(case: Case, model: Path, prompts: Path, run_dir: Path, seed: int, steps: int) -> dict[str, Any]:
    """The run file: what `run_trl.py` gives GRPOConfig, in Hone's words; all else by default."""
    return {
        "seed": seed,
        "stages": ["rl"],
        "run": {"dir": str(run_dir), "steps": steps, "device": "cpu", "precision": "bfloat16"},
        "model": {"path": str(model)},
        "data": {"train": str(prompts), "answer_column": "answer", "order": "source", "max_prompt_tokens": 16},
        "reward": {"components": [{"use": f"{TRL / 'hone_reward.py'}:correct" if case.noisy else "exact"}]},
        "rollout": {"group_size": GROUP_SIZE, "max_response_tokens": case.max_response_tokens},
        "algorithm": {"credit": "group_norm", "ratio": "token", "clip": "ppo", "aggregate": "sample_mean"},
        "train": {
            "prompts_per_step": PROMPTS_PER_STEP,
            "optimizer": {"lr": LEARNING_RATE, "betas": BETAS, "schedule": "linear", "grad_clip": 1.0},
        },
        "checkpoint": {"every": 0},
    }


def run_measured(command: list[Any], log: Path) -> float:
    """Run to the end, all output to `log`; returns the peak resident set in GiB. Exits when the run failed."""
    with log.open("w") as output:
        errors: IO[str] = log.with_suffix(".err").open("w")
        process = subprocess.Popen([str(part) for part in command], stdout=output, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)  # of this child alone, unlike RUSAGE_CHILDREN
        errors.close()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{log}: exit {process.returncode}\n{log.with_suffix('.err').read_text()[-2000:]}")
    return usage.ru_maxrss / 2**20


def print_tables(outcomes: list[Outcome]) -> None:
    """The ratios, then the reward curves side by side; `outside both`: of Hone's steps, not generating or training."""
    sides = list(dict.fromkeys(outcome.side for outcome in outcomes))
    for name in dict.fromkeys(outcome.case for outcome in outcomes):
        runs = {side: [o for o in outcomes if (o.case, o.side) == (name, side)] for side in sides}
        runs = {side: found for side, found in runs.items() if found}
        speed = {side: statistics.median(o.samples_per_s for o in found) for side, found in runs.items()}
        print(f"\n{name}, target {TARGETS[name]} x TRL best")
        print("| | samples/s | Hone / this | by seed | Hone / this, CPU time | peak GiB | tokens | outside both |")
        print("|---|---|---|---|---|---|---|---|")
        for side, found in runs.items():
            ratio = f"{speed['Hone'] / speed[side]:.2f}" if "Hone" in speed else ""
            by_seed = ", ".join(f"{ratio:.2f}" for ratio in ratios(runs.get("Hone", []), found, "samples_per_s"))
            cpu = ratios(runs.get("Hone", []), found, "samples_per_cpu_s")
            cpu_ratio = f"{statistics.median(cpu):.2f}" if cpu else ""
            peak, tokens = max(o.peak_rss_gib for o in found), found[0].response_tokens_mean
            shares = [o.outside_frac for o in found if o.outside_frac is not None]
            outside = f"{statistics.median(shares):.0%}" if shares else ""
            columns = (side, f"{speed[side]:.0f}", ratio, by_seed, cpu_ratio, f"{peak:.2f}", f"{tokens:.1f}", outside)
            print(f"| {' | '.join(columns)} |")
        print("\nmean reward over each tenth of the run, and its range over seeds")
        for side, found in runs.items():
            print(f"{side:14}", "  ".join(curve_points([o.rewards for o in found])))


def ratios(ours: list[Outcome], theirs: list[Outcome], of: str) -> list[float]:
    """Of each seed that both sides ran."""
    mine = {outcome.seed: getattr(outcome, of) for outcome in ours}
    other = {outcome.seed: getattr(outcome, of) for outcome in theirs}
    return [mine[seed] / other[seed] for seed in mine if seed in other]


def curve_points(curves: list[list[float]]) -> list[str]:
    """A reward curve in ten points: mean over seeds, then lowest and highest seed."""
    size = max(1, min(map(len, curves)) // 10)
    points = []
    for start in range(0, size * 10, size):
        means = [statistics.fmean(curve[start : start + size]) for curve in curves if len(curve) > start]
        if means:
            points.append(f"{statistics.fmean(means):.3f} ({min(means):.2f}-{max(means):.2f})")
    return points


if __name__ == "__main__":
    main()
