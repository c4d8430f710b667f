"""Training a reward model on preferences, step by step, and measuring it on pairs held out.

Packing, optimizer, checkpoints and observer are those of the other stages. What is measured at the end is what the
exported model says of itself: `normalize` in RL subtracts its mean and divides by its standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hone.config.run import PreferenceSection
from hone.data.order import RowOrder
from hone.data.pairs import PreferencePair
from hone.loop.run import Stage, due, now
from hone.loop.sft import rows_of_step
from hone.model.heads import MEAN, STD
from hone.train.pairs import Measured, PairLearner


@dataclass
class RewardModelRun(Stage[PairLearner]):
    """A reward-model stage."""

    pairs: Sequence[PreferencePair]
    order: RowOrder
    held_out: Sequence[PreferencePair]


def total_steps(settings: PreferenceSection, num_pairs: int) -> int:
    """Optimizer steps of the whole stage."""
    return math.ceil(settings.epochs * num_pairs / settings.pairs_per_step)


async def train_reward_model(run: RewardModelRun) -> None:
    """Learn until the epochs are done or a stop is asked for; once done, describe the model in its own config.

    The caller saves the end.
    """
    progress, settings, config = run.progress, run.config.rm, run.config
    steps = total_steps(settings, len(run.pairs))
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
        describe(run, measured)


async def measure(run: RewardModelRun) -> Measured:
    """The model as it is now, on the pairs held out."""
    with run.observer.span("evaluate"):
        return await run.in_compute_thread(run.trainer.measure, run.held_out)


def describe(run: RewardModelRun, measured: Measured) -> None:
    """Put mean and standard deviation of the scores into what will be config.json, and log them."""
    setattr(run.trainer.hf_config, MEAN, measured.score_mean)
    setattr(run.trainer.hf_config, STD, measured.score_std)
    run.observer.say(
        f"on {len(run.held_out):,} pairs held out: accuracy {measured.accuracy:.3f}, loss {measured.loss:.3f} nats, "
        f"scores {measured.score_mean:.3f} +- {measured.score_std:.3f}"
    )
