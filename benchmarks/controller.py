"""What one controller process carries: loop, router, rewards, credit, recorder, events and audit, without models.

    python benchmarks/controller.py                    # about 4 minutes
    python benchmarks/controller.py --quick
    python benchmarks/controller.py --slots 512 --tokens 32000 --profile
    python benchmarks/controller.py --slots 64 --tokens 200 2000 --routing reference

Engines and trainer are fakes that cost nothing: an engine's samples arrive pickled, as they do from another process
(Ray's own transport is not in it), and an update returns at once. Everything else is the product's own code on real
time, with the recorder at its defaults and a built-in reward in process. A cell is a run of synchronous GRPO steps
whose engines draw `slots` samples of `tokens` tokens at a time. A step has as many samples as there are slots, and 512
at least, which then wait for a slot as they do in an engine's queue.

The process is held on one core. Rates are per second of CPU time of all its threads, so that neighbours on the machine
widen them less; a stall is the longest time that a 2 ms timer of the event loop was late, of which no more is counted
than the CPU time that the process used meanwhile. Each cell is run twice: while samples are recorded, and as it is
when samples/ is full (64 MiB, after a minute at most). The stall is the longer one, `binds` has the largest shares of
the second one's CPU time, and `bytes a token` is what samples in flight hold.

With `--routing` samples have the experts of their tokens, like those of Qwen3-30B-A3B (384 bytes a token): `reference`
as engines in processes of Ray's report them, `value` with the records themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import os
import pickle
import pstats
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch

from hone.algo.algorithm import Algorithm
from hone.config.run import RunConfig
from hone.data import pack
from hone.data.order import RowOrder, SourceRange
from hone.experts import ExpertSpan, RoutingRecord, StoredExperts
from hone.loop import policy
from hone.loop.run import PolicyRun
from hone.observe.observer import Observer
from hone.observe.recorder import Recorder
from hone.reward.rewards import Rewards
from hone.rollout.engine import Request, Sampling
from hone.rollout.router import Router
from hone.run.audit import audit_file
from hone.train.tensor_files import LiveSnapshot
from hone.types import Progress, Prompt, Sample, VersionSpan

SLOTS, TOKENS, GROUP = (8, 64, 512, 4096), (200, 2_000, 32_000), 8
SLOTS_PER_ENGINE, LEAST_SAMPLES = 256, 512
MOST_TOKENS = 140_000_000
"""Of a cell's step."""
SAMPLING = Sampling(max_tokens=1 << 20, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, stop=(), stop_token_ids=())


@dataclass(frozen=True)
class Cell:
    """One cell's figures."""

    slots: int
    tokens: int
    samples_per_s: float
    full_per_s: float
    """Likewise when samples/ is full."""
    stall_ms: float
    bytes_per_token: float
    shares: dict[str, float]

    def row(self) -> str:
        binds = ", ".join(f"{name} {share:.0%}" for name, share in sorted(self.shares.items(), key=lambda s: -s[1])[:3])
        rate = self.samples_per_s * self.tokens / 1e6
        return (
            f"| {self.slots:,} | {self.tokens:,} | {self.samples_per_s:,.0f} | {rate:,.1f} "
            f"| {self.full_per_s:,.0f} | {self.full_per_s * self.tokens / 1e6:,.1f} | {self.stall_ms:.0f} "
            f"| {self.bytes_per_token:.1f} | {binds} |"
        )


class Prompts:
    """Endless, each different."""

    order = RowOrder([SourceRange("", 0, 1)], seed=0, order="source")

    def starting_at(self, index: int) -> Iterator[Prompt]:
        token_ids = np.arange(100, dtype=np.int32)
        while True:
            yield Prompt(f"p{index}", index, "2+2=", token_ids + index % 1000, "4")
            index += 1


class Drawn:
    """Pickled groups that engines send, of the newest version."""

    def __init__(self, tokens: int, routing: str) -> None:
        self._groups = [drawn(tokens, seed, routing) for seed in range(2)]
        self._version = -1
        self.pickled: list[bytes] = []
        self.seconds = 0.0
        """CPU time that was the engines'."""

    def become(self, version: int) -> None:
        if version != self._version:
            began, self._version = time.thread_time(), version
            count = len(self._groups[0][0].token_ids)
            groups = [[replace(s, versions=(VersionSpan(version, count),)) for s in group] for group in self._groups]
            self.pickled = [pickle.dumps(tuple(group), 5) for group in groups]
            self.seconds += time.thread_time() - began


