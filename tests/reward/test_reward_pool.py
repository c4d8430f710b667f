"""User functions in killable processes: everything that can go wrong in one, each with a witness that it did."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hone.doctor.watch import AlarmWatch
from hone.errors import ConfigError, RewardError
from hone.reward.rewards import first_fault

SOURCE = '''
import asyncio, os, pathlib, signal, subprocess, sys, time
from hone.reward import reward
from hone.types import Fault, Score

HERE = pathlib.Path(__file__).parent

def leave_witness(name):
    (HERE / name).write_text(str(os.getpid()))

@reward(minimum=0.0, maximum=10.0)
def length(group, *, factor=1):
    return [factor * len(sample.text) for sample in group.samples]

async def slow_length(group):
    await asyncio.sleep(0.01)
    return [len(sample.text) for sample in group.samples]

def raises(group):
    raise ValueError("a\\nbad day")

def exits(group):
    sys.exit("enough")

def nan(group):
    return [float("nan")] * len(group.samples)

def wrong_count(group):
    return [1.0]

def ill_on_some(group):
    """Hangs, dies or raises where the first response says so; scores otherwise."""
    order = group.samples[0].text
    if order == "hang":
        leave_witness("hang")
        time.sleep(600)
    if order == "hang in C":
        leave_witness("hang in C")
        pow(10**7, 10**8)  # holds the interpreter lock
    if order == "die":
        leave_witness("die")
        os._exit(7)
    if order == "segfault":
        leave_witness("segfault")
        os.kill(os.getpid(), signal.SIGSEGV)
    if order == "leave a child":
        child = subprocess.Popen(["sleep", "600"])
        (HERE / "child").write_text(str(child.pid))
        time.sleep(600)
    return [1.0] * len(group.samples)

def typed(group):
    return [Score(None, Fault.DATA, "no gold"), Score(5.0, Fault.MODEL, "broke it", {"depth": 3})]

class Mute(Exception):
    def __str__(self):
        raise RuntimeError

def raises_mutely(group):
    raise Mute

def raises_half_a_pair(group):
    raise ValueError("\\ud800")

def forks(group):
    child = os.fork()
    if not child:
        return [0.5] * len(group.samples)
    os.waitpid(child, 0)
    return [1.0] * len(group.samples)

def whose_process(group):
    return [float(os.getpid())] * len(group.samples)

KEPT = []

def keeps_what_it_made(group):
    KEPT.append(b"x" * (3 << 20))
    return [1.0] * len(group.samples)

def chatty(group):
    print("to the output")
    return [1.0] * len(group.samples)
'''


@pytest.fixture
def score_all(make_rewards):
    """Scores groups, one after the other, with one function of SOURCE."""

    def score_all(function, *groups, **component):
        async def run():
            rewards = make_rewards({"use": f"mine.py:{function}", **component}, source=SOURCE, max_unscored_frac=1.0)
            async with rewards:
                return [await rewards.score(group) for group in groups]

        return asyncio.run(run())

    return score_all


def has_ended(pid: int) -> bool:
    """Whether a process is gone within 5 seconds, or is a zombie that nobody has reaped yet. While other threads of a
    zombie end, its files are still open."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            num_threads = len(os.listdir(f"/proc/{pid}/task"))
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z" and num_threads == 1:
            return True
        time.sleep(0.01)
    return False


def test_scores_of_a_user_function_with_arguments(score_all, make_group):
    (group,) = score_all("length", make_group("a", "bb", ""), args={"factor": 2})
    assert group.rewards == (2.0, 4.0, 0.0)


def test_async_functions(score_all, make_group):
    groups = score_all("slow_length", make_group("a"), make_group("bbb"))
    assert [group.rewards for group in groups] == [(1.0,), (3.0,)]


def test_it_runs_in_another_process_and_stays_there(score_all, make_group):
    first, second = score_all("whose_process", make_group("a"), make_group("a"))
    assert first.rewards == second.rewards
    assert first.rewards[0] != os.getpid()


