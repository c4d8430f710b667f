"""Engines that have every byte and compute something else are found, by name."""

import asyncio
from dataclasses import replace

import pytest
import torch
from fakes import Engine, fake_run, run_virtually

from hone.errors import EngineError
from hone.loop.policy import train_policy


class Drifting(Engine):
    """Its logprobs are not of the weights that it was given, from a version on."""

    def __init__(self, clock, since: int = 10**9) -> None:
        super().__init__(clock)
        self.since, self.asked = since, []

    async def generate(self, request, on_sample=None):
        self.asked.append((self.version, request.stream, request.prompt.index))
        samples = await super().generate(request, on_sample)
        shift = -0.5 if self.version < self.since else -0.9
        return tuple(replace(sample, sampler_logprobs=(shift,)) for sample in samples)


def run_with(*, every: int, steps: int, **since):
    run = fake_run(steps=steps)
    run.config = run.config.model_copy(
        update={"cluster": run.config.cluster.model_copy(update={"canary_every": every})}
    )
    run.trainer.logprobs = lambda batch, **_: torch.full_like(batch.sampler_logprobs_T, -0.5)
    replicas = {name: Drifting(run.engine.clock, at) for name, at in since.items()}

    async def load(weights, version):
        for engine in (run.engine, *replicas.values()):
            engine.version = version

    run.engine.load = load
    run.replicas = lambda: replicas
    return run, replicas


def test_every_replica_is_asked_after_every_so_many_publishes():
    run, replicas = run_with(every=3, steps=10, a=99, b=99)
    run_virtually(train_policy(run))
    for engine in replicas.values():
        assert [asked for asked in engine.asked if asked[2] == 0] == [(v, "eval", 0) for v in (0, 3, 6, 9)]


def test_the_replica_that_drifts_is_named():
    run, _ = run_with(every=2, steps=10, steady=99, drifting=5)
    told = r"drifting holds version 6 and samples from another policy: .* 0.4 nats"
    with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match=told)):
        run_virtually(train_policy(run))


def test_it_can_be_turned_off():
    run, replicas = run_with(every=0, steps=3, drifting=0)
    run_virtually(train_policy(run))
    assert replicas["drifting"].asked == []


def test_a_replica_that_dies_meanwhile_ends_nothing():
    run, replicas = run_with(every=1, steps=3, dying=99)

    async def generate(request, on_sample=None):
        await asyncio.sleep(0.1)
        raise EngineError("killed")

    replicas["dying"].generate = generate
    run_virtually(train_policy(run))
    assert run.progress.step == 3
