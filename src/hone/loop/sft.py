"""Supervised fine-tuning: imitate given responses. The warm-up before RL, through the same trainer and loss.

An SFT row is a batch whose advantages are 1 and whose ratio is none: minus the mean log-likelihood of the
response's tokens. So packing, chunked logprobs, optimizer and checkpoints are those of RL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hone.algo.algorithm import Algorithm
from hone.config.run import AlgorithmSection, SftSection
from hone.data.prompts import SftRow, epoch_order
from hone.loop.run import Stage, due, now
from hone.types import Batch

IMITATION = Algorithm(AlgorithmSection(ratio="none", clip="none", aggregate="token_mean"))


@dataclass
class SftRun(Stage):
    """A supervised stage."""

    rows: Sequence[SftRow]


def total_steps(settings: SftSection, num_rows: int) -> int:
    """Optimizer steps of the whole stage."""
    return math.ceil(settings.epochs * num_rows / settings.rows_per_step)


async def train_sft(run: SftRun) -> None:
    """Imitate until the epochs are done or a stop is asked for. The caller saves the end."""
    progress, settings = run.progress, run.config.sft
    steps = total_steps(settings, len(run.rows))
    while progress.step < steps and not run.stop.is_set():
        started = now()
        with run.observer.span("train"):
            batch = batch_of([run.rows[i] for i in rows_of_step(run, progress.step)], run.trainer.device)
            metrics = await run.in_compute_thread(run.trainer.update, batch, IMITATION)
        progress.step += 1
        seconds = now() - started
        run.observer.log(
            "sft",
            progress.step,
            {
                "sft/loss": metrics["train/loss"],
                "sft/lr": metrics["train/lr"],
                "sft/grad_norm": metrics["train/grad_norm"],
                "sft/tokens_per_s": len(batch.token_ids_T) / seconds,
                "time/step_s": seconds,
            },
        )
        if due(progress.step, run.config.checkpoint.every) and progress.step < steps:
            await run.save()


def rows_of_step(run: SftRun, step: int) -> list[int]:
    """Which rows step number `step` trains on: a slice of an endless stream of shuffled epochs.

    A function of (seed, step) alone, so that a resumed run needs nothing but the step.
    """
    count, num_rows = run.config.sft.rows_per_step, len(run.rows)
    rows: list[int] = []
    while len(rows) < count:
        epoch, start = divmod(step * count + len(rows), num_rows)
        order = epoch_order(num_rows, seed=run.config.seed, epoch=epoch)
        rows += order[start : start + count - len(rows)]
    return rows


def batch_of(rows: Sequence[SftRow], device: torch.device) -> Batch:
    """A batch that imitates: every response token has loss and advantage 1."""
    lengths = torch.tensor([len(response) for _, response in rows], device=device)
    tokens = torch.tensor([token for _, response in rows for token in response], device=device)
    ones = torch.ones(len(tokens), device=device)
    return Batch(
        prompts=tuple(tuple(prompt) for prompt, _ in rows),
        prompt_S=torch.arange(len(rows), device=device),
        length_S=lengths,
        token_ids_T=tokens,
        loss_mask_T=ones,
        sampler_logprobs_T=torch.zeros_like(ones),
        reward_S=torch.ones(len(rows), device=device),
        columns={"advantages_T": ones},
    )
