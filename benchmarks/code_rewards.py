"""Programs scored per second: sandboxes of Hone against the usual way, a plain interpreter for each test.

    python benchmarks/code_rewards.py --parallel 2 --rounds 5

One process, the same programs (all different) and tests on all sides, rounds interleaved; the median of the rounds.
`plain` is `subprocess.run([python, "-I", "-S", "-c", program])` for each test, in `parallel` threads: no isolation, no
limit but time, and the fastest way to start an interpreter. An item is one program with all its tests. The loads: 1, 10
and 50 tests that print a sum; 10 calls of a function; and half of the programs hanging until their CPU second is over.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hone.reward.code import CodeReward
from hone.reward.sandbox.base import SandboxUnavailable
from hone.reward.sandbox.local import BareProcess
from hone.types import Group, Prompt, Sample, VersionSpan

ADD = "print(sum(map(int, input().split())))"
CALL = "from typing import List\ndef add(a: int, b: int) -> int:\n    return a + b"
HANG = "while True: pass"


@dataclass(frozen=True)
class Load:
    """Programs of one group, and its row's tests."""

    name: str
    programs: tuple[str, ...]
    tests: list[dict]
    has_plain: bool = True


def loads(num_items: int) -> list[Load]:
    def different(*programs: str) -> tuple[str, ...]:
        return tuple(f"{programs[n % len(programs)]}\n# {n}" for n in range(num_items))

    def sums(count: int) -> list[dict]:
        return [{"stdin": f"{n} 1\n", "stdout": f"{n + 1}\n"} for n in range(count)]

    calls = [{"call": "add", "args": [n, 1], "expected": n + 1} for n in range(10)]
    return [
        Load("1 test", different(ADD), sums(1)),
        Load("10 tests", different(ADD), sums(10)),
        Load("50 tests", different(ADD), sums(50)),
        Load("10 calls", different(CALL), calls, has_plain=False),
        Load("10 tests, half hang", different(ADD, HANG), sums(10), has_plain=False),
    ]


def plain(load: Load, parallel: int) -> None:
    """The usual way; expected output compared like Hone does, without its tolerance."""

    def item(program: str) -> bool:
        command = [sys.executable, "-I", "-S", "-c", program]
        outputs = (
            subprocess.run(command, input=test["stdin"], capture_output=True, text=True, timeout=30).stdout
            for test in load.tests
        )
        return all(output == test["stdout"] for output, test in zip(outputs, load.tests, strict=True))

    with ThreadPoolExecutor(parallel) as threads:
        assert all(threads.map(item, load.programs))


async def scored(reward: CodeReward, load: Load) -> None:
    samples = tuple(
        Sample("p", n, (1,), (0.0,), (VersionSpan(0, 1),), "stop", f"```python\n{program}\n```")
        for n, program in enumerate(load.programs)
    )
    scores = await reward.score(Group(Prompt("p", 0, "", (1,), answer=load.tests), samples))
    right = [
        program.startswith(HANG) or score.value == 1.0 for program, score in zip(load.programs, scores, strict=True)
    ]
    assert all(right), scores


async def main(parallel: int, rounds: int, num_items: int) -> None:
    args = {"parallel": parallel, "test_cpu_s": 1}
    walled, bare = CodeReward.from_args(args), CodeReward.from_args(args)
    bare.sandbox = BareProcess(bare._settings.limits(), num_slots=parallel)
    await walled.start()
    ways: dict[str, Callable[[Load], Awaitable[None]]] = {}
    try:
        await bare.sandbox.start()
        ways["bare"] = lambda load: scored(bare, load)
    except SandboxUnavailable as error:  # root's own interpreter, which no other user can read
        print(f"without bare: {error}")
    if walled.sandbox is not None:
        ways["bubblewrap"] = lambda load: scored(walled, load)
    ways["plain"] = lambda load: asyncio.to_thread(plain, load, parallel)
    print(f"{num_items} items, {parallel} at a time, items per second (median of {rounds} rounds)")
    print(f"{'':>22}" + "".join(f"{name:>12}" for name in ways))
    try:
        for load in loads(num_items):
            hangs = any(program.startswith(HANG) for program in load.programs)
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(1 if hangs else rounds):
                for name, way in ways.items():
                    if name == "plain" and not load.has_plain:
                        continue
                    started = time.perf_counter()
                    await way(load)
                    seconds[name].append(time.perf_counter() - started)
            cells = (f"{num_items / statistics.median(s):12.1f}" if s else f"{'-':>12}" for s in seconds.values())
            print(f"{load.name:>22}" + "".join(cells), flush=True)
    finally:
        await walled.close()
        await bare.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--items", type=int, default=8)
    options = parser.parse_args()
    asyncio.run(main(options.parallel, options.rounds, options.items))
