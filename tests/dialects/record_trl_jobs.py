"""Recorder of `trl_jobs.json`: what TRL's own trainer does in 20 steps of the jobs in `trl_jobs/`, on a CPU.

Run where TRL is installed (`pip install trl`), as `python tests/dialects/record_trl_jobs.py`. Nothing of the jobs is
changed: the trainer's methods are wrapped, and what goes in and out of them is written down. test_trl_jobs.py imports
the same files into Hone and gives it the same completions.
"""

import importlib.metadata
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import get_scheduler
from trl import GRPOConfig, GRPOTrainer
from trl_setting import RECORDED, summary, write_setting

VERSIONS = ("trl", "transformers", "torch")
LOGGED = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm"}
LOGGED |= {"clip_ratio/low_mean": "clip_low", "clip_ratio/high_mean": "clip_high"}
"""Name in TRL's log -> in the record."""


SCHEDULES = (
    {"lr_scheduler_type": "linear"},
    {"lr_scheduler_type": "linear", "warmup_steps": 5},
    {"lr_scheduler_type": "cosine", "warmup_steps": 0.1},
    {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
)
"""Arguments of GRPOConfig."""
STEPS = 20


class Recorder:
    """Wraps the methods of GRPOTrainer."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Any]] = []
        """What was sampled together, in the order of the data."""
        self.steps: list[dict[str, float]] = []
        """Of each optimizer step what TRL logs."""
        self.weights: dict[str, list[float]] = {}
        self.wrap("_generate_and_score_completions", self.sampled)
        self.wrap("log", self.logged)
        self.wrap("train", self.trained)

    def wrap(self, name: str, after: Any) -> None:
        inner = getattr(GRPOTrainer, name)

        def wrapped(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            returned = inner(trainer, *args, **kwargs)
            after(trainer, returned, *args)
            return returned

        setattr(GRPOTrainer, name, wrapped)

    def sampled(self, trainer: Any, found: dict[str, torch.Tensor], rows: list[dict[str, Any]]) -> None:
        """One call for all samples that are drawn together, before they are shuffled."""
        logprobs = self.logprobs(trainer, found)
        weights = trainer.reward_weights.tolist()
        scores = [list(trainer._logs["rewards"][name])[-len(rows) :] for name in trainer.reward_func_names]
        mask = found["completion_mask"].bool()
        samples = []
        for i in range(len(rows)):
            samples.append(
                {
                    "prompt": found["prompt_ids"][i][found["prompt_mask"][i].bool()].tolist(),
                    "tokens": found["completion_ids"][i][mask[i]].tolist(),
                    "logprobs": [round(value, 7) for value in logprobs[i][mask[i]].tolist()],
                    "reward": sum(w * score[i] for w, score in zip(weights, scores, strict=True)),
                    "advantage": found["advantages"][i].item(),
                }
            )
        self.updates.append({"samples": samples})

    def logprobs(self, trainer: Any, found: dict[str, torch.Tensor]) -> torch.Tensor:
        """(samples, tokens) by TRL's own function, under the weights that sampled."""
        ids = torch.cat([found["prompt_ids"], found["completion_ids"]], 1)
        mask = torch.cat([found["prompt_mask"], found["completion_mask"]], 1)
        with torch.no_grad():
            logprobs, *_ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, found["completion_ids"].shape[1]
            )
        return logprobs

    def logged(self, trainer: Any, _: None, logs: dict[str, float], *rest: Any) -> None:
        if "learning_rate" in logs:
            self.steps.append({ours: logs[theirs] for theirs, ours in LOGGED.items() if theirs in logs})

    def trained(self, trainer: Any, _: Any, *args: Any) -> None:
        self.weights = summary(dict(trainer.model.named_parameters()))


def run_job(name: str) -> None:
    """As a user runs it: a Python file, or a YAML for `trl grpo`."""
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
        return
    from trl.scripts.grpo import main, make_parser

    sys.argv = ["trl grpo", "--config", name]
    main(*make_parser().parse_args_and_config(fail_with_unknown_args=False))


def record(name: str) -> dict[str, Any]:
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        write_setting(Path(folder))
        os.chdir(folder)
        sys.path.insert(0, folder)
        run_job(name)
    return {"updates": recorder.updates, "steps": recorder.steps, "weights": recorder.weights}


def learning_rates(arguments: dict[str, Any]) -> list[float]:
    """Of each of STEPS optimizer steps, by the scheduler that the trainer makes of its arguments."""
    config = GRPOConfig("out", learning_rate=1.0, max_steps=STEPS, use_cpu=True, bf16=False, **arguments)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    scheduler = get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.get_warmup_steps(STEPS),
        num_training_steps=STEPS,
        scheduler_specific_kwargs=config.lr_scheduler_kwargs,
    )
    found = []
    for _ in range(STEPS):
        found += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    return found


def main() -> None:
    """Each job in a process of its own, for the wrapped methods; `python record_trl_jobs.py JOB` is one of them."""
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        name, to = sys.argv[1:]
        Path(to).write_text(json.dumps(record(name)), "utf-8")
        return
    found: dict[str, Any] = {"versions": {name: importlib.metadata.version(name) for name in VERSIONS}}
    found["schedules"] = [{"arguments": one, "lr": learning_rates(one)} for one in SCHEDULES]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("dapo.py", "classic.yaml"):
            part = Path(folder) / f"{name}.json"
            if os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, name, str(part)]):
                raise SystemExit(f"{name} failed")
            found[name] = json.loads(part.read_text("utf-8"))
    RECORDED.write_text(json.dumps(found) + "\n", "utf-8")


if __name__ == "__main__":
    main()
