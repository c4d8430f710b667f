"""Math answers per second: `math` in the killable processes against calling math-verify directly, in the same run.

    python benchmarks/rules.py --workers 2 --rounds 5

Both sides grade the same responses, all different, in groups of 8 for each gold answer; rounds interleaved, each with
numbers of its own, so that no side meets an answer it has in a cache; the median of the rounds. `direct` is
`verify(parse(gold), parse(response))` in this process, one after the other, with the time-outs that math-verify has by
default (an alarm, five seconds). `off` is the same without them: faster, and unusable, for one answer can stop it for
minutes. `pool` is the reward as a run file has it, which reads each gold answer once. The last line has a stalling
answer on every worker at once: how long the next good one waits beyond the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from math_verify import parse, verify

from hone.config.run import RewardComponent, RewardSection
from hone.reward.rewards import Rewards
from hone.types import Group, Prompt, Sample, VersionSpan

GROUP_SIZE = 8
LIMIT_S = 3.0
BOMB = r"\boxed{9^{9^9}}"
KINDS: dict[str, Callable[[int, int], tuple[str, str]]] = {
    "numbers": lambda n, k: (f"{n}", f"So it is\n\\boxed{{{n + k}}}"),
    "fractions": lambda n, k: (f"\\frac{{{n}}}{{7}}", f"\\boxed{{\\dfrac{{{2 * n}}}{{{14 + k}}}}}"),
    "expressions": lambda n, k: (f"(x+{n})^2", f"\\boxed{{x^2+{2 * n}x+{n * n + k}}}"),
}
"""Gold and response of the n-th row, k-th sample; the first of a group is right, the others are wrong."""


def group(gold: str, *texts: str) -> Group:
    samples = tuple(Sample("p", n, (1,), (0.0,), (VersionSpan(0, 1),), "stop", text) for n, text in enumerate(texts))
    return Group(Prompt("p", 0, "", (1,), answer=gold), samples)


def make_groups(kind: str, first: int, count: int) -> list[Group]:
    rows = [[KINDS[kind](n, k) for k in range(GROUP_SIZE)] for n in range(first, first + count)]
    return [group(row[0][0], *(text for _, text in row)) for row in rows]


async def direct(work: Sequence[Group], limit_s: int) -> list[float]:
    return [
        float(
            verify(
                parse(f"\\boxed{{{group.prompt.answer}}}", parsing_timeout=limit_s),
                parse(sample.text, parsing_timeout=limit_s),
                timeout_seconds=limit_s,
            )
        )
        for group in work
        for sample in group.samples
    ]


async def pool(work: Sequence[Group], rewards: Rewards) -> list[float]:
    scored = await asyncio.gather(*(rewards.score(group) for group in work))
    return [reward for group in scored for reward in group.rewards if reward is not None]


async def compare(rewards: Rewards, kind: str, rounds: int, num_groups: int) -> None:
    rates: dict[str, list[float]] = {"direct": [], "off": [], "pool": []}
    ways: dict[str, Callable[[Sequence[Group]], Awaitable[list[float]]]] = {
        "direct": lambda work: direct(work, 5),
        "off": lambda work: direct(work, 0),
        "pool": lambda work: pool(work, rewards),
    }
    right = [1.0, *[0.0] * (GROUP_SIZE - 1)] * num_groups
    first = 10
    for _ in range(rounds):
        for name, way in ways.items():
            work = make_groups(kind, first, num_groups)
            first += num_groups
            started = time.perf_counter()
            assert await way(work) == right
            rates[name].append(len(right) / (time.perf_counter() - started))
    middle = {name: statistics.median(found) for name, found in rates.items()}
    cells = "".join(f"{rate:10.0f}" for rate in middle.values())
    print(f"{kind:>12}{cells}{middle['pool'] / middle['direct']:14.2f}", flush=True)


async def stall(rewards: Rewards, workers: int) -> None:
    stalled = [asyncio.create_task(rewards.score(group(str(n), BOMB))) for n in range(1, workers + 1)]
    await asyncio.sleep(0)
    started = time.perf_counter()
    good = await rewards.score(group("4", r"\boxed{4}"))
    waited_s = time.perf_counter() - started
    assert good.rewards == (1.0,)
    assert [scored.rewards for scored in await asyncio.gather(*stalled)] == [(0.0,)] * workers
    print(
        f"a stalling answer on all {workers} workers: the next good one waits {LIMIT_S:g} {waited_s - LIMIT_S:+.2f} s"
    )


async def main(workers: int, rounds: int, num_groups: int) -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns when its time-outs are off
    component = RewardComponent(use="math", timeout_s=LIMIT_S)
    settings = RewardSection(components=(component,), workers=workers, max_unscored_frac=1.0)
    async with Rewards.from_config(settings, Path("."), window_samples=10**9) as rewards:
        print(f"{num_groups * GROUP_SIZE} answers, {workers} workers: answers per second, median of {rounds} rounds")
        print(f"{'':>12}{'direct':>10}{'off':>10}{'pool':>10}{'pool / direct':>14}")
        for kind in KINDS:
            await compare(rewards, kind, rounds, num_groups)
        await stall(rewards, workers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=40, help=f"of {GROUP_SIZE} responses")
    options = parser.parse_args()
    asyncio.run(main(options.workers, options.rounds, options.groups))
