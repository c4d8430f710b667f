"""The healthy runs of benchmarks/doctor.py: several tasks and algorithms, in which every alarm is a false one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from _doctor_faults import LR, LR_CRITIC, PPO
from _doctor_sums import SUMS
from _doctor_task import ARITHMETIC, Task


@dataclass(frozen=True)
class Healthy:
    """One run."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys over those of its task."""
    of: Task | str = ARITHMETIC
    """Its task, or a run file in examples/."""
    extends: tuple[str, ...] = ()
    """Presets over the task's."""
    steps: int | None = 100
    """None: as the run file has it."""
    is_start: bool = False
    """It is the supervised start of its task, from which the task's other runs begin."""


def start_name(task: str) -> str:
    return f"{task}: supervised start"


def sums(name: str, algorithm: str = "grpo", settings: Mapping[str, Any] | None = None) -> Healthy:
    """At 3e-4: at the task's own rate the reward moves up and down."""
    return Healthy(f"sums: {name}", {LR: 3e-4} | dict(settings or {}), SUMS, (f"algorithm/{algorithm}",), 200)


def quickstart(name: str, algorithm: str = "grpo", settings: Mapping[str, Any] | None = None) -> Healthy:
    return Healthy(f"quickstart: {name}", settings or {}, extends=(f"algorithm/{algorithm}",))


HEALTHY = (
    Healthy(start_name("sums"), of=SUMS, is_start=True),
    sums("grpo"),
    sums("dr_grpo", "dr_grpo"),
    sums("rloo", "rloo"),
    sums("reinforce_pp", "reinforce_pp"),
    sums("gspo, 2 steps", "gspo", {"train.samples_per_optimizer_step": 64}),
    sums("dapo", "dapo"),
    sums("ppo", "ppo", PPO | {LR_CRITIC: 3e-3}),
    sums("grpo with KL", settings={"algorithm.kl_loss_coef": 0.02}),
    sums("overlapped", settings={"rollout.max_staleness": 1}),
    sums(
        "two components",
        settings={
            "reward.components": [
                {"use": "exact"},
                {"use": "length", "weight": 0.1, "args": {"target_tokens": 3, "tolerance_tokens": 1}},
            ]
        },
    ),
    Healthy(start_name("quickstart"), is_start=True),
    Healthy("quickstart: as the faults' base"),
    quickstart("grpo"),
    quickstart("dr_grpo", "dr_grpo"),
    quickstart("rloo", "rloo"),
    quickstart("gspo, 2 steps", "gspo", {"train.samples_per_optimizer_step": 128}),
    quickstart("dapo", "dapo"),
    quickstart("ppo", "ppo", PPO | {"critic.warmup_updates": 10}),
    quickstart("grpo with KL", settings={"algorithm.kl_loss_coef": 0.02}),
    quickstart("adapter", settings={"lora.rank": 8, LR: 1e-3}),
    quickstart("staleness 2", settings={"rollout.max_staleness": 2}),
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
