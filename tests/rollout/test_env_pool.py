"""The process in which environments live: what they say arrives, whatever they do wrong is a fault of that episode."""

import asyncio
from pathlib import Path

import pytest

from hone.config.run import EnvironmentSection
from hone.errors import ConfigError
from hone.rollout import env_pool
from hone.rollout.env import Episode, Observation, episode_seed
from hone.rollout.env_pool import EnvironmentFault, EnvironmentPool
from hone.types import Prompt

HERE = Path(__file__).parent
PROMPT = Prompt("p", 0, "2+2=", (1, 2, 3))


def play(name, use, *, timeout_s=5.0, grace_s=env_pool.GRACE_S, **args):
    """Run `use(pool)` on the pool of a toy environment."""

    async def main():
        settings = EnvironmentSection(use=f"toy_environments.py:{name}", args=args, timeout_s=timeout_s)
        pool = EnvironmentPool(settings, HERE, grace_s=grace_s)
        try:
            async with asyncio.timeout(50):
                return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


def episode(index=0):
    return Episode(PROMPT, index, episode_seed(0, "train", 0, index))


async def told(handle, *turns):
    """What the environment says to some turns in a row; a fault is the last word."""
    said = []
    for turn in turns:
        try:
            said.append(await handle.step(turn))
        except EnvironmentFault as fault:
            return [*said, str(fault)]
    return said


@pytest.mark.parametrize("name", ["Echo", "AsyncEcho"])
def test_each_episode_has_an_environment_of_its_own(name):
    async def use(pool):
        return await asyncio.gather(told(pool.open(episode(0)), "a", "b", "c"), told(pool.open(episode(1)), "x"))

    first, second = play(name, use, times=2)
    metrics = {"calls": 1.0}
    assert first == [Observation("[a1]", 0.5, metrics), Observation("[b0]", 0.5, metrics), Observation()]
    assert second == [Observation("[x1]", 0.5, metrics)]


def test_chance_is_of_the_sample_and_not_of_the_order():
    async def use(pool):
        forwards = [await told(pool.open(episode(i)), "") for i in range(3)]
        backwards = [await told(pool.open(episode(i)), "") for i in (2, 1, 0)]
        return forwards, backwards

    forwards, backwards = play("Chance", use)
    assert forwards == backwards[::-1] and forwards[0] != forwards[1]


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("raises", "raised ValueError: no such tool"),
        ("exits", "raised SystemExit: 3"),
        ("awaits", "took longer than 0.3 s"),
        ("refuses to be cancelled", "took longer than 0.3 s"),
        ("gives a text", "returned str, not Observation or None"),
        ("gives a number", "gave a text that is int"),
        ("gives NaN", "gave 'reward' = nan; names must be identifiers and values finite"),
        ("gives a bad metric", "gave 'a/b' = 1.0; names must be identifiers and values finite"),
        ("gives a word as reward", "gave a reward or metrics that are not numbers"),
        ("gives no end", "gave a text of 2097152 characters; at most 1048576 are taken"),
    ],
)
def test_what_goes_wrong_is_a_fault_of_that_episode_alone(how, fault):
    async def use(pool):
        return await asyncio.gather(*(told(pool.open(episode(i)), "a", "b") for i in (0, 1)))

    bad, good = play("Misbehaves", use, timeout_s=0.3, how=how, only=0)
    assert bad[0] == Observation("?") and bad[1].startswith(fault) and len(bad) == 2
    assert good == [Observation("?")] * 2


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("dies", "the process of the environments ended with exit code 7"),
        ("blocks", "the process of the environments sent no reply for 0.4 s: a step blocked it; killed"),
    ],
)
def test_a_lost_process_costs_the_episodes_in_it_and_is_replaced(how, fault):
    async def use(pool):
        lost = [pool.open(episode(0)), pool.open(episode(1))]
        firsts = [await told(handle, "a") for handle in lost]
        seconds = await asyncio.gather(*(told(handle, "b") for handle in lost))
        later = await told(pool.open(episode(1)), "a", "b", "c")
        return firsts, seconds, later

    firsts, seconds, later = play("Misbehaves", use, timeout_s=0.3, grace_s=0.1, how=how, only=0)
    assert firsts == [[Observation("?")]] * 2
    assert seconds == [[fault]] * 2, "its neighbour is lost with it"
    assert later == [Observation("?")] * 3, "and the next episode has a process again"


def test_an_environment_that_fails_to_start_is_a_fault():
    (fault,) = play("FailsToStart", lambda pool: told(pool.open(episode()), "a"))
    assert fault.startswith("raised KeyError: 'no table' (")


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        ("Nothing", {}, "has no class or function 'Nothing'"),
        ("NoStep", {}, r"NoStep has no method `step\(self, turn\)`"),
        ("Echo", {"time": 1}, r"Echo\(episode, \*, times=3\) does not fit args {'time': 1}"),
    ],
)
def test_an_environment_that_cannot_be_had_is_a_problem_of_the_run_file(name, args, problem):
    with pytest.raises(ConfigError, match=f"rollout.environment.use: .*{problem}"):
        play(name, lambda pool: pool.start(), **args)


def test_a_closed_process_ends_by_itself_and_closing_may_come_twice():
    async def use(pool):
        worker = await pool.worker()
        await worker.close(timeout_s=3600)  # by which it would be killed; `play` waits for less
        await pool.close()
        await pool.close()
        return worker.died is not None

    assert play("Echo", use)
