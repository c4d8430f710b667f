"""Now and then after a publish: does each engine compute with the weights what the trainer does?

A fingerprint proves that every byte arrived. An engine that converts, fuses and divides them afterwards may still hold
something else, and then it samples from another policy, silently. So every engine draws a few tokens after the same
prompts, and the trainer scores them: the first-step gate's question, asked of each replica again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from hone.data.pack import collate
from hone.errors import EngineError
from hone.loop.gate import logprob_bound, mean_gap
from hone.rollout.engine import Engine, Request
from hone.types import Group

if TYPE_CHECKING:
    from hone.loop.run import PolicyRun

NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 2, 2, 16
"""What each engine draws; the prompts are the first of the data."""


async def check_replicas(run: PolicyRun, replicas: Mapping[str, Engine]) -> None:
    """Compares each replica's logprobs with the trainer's, whose weights it must have been given just now.

    A replica that cannot sample is no matter of this: whoever asks it next finds out.

    Raises:
        EngineError: naming a replica that samples from another distribution.
    """
    found = await asyncio.gather(*(_drawn(run, engine) for engine in replicas.values()))
    bound = logprob_bound(run.config)
    for name, groups in zip(replicas, found, strict=True):
        if not groups:
            continue
        batch = collate(groups)
        trainer_T = await run.in_compute_thread(run.trainer.logprobs, batch)
        gap = mean_gap(trainer_T, batch.sampler_logprobs_T, batch.loss_mask_T)
        if not gap <= bound:
            raise EngineError(
                f"{name} holds version {run.progress.step} and samples from another policy: its logprobs differ from "
                f"the trainer's by {gap:.3g} nats per token on average (bound {bound:g}, gate.max_logprob_gap), though "
                "all bytes of the weights arrived. Does the engine convert or quantise them? "
                "cluster.canary_every = 0 does not ask."
            )


async def _drawn(run: PolicyRun, engine: Engine) -> Sequence[Group]:
    sampling = replace(run.sampling, max_tokens=min(MAX_TOKENS, run.sampling.max_tokens))
    prompts = islice(run.prompts.starting_at(0), NUM_PROMPTS)
    requests = [Request(prompt, NUM_SAMPLES, sampling, run.config.seed, "eval") for prompt in prompts]
    try:
        async with asyncio.timeout(run.config.rollout.timeout_s):
            drawn = await asyncio.gather(*(engine.generate(request) for request in requests))
    except (EngineError, TimeoutError):
        return ()
    return [
        Group(request.prompt, samples).scored({}, (0.0,) * len(samples))
        for request, samples in zip(requests, drawn, strict=True)
    ]
