"""Comparison of every engine replica with the trainer after some publishes: the canary.

A fingerprint proves that every byte of new weights arrived, but not that an engine which converts, fuses or divides
them still computes the same. So after some publishes each replica samples a few tokens, and at the next update, while
the engines are offloaded and before anything is trained on this version, the trainer computes their logprobs.

A few tokens say little: gaps between two correct programs have heavy tails. So all replicas are pooled, what counts is
how much larger the gap is than the one that the first-step gate measured, and a first finding is a warning. The next
one of the same replicas stops the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from torch import Tensor

from hone.config.run import RunConfig
from hone.data.pack import collate
from hone.errors import EngineError
from hone.loop.gate import mean_gap, noticeable_gap
from hone.rollout.engine import Engine, Request, Sampling
from hone.types import Batch, Group, Prompt

NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 2, 2, 16
"""What each replica samples."""

GROWTH = 3.0
"""How many times as large as before the first update a gap is suspicious."""


@dataclass
class Canary:
    """What a run remembers between one comparison and the next."""

    expected_gap: float | None = None
    """Mean |trainer - sampler| logprob that the first-step gate measured, nats; None: it was disabled."""
    sampled: Mapping[str, Sequence[Group]] = field(default_factory=dict)
    """Samples of the newest version by replica, until they are compared."""
    version: int = 0
    suspects: frozenset[str] = frozenset()
    """Replicas whose gap was too large the last time."""

    async def sample(
        self, config: RunConfig, replicas: Mapping[str, Engine], prompts: Sequence[Prompt], sampling: Sampling
    ) -> None:
        """Have each replica sample. One that cannot is skipped: the next request to it reports the failure."""
        sampling = replace(sampling, max_tokens=min(MAX_TOKENS, sampling.max_tokens))
        requests = [Request(prompt, NUM_SAMPLES, sampling, config.seed, "eval") for prompt in prompts]
        found = await asyncio.gather(*(_sampled(e, requests, config.rollout.timeout_s) for e in replicas.values()))
        self.sampled = {name: groups for name, groups in zip(replicas, found, strict=True) if groups}

    def compare(
        self,
        config: RunConfig,
        logprobs: Callable[[Batch], Tensor],
        warn: Callable[[str], object],
    ) -> dict[str, float]:
        """Metrics of what was sampled, compared with the trainer's logprobs of the same tokens; none if nothing was.

        Raises:
            EngineError: see `judge`.
        """
        sampled, self.sampled = self.sampled, {}
        gaps: dict[str, float] = {}
        for name, groups in sampled.items():
            batch = collate(groups)
            gaps[name] = mean_gap(logprobs(batch), batch.sampler_logprobs_T, batch.loss_mask_T)
        return self.judge(config, gaps, warn) if gaps else {}

    def judge(self, config: RunConfig, gaps: Mapping[str, float], warn: Callable[[str], object]) -> dict[str, float]:
        """Metrics of the mean gaps |trainer - sampler| of a few tokens of each replica.

        Raises:
            EngineError: replicas sample from another distribution, for the second time in a row.
        """
        pooled = fmean(gaps.values())
        of_all, of_one = self.bounds(config)
        wrong = frozenset(name for name, gap in gaps.items() if not gap <= of_one)
        if not pooled <= of_all:
            wrong |= {name for name, gap in gaps.items() if not gap <= of_all}
        again = sorted(wrong & self.suspects)
        self.suspects = wrong
        if wrong:
            names = again or sorted(wrong)
            worst = max(names, key=lambda name: gaps[name])
            message = (
                f"{', '.join(names)}: holds version {self.version} and samples from another policy: its logprobs "
                f"differ from the trainer's by {gaps[worst]:.3g} nats per token on average (bound {of_one:.3g}; all "
                f"replicas: {pooled:.3g}, bound {of_all:.3g}), though all bytes of the weights arrived. Does it "
                "convert or quantise them? cluster.canary_every = 0 disables this check."
            )
            if again:
                raise EngineError(message)
            warn(f"{message} A second time in a row stops the run.")
        named = {f"engine/{name}_logprob_gap": gap for name, gap in gaps.items()}
        return {"engine/canary_gap": pooled, **named}

    def bounds(self, config: RunConfig) -> tuple[float, float]:
        """Largest mean gap of all replicas together, and of one, nats."""
        if config.gate.max_logprob_gap is not None:
            return config.gate.max_logprob_gap, config.gate.max_logprob_gap
        noticeable = noticeable_gap(config)
        expected = noticeable if self.expected_gap is None else self.expected_gap
        of_all = max(GROWTH * expected, noticeable)
        return of_all, max(of_all, GROWTH * noticeable)


async def _sampled(engine: Engine, requests: Sequence[Request], timeout_s: float) -> Sequence[Group]:
    try:
        async with asyncio.timeout(timeout_s):
            sampled = await asyncio.gather(*(engine.generate(request) for request in requests))
    except (EngineError, TimeoutError):
        return ()
    return [
        Group(request.prompt, samples).scored({}, (0.0,) * len(samples))
        for request, samples in zip(requests, sampled, strict=True)
    ]