@pytest.mark.parametrize(("function", "named"), [("keeps_what_it_made", ["process_memory_grows"]), ("length", [])])
def test_memory_that_a_function_keeps_is_logged_and_named(make_rewards, make_group, function, named):
    """It is in the processes of the pool, not in this one."""

    async def run():
        rewards, watch = make_rewards({"use": f"mine.py:{function}"}, source=SOURCE), AlarmWatch({})
        assert rewards.memory_metrics() == {}
        async with rewards:
            for step in range(70):
                await rewards.score(make_group("a"))
                watch.add({"stage": "rl", "step": step, "memory/rss_gib": 1.0, **rewards.memory_metrics()})
        return watch.alarms

    alarms = asyncio.run(run())
    assert [alarm.name for alarm in alarms] == named
    assert all(alarm.metric == "memory/reward_workers_process_rss_gib" for alarm in alarms)
    assert all(alarm.what.startswith("a reward function keeps") for alarm in alarms)


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("raises", "raises: infra fault: raised ValueError: a bad day (mine.py:"),
        ("exits", "exits: infra fault: raised SystemExit: enough (mine.py:"),
        ("raises_mutely", "raises_mutely: infra fault: raised Mute: (its message cannot be had: RuntimeError)"),
        ("raises_half_a_pair", r"raises_half_a_pair: infra fault: raised ValueError: \ud800 (mine.py:"),
        ("nan", "nan: infra fault: gave nan, not a finite number"),
        ("wrong_count", "wrong_count: infra fault: returned 1 scores for 2 samples"),
    ],
)
def test_a_function_that_misbehaves_gives_faults_and_continues(score_all, make_group, function, cause):
    groups = score_all(function, make_group("a", "b"), make_group("a", "b"))
    assert [group.rewards for group in groups] == [(None, None)] * 2
    assert all(first_fault(group).startswith(cause) for group in groups)


@pytest.mark.parametrize(
    ("order", "cause"),
    [
        ("hang", "took longer than 0.4 s; its process was killed"),
        ("hang in C", "took longer than 0.4 s; its process was killed"),
        ("die", "its process ended with exit code 7"),
        ("segfault", "its process was killed by SIGSEGV"),
    ],
)
def test_a_process_that_hangs_or_dies_costs_its_group_alone(score_all, make_group, tmp_path, order, cause):
    groups = score_all("ill_on_some", make_group("fine"), make_group(order, "x"), make_group("fine"), timeout_s=0.4)
    assert [group.rewards for group in groups] == [(1.0,), (None, None), (1.0,)]
    assert first_fault(groups[1]) == f"ill_on_some: infra fault: {cause}"
    assert has_ended(int((tmp_path / order).read_text()))  # it was really there, and is no more


def test_what_a_killed_reward_started_dies_with_it(score_all, make_group, tmp_path):
    score_all("ill_on_some", make_group("leave a child"), timeout_s=1.0)
    assert has_ended(int((tmp_path / "child").read_text()))


def test_a_process_that_a_reward_forks_answers_nothing_in_its_place(score_all, make_group):
    groups = score_all("forks", make_group("a", "b"), make_group("a"))
    assert [group.rewards for group in groups] == [(1.0, 1.0), (1.0,)]


def test_typed_scores_cross_the_process_boundary(score_all, make_group):
    (group,) = score_all("typed", make_group("a", "b"))
    data, model = group.scores["typed"]
    assert (data.fault, data.detail) == ("data", "no gold")
    assert (model.value, model.fault, model.metrics) == (5.0, "model", {"depth": 3.0})


def test_what_a_reward_prints_stays_out_of_the_output(score_all, make_group, capfd):
    score_all("chatty", make_group("a"))
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "to the output" in printed.err


def test_several_workers_score_at_once_and_two_hangs_do_not_starve_the_rest(make_rewards, make_group):
    async def run():
        component = {"use": "mine.py:ill_on_some", "timeout_s": 0.5}
        async with make_rewards(component, source=SOURCE, workers=2, max_unscored_frac=1.0) as rewards:
            groups = [make_group(text) for text in ("hang", "hang", "hang", "a", "b", "c")]
            return await asyncio.gather(*(rewards.score(group) for group in groups))

    groups = asyncio.run(run())
    assert [group.rewards[0] for group in groups] == [None, None, None, 1.0, 1.0, 1.0]


