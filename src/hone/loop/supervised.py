"""Supervised stages: SFT on given responses, and reward-model training on preference pairs.

An SFT row is a batch whose advantages are 1 and whose ratio is none: minus the mean log-likelihood of the
response's tokens. So packing, chunked logprobs, optimizer and checkpoints are those of RL. What is measured at the end
of a reward model's training is what the exported model says of itself: `normalize` in RL subtracts its mean and divides
by its standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hone.algo.algorithm import Algorithm
from hone.config.algorithm import AlgorithmSection
from hone.config.derived import longest_tokens
from hone.config.run import PreferenceSection, RunConfig, SftSection
from hone.data.cache import DEFAULT_CACHE, DataCache
from hone.data.chat import Tokenizer
from hone.data.lazy import LazyRows, SampleSize
from hone.data.order import RowOrder
from hone.data.pack import joined, pictures_of
from hone.data.pairs import PreferencePair
from hone.data.prompts import SftRow, load_sft_rows
from hone.data.sft_chat import load_chat_rows
from hone.loop.run import Stage, due, now
from hone.model.heads import MEAN, STD
from hone.train.pairs import Measured, PairLearner
from hone.train.trainer import Trainer
from hone.types import Batch

SFT_ALGORITHM = Algorithm(AlgorithmSection(ratio="none", clip="none", aggregate="token_mean"))


@dataclass
class SftRun(Stage[Trainer]):
    """A supervised stage."""

    rows: Sequence[SftRow]
    order: RowOrder


def sft_rows(
    config: RunConfig,
    tokenizer: Tokenizer,
    folder: Path,
    cache: DataCache = DEFAULT_CACHE,
    *,
    sample: SampleSize | None = None,
) -> LazyRows[SftRow]:
    """What SFT trains on: responses after prompts, or the assistant's turns of whole conversations.
    `sample` is as of `load_lazily`.

    Raises DataError as `load_sft_rows` and `load_chat_rows` do.
    """
    if config.sft.messages_column is None:
        return load_sft_rows(config.data, config.sft, tokenizer, folder, cache=cache, sample=sample)
    longest = longest_tokens(config)
    return load_chat_rows(config.data, config.sft, tokenizer, folder, max_tokens=longest, cache=cache, sample=sample)


def sft_steps(sft: SftSection, num_rows: int) -> int:
    """Optimizer steps of the whole stage."""
    return math.ceil(sft.epochs * num_rows / sft.rows_per_step)


async def train_sft(run: SftRun) -> None:
    """Train until the epochs are done or a stop is asked for. The caller saves the end."""
    progress, settings = run.progress, run.config.sft
    steps = sft_steps(settings, len(run.rows))
    while progress.step < steps and not run.stop.is_set():
        started = now()
        with run.observer.span("train"):
            rows = rows_of_step(run.order, progress.step, count=settings.rows_per_step)
            batch = batch_of([run.rows[i] for i in rows], run.trainer.device)
            metrics = await run.in_compute_thread(run.trainer.update, batch, SFT_ALGORITHM)
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


def rows_of_step(order: RowOrder, step: int, *, count: int) -> list[int]:
    """Which `count` rows step number `step` trains on: a slice of the endless stream, so that a resumed run needs
    nothing but the step."""
    return order.at(step * count, (step + 1) * count).tolist()


def batch_of(rows: Sequence[SftRow], device: torch.device) -> Batch:
    """An SFT batch: advantage 1, and loss on every response token that the row's mask does not exclude."""
    lengths = torch.tensor([len(row.response) for row in rows], device=device)
    tokens = torch.from_numpy(joined([row.response for row in rows], np.int64)).to(device)
    ones = torch.ones(len(tokens), device=device)
    masks = [np.ones(len(row.response)) if row.loss_mask is None else row.loss_mask for row in rows]
    return Batch(
        prompts=tuple(row.prompt for row in rows),
        prompt_S=torch.arange(len(rows), device=device),
        length_S=lengths,
        token_ids_T=tokens,
        loss_mask_T=torch.from_numpy(joined(masks, np.float32)).to(device),
        sampler_logprobs_T=torch.zeros_like(ones),
        reward_S=torch.ones(len(rows), device=device),
        columns={"advantages_T": ones},
        pictures=pictures_of([row.pictures for row in rows]),
    )


@dataclass
class RewardModelRun(Stage[PairLearner]):
    """A reward-model stage."""

    pairs: Sequence[PreferencePair]
    order: RowOrder
    held_out: Sequence[PreferencePair]


def preference_steps(rm: PreferenceSection, num_pairs: int) -> int:
    """Optimizer steps of the whole stage."""
    return math.ceil(rm.epochs * num_pairs / rm.pairs_per_step)


async def train_reward_model(run: RewardModelRun) -> None:
    """Learn until the epochs are done or a stop is asked for; once done, describe the model in its own config.

    The caller saves the end.
    """
    progress, settings, config = run.progress, run.config.rm, run.config
    steps = preference_steps(settings, len(run.pairs))
    measured: Measured | None = None
    while progress.step < steps and not run.stop.is_set():
        started = now()
        with run.observer.span("train"):
            rows = rows_of_step(run.order, progress.step, count=settings.pairs_per_step)
            metrics = await run.in_compute_thread(run.trainer.update, [run.pairs[i] for i in rows])
        progress.step += 1
        if progress.step == steps or due(progress.step, config.eval.every):
            measured = await measure(run)
            metrics |= {
                "rm/eval_loss": measured.loss,
                "rm/eval_accuracy": measured.accuracy,
                "rm/eval_score_mean": measured.score_mean,
                "rm/eval_score_std": measured.score_std,
            }
        seconds = now() - started
        timing = {"rm/pairs_per_s": len(rows) / seconds, "time/step_s": seconds}
        run.observer.log("reward_model", progress.step, metrics | timing)
        if due(progress.step, config.checkpoint.every) and progress.step < steps:
            await run.save()
    if progress.step == steps:
        measured = measured or await measure(run)  # killed between the last step and the export: the line is logged
        setattr(run.trainer.hf_config, MEAN, measured.score_mean)
        setattr(run.trainer.hf_config, STD, measured.score_std)
        run.observer.say(
            f"on {len(run.held_out):,} pairs held out: accuracy {measured.accuracy:.3f}, loss {measured.loss:.3f} "
            f"nats, scores {measured.score_mean:.3f} +- {measured.score_std:.3f}"
        )


async def measure(run: RewardModelRun) -> Measured:
    """The model as it is now, on the pairs held out."""
    with run.observer.span("evaluate"):
        return await run.in_compute_thread(run.trainer.measure, run.held_out)
