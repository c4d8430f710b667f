"""The permit argument, on a virtual clock: no token is trained more than max_staleness updates late."""

import asyncio

import pytest
from fakes import EarlyBuffer, fake_run, run_virtually

from hone.errors import EngineError
from hone.loop import policy

MORE = pytest.mark.slow("fifteen runs for each bound")


def staleness_seen(run):
    return max(values["rollout/staleness_max"] for _, _, values in run.observer.rows)


@pytest.mark.parametrize("max_staleness", [0, 1, pytest.param(2, marks=MORE), pytest.param(4, marks=MORE)])
def test_slow_engines_and_dropped_groups_never_break_the_bound(max_staleness):
    worst = 0
    for seed in range(15):
        run = fake_run(max_staleness, seed=seed)
        run_virtually(policy.train_policy(run))
        worst = max(worst, staleness_seen(run))
        trained = [index for _, indices, kept in run.observer.records if kept for index in indices]
        assert trained == sorted(set(trained)), "every accepted group is trained once, in the order of the data"
        assert run.progress.step == 30 and run.progress.next_prompt == trained[-1] + 1
    assert worst == max_staleness, "the bound is kept, and reached: generation really ran ahead"


def test_releasing_before_publishing_is_caught(monkeypatch):
    """Permits returned before the new weights are live let a group start one version too early."""
    monkeypatch.setattr(policy, "GroupBuffer", EarlyBuffer)
    worst = 0
    for seed in range(15):
        run = fake_run(1, seed=seed)
        run_virtually(policy.train_policy(run))
        worst = max(worst, staleness_seen(run))
    assert worst == 2


def test_synchronous_runs_are_on_policy_and_idle_while_training():
    run = fake_run(0)
    busy = []
    update = run.trainer.update
    run.trainer.update = lambda *args: (busy.append(run.engine.active), update(*args))[1]
    run_virtually(policy.train_policy(run))
    assert staleness_seen(run) == 0 and set(busy) == {0}


def test_synchronous_runs_choose_no_prompt_before_the_last_step_is_measured(monkeypatch):
    """Else a resumed run would choose it from newer pass rates than a run that never stopped."""
    run, ahead = fake_run(0), []

    def measure(rates):
        ahead.append(run.prompts.taken - 1 - max(index for index, _ in rates))

    monkeypatch.setattr(run.prompts.order, "measure", measure)
    run_virtually(policy.train_policy(run))
    assert ahead == [0] * 30, "kept and dropped groups of a step are all that was chosen"


def test_refills_start_together_so_that_batches_repeat():
    """With groups dropped at random times, two runs with other latencies still train on the same prompts."""

    def prompts_trained(latency_seed):
        run = fake_run(0, seed=latency_seed, equal_frac=0.0)
        odd = run.rewards.score

        async def drop_every_third(group):
            scored = await odd(group)
            return scored.scored(scored.scores, (0.0,) * 2) if group.prompt.index % 3 == 0 else scored

        run.rewards.score = drop_every_third
        run_virtually(policy.train_policy(run))
        return [indices for _, indices, kept in run.observer.records if kept]

    assert prompts_trained(1) == prompts_trained(2)


@pytest.mark.parametrize(("fault", "error"), [({"engine_fails": 17}, ValueError), ({"data_fails": 25}, RuntimeError)])
def test_a_failure_in_the_background_ends_the_run(fault, error):
    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(policy.train_policy(fake_run(1, **fault)))
    assert caught.group_contains(error)


def test_a_group_that_takes_too_long_ends_the_run_with_a_message():
    run = fake_run(0)

    async def never(request, on_sample):
        await asyncio.sleep(1e6)

    run.engine.generate = never
    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(policy.train_policy(run))
    assert caught.group_contains(EngineError, match=r"rollout\.timeout_s = 600 s")


def test_a_stop_drops_the_step_in_flight():
    run = fake_run(0, steps=1000)

    async def stop_later():
        loop = asyncio.get_running_loop()
        loop.call_later(50, run.stop.set)
        await policy.train_policy(run)

    run_virtually(stop_later())
    assert 0 < run.progress.step < 1000
    assert len(run.observer.rows) == run.progress.step
