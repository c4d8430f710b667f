"""Tensors on disk in parts: each rank writes what it has of them, and reads back what it needs, on any number of ranks.

A file is plain safetensors. Where each part begins in its whole tensor stands in the file's metadata, in the layout of
PyTorch's distributed checkpoints (`DCP_SHARDING_INFO`), so that `torch.distributed.checkpoint` reads them too, with its
`HuggingFaceStorageReader`. They are written here because PyTorch's own writers pickle what they know of the tensors, or
copy them once more, and none hashes what it writes. A file without such metadata holds whole tensors.

Not here: when a set of files is whole and valid (`checkpoint.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from hone.devices import is_accelerator, synchronize
from hone.errors import CheckpointError
from hone.model.shards import DTYPE_NAMES, raw_bytes

_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Share:
    """What one rank has of a tensor: a box of it."""

    tensor: Tensor
    """Live, not a copy."""
    offset: tuple[int, ...]
    """Where the box begins in the whole, in each dimension."""
    is_written: bool = True
    """False where another rank has the same and writes it."""

    @classmethod
    def of(cls, tensor: Tensor | Share) -> Share:
        """A whole tensor is a share too."""
        return tensor if isinstance(tensor, Share) else cls(tensor, (0,) * tensor.dim())

    def take(self, tensors: Mapping[str, Tensor | Share], name: str) -> None:
        """Copy this box of a tensor into it; see `box_of`."""
        self.tensor.copy_(box_of(tensors, name, self.offset, self.tensor.shape))


@dataclass(frozen=True)
class FileFacts:
    """What a manifest says of a file."""

    size_bytes: int
    blake2b: str


class HashingFile:
    """Hashes and counts what passes through, so that a file is not read again to be hashed."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.hash = hashlib.blake2b()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            self.hash.update(chunk)
            self.file.write(chunk)
        self.size += len(data)


def write_synced(path: Path, content: Callable[[HashingFile], object]) -> FileFacts:
    """Write a new file, to the disk itself."""
    with path.open("xb") as file:
        hashing = HashingFile(file)
        content(hashing)
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(hashing.size, hashing.hash.hexdigest())


