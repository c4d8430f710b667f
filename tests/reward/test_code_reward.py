"""The `code` reward: verdicts from runs, faults told apart, and nothing left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from needs import PYTHON_OF_ALL, missing

from hone.errors import ConfigError, RewardError
from hone.reward.code import CodeReward, CodeSettings
from hone.reward.resolve import Unusable
from hone.reward.rewards import Rewards
from hone.reward.sandbox.base import (
    Call,
    Limits,
    ProgramEnding,
    ProgramRun,
    SandboxFault,
    SandboxLost,
    SandboxUnavailable,
    Stdin,
)
from hone.reward.sandbox.bubblewrap import Bubblewrap
from hone.types import Fault, Score

SUMS = [{"stdin": f"{a} {b}\n", "stdout": f"{a + b}\n"} for a, b in ((3, 4), (0, 0), (1, -1), (10, 5))]
"""3 + 4, 0 + 0, 1 - 1, 10 + 5."""


def block(program: str) -> str:
    return f"Here it is.\n```python\n{program}\n```\n"


class FakeSandbox:
    """Runs nothing: `behave` says what becomes of each run, by (source, input, how many sandboxes were opened)."""

    name = "fake"

    def __init__(self, behave):
        self.behave, self.opened, self.runs = behave, 0, 0

    async def start(self):
        pass

    @contextlib.asynccontextmanager
    async def open(self, source):
        self.opened += 1
        opened = self.opened

        class Session:
            async def run(_, given):
                self.runs += 1
                await asyncio.sleep(0)
                outcome = self.behave(source, given, opened)
                if isinstance(outcome, Exception):
                    raise outcome
                return outcome

        yield Session()

    async def close(self):
        pass


def adder(source, given, opened):
    """The right sum for every input."""
    return ProgramRun(ProgramEnding.FINISHED, str(sum(map(int, given.text.split()))).encode())


def score(make_group, *programs, behave=adder, tests=SUMS, columns=None, **args):
    reward = CodeReward.from_args(args)
    reward.sandbox = FakeSandbox(behave)
    group = make_group(*map(block, programs), answer=tests)
    return asyncio.run(reward.score(group)), reward.sandbox


def test_all_tests_or_nothing(make_group):
    def wrong_at_10(source, given, opened):
        return ProgramRun(ProgramEnding.FINISHED, b"0") if given.text.startswith("10") else adder(source, given, opened)

    assert score(make_group, "x")[0] == (Score(1.0),)
    assert score(make_group, "x", behave=wrong_at_10)[0] == (Score(0.0, None, "test 4 of 4: wrong output"),)
    assert score(make_group, "x", behave=wrong_at_10, score="fraction")[0] == (
        Score(0.75, None, "test 4 of 4: wrong output"),
    )


def test_all_or_nothing_stops_at_the_first_failure(make_group):
    def wrong(source, given, opened):
        return ProgramRun(ProgramEnding.FINISHED, b"no")

    assert score(make_group, "x", behave=wrong)[1].runs == 1
    assert score(make_group, "x", behave=wrong, score="fraction")[1].runs == 4


@pytest.mark.parametrize(
    ("ending", "why"),
    [
        (ProgramEnding.CRASHED, "IndexError: x"),
        (ProgramEnding.TIME, "time limit exceeded"),
        (ProgramEnding.MEMORY, "memory limit exceeded"),
        (ProgramEnding.OUTPUT, "output limit exceeded"),
    ],
)
@pytest.mark.parametrize("how", ["all", "fraction"])
def test_a_program_that_breaks_earns_the_minimum_and_a_flag(make_group, ending, why, how):
    def broken(source, given, opened):
        return ProgramRun(ending, b"7\n", "IndexError: x")

    scores, _ = score(make_group, "x", behave=broken, score=how)
    assert scores == (Score(0.0, Fault.MODEL, f"test 1 of 4: {why}"),)


def test_breaking_on_some_inputs_is_failing_those_tests(make_group):
    def slow_at_0(source, given, opened):
        return ProgramRun(ProgramEnding.TIME, b"") if given.text.startswith("0") else adder(source, given, opened)

    scores, _ = score(make_group, "x", behave=slow_at_0, score="fraction")
    assert scores == (Score(0.75, None, "test 2 of 4: time limit exceeded"),)


def test_a_response_without_a_program_earns_the_minimum(make_group):
    reward = CodeReward.from_args({})
    reward.sandbox = FakeSandbox(adder)
    group = make_group("7", "```python\nprint(", block("x"), answer=SUMS)
    assert asyncio.run(reward.score(group)) == (
        Score(0.0, Fault.MODEL, "no code block"),
        Score(0.0, Fault.MODEL, "its last code block is not closed"),
        Score(1.0),
    )


def test_equal_programs_run_once(make_group):
    scores, sandbox = score(make_group, "same", "other", "same", "same")
    assert scores == (Score(1.0),) * 4
    assert sandbox.opened == 2


@pytest.mark.parametrize("tests", [None, "{", [], [{"stdin": "1"}]])
def test_a_row_without_usable_tests_is_a_fault_of_the_data(make_group, tests):
    scores, sandbox = score(make_group, "x", "y", tests=tests)
    assert [s.fault for s in scores] == [Fault.DATA] * 2
    assert sandbox.opened == 0


def test_a_sandbox_that_fails_once_changes_nothing(make_group):
    def fails_first(source, given, opened):
        return SandboxFault("no process") if opened == 1 else adder(source, given, opened)

    scores, sandbox = score(make_group, "x", behave=fails_first)
    assert (scores, sandbox.opened) == ((Score(1.0),), 2)


def test_a_test_that_cannot_be_run_leaves_the_whole_program_without_a_score(make_group):
    """It is not dropped from the count: 3 of 3 would be a made-up number."""

    def fails_at_10(source, given, opened):
        return SandboxFault("host went away") if given.text.startswith("10") else adder(source, given, opened)

    for how in ("all", "fraction"):
        scores, _ = score(make_group, "x", behave=fails_at_10, score=how)
        assert scores == (Score(None, Fault.INFRA, "host went away"),)


def test_losing_the_sandbox_twice_is_the_programs_doing(make_group):
    def kills(source, given, opened):
        return SandboxLost("the sandbox ended") if source == "bad" else adder(source, given, opened)

    scores, sandbox = score(make_group, "bad", "good", behave=kills)
    assert scores == (Score(0.0, Fault.MODEL, "its sandbox was lost 2 times: the sandbox ended"), Score(1.0))
    assert sandbox.opened == 3


def test_a_program_killed_from_nowhere_is_run_again(make_group):
    def killed_first(source, given, opened):
        return ProgramRun(ProgramEnding.LOST, b"", "killed by SIGKILL") if opened == 1 else adder(source, given, opened)

    assert score(make_group, "x", behave=killed_first)[0] == (Score(1.0),)


def test_tests_not_reached_in_time_count_as_failed(make_group):
    def slow(source, given, opened):
        time.sleep(0.06)
        return adder(source, given, opened)

    scores, sandbox = score(make_group, "x", behave=slow, score="fraction", program_wall_s=0.1)
    assert scores == (Score(0.5, None, "test 3 of 4: time limit exceeded"),)
    assert sandbox.runs == 2


def test_function_calls_and_a_column_of_tests(make_group):
    def add(source, given, opened):
        assert isinstance(given, Call)
        return ProgramRun(ProgramEnding.FINISHED, b"%d\n" % sum(given.args))

    assert score(make_group, "x", behave=add, tests=["assert add(3, 4) == 7"])[0] == (Score(1.0),)
    scores, _ = score(make_group, "x", column="tests")
    assert scores[0].fault is Fault.DATA


@pytest.mark.parametrize("args", [{"scor": "all"}, {"score": "half"}, {"test_cpu_s": 0}, {"memory_mib": 1}])
def test_args_that_do_not_fit_are_named(args):
    with pytest.raises(Unusable, match=next(iter(args))):
        CodeReward.from_args(args)


def test_args_that_do_not_fit_are_a_problem_of_the_run_file(make_rewards):
    with pytest.raises(ConfigError, match=r"reward\.components\.0\.use: args\.scor"):
        make_rewards({"use": "code", "args": {"scor": 1}})


# Which sandbox


class Candidate(FakeSandbox):
    def __init__(self, name, problem=None):
        super().__init__(adder)
        self.name, self.problem, self.starts = name, problem, 0

    async def start(self):
        self.starts += 1
        if self.problem:
            raise SandboxUnavailable(self.problem)


def test_nothing_available_is_an_infra_fault_and_never_a_number(make_group, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # witness below: bwrap is looked for and not found
    reward = CodeReward.from_args({})
    assert asyncio.run(reward.start()) == []
    (scored,) = asyncio.run(reward.score(make_group(block("print(1)"), answer=SUMS)))
    assert (scored.value, scored.fault) == (None, Fault.INFRA)
    assert scored.detail.startswith("sandbox_unavailable: bubblewrap: bwrap is not installed")
    assert scored.detail.endswith("allow_unsafe_local_exec is off")


def test_a_run_with_no_sandbox_ends_by_the_bound_on_unscored_samples(make_rewards, make_group, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))

    async def run(rewards: Rewards):
        async with rewards:
            await rewards.score(make_group(block("print(1)"), answer=SUMS))

    with pytest.raises(RewardError, match="sandbox_unavailable"):
        asyncio.run(run(make_rewards({"use": "code"}, window_samples=10)))


def test_a_sandbox_may_come_back(make_group):
    candidate = Candidate("remote", "connection refused")
    reward = CodeReward(CodeSettings(), sandboxes=[candidate], start_again_s=0.0)
    group = make_group(block("x"), answer=SUMS)

    async def go():
        await reward.start()
        first = await reward.score(group)
        candidate.problem = None
        return first, await reward.score(group)

    first, second = asyncio.run(go())
    assert first[0].detail == "sandbox_unavailable: remote: connection refused; " + first[0].detail.split("; ", 1)[1]
    assert second == (Score(1.0),)
    assert candidate.starts == 3


def test_plain_processes_need_leave_and_a_reason(monkeypatch, tmp_path, make_group, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    reward = CodeReward.from_args({"allow_unsafe_local_exec": True, "parallel": 2, "python": PYTHON_OF_ALL})
    group = make_group(block("print(sum(map(int, input().split())))"), block("1/0"), answer=SUMS)

    async def go():
        await reward.start()
        try:
            return reward.sandbox.name, await reward.score(group)
        finally:
            await reward.close()

    name, scores = asyncio.run(go())
    assert name == "bare"
    assert "WITHOUT a sandbox (bubblewrap: bwrap is not installed" in caplog.text
    assert scores[0] == Score(1.0)
    assert scores[1].fault is Fault.MODEL


# With bubblewrap


@pytest.fixture
def scored(make_group):
    """Scores of responses, and of what else happens meanwhile, by the real thing."""

    def run(*programs, tests=SUMS, meanwhile=None, **args):
        reward = CodeReward.from_args({"test_cpu_s": 1, "test_wall_s": 4, "parallel": 4, **args})

        async def go():
            await reward.start()
            try:
                if reward.sandbox is None or reward.sandbox.name != "bubblewrap":
                    missing(f"needs bubblewrap: {reward._unavailable}")
                group = make_group(*map(block, programs), answer=tests)
                task = asyncio.create_task(reward.score(group))
                if meanwhile is not None:
                    await meanwhile(task)
                return await task
            finally:
                await reward.close()

        return asyncio.run(go())

    yield run
    assert [p for p in psutil.Process().children(recursive=True) if p.name() == "bwrap"] == []


GOOD = "print(sum(map(int, input().split())))"


def test_a_group_of_good_wrong_and_hostile_programs(scored):
    scores = scored(
        GOOD,
        "print(7)",
        "import os; os._exit(0)",
        "def f(:",
        "import os, time\nos.kill(-1, 9)\ntime.sleep(9)",
        GOOD + "  # again",
        score="fraction",
        tests=SUMS[:2],
    )
    assert [s.value for s in scores] == [1, 0.5, 0, 0, 0, 1]
    assert [s.fault for s in scores] == [None, None, None, Fault.MODEL, Fault.MODEL, None]


def test_expected_outputs_are_nowhere_in_the_sandbox(scored):
    """The program searches the memory that it was forked with: it finds the needle it was given, and no answer."""
    program = """
