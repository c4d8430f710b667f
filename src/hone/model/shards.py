"""Weight files of a Hugging Face directory, written one weight at a time.

A safetensors file begins with a header that describes all of its tensors, so most writers hold them all. Here room for
the header is left at the start and filled at the end, with the spaces that the format allows after it. A model of any
size is written with one weight in host memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

SHARD_BYTES = 5 * 10**9
"""Size of a file after which the next one begins, as Transformers' `save_pretrained` has it."""
HEADER_BYTES = 1 << 18
"""Room for a header; a file whose header would be larger ends there too. Enough for some 2,000 weights."""

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names that the safetensors format gives to dtypes."""


def write_weights(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    header_bytes: int = HEADER_BYTES,
) -> None:
    """Write `model.safetensors`, or numbered shards and `model.safetensors.index.json`, into an existing folder.

    Args:
        weights: on any device, read one after another; each is copied to the host and let go of before the next.
        dtype: of weights that are floating-point numbers; None keeps theirs.
        shard_bytes: largest size of a file; a larger weight has one of its own.
        header_bytes: room for the header of a file.
    """
    shards: list[_Shard] = []
    try:
        for name, weight in weights:
            host = weight.detach().to(dtype if dtype and weight.is_floating_point() else weight.dtype).to("cpu")
            del weight  # before the next one is made
            if not shards or not shards[-1].has_room(name, host, shard_bytes):
                if shards:
                    shards[-1].finish()
                shards.append(_Shard(folder / f".model-{len(shards) + 1:05d}.safetensors", header_bytes))
            shards[-1].add(name, host)
            del host
        if shards:
            shards[-1].finish()
    finally:
        for shard in shards:
            shard.file.close()
    if len(shards) == 1:
        shards[0].path.rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = shard.path.rename(folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        weight_map |= dict.fromkeys(shard.header, file.name)
    index = {"metadata": {"total_size": sum(shard.size for shard in shards)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's numbers as they are in a file, in host memory."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


class _Shard:
    """One file that is being written."""

    def __init__(self, path: Path, header_bytes: int) -> None:
        self.path, self._header_bytes = path, header_bytes
        self.file: BinaryIO = path.open("xb")
        self.file.write(b" " * header_bytes)
        self.header: dict[str, dict[str, Any]] = {}
        self.size = 0
        self._header_size = 64  # length, braces and metadata

    def has_room(self, name: str, weight: Tensor, shard_bytes: int) -> bool:
        fits = self._header_size + _entry_size(name, self._entry(weight)) <= self._header_bytes
        return fits and self.size + weight.nbytes <= shard_bytes

    def add(self, name: str, weight: Tensor) -> None:
        self.header[name] = self._entry(weight)
        self._header_size += _entry_size(name, self.header[name])
        self.file.write(raw_bytes(weight))
        self.size += weight.nbytes

    def finish(self) -> None:
        text = json.dumps({"__metadata__": {"format": "pt"}, **self.header}).encode()
        self.file.seek(0)
        self.file.write((self._header_bytes - 8).to_bytes(8, "little") + text)
        self.file.close()

    def _entry(self, weight: Tensor) -> dict[str, Any]:
        ends = [self.size, self.size + weight.nbytes]
        return {"dtype": DTYPE_NAMES[weight.dtype], "shape": list(weight.shape), "data_offsets": ends}


def _entry_size(name: str, entry: dict[str, Any]) -> int:
    return len(json.dumps({name: entry}))
