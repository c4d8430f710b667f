"""Another task for healthy runs of benchmarks/doctor.py: adding two numbers, by a model of 30 thousand parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _doctor_task import QUIET, Rows, Task

MODEL = {
    "model_type": "qwen3", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 96, "max_position_embeddings": 48,
    "tie_word_embeddings": True,
}  # fmt: skip


def row(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def train_rows() -> Rows:
    return [row(a, b) for a in range(5, 25) for b in range(10)]


def supervised_rows() -> Rows:
    """Mostly of smaller numbers, so that the start is right in part."""
    return [row(a, b) for a in range(6) for b in range(6)] * 12 + train_rows() * 4


def _settings(folder: Path, seed: int) -> dict[str, Any]:
    optimizer = {"lr": 5e-3, "schedule": "cosine", "warmup_steps": 10}
    return {
        "extends": [],
        "seed": seed,
        "run": {"dir": str(folder / "run"), "threads": 1, "device": "cpu"},
        "model": {"characters": "0123456789+=", "init": MODEL},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl", "answer_column": "answer", "max_prompt_tokens": 16},
        "reward": {"components": [{"use": "exact"}]},
        "rollout": {"group_size": 8, "max_response_tokens": 8},
        "train": {"prompts_per_step": 16, "optimizer": {"lr": 1e-3, "warmup_steps": 10}},
        "sft": {"epochs": 6, "rows_per_step": 64, "optimizer": optimizer},
        "eval": {"every": 20},
        "gate": {"enabled": False},
        "checkpoint": {"every": 0},
        "observe": QUIET,
    }


SUMS = Task(_settings, supervised_rows, train_rows, lambda: train_rows()[::5])