import gc
def search():
    seen = [str(value) for thing in gc.get_objects() if isinstance(thing, dict) for value in thing.values()]
    return ["-".join(["needle", end]) in text for end in ("in", "out") for text in [" ".join(seen)]]
kept = input()
print(*search())
"""
    tests = [{"stdin": "needle-in", "stdout": "needle-out"}, {"stdin": "needle-in", "stdout": "True False"}]
    (found,) = scored(program, tests=tests, score="fraction")
    assert (found.value, found.detail) == (0.5, "test 1 of 2: wrong output")


def sandboxes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if p.name() == "bwrap"]


async def until(condition, timeout_s: float = 5.0):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return found


def test_a_sandbox_killed_from_outside_changes_no_score(scored):
    killed = []

    async def kill_one(task):
        (outer, *_) = await until(sandboxes)
        await asyncio.sleep(0.3)
        outer.send_signal(signal.SIGKILL)
        killed.append(outer.pid)

    (found,) = scored("import time\ntime.sleep(0.5)\n" + GOOD, tests=SUMS[:1], meanwhile=kill_one)
    assert found == Score(1.0)
    assert len(killed) == 1


def test_a_sandbox_killed_from_outside_every_time_is_no_score(scored):
    killed = []

    async def kill_all(task):
        while not task.done():
            for outer in sandboxes():
                outer.send_signal(signal.SIGKILL)
                killed.append(outer.pid)
            await asyncio.sleep(0.05)

    (found,) = scored("import time\ntime.sleep(2)\n" + GOOD, tests=SUMS[:1], meanwhile=kill_all)
    assert (found.value, found.fault) == (None, Fault.INFRA)
    assert len(set(killed)) == 2


def test_a_sandbox_killed_from_outside_before_a_test_is_sent_is_no_fault_of_the_program(scored):
    scored(GOOD)  # or missing

    async def go():
        sandbox = Bubblewrap(Limits(60, 60.0, 256 << 20, 8, 1 << 16, 8 << 20), num_slots=1)
        await sandbox.start()
        async with sandbox.open(GOOD) as session:
            (outer,) = sandboxes()
            outer.send_signal(signal.SIGKILL)
            await until(lambda: session._process_fd is None, timeout_s=60.0)
            with pytest.raises(SandboxFault, match="killed from outside"):
                await session.run(Stdin("1 2"))

    asyncio.run(go())


def test_cancelling_ends_the_sandboxes(scored):
    async def cancel(task):
        assert await until(sandboxes)
        task.cancel()

    with pytest.raises(asyncio.CancelledError):
        scored("import time\ntime.sleep(60)", meanwhile=cancel, test_wall_s=60)


def test_no_sandbox_outlives_a_parent_that_is_killed(scored):
    scored(GOOD)  # or missing
    program = """
