"""Not a test: run folders, written as a run writes them."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "observe"))

import numpy as np
from observed import Settings, decode, make_group

from hone.observe.observer import Observer
from hone.observe.recorder import TokenFigures


def write_run(folder: Path, steps: int = 12, lr: float = 1e-3) -> Observer:
    """A run that has made `steps` steps and has not ended."""
    folder.mkdir(parents=True)
    settings = {"run": {"dir": str(folder)}, "train": {"optimizer": {"lr": lr}, "prompts_per_step": 2}}
    settings |= {"rollout": {"group_size": 2}}
    (folder / ".identity.json").write_text(json.dumps({"run_file": "run.yaml", "config": settings}))
    origin = {"command": "hone train run.yaml", "git_commit": "1234abc"}
    observer = Observer(
        folder,
        Settings(),
        title=folder.name,
        group="seeds",
        tags=("math",),
        total_steps=20,
        decode=decode,
        metadata=origin,
    )
    observer.begin("rl", 20)
    add_steps(observer, 1, steps)
    return observer


def add_steps(observer: Observer, first: int, last: int) -> None:
    figures = [TokenFigures(mismatch_T=np.full(2, 0.25), entropy_T=np.full(2, 0.75)), *[TokenFigures()] * 3]
    for step in range(first, last + 1):
        groups = [make_group(0, rewards=(1.0, 1.0)), make_group(1, texts=("4", "<b>22</b>"), rewards=(0.0, 1.0))]
        observer.record("rl", step, groups, [[0.0, 0.0], [-0.5, 0.5]], lambda places: figures)
        measured = {"train/update_kl": 0.01 * step} if step % 4 == 1 else {}
        observer.log("rl", step, {"rollout/reward_mean": step / 20, "train/entropy": 1 / step, **measured})
    observer.log("rl", last, {"eval/accuracy": 0.25, "eval/accuracy_se": 0.01})
    observer.position()  # all of it is on the disk
