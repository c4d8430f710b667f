"""Engines that have every byte and compute something else are found, by name."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import Engine, fake_run, run_virtually

from hone.errors import EngineError
from hone.loop.gate import Canary
from hone.loop.policy import train_policy


class Drifting(Engine):
    """Its logprobs are not of the weights that it was given, from a version on."""

    def __init__(self, clock, since: int = 10**9) -> None:
        super().__init__(clock)
        self.since, self.until, self.asked = since, 10**9, []

    async def generate(self, request, on_sample=None):
        self.asked.append((self.version, request.stream, request.prompt.index))
        samples = await super().generate(request, on_sample)
        shift = -0.9 if self.since <= self.version < self.until else -0.5
        return tuple(replace(sample, sampler_logprobs=(shift,)) for sample in samples)


def run_with(*, every: int, steps: int, **since) -> Any:
    run: Any = fake_run(steps=steps)
    run.config = run.config.model_copy(
        update={"cluster": run.config.cluster.model_copy(update={"canary_every": every})}
    )
    run.observer.warn = print
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
    warnings = []
    run.observer.warn = warnings.append
    told = r"drifting: holds version 8 and samples from another policy: .* 0.4 nats"
    with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match=told)):
        run_virtually(train_policy(run))
    [first] = warnings
    assert first.startswith("drifting: holds version 6 ")
    assert run.progress.step == 8, "what it sampled of version 8 was not trained on"


def test_a_bad_moment_is_a_warning():
    run, replicas = run_with(every=2, steps=10, steady=99, odd=5)
    warnings = []
    run.observer.warn = warnings.append
    replicas["odd"].until = 7
    run_virtually(train_policy(run))
    assert run.progress.step == 10 and len(warnings) == 1


def heavy_tailed(random, shape):
    """Gaps of mean 0.020 nats: most tokens are close, one of fifty is off by half a nat on average."""
    close, far = np.abs(random.normal(0, 0.01 / 0.98 * np.sqrt(np.pi / 2), shape)), random.exponential(0.5, shape)
    return np.where(random.random(shape) < 0.02, far, close)


def false_alarms(runs, replicas=8, comparisons=20, tokens=64):
    """Healthy runs of 200 steps with a comparison every 10, that were stopped, and warnings of all runs."""
    gaps = heavy_tailed(np.random.default_rng(0), (runs, comparisons, replicas, tokens))
    assert abs(float(gaps.mean()) - 0.020) < 1e-4
    names, stopped, warnings = [f"engine-{number}" for number in range(replicas)], 0, []
    config = fake_run().config
    config = config.model_copy(update={"run": config.run.model_copy(update={"precision": "bfloat16"})})
    for of_run in gaps.mean(-1).tolist():
        canary = Canary(expected_gap=0.020)
        try:
            for of_all in of_run:
                canary.judge(config, dict(zip(names, of_all, strict=True)), warnings.append)
        except EngineError:
            stopped += 1
    return stopped, len(warnings)


def test_healthy_runs_with_heavy_tails_are_not_stopped():
    """In most such runs the mean of some replica's 64 tokens exceeds 0.03."""
    stopped, warnings = false_alarms(runs=1000)
    assert stopped <= 1  # 0.1 %
    assert warnings <= 0.01 * 20_000  # comparisons


def test_what_counts_is_the_gap_before_the_first_update():
    """A model of experts that rounds by 0.05 from the start is sound; one that comes to it is not."""
    config = fake_run().config
    config = config.model_copy(update={"run": config.run.model_copy(update={"precision": "bfloat16"})})
    gaps = {"a": 0.05, "b": 0.05}
    warnings = []
    for _ in range(2):
        Canary(expected_gap=0.05).judge(config, gaps, warnings.append)
    assert not warnings
    changed = Canary(expected_gap=0.005)
    changed.judge(config, gaps, warnings.append)
    with pytest.raises(EngineError, match=r"a, b: .* by 0\.05 nats"):
        changed.judge(config, gaps, warnings.append)
    assert len(warnings) == 1


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
