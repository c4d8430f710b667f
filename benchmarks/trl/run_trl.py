"""The TRL side: one run of GRPOTrainer, one JSON line with its speed and its reward curve.

    python benchmarks/trl/run_trl.py --case 0.8M --model runs/trl/0.8M --prompts runs/trl/prompts-0-100.jsonl \\
        --settings best --seed 0 --steps 100

Runs in an environment of its own, which `benchmarks/trl_compare.py` makes. `newcomer` sets what the task needs and
leaves the rest to TRL 1.16; `best` is the fastest of what TRL offers on a CPU that we found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time

import torch
from cases import BETAS, CASES, GROUP_SIZE, LEARNING_RATE, PROMPTS_PER_STEP, correct
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SAMPLES_PER_STEP = PROMPTS_PER_STEP * GROUP_SIZE

NEWCOMER = {"gradient_accumulation_steps": SAMPLES_PER_STEP // 8}
BEST = {
    "per_device_train_batch_size": SAMPLES_PER_STEP,
    "gradient_checkpointing": False,
    "bf16": True,
    "optim": "adamw_torch_fused",
    "logging_steps": 10_000,
}


class StepTimes(TrainerCallback):
    """Wall time, and processor time of all threads, from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.ends = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append((time.perf_counter(), time.process_time()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--settings", choices=["newcomer", "best"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", type=json.loads, default={}, help="GRPOConfig values to try, as JSON")
    options = parser.parse_args()
    case = CASES[options.case]
    torch.set_num_threads(options.threads)

    curve: list[float] = []
    lengths: list[float] = []
    pending: list[float] = []

    def reward(completions: list[str], answer: list[str], completion_ids: list[list[int]], **columns) -> list[float]:
        values = [correct(text, gold) for text, gold in zip(completions, answer, strict=True)]
        pending.extend(values)
        lengths.append(statistics.fmean(map(len, completion_ids)))
        if len(pending) == SAMPLES_PER_STEP:
            curve.append(statistics.fmean(pending))
            pending.clear()
        return values

    times = StepTimes()
    settings = (NEWCOMER if options.settings == "newcomer" else BEST) | options.set
    attention = settings.pop("attention", "sdpa" if options.settings == "newcomer" else "eager")
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, attn_implementation=attention),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            reward_funcs=reward,
            train_dataset=load_dataset("json", data_files=options.prompts, split="train", cache_dir=scratch),
            callbacks=[times],
            args=GRPOConfig(
                output_dir=scratch,
                use_cpu=True,
                num_generations=GROUP_SIZE,
                max_completion_length=case.max_response_tokens,
                max_steps=options.steps,
                learning_rate=LEARNING_RATE,
                adam_beta1=BETAS[0],
                adam_beta2=BETAS[1],
                loss_type="grpo",
                shuffle_dataset=False,
                seed=options.seed,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                **settings,
            ),
        )
        trainer.train()

    pairs = list(itertools.pairwise(times.ends))
    step_s, step_cpu_s = ([end[i] - start[i] for start, end in pairs] for i in (0, 1))
    print(
        json.dumps(
            {
                "step_s": step_s,
                "step_cpu_s": step_cpu_s,
                "response_tokens_mean": statistics.fmean(lengths),
                "rewards": [round(value, 4) for value in curve],
            }
        )
    )


if __name__ == "__main__":
    main()
