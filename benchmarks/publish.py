"""Seconds to bring a model's weights to an engine in another process, by transport, against a copy and against a file.

    python benchmarks/publish.py --mib 64 256 --bucket-mib 32 --engines 1 2 --rounds 3

Every transport brings the same tensors to processes that copy each into a model of their own, with both fingerprints,
as a run does. `copy` is the least possible: one pass over the bytes in one process. `file` is what many tools do: the
weights are saved as safetensors, and loaded by the other processes. Sides take turns; medians; ratios to `copy` and to
`file` in the same run. The last rows say what the fingerprints alone cost.

`bytes` is what a publish moves over the least that it must: the weights once for each engine, or with Ray's object
store once for each machine, whose engines read the same memory.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hone.model.fingerprint import byte_sum, weights_fingerprint
from hone.weights.buckets import bucket_bytes
from hone.weights.meeting import Link, Meeting
from hone.weights.publish import Published, publish, take
from hone.weights.publish_group import GroupInlet, GroupOutlet
from hone.weights.publish_ray import Intake, RayOutlet
from hone.weights.publisher import Routes

TENSORS = 24
"""Tensors that the bytes are divided over, as layers would be."""
TIMEOUT_S = 120.0
CPU = torch.device("cpu")


class Holder:
    """What an engine is to a transport: it has weights and loads others."""

    def __init__(self, num_bytes: int) -> None:
        self.own = tensors_of(num_bytes)
        self.version = 0

    async def load(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        assert weights is not None
        await asyncio.to_thread(self._copy, weights)
        self.version = version

    def _copy(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.own[name].copy_(weight)

    def fingerprint(self) -> str:
        return weights_fingerprint(self.own.items())


@ray.remote(num_cpus=0)
class Actor:
    """An engine's actor, as far as weights go."""

    def __init__(self, num_bytes: int) -> None:
        torch.set_num_threads(1)
        self.intake = Intake(Holder(num_bytes), timeout_s=TIMEOUT_S)

    async def begin_weights(self, version: int) -> None:
        await self.intake.begin(version)

    async def take_bucket(self, header: str, data: np.ndarray) -> None:
        await self.intake.bucket(header, data)

    async def finish_weights(self, manifest: str) -> str:
        return await self.intake.manifest(manifest)


def other_process(channel: Connection, num_bytes: int, name: str) -> None:
    """Takes weights through gloo, or loads a file, as it is told."""
    torch.set_num_threads(1)
    holder = Holder(num_bytes)
    link: Link = channel.recv()
    inlet = GroupInlet(link, name, backend="gloo", device=CPU, timeout_s=TIMEOUT_S)
    while isinstance(told := channel.recv(), str | int):
        if isinstance(told, int):
            asyncio.run(take(holder, inlet, told))
        else:
            holder._copy(load_file(told).items())
        channel.send("done")


def tensors_of(num_bytes: int) -> dict[str, Tensor]:
    return {f"layer.{i}": torch.randn(num_bytes // TENSORS // 2).bfloat16() for i in range(TENSORS)}


@dataclass(frozen=True)
class Found:
    """Of one size and number of engines."""

    seconds: dict[str, float]
    """Median of every side."""
    moved: dict[str, float]
    """Bytes that a transport moves, over the least possible."""


def measure(mib: float, bucket_mib: float, num_engines: int, rounds: int, folder: Path) -> Found:
    """All sides, in turn."""
    weights, target = tensors_of(int(mib * 2**20)), tensors_of(int(mib * 2**20))
    num_bytes, size = sum(weight.nbytes for weight in weights.values()), bucket_bytes(bucket_mib)
    names = [f"engine-{number}" for number in range(num_engines)]
    versions = iter(range(1, 10**6))
    actors: dict[str, Any] = {name: Actor.remote(num_bytes) for name in names}
    context = multiprocessing.get_context("spawn")
    gloo = GroupOutlet(Meeting(), names, backend="gloo", device=CPU, timeout_s=TIMEOUT_S)
    channels, processes = [], []
    for name in names:
        ours, theirs = context.Pipe()
        process = context.Process(target=other_process, args=(theirs, num_bytes, name), daemon=True)
        process.start()
        ours.send(gloo.link)
        channels.append(ours)
        processes.append(process)
    gloo.connect()
    sent: dict[str, Published] = {}

    def tell(what: str | int | None) -> None:
        for channel in channels:
            channel.send(what)

    def wait() -> None:
        for channel in channels:
            channel.recv()

    def through_ray() -> None:
        version = next(versions)
        outlet = RayOutlet(actors, version=version, timeout_s=TIMEOUT_S)
        sent["Ray"] = publish(weights.items(), outlet, version=version, bucket_size=size)

    def through_gloo() -> None:
        version = next(versions)
        tell(version)
        sent["gloo"] = publish(weights.items(), gloo, version=version, bucket_size=size)
        wait()

    def through_a_file(sync: bool) -> None:
        path = folder / "weights.safetensors"
        save_file(weights, path)
        if sync:
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        tell(str(path))
        wait()

    data = torch.cat([weight.view(torch.uint8) for weight in weights.values()])
    sides: dict[str, Callable[[], object]] = {
        "copy": lambda: [target[name].copy_(weight) for name, weight in weights.items()],
        "Ray": through_ray,
        "gloo": through_gloo,
        "file": lambda: through_a_file(sync=False),
        "file, fsync": lambda: through_a_file(sync=True),
        "one fingerprint": lambda: byte_sum(data),
        "BLAKE2b": lambda: hashlib.blake2b(data.numpy().data).digest(),
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, work in sides.items():
            started = time.perf_counter()
            work()
            if number:  # the first round warms up
                found[name].append(time.perf_counter() - started)
    assert not any(published.failed for published in sent.values()), sent
    tell(None)
    for process in processes:
        process.join(TIMEOUT_S)
    for actor in actors.values():
        ray.kill(actor)
    moved = {
        name: Routes("ray" if name == "Ray" else "gloo").moved_over_least([published], names)
        for name, published in sent.items()
    }
    return Found({name: statistics.median(values) for name, values in found.items()}, moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", nargs="+", type=float, default=[16, 128, 512])
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        print(f"buckets of {options.bucket_mib:g} MiB\n")
        print("| MiB | engines | way | s | GB/s | / copy | / file | bytes / least |")
        print("|---|---|---|---|---|---|---|---|")
        for mib, engines in itertools.product(options.mib, options.engines):
            with tempfile.TemporaryDirectory() as folder:
                found = measure(mib, options.bucket_mib, engines, options.rounds, Path(folder))
            for name, s in found.seconds.items():
                ratios = f"{s / found.seconds['copy']:.1f} | {s / found.seconds['file']:.2f}"
                moved = f"{found.moved[name]:.3f}" if name in found.moved else ""
                speed = mib * 2**20 / s / 1e9
                print(f"| {mib:g} | {engines} | {name} | {s:.3f} | {speed:.2f} | {ratios} | {moved} |", flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
