"""Parts with ranks: updates divided over two devices against one, and exports by one process and by ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from hone.devices import devices_here, forget_peak, give_back_memory, peak_bytes
from hone.sizes import GIB
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import (
    NO_ACCELERATOR,
    PROMPT,
    PartSetting,
    UpdateFigures,
    among_ranks,
    make_trainer,
    measured_update,
    random_batch,
    random_model,
)
from hone.train.fsdp_ranks import FsdpRanks
from hone.train.mesh import make_mesh
from hone.train.ranks import ALONE, Ranks
from hone.types import Batch

RANKS = 2


def of_first_rank(work: Callable[..., None], ranks: int, *arguments: Any) -> dict[str, Any]:
    """Run `work` in a process for each rank, with its number, these arguments and the folder where they meet.

    Returns what the first one kept.
    """
    with TemporaryDirectory(prefix="hone-gpu-") as name:
        spawn(work, (*arguments, Path(name)), nprocs=ranks)
        return torch.load(Path(name) / "found.pt", weights_only=True)


def keep(found: UpdateFigures | Written, folder: Path) -> None:
    """Leave what this process measured to `of_first_rank`."""
    torch.save(asdict(found), folder / "found.pt")


@dataclass(frozen=True, slots=True)
class DividedWay:
    """How the work is divided."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """See `make_mesh`."""
    shape: Mapping[str, int] = field(default_factory=dict)
    """Keys of config.json with other values."""


WAYS: Mapping[str, DividedWay] = {
    "FSDP2": DividedWay(),
    "tensor parallel": DividedWay({"tensor_parallel": RANKS}),
    "sequence parallel": DividedWay({"sequence_parallel": RANKS}),
    "sequence parallel, a ring": DividedWay({"sequence_parallel": RANKS}, {"num_key_value_heads": 1}),
}
"""The ring is of a model whose one key-value head two ranks cannot divide."""


def several(setting: PartSetting) -> Iterator[Figure]:
    """The same update on one device and on two, divided in each way; processes of gloo on a CPU."""
    if setting.is_gpu and devices_here("auto").per_node < RANKS:
        yield Figure("several", "left_out", 1.0, note="it needs two devices, and one is visible")
        return
    length = setting.lengths[1]
    samples = 2 * max(2, setting.budget // length)
    vocab = setting.shape()["vocab_size"]
    batch = random_batch([length] * samples, samples // 2, vocab=vocab, prompt_tokens=PROMPT)
    changes, alone = None, None
    for way, divided_way in WAYS.items():
        shape = {**setting.shape(), **divided_way.shape}
        if alone is None or divided_way.shape != changes:
            changes, alone = divided_way.shape, trained(setting, shape, batch, setting.device, ALONE)
            give_back_memory()
        divided = UpdateFigures(**of_first_rank(train_rank, RANKS, setting, shape, batch, way))
        case = f"{way}, {samples} x {length} tokens, {setting.precision}"
        apart = float((divided.logprobs_T - alone.logprobs_T).abs().mean())
        yield Figure("several", "divided_logprob_difference", apart, case)
        yield Figure("several", "divided_grad_difference", abs(divided.grad_norm / alone.grad_norm - 1), case)
        yield Figure("several", "divided_speedup", alone.seconds / divided.seconds, case)


def train_rank(rank: int, setting: PartSetting, shape: Mapping[str, Any], batch: Batch, way: str, folder: Path) -> None:
    """One of the processes that train together."""
    with among_ranks(setting, rank, RANKS, folder) as device:
        found = trained(setting, shape, batch, device, FsdpRanks(make_mesh(device, **WAYS[way].sizes)))
    if rank == 0:
        keep(found, folder)


def trained(
    setting: PartSetting, shape: Mapping[str, Any], batch: Batch, device: torch.device, ranks: Ranks
) -> UpdateFigures:
    """An update by this process, alone or among ranks."""
    model = random_model(shape, device)
    budget = max(setting.budget, int(batch.length_S[0]) + PROMPT)
    return measured_update(make_trainer(model, setting.precision, budget, ranks=ranks), batch)


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
    yield from export_figures(setting, written(setting, setting.device, ALONE), "one process")
    give_back_memory()
    ranks = min(RANKS, devices_here("auto").per_node) if setting.is_gpu else RANKS
    found = Written(**of_first_rank(write_rank, ranks, setting, ranks))
    yield from export_figures(setting, found, f"FSDP2, {ranks} rank{'s' if ranks > 1 else ''}")
    if not setting.is_gpu:
        yield Figure("export", "left_out", 1.0, "memory", NO_ACCELERATOR)


def export_figures(setting: PartSetting, found: Written, case: str) -> Iterator[Figure]:
    """Of one way to write."""
    yield Figure("export", "export_gib_per_s", found.num_bytes / GIB / found.seconds, case)
    if setting.is_gpu:
        yield Figure("export", "export_device_gib", found.device_bytes / GIB, case)


def write_rank(rank: int, setting: PartSetting, ranks: int, folder: Path) -> None:
    """One of the processes that have the weights together."""
    with among_ranks(setting, rank, ranks, folder) as device:
        found = written(setting, device, FsdpRanks(make_mesh(device)), is_first=rank == 0)
    if rank == 0:
        keep(found, folder)


def written(setting: PartSetting, device: torch.device, ranks: Ranks, *, is_first: bool = True) -> Written:
    """The master weights in bfloat16, by the first rank; the others have their shares of each ready."""
    trainer = make_trainer(random_model(setting.shape(), device), "float32", 1024, ranks=ranks)
    forget_peak()
    before = peak_bytes()
    with TemporaryDirectory(prefix="hone-gpu-") as name:
        started = time.perf_counter()
        if is_first:
            trainer.write_weights(Path(name), torch.bfloat16)
        else:
            for _ in trainer.master_weights():
                pass
        seconds = time.perf_counter() - started
        num_bytes = sum(file.stat().st_size for file in Path(name).glob("*.safetensors"))
    return Written(seconds, num_bytes, peak_bytes() - before)
