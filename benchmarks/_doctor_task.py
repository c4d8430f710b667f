"""The task of benchmarks/doctor.py: the quickstart's, from a supervised start that all faults of a seed share.

Model, rows, reward, learning rate and algorithm are those of examples/quickstart/run.yaml. Smaller are the batch (16
prompts x 16 samples), the number of steps and the evaluation; larger is the limit of a response, so that there is room
to become longer. The supervised rows hold three things more, which faults need: some rows copy (answers that leak,
prompts that are easy), and one in ten has zeros behind its answer (a start that sometimes writes more than it must).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
QUICKSTART = EXAMPLES / "quickstart"
STEPS = 40
PROMPTS, SAMPLES = 16, 16
"""Of a step."""
RESPONSE_TOKENS = 12
SUPERVISED = 24_000
"""Rows of the quickstart's supervised stage that the start is made of: of them it is right in part."""
QUIET = {"console": "quiet", "tensorboard": False, "trace": False, "samples_max_mib": 0}
Rows = list[dict[str, Any]]


def rows_of(name: str) -> Rows:
    return [json.loads(line) for line in (QUICKSTART / name).read_text("utf-8").splitlines()]


def written(number: int, digits: int) -> str:
    """As in examples/quickstart/make_data.py: of fixed width, from the least significant digit."""
    return str(number).zfill(digits)[::-1]


@lru_cache(maxsize=1)
def train_rows() -> Rows:
    """What the quickstart's GRPO asks."""
    return rows_of("train.jsonl")[32_000:]


@lru_cache(maxsize=1)
def eval_rows() -> Rows:
    """Expressions that no row of either stage asks."""
    unseen = [row for row in rows_of("test.jsonl") if not row["seen"]]
    return [{"prompt": row["prompt"], "answer": row["answer"]} for row in unseen[:100]]


def leaked(rows: Rows) -> Rows:
    """The answer stands in front of the expression, where there is room for it."""
    return [row | {"prompt": f"{row['answer']}={row['prompt']}"} for row in rows if len(row["prompt"]) <= 10]


def easy_rows() -> Rows:
    """One number, to be copied."""
    return [{"prompt": f"{written(n, 4)}=", "answer": written(n, 5)} for n in range(1000, 9000, 7)]


def hard_rows() -> Rows:
    """Products of three and two digits, which the start has never right."""
    numbers = random.Random(0)
    pairs = [(numbers.randrange(301, 999), numbers.randrange(51, 99)) for _ in range(400)]
    return [{"prompt": f"{written(a, 4)}*{written(b, 4)}=", "answer": written(a * b, 5)} for a, b in pairs]


def supervised_rows() -> Rows:
    chance = random.Random(0)
    rows = rows_of("train.jsonl")[:SUPERVISED]
    rows = [
        row | {"answer": row["answer"] + "0" * chance.randint(1, 4)} if chance.random() < 0.1 else row for row in rows
    ]
    rows += leaked(rows_of("train.jsonl")[SUPERVISED:32_000])[:3000] + easy_rows()
    chance.shuffle(rows)
    return rows


def write_rows(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True)
class Task:
    """What a run is about."""

    settings: Callable[[Path, int], dict[str, Any]]
    """Takes a folder, which has train.jsonl and eval.jsonl, and a seed; both stages."""
    supervised: Callable[[], Rows]
    train: Callable[[], Rows]
    eval: Callable[[], Rows]

    def base(self, folder: Path, start: Path, seed: int) -> dict[str, Any]:
        """A run that learns: from the supervised weights in `start`."""
        model = {"path": str(start), "init": None, "characters": None}
        return self.settings(folder, seed) | {"stages": ["rl"], "model": model}


def _settings(folder: Path, seed: int) -> dict[str, Any]:
    """The quickstart's run file with other rows."""
    return {
        "extends": [str(QUICKSTART / "run.yaml")],
        "seed": seed,
        "run": {"dir": str(folder / "run"), "steps": STEPS, "threads": 1, "device": "cpu"},
        "data": {
            "train": str(folder / "train.jsonl"),
            "train_rows": None,
            "eval": str(folder / "eval.jsonl"),
            "max_prompt_tokens": 24,
        },
        "reward": {"components": [{"use": "exact"}]},
        "rollout": {"group_size": SAMPLES, "max_response_tokens": RESPONSE_TOKENS},
        "train": {"prompts_per_step": PROMPTS},
        "sft": {"rows": None},
        "eval": {"every": 20, "by": None},
        "gate": {"enabled": False},
        "checkpoint": {"every": 0},
        "observe": QUIET,
    }


ARITHMETIC = Task(_settings, supervised_rows, train_rows, eval_rows)
