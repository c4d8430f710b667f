"""A response that its reward never comes back from: it alone pays for that, and the others get what they would have."""

import asyncio
import os
import re
import signal

import pytest

from hone.reward.signature import overrun_score, reward
from hone.types import Fault

SOURCE = '''
import os, pathlib, signal, time
from hone.reward import reward
from hone.types import Fault

HERE = pathlib.Path(__file__).parent

def witness(name):
    with (HERE / name).open("a") as file:
        file.write(f"{os.getpid()}\\n")

@reward(minimum=-1.0, maximum=1.0, overrun=Fault.MODEL)
def judge(group):
    """Hangs or dies over what the response, or the row, says; else a number that depends on the response."""
    if group.prompt.answer == "crash":
        witness("row")
        os.kill(os.getpid(), signal.SIGSEGV)
    if group.prompt.answer == "hang":
        witness("row")
        while True:
            pass
    return [verdict(sample.text) for sample in group.samples]

def verdict(text):
    witness("judged")
    with (HERE / "order").open("a") as file:
        file.write(text + "\\n")
    if text == "hang":
        witness("hang")
        while True:
            pass
    if text == "wait":
        witness("wait")
        time.sleep(600)
    if text == "crash":
        witness("crash")
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == "shot once":
        witness("shot")
        if len((HERE / "shot").read_text().split()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # as from outside, while it was at work
    if text == "shot twice":
        os.kill(os.getpid(), signal.SIGKILL)
    return len(text) / 100

def in_one_go(group):
    witness("in one go")
    return [float(len(group.samples))] * len(group.samples)
'''


@pytest.fixture
def score_all(make_rewards):
    def score_all(*groups, function="judge", timeout_s=0.8, **settings):
        async def run():
            component = {"use": f"mine.py:{function}", "timeout_s": timeout_s}
            async with make_rewards(component, source=SOURCE, max_unscored_frac=1.0, **settings) as rewards:
                return await asyncio.gather(*(rewards.score(group) for group in groups))

        return asyncio.run(run())

    return score_all


def pids(folder, name):
    return [int(pid) for pid in (folder / name).read_text().split()]


def test_the_one_that_hangs_earns_the_minimum_and_the_others_their_own_scores(score_all, make_group, tmp_path):
    texts = ["a", "bb", "ccc", "hang", "eeeee", "f", "g", "hh"]
    (clean,) = score_all(make_group(*(text if text != "hang" else "a" for text in texts)))
    (group,) = score_all(make_group(*texts))
    assert group.rewards == (*clean.rewards[:3], -1.0, *clean.rewards[4:])
    hung = group.scores["judge"][3]
    assert (hung.fault, hung.detail) == (Fault.MODEL, "took longer than 0.8 s; its process was killed")
    assert len(pids(tmp_path, "hang")) == 1  # the limit was spent on it once
    assert len(set(pids(tmp_path, "judged")[8:])) == 2  # the rest was judged by another process


@pytest.mark.slow("waits for time-outs")
def test_a_group_that_only_hangs_lets_others_pass_between(score_all, make_group, tmp_path):
    hangs, good = score_all(make_group("hang", "hang", "hang"), make_group("a"), timeout_s=0.5)
    assert hangs.rewards == (-1.0, -1.0, -1.0)
    assert good.rewards == (0.01,)
    assert (tmp_path / "order").read_text().split() == ["hang", "a", "hang", "hang"]


def test_a_worker_that_waits_instead_of_computing_was_held_up_and_the_response_is_not_blamed(
    score_all, make_group, tmp_path
):
    (group,) = score_all(make_group("a", "wait", "bb"))
    assert group.rewards == (0.01, None, 0.02)
    held_up = group.scores["judge"][1]
    assert held_up.fault is Fault.INFRA
    assert re.search(r"after 0\.[0-3] s of processor time", held_up.detail)  # of a limit of 0.8
    assert len(pids(tmp_path, "wait")) == 1


def test_a_row_that_cannot_be_read_in_time_is_a_fault_of_the_data(score_all, make_group, tmp_path):
    (group,) = score_all(make_group("a", "bb", answer="hang"))
    assert [(score.fault, score.value) for score in group.scores["judge"]] == [(Fault.DATA, None)] * 2
    assert len(pids(tmp_path, "row")) == 1


def test_a_row_that_its_judge_does_not_survive_is_no_samples_fault(score_all, make_group, tmp_path):
    (group,) = score_all(make_group("a", "bb", answer="crash"), timeout_s=10)
    assert [score.fault for score in group.scores["judge"]] == [Fault.INFRA] * 2
    assert group.scores["judge"][0].detail == "with the row, its process was killed by SIGSEGV, twice"
    assert len(pids(tmp_path, "row")) == 2


def test_a_response_that_crashes_its_judge_twice_is_to_blame(score_all, make_group, tmp_path):
    (group,) = score_all(make_group("a", "crash", "bb"), timeout_s=10)
    assert group.rewards == (0.01, -1.0, 0.02)
    assert group.scores["judge"][1].detail == "its process was killed by SIGSEGV, twice"
    assert len(set(pids(tmp_path, "crash"))) == 2


def test_a_worker_that_is_killed_from_outside_costs_nothing(score_all, make_group, tmp_path):
    (group,) = score_all(make_group("a", "shot once", "bb"))
    assert group.rewards == (0.01, 0.09, 0.02)
    assert len(set(pids(tmp_path, "shot"))) == 2


def test_a_worker_that_is_killed_over_and_over_scores_that_response_with_nothing(score_all, make_group):
    (group,) = score_all(make_group("a", "shot twice", "bb"))
    assert group.rewards == (0.01, None, 0.02)
    assert group.scores["judge"][1].detail == "its process was killed by SIGKILL, twice"


def test_other_functions_see_the_group_whole(score_all, make_group, tmp_path):
    (group,) = score_all(make_group("a", "b", "c"), function="in_one_go")
    assert group.rewards == (3.0, 3.0, 3.0)
    assert len(pids(tmp_path, "in one go")) == 1


def test_cancelling_in_the_middle_of_a_group_leaves_no_process(make_rewards, make_group, tmp_path):
    async def run():
        component = {"use": "mine.py:judge", "timeout_s": 60.0}
        async with make_rewards(component, source=SOURCE) as rewards:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.4):
                    await rewards.score(make_group("a", "hang", "bb"))
            (pid,) = pids(tmp_path, "hang")
            with pytest.raises(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            return await rewards.score(make_group("a"))

    assert asyncio.run(run()).rewards == (0.01,)


def test_only_a_function_with_a_minimum_can_blame_the_response():
    with pytest.raises(ValueError, match="minimum"):
        reward(overrun=Fault.MODEL)
    with pytest.raises(ValueError, match=r"choose Fault\.INFRA"):
        reward(minimum=0.0, overrun=Fault.DATA)
    assert overrun_score(reward(minimum=-1.0, overrun=Fault.MODEL)(lambda group: [])) == -1.0
    assert overrun_score(reward(minimum=-1.0)(lambda group: [])) is None
    assert overrun_score(lambda group: []) is None