import asyncio
from hone.reward.sandbox.base import Limits, Stdin
from hone.reward.sandbox.bubblewrap import Bubblewrap
async def main():
    sandbox = Bubblewrap(Limits(60, 60.0, 256 << 20, 8, 1 << 16, 8 << 20), num_slots=1)
    await sandbox.start()
    async with sandbox.open("import os, time\\nos.fork() or os.setsid()\\nos.fork()\\ntime.sleep(60)") as session:
        await session.run(Stdin(""))
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)

    def inside() -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(parent.pid).children(recursive=True)
        return []

    async def go():
        found = await until(lambda: found if len(found := inside()) >= 6 else [], 20)
        assert len(found) >= 6  # bwrap, the warden, and the program's four
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        return await until(lambda: not any(p.is_running() and p.status() != "zombie" for p in found))

    assert asyncio.run(go())


def test_scores_are_those_of_another_time_exactly(scored):
    """Sets come out in one order: a program's output does not change from run to run."""
    program = "print({'a', 'b', 'c', 'd', input()})"
    ours = {"args": [sys.executable, "-c", program], "env": {"PYTHONHASHSEED": "0"}, "input": "e", "text": True}
    order = subprocess.run(**ours, capture_output=True, check=True).stdout
    for _ in range(2):
        assert scored(program, tests=[{"stdin": "e", "stdout": order}]) == (Score(1.0),)


def test_stdin_and_calls_in_one_row(scored):
    program = """
import sys
def add(a, b): return a + b
for line in sys.stdin: print(add(*map(int, line.split())))
"""
    tests = [*SUMS, {"call": "add", "args": [0.1, 0.2], "expected": 0.3}]
    assert scored(program, tests=tests) == (Score(1.0),)
