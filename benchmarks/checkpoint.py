"""Seconds to save and restore a checkpoint against the model's size, and against bare writers without its guarantees.

    python benchmarks/checkpoint.py --parameters 1e6 1e7 1e8 --rounds 3

A checkpoint holds float32 master weights and AdamW's two moments: 12 bytes a parameter. Baselines write the same
tensors with `torch.save` and with safetensors' `save_file`, without a hash, an fsync or a rename; the third is
`save_file` with an fsync, which says how much of the price is the disk's. Sides take turns in one process; medians.
Restoring reads a file that is in the page cache, as after a short interruption.

`held up` is how long a step waits on a cluster, where ranks copy their state and write the copy while training
continues: the copy alone, into memory that is kept from one time to the next.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hone.train.checkpoint import Checkpoints
from hone.train.tensor_files import HostCopies, LiveSnapshot
from hone.types import Progress

SLICES = 24
"""Tensors that the parameters are divided over, as layers would be."""


def state_of(num_parameters: int) -> dict[str, torch.Tensor]:
    size = max(1, num_parameters // SLICES)
    return {f"{part}.{i}": torch.randn(size) for part in ("master", "moment_1", "moment_2") for i in range(SLICES)}


def save_synced(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(num_parameters: int, rounds: int, folder: Path) -> dict[str, float]:
    """Median seconds of every side."""
    tensors = state_of(num_parameters)
    checkpoints, copies = Checkpoints(folder / "checkpoints", keep=1), HostCopies()
    copies.take(tensors)
    sides: dict[str, Callable[[], object]] = {
        "save": lambda: checkpoints.save(Progress(step=1), LiveSnapshot(tensors, {})),
        "torch.save": lambda: torch.save(tensors, folder / "bare.pt"),
        "save_file": lambda: save_file(tensors, folder / "bare.safetensors"),
        "save_file, fsync": lambda: save_synced(tensors, folder / "synced.safetensors"),
        "copy": lambda: copies.take(tensors),
        "newest": lambda: touch(checkpoints.newest().tensors),
        "torch.load": lambda: torch.load(folder / "bare.pt", weights_only=True),
        "load_file": lambda: touch(load_file(folder / "bare.safetensors")),
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, work in sides.items():
            os.sync()  # so that no side pays for the pages of the one before
            found[name].append(seconds(work))
    return {name: statistics.median(values) for name, values in found.items()}


def touch(tensors: Mapping[str, torch.Tensor]) -> None:
    """Read every page: load_file only maps them."""
    for tensor in tensors.values():
        tensor.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", nargs="+", type=float, default=[1e6, 1e7, 1e8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ["parameters", "MiB", "save s", "/ torch.save", "/ save_file", "/ save_file + fsync"]
    columns += ["held up s", "/ save", "restore s", "/ load_file"]
    print("|", " | ".join(columns), "|")
    print("|---" * len(columns) + "|")
    for count in map(int, options.parameters):
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            s = measure(count, options.rounds, folder)
        finally:
            shutil.rmtree(folder)
        ratios = [s["save"] / s[other] for other in ("torch.save", "save_file", "save_file, fsync")]
        cells = [f"{count:,}", f"{12 * count / 2**20:,.0f}", f"{s['save']:.3f}", *(f"{ratio:.1f}" for ratio in ratios)]
        cells += [f"{s['copy']:.4f}", f"{s['copy'] / s['save']:.2f}"]
        print("|", " | ".join([*cells, f"{s['newest']:.3f}", f"{s['newest'] / s['load_file']:.1f}"]), "|", flush=True)


if __name__ == "__main__":
    main()
