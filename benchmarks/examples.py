"""Every run file of examples/ that fits a laptop, run to its end: what each learns, in one figure and one table.

    python benchmarks/examples.py --minutes 30        # about two hours of one core in all; call again to resume
    python benchmarks/examples.py --examples ppo lora
    python benchmarks/examples.py --minutes 0         # only draw what there is

Each run file is taken as it stands, in a process with one thread, into runs/examples; remove that folder to begin anew.
One run each, one seed, so a difference of a point or two says nothing. A curve is a share: of right answers among
held-out rows, of pairs ranked right, of samples that call the tool. Of a loss the figure shows exp(-loss), the
likelihood of a token. `ppo`, `lora` and the variations have the task of `gsm8k-arithmetic`, and all start
from the same supervised stage. Not here: examples/gsm8k, which needs a model from elsewhere.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._figure import Points, small_multiples
from benchmarks._runs import ROOT, lines_of, train_until

FOLDER = ROOT / "runs" / "examples"
FIGURE = ROOT / "docs" / "examples.svg"


@dataclass(frozen=True)
class Curve:
    """One panel of the figure and one row of the table."""

    panel: str
    metric: str
    over: int = 1
    """Logged values that a point is the mean of; more than 1 where each is of one small step."""
    share: Callable[[float], float] = float
    """From the metric to a share, which is what the figure shows."""


@dataclass(frozen=True)
class Example:
    """A run file, and what to look at in its run."""

    run_file: str
    """Relative to examples/."""
    curves: tuple[Curve, ...]
    settings: tuple[str, ...] = ()
    """Only of paths: what the run file looks for in runs/ is in `FOLDER` here."""


def accuracy(panel: str, metric: str = "eval/accuracy") -> tuple[Curve, ...]:
    return (Curve(panel, metric),)


def likelihood(loss: float) -> float:
    """Geometric mean over tokens, from their mean negative logprob."""
    return math.exp(-loss)


RM = f"{{path: {FOLDER / 'reward-model' / 'hf'}, normalize: true}}"
EXAMPLES = {
    "gsm8k-arithmetic": Example("gsm8k-arithmetic/run.yaml", accuracy("gsm8k-arithmetic")),
    "ppo": Example("ppo/run.yaml", accuracy("ppo")),
    "lora": Example("lora/run.yaml", accuracy("lora")),
    "kl-control": Example("variations/kl-control.yaml", accuracy("kl-control")),
    "optimizer-steps": Example("variations/optimizer-steps.yaml", accuracy("optimizer-steps")),
    "shaping": Example("variations/shaping.yaml", accuracy("shaping")),
    "off-policy": Example("variations/off-policy.yaml", accuracy("off-policy")),
    "evaluation": Example("variations/evaluation.yaml", accuracy("evaluation: pass@4", "eval/pass@4")),
    "calculator": Example(
        "calculator/run.yaml",
        (
            Curve("calculator", "eval/accuracy"),
            Curve("calculator: tool used", "rollout/env_tool_used_mean", over=3),
        ),
    ),
    "reward-model": Example("reward-model/run-rm.yaml", accuracy("reward-model: pairs", "rm/eval_accuracy")),
    "reward-model-rl": Example(
        "reward-model/run-rl.yaml",
        (Curve("reward-model: policy", "reward/exact_mean", over=10),),
        (f"reward.components=[{{use: reward_model, args: {RM}, timeout_s: 60}}, {{use: exact, weight: 0}}]",),
    ),
    "sft-chat": Example("sft-chat/run.yaml", (Curve("sft-chat: exp(-loss)", "sft/loss", over=3, share=likelihood),)),
    "pictures": Example("pictures/run.yaml", accuracy("pictures", "eval/reward_mean")),
    "poster": Example("poster/run.yaml", accuracy("poster: reward", "eval/reward_mean")),
}


def curve_of(run: Path, curve: Curve) -> Points:
    """The metric by step, in its own unit; each point the mean of `curve.over` lines, at the last one's step."""
    logged = [(line["step"], line[curve.metric]) for line in lines_of(run) if curve.metric in line]
    parts = [logged[i : i + curve.over] for i in range(0, len(logged) - curve.over + 1, curve.over)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def run_all(names: Sequence[str], deadline: float) -> None:
    """Make the runs that time allows, in order."""
    for name in names:
        example = EXAMPLES[name]
        run_file = ROOT / "examples" / example.run_file
        if not train_until(deadline, run_file, FOLDER / name, [*example.settings, "run.threads=1"]):
            print("time is up; call again to resume", flush=True)
            return
        print(f"{name}: done", flush=True)


def table() -> str:
    """A row for each curve of a run that has been begun."""
    rows = ["| run file of examples/ | what | first | last | best | at step |", "|---|---|---|---|---|---|"]
    for name, example in EXAMPLES.items():
        for curve in example.curves:
            points = curve_of(FOLDER / name, curve)
            if points:
                best = max(points, key=lambda point: curve.share(point[1]))[1]
                cells = " | ".join(f"{value:.3f}" for value in (points[0][1], points[-1][1], best))
                rows.append(f"| `{example.run_file}` | `{curve.metric}` | {cells} | {points[-1][0]} |")
    return "\n".join(rows)


def figure() -> str:
    """A panel for each curve."""
    shares = {
        curve.panel: [(step, curve.share(value)) for step, value in curve_of(FOLDER / name, curve)]
        for name, example in EXAMPLES.items()
        for curve in example.curves
    }
    return small_multiples(
        shares,
        title="Every example",
        subtitle="Accuracy on held-out rows where a panel says nothing else; one run, one seed, one thread each",
        x_label="policy updates, or steps of supervised training",
        comparable=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--minutes", type=float, default=30, help="no longer than this; the next call resumes")
    parser.add_argument("--out", type=Path, default=FIGURE, help="where the figure goes")
    options = parser.parse_args()
    run_all(options.examples, time.monotonic() + 60 * options.minutes)
    options.out.write_text(figure(), "utf-8")
    print(f"\n{table()}\n\n{options.out}")


if __name__ == "__main__":
    main()
