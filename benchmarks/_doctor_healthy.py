"""The healthy runs of benchmarks/doctor.py: several tasks and algorithms, in which every alarm is a false one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _doctor_faults import LR, PPO

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@dataclass(frozen=True)
class Healthy:
    """One run."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys over those of its task."""
    example: str | None = None
    """A run file in examples/ that it extends; None: the base run of the faults."""
    start: str | None = None
    """The run before whose weights it starts from."""
    extends: tuple[str, ...] = ()
    """Presets over the run file."""
    steps: int | None = 200
    """None: as the run file has it."""


GENTLE = {LR: 3e-4}
"""Of healthy runs of sums: at the faults' rate the reward moves up and down."""


def on_quickstart(name: str, algorithm: str, steps: int = 100, **settings: Any) -> Healthy:
    """RL on the quickstart's task, from weights that it is right with in part."""
    smaller = {"stages": ["rl"], "rollout.group_size": 16, "eval.every": 50}
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return Healthy(name, smaller | named, "quickstart/run.yaml", "quickstart sft", (f"algorithm/{algorithm}",), steps)


HEALTHY = (
    Healthy("sums: grpo"),
    Healthy("sums: dr_grpo", extends=("algorithm/dr_grpo",)),
    Healthy("sums: rloo", extends=("algorithm/rloo",)),
    Healthy("sums: reinforce_pp", extends=("algorithm/reinforce_pp",)),
    Healthy("sums: gspo, 2 steps", {"train.samples_per_optimizer_step": 64}, extends=("algorithm/gspo",)),
    Healthy("sums: dapo", extends=("algorithm/dapo",)),
    Healthy("sums: ppo", PPO),
    Healthy("sums: grpo with KL", {"algorithm.kl_loss_coef": 0.02}),
    Healthy("sums: overlapped", {"rollout.max_staleness": 1}),
    Healthy(
        "sums: two components",
        {
            "reward.components": [
                {"use": "exact"},
                {"use": "length", "weight": 0.1, "args": {"target_tokens": 3, "tolerance_tokens": 1}},
            ]
        },
    ),
    Healthy("quickstart sft", {"stages": ["sft"], "sft.rows": "0:24000"}, "quickstart/run.yaml", steps=None),
    on_quickstart("quickstart: grpo", "grpo"),
    on_quickstart("quickstart: dr_grpo", "dr_grpo"),
    on_quickstart("quickstart: rloo", "rloo"),
    on_quickstart("quickstart: gspo, 2 steps", "gspo", train__samples_per_optimizer_step=256),
    on_quickstart("quickstart: dapo", "dapo"),
    on_quickstart("quickstart: ppo", "ppo", critic__warmup_updates=10, critic__optimizer__lr=1e-3),
    on_quickstart("quickstart: adapter", "grpo", lora__rank=8, train__optimizer__lr=1e-3),
    on_quickstart("quickstart: staleness 2", "grpo", rollout__max_staleness=2),
    Healthy("calculator: several turns", {"sft.epochs": 4}, "calculator/run.yaml", steps=40),
    Healthy("pictures", {"train.prompts_per_step": 32}, "pictures/run.yaml", steps=60),
    Healthy("poster", {"sft.epochs": 6}, "poster/run.yaml", steps=30),
    Healthy("reward model", {}, "reward-model/run-rm.yaml", steps=None),
    Healthy(
        "reward from that model",
        {
            "reward.components": [
                {
                    "use": "reward_model",
                    "args": {"path": "../reward-model/run/hf", "normalize": True},
                    "timeout_s": 60,
                },
                {"use": "exact", "weight": 0},
            ]
        },
        "reward-model/run-rl.yaml",
        steps=80,
    ),
)
