"""What processes take, asked of stand-ins that are busy, die, or come and go."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace

from ray.exceptions import RayActorError

from hone.cluster.actors import Vitals
from hone.cluster.vitals import VitalsWatch
from hone.rollout.engine import CacheUse

GIB = 2**30


def vitals_of(rss_bytes, cache=None):
    return Vitals(pid=1, host="h", rss_bytes=rss_bytes, cuda_peak_bytes=0, cache=cache)


class Process:
    """A stand-in for the handle of an actor: answers what it is told to, or nothing."""

    def __init__(self, *answers):
        self.ping, self._answers, self.asked = self, list(answers), 0

    def remote(self):
        self.asked += 1
        return self

    def future(self):
        said = Future()
        answer = self._answers.pop(0) if self._answers else None
        if isinstance(answer, Exception):
            said.set_exception(answer)
        elif answer is not None:
            said.set_result(answer if isinstance(answer, Vitals) else vitals_of(answer))
        return said


def watching(processes, silence_s=1e9, silent=None):
    soon = {"interval_s": 0.01, "timeout_s": 0.01, "look_s": 0.01}
    return VitalsWatch(processes, silence_s=silence_s, silent=silent, **soon)


async def until(holds):
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


def test_who_is_late_keeps_what_it_said_and_who_dies_is_left_out():
    async def run():
        busy, dying = Process(GIB), Process(2 * GIB, RayActorError())
        async with watching(lambda: {"rank-0": busy, "engine-0": dying}) as watch:
            await until(lambda: len(watch.metrics()) == 2)
            await until(lambda: busy.asked >= 4 and len(watch.metrics()) == 1)
            assert watch.metrics() == {"memory/rank-0_process_rss_gib": 1.0}

    asyncio.run(run())


def test_one_that_is_started_again_is_not_taken_for_the_one_before():
    async def run():
        there = {"engine-0": Process(GIB)}
        async with watching(lambda: there) as watch:
            await until(watch.metrics)
            there["engine-0"] = Process()
            assert watch.metrics() == {}, "it has said nothing yet"
            there["engine-0"] = Process(3 * GIB)
            await until(watch.metrics)
            assert watch.metrics() == {"memory/engine-0_process_rss_gib": 3.0}

    asyncio.run(run())


def test_a_cache_is_reported_at_its_fullest_since_the_last_line():
    async def run():
        engine = Process(*(vitals_of(GIB, CacheUse(tokens, 100, 2**20)) for tokens in (10, 70, 30)))
        async with watching(lambda: {"engine-0": engine}) as watch:
            await until(lambda: engine.asked == 4)
            first, second = watch.metrics(), watch.metrics()
        assert first["memory/engine-0_cache_tokens"] == 70 and first["memory/engine-0_cache_mib"] == 1
        assert second["memory/engine-0_cache_tokens"] == 30, "the last that is known"

    asyncio.run(run())


def test_one_that_stops_answering_is_reported_once_and_one_that_is_starting_or_late_is_not():
    async def run():
        silent = []
        starting, late = Process(), Process(*[GIB, None] * 40)  # every other question is missed
        stopped = Process(GIB)
        there = {"rank-0": starting, "engine-0": late, "engine-1": stopped}
        async with watching(lambda: there, silence_s=0.1, silent=lambda *who: silent.append(who)) as watch:
            await until(lambda: silent)
            assert stopped.asked == 6, "five questions of 0.02 s each were missed"
            assert "memory/engine-1_process_rss_gib" not in watch.metrics()
            await until(lambda: late.asked > 20 and starting.asked > 20)
        assert silent == [("engine-1", stopped)]

    asyncio.run(run())


def test_a_process_on_an_accelerator_says_how_full_it_is():
    on_device = replace(vitals_of(GIB), cuda_peak_bytes=3 * GIB, device_bytes=(60 * GIB, 79 * GIB))

    async def run():
        process = Process(on_device)
        async with watching(lambda: {"engine-0": process}) as watch:
            await until(lambda: len(watch.metrics()) == 4)
            assert watch.metrics() == {
                "memory/engine-0_process_rss_gib": 1.0,
                "memory/engine-0_process_cuda_peak_gib": 3.0,
                "memory/engine-0_device_used_gib": 60.0,
                "memory/engine-0_device_total_gib": 79.0,
            }

    asyncio.run(run())