def test_a_cancelled_group_frees_its_worker(make_rewards, make_group, tmp_path):
    async def run():
        async with make_rewards({"use": "mine.py:ill_on_some"}, source=SOURCE) as rewards:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await rewards.score(make_group("hang"))
            return await rewards.score(make_group("fine"))

    assert asyncio.run(run()).rewards == (1.0,)
    assert has_ended(int((tmp_path / "hang").read_text()))


def test_a_worker_that_died_while_idle_is_replaced_before_the_next_group(make_rewards, make_group):
    async def run():
        async with make_rewards({"use": "mine.py:whose_process"}, source=SOURCE) as rewards:
            first = (await rewards.score(make_group("a"))).rewards[0]
            os.kill(int(first), signal.SIGKILL)
            while not has_ended(int(first)):
                await asyncio.sleep(0.01)
            return first, (await rewards.score(make_group("a"))).rewards[0]

    first, second = asyncio.run(run())
    assert second is not None
    assert second != first


def test_closing_with_a_group_in_flight_ends_its_process(make_rewards, make_group, tmp_path):
    async def run():
        rewards = make_rewards({"use": "mine.py:ill_on_some", "timeout_s": 60.0}, source=SOURCE)
        await rewards.start()
        scoring = asyncio.create_task(rewards.score(make_group("hang")))
        while not (tmp_path / "hang").exists():
            await asyncio.sleep(0.01)
        scoring.cancel()
        await rewards.close()
        with pytest.raises(asyncio.CancelledError):
            await scoring

    asyncio.run(run())
    assert has_ended(int((tmp_path / "hang").read_text()))


def test_a_run_ends_when_nothing_can_be_scored(make_rewards, make_group):
    async def run():
        async with make_rewards({"use": "mine.py:raises"}, source=SOURCE, window_samples=160) as rewards:
            for _ in range(5):
                await rewards.score(make_group("a", "b"))

    with pytest.raises(RewardError, match=r"10 of the last 10 samples.*raised ValueError: a bad day"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import no_such_module", "reward.components.0.use: .*cannot be imported: ModuleNotFoundError"),
        ("def g(group): pass", "reward.components.0.use: .*has no function 'f'"),
        ("import sys; sys.exit(3)", "reward.components.0.use: .*cannot be imported: SystemExit: 3"),
        ("import os; os._exit(9)", "reward.components.0.use: the process that imports it ended with exit code 9"),
        ("def f(group, needed): pass", "does not fit args {}: missing a required argument: 'needed'"),
    ],
)
def test_a_reward_that_cannot_be_imported_is_a_problem_of_the_run_file(make_rewards, source, problem):
    async def run():
        async with make_rewards({"use": "mine.py:f"}, source=source):
            pass

    with pytest.raises(ConfigError, match=problem):
        asyncio.run(run())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a busy child with its parent")
def test_no_process_outlives_a_parent_that_is_killed(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    program = """
import asyncio, pathlib, sys
from hone.config.run import RewardComponent, RewardSection
from hone.reward.rewards import Rewards
from hone.types import Group, Prompt, Sample

async def main():
    section = RewardSection(components=(RewardComponent(use="mine.py:ill_on_some", timeout_s=600),))
    sample = Sample("p", 0, (), (), (), "stop", "hang in C")
    async with Rewards.from_config(section, pathlib.Path(sys.argv[1]), window_samples=8) as rewards:
        await rewards.score(Group(Prompt("p", 0, "", ()), (sample,)))

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as parent:
        witness = tmp_path / "hang in C"
        while not (witness.exists() and witness.read_text()):
            assert parent.poll() is None
            time.sleep(0.02)
        parent.kill()
    assert has_ended(int(witness.read_text()))
