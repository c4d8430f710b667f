"""The state machine of a replica, on a virtual clock: every state in the documentation's picture."""

import asyncio
from pathlib import Path
from typing import get_args

import pytest
from fakes import run_virtually

from hone.runtime.replicas import Instance, ReplicaLost, Replicas, ReplicaState

RECOVERY = Path(__file__).parents[2] / "docs" / "recovery.md"


class Broken(Exception):
    pass


class Fleet:
    """Two replicas whose starts take five seconds, and the states that they went through."""

    def __init__(self, restarts=2, start_fails=lambda: False):
        self.states, self.said, self.ended, self.start_fails = {"a": [], "b": []}, [], [], start_fails
        self.pool = Replicas(
            {"a": None, "b": None},
            self.start,
            self.end,
            lost_by=Broken,
            restarts=restarts,
            changed=lambda replica: self.states[replica.name].append(replica.state),
            say=self.said.append,
        )
        self.a, self.b = self.pool.replicas

    async def start(self, name):
        await asyncio.sleep(5)
        if self.start_fails():
            raise Broken("no device is free")
        return Instance()

    async def end(self, instance):
        self.ended.append(instance)


async def work(seconds=1.0, error=None):
    await asyncio.sleep(seconds)
    if error is not None:
        raise error
    return "done"


def virtually(scenario, **options):
    async def run():
        fleet = Fleet(**options)
        await fleet.pool.start()
        try:
            await scenario(fleet)
        finally:
            await fleet.pool.close("over")
        assert {fleet.a.state, fleet.b.state} == {"stopped"}
        return fleet

    return run_virtually(run())


def test_ready_busy_lost_restarted_and_offloaded():
    async def scenario(fleet):
        first = fleet.a.instance
        assert await first.call(work(), "working", 60) == "done"
        waiting = asyncio.ensure_future(first.call(work(100), "working", 60))
        with pytest.raises(ReplicaLost, match="a broke"):
            await first.call(work(error=Broken("a broke.")), "working", 60)
        with pytest.raises(ReplicaLost, match="a broke"):  # what else it was doing is lost with it
            await waiting
        await asyncio.sleep(10)
        assert fleet.ended == [first] and fleet.a.instance not in (None, first)
        fleet.a.enter("offloaded")
        fleet.a.enter("ready")

    fleet = virtually(scenario)
    assert fleet.states["a"] == ["ready", "busy", "ready", "busy", "restarting", "ready", "offloaded", "ready"]
    assert fleet.states["b"] == ["ready"] and fleet.said == ["a broke; started again in 0.5 s (1 of 2 an hour)"]


def test_a_call_without_a_sign_of_life_loses_the_instance():
    async def scenario(fleet):
        with pytest.raises(ReplicaLost, match=r"working: a gave no sign of life for 60 s"):
            await fleet.a.instance.call(work(1e6), "working", 60)

    virtually(scenario)


def test_an_error_of_the_work_is_the_callers():
    async def scenario(fleet):
        with pytest.raises(ValueError, match="a bug"):
            await fleet.a.instance.call(work(error=ValueError("a bug")), "working", 60)
        assert fleet.a.state == "ready" and not fleet.ended

    virtually(scenario)


def test_beyond_its_restarts_a_replica_has_failed_and_says_why():
    async def scenario(fleet):
        fleet.start_fails = lambda: True
        for replica in (fleet.a, fleet.b):
            replica.instance.lose("was killed")
        await asyncio.sleep(100)
        assert fleet.pool.all_failed and fleet.a.why == "could not be started: no device is free"

    assert virtually(scenario).states["a"] == ["ready", "restarting", "restarting", "failed"]


def test_a_first_start_that_fails_is_raised():
    with pytest.raises(ExceptionGroup) as caught:
        virtually(None, start_fails=lambda: True)
    assert all(isinstance(error, Broken) for error in caught.value.exceptions)


def test_while_it_is_held_nothing_is_started():
    async def scenario(fleet):
        fleet.pool.may_start.clear()
        fleet.a.instance.lose("was killed")
        await asyncio.sleep(1000)
        assert fleet.a.state == "restarting" and fleet.a.instance is None
        fleet.pool.may_start.set()
        await asyncio.sleep(6)
        assert fleet.a.state == "ready"

    virtually(scenario)


def test_one_that_is_lost_as_soon_as_it_is_up_and_closed_while_it_restarts_is_ended():
    async def scenario(fleet):
        lost = fleet.a.instance
        lost.lose("was killed")
        await asyncio.sleep(2)
        assert fleet.ended == [lost]

    virtually(scenario)


def test_the_picture_has_every_state():
    picture = RECOVERY.read_text().split("## States of a replica")[1].split("```")[1]
    assert all(state in picture for state in get_args(ReplicaState))
