"""The part on exports: how fast weights are written, and what that takes of a device, in one process and by ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.multiprocessing.spawn import spawn

from hone.devices import devices_here, give_back_memory, module_of
from hone.memory.gauges import GIB
from hone.model.load import init_model
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import NO_ACCELERATOR, TINY, PartSetting, among_ranks, make_trainer, shape_of
from hone.train.fsdp_ranks import FsdpRanks
from hone.train.mesh import make_mesh
from hone.train.ranks import ALONE, Ranks

MOST_RANKS = 2


@dataclass(frozen=True, slots=True)
class Written:
    """What the process that writes measured."""

    seconds: float
    num_bytes: int
    """Of the files."""
    device_bytes: int
    """Most memory of tensors on its device beyond what was there before; 0 on a CPU."""


def export(setting: PartSetting) -> Iterator[Figure]:
    """By one process, and by the first of ranks that have a share of each weight: one, or two where devices are."""
    yield from figures_of(setting, written(setting, setting.device, ALONE), "one process")
    give_back_memory()
    ranks = min(MOST_RANKS, devices_here("auto").per_node) if setting.is_gpu else MOST_RANKS
    with TemporaryDirectory(prefix="hone-gpu-") as name:
        spawn(write_rank, (setting, ranks, Path(name)), nprocs=ranks)
        found = Written(**torch.load(Path(name) / "written.pt", weights_only=True))
    yield from figures_of(setting, found, f"FSDP2, {ranks} rank{'s' if ranks > 1 else ''}")
    if not setting.is_gpu:
        yield Figure("export", "left_out", 1.0, "memory", NO_ACCELERATOR)


def figures_of(setting: PartSetting, found: Written, case: str) -> Iterator[Figure]:
    """Of one way to write."""
    yield Figure("export", "export_gib_per_s", found.num_bytes / GIB / found.seconds, case)
    if setting.is_gpu:
        yield Figure("export", "export_device_gib", found.device_bytes / GIB, case)


def write_rank(rank: int, setting: PartSetting, ranks: int, folder: Path) -> None:
    """One of the processes that have the weights together; the first leaves what it measured."""
    with among_ranks(setting, rank, ranks, folder) as device:
        found = written(setting, device, FsdpRanks(make_mesh(device)), is_first=rank == 0)
    if rank == 0:
        torch.save(asdict(found), folder / "written.pt")


def written(setting: PartSetting, device: torch.device, ranks: Ranks, *, is_first: bool = True) -> Written:
    """The master weights in bfloat16, by the first rank; the others have their shares of each ready."""
    shape = TINY if setting.tiny else shape_of("0.6b")
    model = init_model(shape, vocab_size=None, seed=0, dtype=torch.float32, device=device)
    trainer = make_trainer(model, "float32", 1024, ranks=ranks)
    before = module_of(device).memory_allocated() if setting.is_gpu else 0
    if setting.is_gpu:
        module_of(device).reset_peak_memory_stats()
    with TemporaryDirectory(prefix="hone-gpu-") as name:
        started = time.perf_counter()
        if is_first:
            trainer.write_weights(Path(name), torch.bfloat16)
        else:
            for _ in trainer.master_weights():
                pass
        seconds = time.perf_counter() - started
        num_bytes = sum(file.stat().st_size for file in Path(name).glob("*.safetensors"))
    taken = module_of(device).max_memory_allocated() - before if setting.is_gpu else 0
    return Written(seconds, num_bytes, taken)
