"""Evaluation: sample held-out prompts with the live engine, score them, report unbiased estimates.

Samples are keyed by (seed, "eval", prompt, sample), so two evaluations differ only by the weights.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hone.config.rules.data import flat
from hone.config.run import EvalSection
from hone.loop.summaries import pass_rate
from hone.observe.metrics import error_name
from hone.reward.rewards import Rewards
from hone.rollout.engine import Engine, Request, Sampling
from hone.rollout.env import episode_metrics
from hone.types import Group, Prompt


@dataclass(frozen=True)
class Evaluation:
    """Samples of an evaluation, and its metrics."""

    groups: tuple[Group, ...]
    metrics: Mapping[str, float]


async def evaluate(
    engine: Engine, rewards: Rewards, prompts: Sequence[Prompt], sampling: Sampling, settings: EvalSection, *, seed: int
) -> Evaluation:
    """Sample `settings.samples` responses per prompt and score them."""

    async def one(prompt: Prompt) -> Group:
        async with rewards.begin(prompt) as scoring:
            request = Request(prompt, settings.samples, sampling, seed, "eval")
            return await scoring.finish(await engine.generate(request, scoring.on_sample))

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(prompt)) for prompt in prompts]
    groups = tuple(task.result() for task in running)
    return Evaluation(groups, metrics_of(groups, settings))


def metrics_of(groups: Sequence[Group], settings: EvalSection) -> dict[str, float]:
    """`eval/*` metrics; unscored samples count as neither right nor wrong, and `eval/unscored_frac` says how many."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [reward for group in groups for reward in group.rewards]
    right = partial(pass_rate, threshold=settings.threshold)
    metrics = {
        **with_error("eval/reward_mean", groups, reward_mean),
        **with_error("eval/accuracy", groups, right),
        "eval/unscored_frac": 1 - sum(reward is not None for reward in rewards) / max(1, len(rewards)),
        "eval/response_tokens_mean": float(np.mean([len(s.token_ids) for s in samples])),
        "eval/truncated_frac": sum(s.finish_reason == "length" for s in samples) / max(1, len(samples)),
    }
    metrics |= episode_metrics(samples, "eval/")
    for k in settings.pass_k:
        metrics |= with_error(f"eval/pass@{k}", groups, partial(pass_at_k, k=k, threshold=settings.threshold))
    metrics |= accuracy_by("source", [group.prompt.source for group in groups], groups, settings.threshold)
    if settings.by is not None:
        values = [str(flat(group.prompt.columns).get(settings.by)) for group in groups]
        metrics |= accuracy_by(settings.by, values, groups, settings.threshold)
    return metrics


def accuracy_by(name: str, values: Sequence[str], groups: Sequence[Group], threshold: float) -> dict[str, float]:
    """The accuracy of each part of the groups, which have one value each, with its error; none for an empty value."""
    found: dict[str, float] = {}
    for value in sorted(set(values) - {""} if name == "source" else set(values)):
        part = [group for group, own in zip(groups, values, strict=True) if own == value]
        found |= with_error(f"eval/accuracy[{name}={value}]", part, partial(pass_rate, threshold=threshold))
    return found


def with_error(name: str, groups: Sequence[Group], measure: Callable[[Sequence[Group]], float]) -> dict[str, float]:
    """A metric of the groups, and its standard error over prompts, whose samples are alike, where there are two."""
    each = [value for group in groups if not math.isnan(value := measure([group]))]
    error = {error_name(name): float(np.std(each, ddof=1)) / math.sqrt(len(each))} if len(each) > 1 else {}
    return {name: measure(groups), **error}


def reward_mean(groups: Sequence[Group]) -> float:
    """Over scored samples."""
    scored = [reward for group in groups for reward in group.known_rewards]
    return float(np.mean(scored)) if scored else float("nan")


def pass_at_k(groups: Sequence[Group], k: int, threshold: float) -> float:
    """Unbiased estimate of the chance that one of k samples is right: mean of 1 - C(n-c, k) / C(n, k).

    n is the scored samples of a prompt, c the right ones (Chen et al., arXiv:2107.03374). Prompts with fewer than
    k scored samples cannot be estimated and are left out.
    """
    estimates = []
    for group in groups:
        scored = [reward >= threshold for reward in group.known_rewards]
        n, c = len(scored), sum(scored)
        if n >= k:
            estimates.append(1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1))))
    return float(np.mean(estimates)) if estimates else float("nan")
