"""What a rank of a `Gang` does when its trainer is saved and goes on elsewhere. Its trainer lives between the calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from cases import algorithm_of, make_batch, make_groups
from gang import Gang
from sharded_cases import Case, alone_or_sharded
from torch import Tensor

from hone.model.load import hf_folder
from hone.train.roles import Roles
from hone.train.tensor_files import FileFacts, HostCopies, LiveSnapshot, SavedTensors, Snapshot

_trainer: Roles | None = None
_case = Case()
_copies = HostCopies()


def make(case: Case, alone: bool = False) -> bool:
    """A new trainer, in place of the one before."""
    global _trainer, _case, _copies
    needs = algorithm_of(case.algorithm).needs
    _trainer, _case, _copies = alone_or_sharded(case, needs, alone=alone), case, HostCopies()
    return True


def trainer() -> Roles:
    assert _trainer is not None
    return _trainer


def update(*seeds: int) -> list[dict[str, float]]:
    """One update for each seed of a batch."""
    algorithm, found = algorithm_of(_case.algorithm), []
    for seed in seeds:
        batch = make_batch(make_groups(seed), algorithm, moved=_case.moved)
        if trainer().critic is not None:
            batch = batch.with_column("value_T", trainer().values(batch))
        found.append(trainer().update(batch, algorithm))
    return found


def copy_state() -> tuple[int, dict[str, Any]]:
    tensors, rest = trainer().state()
    return _copies.take(tensors), rest


def write_copy(folder: Path) -> dict[str, FileFacts]:
    return _copies.write(folder, dist.get_rank(), dist.get_world_size())


def restore(tensors: SavedTensors, rest: dict[str, Any]) -> bool:
    trainer().restore(tensors, rest)
    return True


def masters() -> dict[str, Tensor]:
    return dict(trainer().master_weights())


def fingerprint() -> str:
    return trainer().fingerprint()


def exported() -> dict[str, bytes]:
    """The files of a Hugging Face directory; each rank writes one, for all gather every weight."""
    with TemporaryDirectory() as name:
        folder = Path(name) / "hf"
        with hf_folder(folder, trainer().hf_config, dtype=torch.float32) as aside:
            trainer().write_weights(aside, torch.float32)
        return {file.name: file.read_bytes() for file in folder.iterdir()}


class Here:
    """A trainer alone in this process, asked as a gang is."""

    def __call__(self, function, *args):
        return [function(*args)]


@dataclass(frozen=True)
class GangSnapshot:
    """What each rank has copied."""

    gang: Gang
    num_bytes: int
    rest: Mapping[str, Any]
    is_live = False

    def write(self, folder: Path) -> dict[str, FileFacts]:
        return {name: facts for files in self.gang(write_copy, folder) for name, facts in files.items()}


def snapshot(ranks: Gang | Here) -> Snapshot:
    if isinstance(ranks, Here):
        return LiveSnapshot(*trainer().state())
    copied = ranks(copy_state)
    return GangSnapshot(ranks, sum(size for size, _ in copied), copied[0][1])