class FakeEngine:
    """Draws a group in no time; its samples come as bytes, which a thread unpickles, as Ray's does."""

    transport = ThreadPoolExecutor(1)

    def __init__(self, samples: Drawn, slots: int) -> None:
        self.version, self._samples, self._drawn = -1, samples, 0
        self._groups = asyncio.Semaphore(slots // GROUP)

    async def generate(self, request: Request, on_sample: Any = None) -> tuple[Sample, ...]:
        async with self._groups:
            self._drawn += 1
            sent = self._samples.pickled[self._drawn % 2]
            return await asyncio.get_running_loop().run_in_executor(self.transport, pickle.loads, sent)

    async def load(self, weights: Any, version: int) -> None:
        self._samples.become(version)
        self.version = version

    async def close(self) -> None:
        pass

    def fingerprint(self) -> str:
        return "same"


class FakeTrainer:
    """Updates in no time."""

    device = torch.device("cpu")

    def update(self, batch: Any, algorithm: Any) -> dict[str, float]:
        return {"train/loss": 0.0}

    def logprobs(self, batch: Any, **_: Any) -> torch.Tensor:
        return batch.sampler_logprobs_T

    def logprobs_and_entropies(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.sampler_logprobs_T, torch.zeros_like(batch.sampler_logprobs_T)

    def measure(self, batch: Any, needs: Any) -> dict[str, Any]:
        return {}

    def weights(self) -> Iterator[Any]:
        return iter(())

    def snapshot(self) -> LiveSnapshot:
        return LiveSnapshot({}, {})


class Shares:
    """CPU time of named calls, on whatever thread."""

    def __init__(self) -> None:
        self.seconds = Counter[str]()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                self.seconds[name] += time.thread_time() - began

        return timing


class Stalls:
    """Longest delay of a timer of the event loop."""

    EVERY_S = 0.002

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        while True:
            wall, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(self.EVERY_S)
            late = time.perf_counter() - wall - self.EVERY_S
            self.longest_s = max(self.longest_s, min(late, time.process_time() - cpu))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", nargs="+", type=int, default=SLOTS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--seconds", type=float, default=6.0, help="of CPU time of a cell, about")
    parser.add_argument("--profile", action="store_true", help="print where the event loop's thread was, of each cell")
    parser.add_argument("--routing", choices=["none", "value", "reference"], default="none")
    parser.add_argument("--quick", action="store_true", help="one small cell: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.slots, options.tokens, options.seconds = [64], [200], 0.5
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    print("| slots | tokens | samples/s | million tokens/s | samples/s, full | million tokens/s, full |", end="")
    print(" longest stall, ms | bytes a token | binds |\n|---|---|---|---|---|---|---|---|---|", flush=True)
    for tokens in options.tokens:
        for slots in options.slots:
            if max(slots, LEAST_SAMPLES) * tokens <= MOST_TOKENS:
                found = measured(slots, tokens, options.seconds, options.profile, options.routing)
                print(found.row(), flush=True)
                gc.collect()


def measured(slots: int, tokens: int, seconds: float, profile: bool, routing: str) -> Cell:
    """Steps of one cell for about so much CPU time."""
    folder = Path(tempfile.mkdtemp(prefix="hone-controller-"))
    try:
        run = partial(cell, slots=slots, tokens=tokens, seconds=seconds, profile=profile, routing=routing)
        recording = asyncio.run(run(folder / "recording", samples_mib=1 << 20))
        full = asyncio.run(run(folder / "full", samples_mib=0))
        stall_ms = max(recording.stall_ms, full.stall_ms)
        return replace(full, samples_per_s=recording.samples_per_s, stall_ms=stall_ms)
    finally:
        shutil.rmtree(folder)


def drawn(tokens: int, seed: int, routing: str) -> tuple[Sample, ...]:
    """A group's samples: half of them right."""
    chance = np.random.default_rng(seed)

    def record() -> RoutingRecord | None:
        if routing == "value":
            return chance.integers(0, 127, (tokens, 48, 8), dtype=np.int8)
        unread = ExpertSpan(partial(np.zeros, (tokens, 48, 8), np.int8), 0, tokens)
        return StoredExperts((unread,)) if routing == "reference" else None

    return tuple(
        Sample(
            "p",
            index,
            chance.integers(0, 150_000, tokens, dtype=np.int32),
            -chance.exponential(0.5, tokens).astype(np.float32),
            (VersionSpan(0, tokens),),
            "stop",
            "4" if index % 2 else "word " * tokens,
            routing=record(),
        )
        for index in range(GROUP)
    )


def bytes_per_token(groups: list[bytes], samples: int, tokens: int) -> float:
    """What a step's samples hold, by every allocation."""
    count = max(1, min(samples * tokens, 4_000_000) // (GROUP * tokens))
    tracemalloc.start()
    held = [pickle.loads(groups[number % 2]) for number in range(count)]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / (len(held) * GROUP * tokens)


async def cell(
    folder: Path, *, slots: int, tokens: int, seconds: float, profile: bool, routing: str, samples_mib: int
) -> Cell:
    """See `measured`."""
    samples_per_step = max(slots, LEAST_SAMPLES)
    config = RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "run": {"steps": 1_000_000},
            "reward": {"components": [{"use": "exact"}]},
            "rollout": {"group_size": GROUP, "max_response_tokens": tokens},
            "train": {"prompts_per_step": samples_per_step // GROUP},
            "gate": {"enabled": False},
            "checkpoint": {"every": 0},
            "observe": {"console": "quiet", "samples_max_mib": samples_mib},
        }
    )
    shares, stalls, samples = Shares(), Stalls(), Drawn(tokens, routing)
    observer = Observer(folder, config.observe, title="controller", total_steps=config.run.steps)
    observer.record = shares.timed("recording", observer.record)  # type: ignore[method-assign]
    Recorder._write = shares.timed("writing samples", WRITE)
    policy.collate_and_check = shares.timed("collating", COLLATE)
    policy.learn = shares.timed("credit", LEARN)
    policy.summarize = shares.timed("metrics", SUMMARIZE)
    count = max(1, slots // SLOTS_PER_ENGINE)
    engines = {f"engine-{n}": FakeEngine(samples, slots // count) for n in range(count)}
    router = Router(engines, observer, silence_s=600.0, call_s=600.0, patience_s=600.0)
    async with Rewards.from_config(config.reward, folder, window_samples=20 * samples_per_step) as rewards:
        run = PolicyRun(
            config=config,
            progress=Progress(),
            trainer=FakeTrainer(),
            observer=observer,
            checkpoints=SimpleNamespace(save=lambda *_: None),
            compute=ThreadPoolExecutor(1),
            stop=asyncio.Event(),
            prompts=Prompts(),
            engine=router,
            rewards=rewards,
            algorithm=Algorithm(config.algorithm),
            sampling=replace(SAMPLING, max_tokens=tokens),
            eos_ids=frozenset({2}),
            weights_are_shared=True,
            evaluate=None,
            gate_passed=True,
        )
        watching = asyncio.create_task(stalls.watch())
        training = asyncio.create_task(policy.train_policy(run))
        await steps(run, 2, training)  # imports, first files
        observer._background.drain()
        await asyncio.sleep(4 * Stalls.EVERY_S)  # that it stood still meanwhile is noticed before the count begins
        profiler = cProfile.Profile()
        stalls.longest_s, samples.seconds, shares.seconds = 0.0, 0.0, Counter()
        first, began = run.progress.step, time.process_time()
        if profile:
            profiler.enable()
        while time.process_time() - began < seconds or run.progress.step < first + 3:
            await steps(run, run.progress.step + 1, training)
        if profile:
            profiler.disable()
        made, stall_ms = run.progress.step - first, stalls.longest_s * 1e3
        observer._background.drain()  # stops the event loop, which a run does only where it saves
        used = time.process_time() - began - samples.seconds
        run.stop.set()
        watching.cancel()
        await training
        run.compute.shutdown()
    await router.close()
    observer.close("done")
    began = time.process_time()
    audited = audit_file(folder / "events.jsonl")
    audit_s = (time.process_time() - began) * made / (made + first)
    assert not audited.violations, audited
    if profile:
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(25)
    total = used + audit_s
    found = {name: spent / total for name, spent in shares.seconds.items()} | {"audit": audit_s / total}
    found["loop, router, rewards"] = 1 - sum(found.values())
    rate = made * samples_per_step / total
    return Cell(slots, tokens, rate, rate, stall_ms, bytes_per_token(samples.pickled, samples_per_step, tokens), found)


async def steps(run: PolicyRun, count: int, training: asyncio.Task[None]) -> None:
    """Wait until this number of steps is made. Raises what ends the training before."""
    while run.progress.step < count:
        if training.done():
            training.result()
        await asyncio.sleep(0.005)


COLLATE, LEARN, SUMMARIZE, WRITE = policy.collate_and_check, policy.learn, policy.summarize, Recorder._write
assert pack.collate is policy.collate

if __name__ == "__main__":
    main()
