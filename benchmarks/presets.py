"""Every algorithm preset beside grpo: cost of a step, memory of a critic, and all learning curves in one figure.

    python benchmarks/presets.py                                      # cost and memory: some minutes
    python benchmarks/presets.py cost --rounds 5
    python benchmarks/presets.py memory
    python benchmarks/presets.py curves --steps 150 --minutes 60      # draws docs/presets.svg

The task is that of examples/gsm8k-arithmetic; every run starts from one supervised model, made on the first call and
kept in runs/presets; remove that folder to begin anew. `ADJUSTED` says what differs from a preset as it is published,
and why.

Cost: whole steps of `hone train`, sampling and rewards included. Presets take turns, round after round, and a ratio is
of one round; the learning rate is so small that all of them see the same policy throughout. Memory: the resident size
of a process that has made one update, less that before it built anything, against the bytes that parameters, gradients
and moments must have. Curves: one run each, one seed, so a difference of a point or two says nothing. `--minutes`
bounds one call, and the next resumes where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import gc
import io
import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks._figure import Points, small_multiples  # noqa: E402
from benchmarks._runs import QUIET, lines_of, train_until  # noqa: E402
from hone.algo.algorithm import Algorithm  # noqa: E402
from hone.cli.main import main as hone  # noqa: E402
from hone.config.algorithm import AlgorithmSection  # noqa: E402
from hone.config.layers import preset_names  # noqa: E402
from hone.config.run import OptimizerSection  # noqa: E402
from hone.data.pack import collate  # noqa: E402
from hone.model.heads import ScalarModel  # noqa: E402
from hone.model.load import init_model  # noqa: E402
from hone.train.critic import Critic  # noqa: E402
from hone.train.learner import Passes  # noqa: E402
from hone.train.policy import PolicyTrainer  # noqa: E402
from hone.train.roles import Reference, Roles  # noqa: E402
from hone.types import Group, Prompt, Sample, VersionSpan  # noqa: E402

FOLDER = ROOT / "runs" / "presets"
EXAMPLE = ROOT / "examples" / "gsm8k-arithmetic" / "run.yaml"
FIGURE = ROOT / "docs" / "presets.svg"
NAMES = [name.removeprefix("algorithm/") for name in preset_names() if name.startswith("algorithm/")]
BASELINE = "grpo"
ADJUSTED: dict[str, list[str]] = {
    "ppo": [
        "algorithm.kl_reward_coef=0.001",  # over answers of a few tokens 0.02 pays more than being right
        "critic.warmup_updates=10",  # its head starts from nothing
        "critic.optimizer.lr=1e-3",
    ],
}
HELD_OUT = "700:1700"
"""Rows of the test set, a quarter of them expressions that train never asks, as in the whole (which has them first)."""
WARMUP_STEPS = 2
"""First steps of a run that are not timed."""


# ---- runs ---------------------------------------------------------------------------------------------------------


def make_start(threads: int) -> Path:
    """The model that every run starts from, as a directory; trained on the first call."""
    folder = FOLDER / "start"
    if not (folder / "hf").is_dir():
        print("training the supervised model that all start from ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)  # it was cut short
        settings = ["stages=[sft]", f"run.dir={folder}", f"run.threads={threads}", *QUIET]
        train(EXAMPLE, folder, settings)
    return folder / "hf"


def train(run_file: Path, run: Path, settings: list[str]) -> None:
    """A whole run in this process."""
    with contextlib.redirect_stdout(io.StringIO()):
        code = hone(["train", str(run_file), *settings])
    if code:
        sys.exit(f"the run in {run} failed")


def write_run_file(preset: str, folder: Path, start: Path) -> Path:
    """A run file of the example's task with this preset, from the supervised model."""
    folder.mkdir(parents=True, exist_ok=True)
    run_file = folder / f"{preset}.yaml"
    run_file.write_text(
        f"extends: [{EXAMPLE}, algorithm/{preset}]\n"
        "stages: [rl]\n"
        f"model: {{path: {start}, init: null, characters: null}}\n"
        f"data: {{train: {EXAMPLE.parent / 'train.jsonl'}, eval: {EXAMPLE.parent / 'test.jsonl'}}}\n"
        "train: {prompts_per_step: 32}\n"
        "eval: {every: 0, by: null}\n"
    )
    return run_file


# ---- cost ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Medians over the steps of one run, in seconds."""

    step_s: float
    generate_s: float
    train_s: float