def write_tensors(path: Path, tensors: Mapping[str, Tensor | Share]) -> FileFacts:
    """Write what is to be written here into a new file.

    Tensors may share memory and live on any device; one at a time is copied to the CPU. The safetensors library would
    copy every tensor before it writes the first: that doubles the memory.
    """
    shares = {name: Share.of(tensor) for name, tensor in tensors.items()}
    written = {name: share for name, share in shares.items() if share.is_written}

    def content(file: HashingFile) -> None:
        offsets = {name: {_OFFSETS: share.offset} for name, share in written.items()}
        header: dict[str, Any] = {"__metadata__": {"format": "pt", _INFO: json.dumps(offsets)}}
        end = 0
        for name, share in written.items():
            start, end = end, end + share.tensor.numel() * share.tensor.element_size()
            dtype, shape = DTYPE_NAMES[share.tensor.dtype], list(share.tensor.shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # data starts aligned
        file.write(len(text).to_bytes(8, "little") + text)
        for share in written.values():
            file.write(raw_bytes(share.tensor))

    return write_synced(path, content)


class Snapshot(Protocol):
    """A trainer's state at one moment, on its way to the disk."""

    @property
    def rest(self) -> Mapping[str, Any]:
        """What is not a tensor: plain JSON values."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of its tensors, over all ranks."""
        ...

    @property
    def is_live(self) -> bool:
        """Whether it changes with the next update, and so must be written before it."""
        ...

    def write(self, folder: Path) -> dict[str, FileFacts]:
        """Write its tensors into new files of a folder, to the disk itself; by name. Blocks; raises OSError."""
        ...


class LiveSnapshot:
    """A `Snapshot` of this process's own tensors, not copied."""

    is_live = True

    def __init__(self, tensors: Mapping[str, Tensor | Share], rest: Mapping[str, Any]) -> None:
        self.tensors, self.rest = tensors, rest

    @property
    def num_bytes(self) -> int:
        return sum(Share.of(tensor).tensor.nbytes for tensor in self.tensors.values())

    def write(self, folder: Path) -> dict[str, FileFacts]:
        return {file_name(0, 1): write_tensors(folder / file_name(0, 1), self.tensors)}


class HostCopies:
    """One rank's shares in host memory, for a file to be written while training continues.

    The memory is kept from one time to the next: filling it anew is several times as fast as asking for it.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._shares: dict[str, Share] = {}

    def take(self, tensors: Mapping[str, Tensor | Share]) -> int:
        """Copy what this rank is to write. Returns its bytes. What was copied before must have been written."""
        self._shares = {}
        for name, tensor in tensors.items():
            share = Share.of(tensor)
            if not share.is_written:
                continue
            if name not in self._buffers:
                pinned = is_accelerator(share.tensor.device)
                self._buffers[name] = torch.empty_like(share.tensor, device="cpu", pin_memory=pinned)
            self._buffers[name].copy_(share.tensor, non_blocking=True)
            self._shares[name] = Share(self._buffers[name], share.offset)
        synchronize()
        return sum(share.tensor.nbytes for share in self._shares.values())

    def write(self, folder: Path, rank: int, world_size: int, stem: str = "tensors") -> dict[str, FileFacts]:
        """See `Snapshot.write`; one file."""
        name = file_name(rank, world_size, stem)
        return {name: write_tensors(folder / name, self._shares)}


def file_name(rank: int, world_size: int, stem: str = "tensors") -> str:
    """Of the tensors that a rank writes."""
    return f"{stem}.safetensors" if world_size == 1 else f"{stem}-{rank:05d}-of-{world_size:05d}.safetensors"


@dataclass(frozen=True)
class _FilePart:
    """A box of a tensor in a file."""

    file: Path
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of some files, read from the disk when they are asked for, whole or in part, to the CPU.

    May be sent to another process that sees the files under the same path.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._handles: dict[Path, Any] = {}
        self._parts: dict[str, list[_FilePart]] = {}
        for file in map(Path.absolute, files):  # another process may have another working directory
            handle = self._opened(file)
            info = json.loads((handle.metadata() or {}).get(_INFO, "{}"))
            for name in handle.keys():  # noqa: SIM118 - it is not a mapping
                shape = tuple(handle.get_slice(name).get_shape())
                offset = tuple(info[name][_OFFSETS]) if name in info else (0,) * len(shape)
                self._parts.setdefault(name, []).append(_FilePart(file, name, offset, shape))

    def __getitem__(self, name: str) -> Tensor:
        return self.box(name, (0,) * len(self.shape(name)), self.shape(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        ends = [[o + n for o, n in zip(part.offset, part.shape, strict=True)] for part in self._parts[name]]
        return tuple(max(of_dim) for of_dim in zip(*ends, strict=True))

    def box(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Some of a tensor, put together from whichever files have it.

        Raises:
            CheckpointError: the files do not have all of it.
        """
        missing = math.prod(shape)
        if not missing:
            part = self._parts[name][0]
            return self._opened(part.file).get_slice(part.name)[tuple(slice(0) for _ in shape)].new_empty(tuple(shape))
        found: Tensor | None = None
        for part in self._parts[name]:
            overlap = _overlap(offset, shape, part)
            if overlap is None:
                continue
            here, there = overlap
            file, ends = self._opened(part.file), tuple(one.stop - one.start for one in there)
            piece = file.get_tensor(part.name) if ends == part.shape else file.get_slice(part.name)[there]
            if tuple(piece.shape) == tuple(shape):
                return piece
            if found is None:
                found = torch.empty(tuple(shape), dtype=piece.dtype)
            found[here] = piece
            missing -= piece.numel()
        if found is None or missing:
            files = ", ".join(sorted({part.file.name for part in self._parts[name]}))
            raise CheckpointError(f"{self._parts[name][0].file.parent}: {files} hold only parts of tensor {name}")
        return found

    def under(self, prefix: str) -> SavedTensors:
        """Those whose names begin so, without that beginning."""
        some = SavedTensors([])
        named = {name: parts for name, parts in self._parts.items() if name.startswith(prefix)}
        some._parts = {name.removeprefix(prefix): parts for name, parts in named.items()}
        some._handles = self._handles
        return some

    def close(self) -> None:
        """Let go of the files; the next question opens them again."""
        self._handles.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"_parts": self._parts, "_handles": {}}

    def _opened(self, file: Path) -> Any:
        if file not in self._handles:
            self._handles[file] = safe_open(file, framework="pt")
        return self._handles[file]


def _overlap(
    offset: Sequence[int], shape: Sequence[int], part: _FilePart
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where a box and a part of the same tensor overlap: within the box, and within the part."""
    first = [max(a, b) for a, b in zip(offset, part.offset, strict=True)]
    end = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, part.offset, part.shape, strict=True)]
    if any(a >= b for a, b in zip(first, end, strict=True)):
        return None
    here = tuple(slice(a - o, b - o) for a, b, o in zip(first, end, offset, strict=True))
    there = tuple(slice(a - o, b - o) for a, b, o in zip(first, end, part.offset, strict=True))
    return here, there


def box_of(tensors: Mapping[str, Tensor | Share], name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Some of a tensor. Of one on the disk no more than that is read; a share must be that box."""
    if isinstance(tensors, SavedTensors):
        return tensors.box(name, offset, shape)
    found = tensors[name]
    if isinstance(found, Share):
        assert (found.offset, found.tensor.shape) == (tuple(offset), tuple(shape)), f"{name} is divided otherwise"
        return found.tensor
    return found[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]


def put_under(prefix: str, tensors: Mapping[str, Tensor | Share]) -> dict[str, Tensor | Share]:
    """The same with names that begin so; what `under` takes back."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Those whose names begin so, without that beginning."""
    if isinstance(tensors, SavedTensors):
        return tensors.under(prefix)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
