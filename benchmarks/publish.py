"""Seconds to bring a model's weights to an engine in another process, by transport, against a copy and against a file.

    python benchmarks/publish.py --mib 64 256 --bucket-mib 32 --engines 1 2 --rounds 3
    python benchmarks/publish.py --mib 256 --engines 2 --before edf3be0

Every transport brings the same tensors to processes that copy each into a model of their own, with both fingerprints,
as a run does. `copy` is the least possible: one pass over the bytes in one process. `file` is what many tools do: the
weights are saved as safetensors, and loaded by the other processes. Sides take turns; medians; ratios to `copy` and to
`file` in the same run. The last rows say what the fingerprints alone cost.

`bytes` is what a publish moves over the least that it must: the weights once for each engine, or with Ray's object
store once for each machine, whose engines read the same memory.

`--before COMMIT` runs that commit's own benchmark with the same settings, in turns with this one, and prints seconds of
each transport before and after, and their ratio: the lesser of the medians of `REPEATS` runs.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hone.model.fingerprint import byte_sum, weights_fingerprint
from hone.weights.buckets import Header, Manifest, bucket_bytes
from hone.weights.groups import GroupAddress
from hone.weights.parts import BucketPart
from hone.weights.publish import Published, Transport, Update, publish
from hone.weights.receive import Receiver
from hone.weights.routes import Routes
from hone.weights.transports import Broadcast, ObjectStore, RayPeer

TENSORS = 24
"""Tensors that the bytes are divided over, as layers would be."""
TIMEOUT_S = 120.0
REPEATS = 2


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
        self.holder = Holder(num_bytes)
        self.receiver: Receiver | None = None

    async def connect_weights(self, address: GroupAddress) -> None:
        await self._receiver().connect(address)

    async def begin_weights(self, update: Update) -> None:
        await self._receiver().begin(update)

    async def load_weights(self, update_id: str, sender: int, header: Header, part: BucketPart) -> None:
        await self._receiver().load(update_id, sender, header, part)

    async def commit_weights(self, update_id: str, sender: int, manifest: Manifest) -> str:
        return await self._receiver().commit(update_id, sender, manifest)

    async def load_file(self, path: str) -> None:
        self.holder._copy(load_file(path).items())

    def _receiver(self) -> Receiver:
        if self.receiver is None:  # needs the event loop
            self.receiver = Receiver(self.holder, timeout_s=TIMEOUT_S)
        return self.receiver


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
    peers = {name: RayPeer(actor) for name, actor in actors.items()}
    gloo = Broadcast("gloo", "127.0.0.1")
    sent: dict[str, Published] = {}

    def through(name: str, transport: Transport) -> None:
        version = next(versions)
        updates = dict.fromkeys(names, Update(str(version), version))
        sent[name] = publish(weights.items(), peers, transport, updates=updates, bucket_size=size, timeout_s=TIMEOUT_S)

    def through_a_file(sync: bool) -> None:
        path = folder / "weights.safetensors"
        save_file(weights, path)
        if sync:
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        ray.get([actor.load_file.remote(str(path)) for actor in actors.values()])

    data = torch.cat([weight.view(torch.uint8) for weight in weights.values()])
    sides: dict[str, Callable[[], object]] = {
        "copy": lambda: [target[name].copy_(weight) for name, weight in weights.items()],
        "Ray": lambda: through("Ray", ObjectStore()),
        "gloo": lambda: through("gloo", gloo),
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
    for name in names:
        gloo.drop(name)
    for actor in actors.values():
        ray.kill(actor)
    moved = {
        name: Routes("ray" if name == "Ray" else "gloo").moved_over_least([published], names)
        for name, published in sent.items()
    }
    return Found({name: statistics.median(values) for name, values in found.items()}, moved)


def transports_of(command: list[str], env: dict[str, str], cwd: Path) -> dict[tuple[str, str, str], float]:
    """Seconds by MiB, engines and transport, from the table that a run of a benchmark prints."""
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=True)
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row] for row in rows]
    return {(row[0], row[1], row[2]): float(row[3]) for row in cells if row[2] in ("Ray", "gloo")}


def compare(commit: str, arguments: list[str]) -> None:
    """Print before and after."""
    here = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "src", "benchmarks"], cwd=here, stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        least: list[dict[tuple[str, str, str], float]] = [{}, {}]
        for _ in range(REPEATS):
            for tree, found in zip((Path(folder), here), least, strict=True):
                env = os.environ | {"PYTHONPATH": str(tree / "src")}
                command = [sys.executable, str(tree / "benchmarks/publish.py"), *arguments]
                for key, seconds in transports_of(command, env, tree).items():
                    found[key] = min(seconds, found.get(key, seconds))
    print(f"| MiB | engines | way | {commit}, s | now, s | now / {commit} |")
    print("|---|---|---|---|---|---|")
    for (mib, engines, way), seconds in least[0].items():
        now = least[1][mib, engines, way]
        print(f"| {mib} | {engines} | {way} | {seconds:.3f} | {now:.3f} | {now / seconds:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", nargs="+", type=float, default=[16, 128, 512])
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", metavar="COMMIT", help="compare with the transports of a commit")
    options = parser.parse_args()
    if options.before:
        lists = {"--mib": options.mib, "--engines": options.engines}
        lists |= {"--bucket-mib": [options.bucket_mib], "--rounds": [options.rounds]}
        compare(options.before, [str(word) for name, values in lists.items() for word in (name, *values)])
        return
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
