"""Workload of a run file in tokens, independent of hardware: what the planner must not change.

Lengths: memory is planned for the longest that the run file allows. Time is planned for a distribution of response
lengths, of which the run file says only the limit; without a measured mean, half the limit is assumed and said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from hone.config.derived import (
    needs_critic,
    needs_reference,
    optimizer_steps_per_update,
    samples_per_update,
    trains_adapter,
)
from hone.config.run import RunConfig

ASSUMED_MEAN_FRAC = 0.5
"""Of the longest response, and of the longest prompt, where they were not measured."""
QUANTILES = 32
"""Points at which the distribution of response lengths is looked at."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts and responses: the limits, and how long they are on average."""

    max_prompt: int
    max_response: int
    mean_prompt: float
    mean_response: float
    is_assumed: bool = True
    """The means are a guess."""

    @property
    def longest(self) -> int:
        return self.max_prompt + self.max_response

    @property
    def mean(self) -> float:
        return self.mean_prompt + self.mean_response

    def response_quantiles(self) -> list[float]:
        """`QUANTILES` response lengths, ascending: an exponential distribution, cut at the limit, of this mean.

        Chain-of-thought lengths have such a long tail; what ends at the limit was longer.
        """
        limit, mean = float(self.max_response), min(self.mean_response, self.max_response)
        if mean >= 0.98 * limit:
            return [limit] * QUANTILES
        low, high = mean, 1e4 * limit  # of the scale s with s (1 - exp(-limit / s)) = mean
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if middle * -math.expm1(-limit / middle) < mean else (low, middle)
        return [min(limit, -low * math.log1p(-(i + 0.5) / QUANTILES)) for i in range(QUANTILES)]


@dataclass(frozen=True, slots=True)
class Workload:
    """One policy update, and what it is made of."""

    prompts: int
    """P, prompts per update."""
    group: int
    """G, samples per prompt."""
    lengths: Lengths
    samples_per_optimizer_step: int
    optimizer_steps: int
    """Per update, passes included."""
    passes: int
    max_staleness: int
    has_reference: bool
    has_critic: bool
    has_old_logprobs_pass: bool
    has_entropy_gradient: bool
    """The loss has an entropy bonus, whose gradient takes one more copy of the logits."""
    cuts_distribution: bool
    """Sampling sorts the vocabulary (top_p or min_p)."""
    adapter_rank: int
    """LoRA rank; 0 trains every weight."""
    adapter_targets: tuple[str, ...] | None
    evaluates: bool
    replays_routing: bool = False
    """Experts of all tokens are recorded."""

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    def step_tokens(self) -> int:
        """Most tokens that one optimizer step computes, each prompt once for its samples, no response's last token."""
        lengths = self.lengths
        responses = self.samples_per_optimizer_step * max(lengths.max_response - 1, 0)
        return min(self.prompts, self.samples_per_optimizer_step) * lengths.max_prompt + responses

    def mean_step_tokens(self) -> float:
        """The same, on average."""
        lengths = self.lengths
        prompts = math.ceil(self.samples_per_optimizer_step / self.group)
        return prompts * lengths.mean_prompt + self.samples_per_optimizer_step * lengths.mean_response

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "prompts_per_step": self.prompts,
            "group_size": self.group,
            "samples_per_step": self.samples,
            "samples_per_optimizer_step": self.samples_per_optimizer_step,
            "optimizer_steps_per_update": self.optimizer_steps,
            "max_prompt_tokens": self.lengths.max_prompt,
            "max_response_tokens": self.lengths.max_response,
            "mean_prompt_tokens": self.lengths.mean_prompt,
            "mean_response_tokens": self.lengths.mean_response,
            "means_are_assumed": self.lengths.is_assumed,
        }


def workload_of(
    config: RunConfig, *, mean_prompt_tokens: float | None = None, mean_response_tokens: float | None = None
) -> Workload:
    """What the RL stage of a run file asks for.

    Args:
        mean_prompt_tokens, mean_response_tokens: as measured; None assumes half the limit.
    """
    algorithm, rollout, samples = config.algorithm, config.rollout, samples_per_update(config)
    steps = optimizer_steps_per_update(config)
    max_prompt, max_response = config.data.max_prompt_tokens, rollout.max_response_tokens
    adapter = trains_adapter(config, "rl")
    moves_within = steps > 1 and algorithm.ratio != "none" and algorithm.old_logprobs == "trainer"
    return Workload(
        prompts=config.train.prompts_per_step,
        group=rollout.group_size,
        lengths=Lengths(
            max_prompt=max_prompt,
            max_response=max_response,
            mean_prompt=min(mean_prompt_tokens or ASSUMED_MEAN_FRAC * max_prompt, max_prompt),
            mean_response=min(mean_response_tokens or ASSUMED_MEAN_FRAC * max_response, max_response),
            is_assumed=mean_response_tokens is None,
        ),
        samples_per_optimizer_step=config.train.samples_per_optimizer_step or samples,
        optimizer_steps=steps,
        passes=config.train.passes_per_batch,
        max_staleness=rollout.max_staleness,
        has_reference=needs_reference(config),
        has_critic=needs_critic(config),
        has_old_logprobs_pass=moves_within or (algorithm.kl_reward_coef > 0 and algorithm.old_logprobs == "trainer"),
        has_entropy_gradient=algorithm.entropy_coef != 0,
        cuts_distribution=rollout.top_p < 1 or rollout.min_p > 0,
        adapter_rank=config.lora.rank if adapter else 0,
        adapter_targets=config.lora.targets if adapter else None,
        evaluates=config.data.eval is not None,
        replays_routing=algorithm.replay_routing,
    )


def share_of(workload: Workload, replicas: int) -> Workload:
    """What one of `replicas` engines samples."""
    return replace(workload, prompts=-(-workload.prompts // replicas))