def measure_cost(preset: str, start: Path, steps: int, threads: int) -> Cost:
    """Make a short run in this process, and read its steps."""
    folder = FOLDER / "cost"
    run_file, run = write_run_file(preset, folder, start), folder / preset
    shutil.rmtree(run, ignore_errors=True)
    settings = [f"run.dir={run}", f"run.steps={steps}", f"run.threads={threads}", *QUIET]
    settings += ["data.eval=null", "checkpoint.every=0", "train.optimizer.lr=1e-12", *ADJUSTED.get(preset, ())]
    settings += ["critic.warmup_updates=0"] if preset == "ppo" else []
    train(run_file, run, settings)
    timed = [line for line in lines_of(run) if "time/step_s" in line][WARMUP_STEPS:]
    return Cost(*(statistics.median(line[f"time/{part.name}"] for line in timed) for part in fields(Cost)))


def cost(options: argparse.Namespace) -> None:
    """Print the table of costs."""
    start = make_start(options.threads)
    order = [BASELINE, *(name for name in options.presets if name != BASELINE)]
    rounds: list[dict[str, Cost]] = []
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", flush=True)
        rounds.append({p: measure_cost(p, start, WARMUP_STEPS + options.timed_steps, options.threads) for p in order})
    print("\n| preset | step, ms | sampling, ms | training, ms | step / grpo | from - to |\n|---|---|---|---|---|---|")
    for preset in order:
        costs = [costs[preset] for costs in rounds]
        ratios = [costs[preset].step_s / costs[BASELINE].step_s for costs in rounds]
        cells = [1e3 * statistics.median(getattr(c, part.name) for c in costs) for part in fields(Cost)]
        spread = f"{min(ratios):.2f} - {max(ratios):.2f}"
        print(f"| {preset} | {' | '.join(f'{c:.0f}' for c in cells)} | {statistics.median(ratios):.2f} | {spread} |")


# ---- memory -------------------------------------------------------------------------------------------------------

ARCHITECTURE = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
VOCAB = 512
MEMORY_ROWS = {
    "grpo": AlgorithmSection(kl_loss_coef=0.04),
    "grpo without KL": AlgorithmSection(),
    "ppo": AlgorithmSection(credit="gae", kl_reward_coef=0.02, kl_estimator="k1"),
    "ppo without KL": AlgorithmSection(credit="gae"),
}


def predicted_mib(algorithm: Algorithm, parameters: int, hidden: int, precision: str) -> float:
    """Of a trainer at rest, from shapes alone.

    A model that learns holds master weights, gradients and two moments in float32, and in bfloat16 also the copy that
    computes; a reference is that copy alone. A critic is a policy with a head of `hidden` numbers.
    """
    compute = 2 if precision == "bfloat16" else 4
    learning = 16 + (compute if precision == "bfloat16" else 0)
    total = parameters * learning
    total += (parameters + hidden) * learning if "values" in algorithm.needs else 0
    total += parameters * compute if "ref_logprobs" in algorithm.needs else 0
    return total / 2**20


def measure_memory(row: str, precision: str) -> dict[str, float]:
    """In the child process: predicted and measured MiB of a trainer that has made one update."""
    torch.set_num_threads(1)
    algorithm, groups = Algorithm(MEMORY_ROWS[row]), toy_groups()
    new: dict[str, Any] = {"seed": 0, "dtype": torch.float32, "device": torch.device("cpu")}
    warm = init_model(ARCHITECTURE | {"num_hidden_layers": 1}, vocab_size=VOCAB, **new)
    make_update(warm, Algorithm(MEMORY_ROWS["ppo"]), groups, precision)  # what libraries keep is kept before the count
    del warm
    before = resident_mib()
    model = init_model(ARCHITECTURE, vocab_size=VOCAB, **new)
    parameters = sum(p.numel() for p in model.parameters())
    trainer = make_update(model, algorithm, groups, precision)
    measured = resident_mib() - before
    assert trainer.update_count == 1
    predicted = predicted_mib(algorithm, parameters, model.hidden_size, precision)
    return {"parameters": parameters, "predicted": predicted, "measured": measured}


def resident_mib() -> float:
    """Of this process, without what its allocator holds on to after it was freed."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss / 2**20


def make_update(model: Any, algorithm: Algorithm, groups: list[Group], precision: Any) -> Roles:
    """A trainer that has made one update with this row, and everything the row needs."""
    common = {"optimizer": OptimizerSection(), "total_optimizer_steps": 1}
    passes = Passes(precision, tokens_per_microbatch=256, logprob_chunk_tokens=64, temperature=1.0)
    critic = None
    if "values" in algorithm.needs:
        critic = Critic(ScalarModel(copy.deepcopy(model)), passes, value_clip=0.2, **common)
    frozen = copy.deepcopy(model) if "ref_logprobs" in algorithm.needs else None
    policy = PolicyTrainer(model, passes, **common)
    reference = Reference(frozen, passes) if frozen else None
    trainer = Roles(policy=policy, critic=critic, reference=reference)
    batch = collate(groups)
    if reference is not None:
        batch = batch.with_column("ref_logprobs_T", trainer.logprobs(batch, reference=True))
    if "policy_logprobs" in algorithm.needs:
        batch = batch.with_column("old_logprobs_T", trainer.logprobs(batch))
    if critic is not None:
        batch = batch.with_column("value_T", trainer.values(batch))
    trainer.update(algorithm.assign(batch)[0], algorithm)
    return trainer


def toy_groups() -> list[Group]:
    """Two groups of four samples of eight tokens: enough for an update, little to hold."""
    groups = []
    for n in range(2):
        prompt = Prompt(f"p{n}", n, "", (1, 2, 3 + n))
        sample = Sample(prompt.id, 0, tuple(range(10, 18)), (-6.0,) * 8, (VersionSpan(0, 8),), "stop", "")
        samples = tuple(replace(sample, index=i, token_ids=(i, *sample.token_ids[1:])) for i in range(4))
        groups.append(Group(prompt, samples, {}, (0.0, 1.0, 0.0, 1.0)))
    return groups


def memory(options: argparse.Namespace) -> None:
    """Print the table of memory, a process for each row."""
    print("\n| row | precision | predicted, MiB | measured, MiB | measured / predicted | predicted / grpo |")
    print("|---|---|---|---|---|---|")
    for precision in ("float32", "bfloat16"):
        baseline = None
        for row in MEMORY_ROWS:
            command = [sys.executable, __file__, "memory", "--row", row, "--precision", precision]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)
            predicted, measured = found["predicted"], found["measured"]
            baseline = baseline or predicted
            cells = f"{predicted:,.0f} | {measured:,.0f} | {measured / predicted:.2f} | {predicted / baseline:.2f}"
            print(f"| {row} | {precision} | {cells} |", flush=True)
    print(f"({found['parameters']:,} parameters)")


# ---- curves -------------------------------------------------------------------------------------------------------


def curve_of(run: Path) -> Points:
    """Held-out accuracy by step."""
    return [(line["step"], line["eval/accuracy"]) for line in lines_of(run) if "eval/accuracy" in line]


def learn(preset: str, start: Path, folder: Path, options: argparse.Namespace, deadline: float) -> bool:
    """Run one preset, or resume it, until it is done or time is up. Returns whether it is done."""
    settings = [f"run.steps={options.steps}", f"run.threads={options.threads}"]
    settings += [f"eval.every={max(options.steps // 15, 1)}", "eval.samples=2", f"data.eval_rows={HELD_OUT}"]
    settings += ["checkpoint.every=25", "checkpoint.keep=1", *ADJUSTED.get(preset, ())]
    return train_until(deadline, write_run_file(preset, folder, start), folder / preset, settings)


def curves(options: argparse.Namespace) -> None:
    """Make the runs that time allows, then draw all there are."""
    deadline = time.monotonic() + 60 * options.minutes
    start = make_start(options.threads)
    folder = FOLDER / f"curves-{options.steps}"
    for preset in options.presets:
        if not learn(preset, start, folder, options, deadline):
            print("time is up; call again to resume", flush=True)
            break
        print(f"{preset}: {curve_of(folder / preset)[-1][1]:.1%} after {options.steps} steps", flush=True)
    figure = small_multiples(
        {preset: curve_of(folder / preset) for preset in NAMES},
        title="Every preset on GSM8K's arithmetic",
        subtitle="Accuracy of samples on 1,000 held-out rows; one supervised start, one optimizer, one seed, "
        "32 prompts x 16 samples an update; the other presets in grey",
        x_label="policy updates",
    )
    options.out.write_text(figure, "utf-8")
    print(options.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=("cost", "memory", "curves"), default=["cost", "memory"])
    parser.add_argument("--presets", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="cost: how often every preset has its turn")
    parser.add_argument("--timed-steps", type=int, default=10, help="cost: steps of a turn")
    parser.add_argument("--steps", type=int, default=150, help="curves: policy updates of each run")
    parser.add_argument("--minutes", type=float, default=60, help="curves: no longer than this")
    parser.add_argument("--out", type=Path, default=FIGURE, help="curves: where the figure goes")
    parser.add_argument("--row", choices=MEMORY_ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--precision", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure_memory(options.row, options.precision)))
        return
    for what in options.what:
        {"cost": cost, "memory": memory, "curves": curves}[what](options)


if __name__ == "__main__":
    main()
