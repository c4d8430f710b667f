"""A short hash of named weights: equal exactly when every byte is, on whichever device and in whichever pieces.

Weights are compared after every publish, so the hash must cost little beside moving them. A cryptographic one reads
1.4 GB/s on a core and cannot run on a GPU; this one reads 5 GB/s on a core and is plain integer arithmetic anywhere.

A tensor's bytes are 32-bit words w. Its sum is that of w[i] * m[i] modulo 2^64, with odd pseudo-random multipliers m
(multilinear hashing: Lemire and Kaser, arXiv:1202.4961): one changed word always changes it, any other damage goes
unseen with a chance of about 2^-32. It guards against accidents, not attacks. A sum may be made of pieces, in
any order. The m repeat every 65,536 words, times an odd number of the block's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD_BYTES = 4
_BLOCK_WORDS = 1 << 16
_DEVICE_BLOCKS = 256
"""Blocks that a GPU multiplies at once: 128 MiB of products."""
_MASK = (1 << 64) - 1


def _random_odd(first: int, count: int, salt: int) -> NDArray[np.int64]:
    """Numbers `first` to `first + count` of a sequence (splitmix64): the same on every machine."""
    z = (np.arange(first + 1, first + 1 + count, dtype=np.uint64) + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


_MULTIPLIERS = _random_odd(0, _BLOCK_WORDS, salt=0)


def byte_sum(data: Tensor, first_byte: int = 0) -> int:
    """The sum of a piece of a tensor's bytes.

    Args:
        data: (n,) uint8.
        first_byte: where the piece begins in the tensor; a multiple of 4.
    """
    total, first = 0, first_byte // WORD_BYTES
    whole = data.numel() // WORD_BYTES * WORD_BYTES
    if data.data_ptr() % WORD_BYTES or data.storage_offset() % WORD_BYTES:
        data = data.clone()
    words = data[:whole].view(torch.int32)
    while words.numel():
        block, within = divmod(first, _BLOCK_WORDS)
        if within == 0 and words.numel() >= _BLOCK_WORDS:
            count = min(words.numel() // _BLOCK_WORDS, _DEVICE_BLOCKS)
            part, words = words[: count * _BLOCK_WORDS], words[count * _BLOCK_WORDS :]
        else:
            count = 1
            part, words = words[: _BLOCK_WORDS - within], words[_BLOCK_WORDS - within :]
        total += _blocks_sum(part.view(count, -1), block, within)
        first += part.numel()
    if whole < data.numel():
        last = torch.zeros(WORD_BYTES, dtype=torch.uint8)
        last[: data.numel() - whole] = data[whole:]
        block, within = divmod(first, _BLOCK_WORDS)
        total += _blocks_sum(last.view(1, -1).view(torch.int32), block, within)
    return total & _MASK


def _blocks_sum(words: Tensor, block: int, within: int) -> int:
    """Of (blocks, words) of one part of each block; the first is number `block`, the part begins at `within`."""
    multipliers = _MULTIPLIERS[within : within + words.shape[1]]
    of_blocks = _random_odd(block, len(words), salt=_BLOCK_WORDS)
    if words.device.type == "cpu":  # numpy multiplies integer matrices four times as fast as torch
        sums = np.array([row.astype(np.int64) @ multipliers for row in words.numpy()])
        return int(sums @ of_blocks)
    sums_B = (words * torch.from_numpy(multipliers).to(words.device)).sum(1)
    return int((sums_B * torch.from_numpy(of_blocks).to(words.device)).sum())


class Fingerprint:
    """Gathers tensors, whole or in pieces, in any order."""

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}

    def add(self, name: str, shape: Iterable[int], dtype: torch.dtype, data: Tensor, first_byte: int = 0) -> None:
        """A piece of a tensor: (n,) uint8 that begins at `first_byte` of it, a multiple of 4."""
        key = f"{name} {tuple(shape)} {dtype}"
        self._sums[key] = (self._sums.get(key, 0) + byte_sum(data, first_byte)) & _MASK

    def merge(self, other: Fingerprint) -> None:
        """Merge another accumulator."""
        for key, total in other._sums.items():
            self._sums[key] = (self._sums.get(key, 0) + total) & _MASK

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        lines = "\n".join(f"{key} {total}" for key, total in sorted(self._sums.items()))
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def weights_fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Of names, shapes, dtypes and bytes; the order is none of it."""
    fingerprint = Fingerprint()
    for name, weight in weights:
        data = weight.detach().contiguous().view(-1).view(torch.uint8)
        fingerprint.add(name, weight.shape, weight.dtype, data)
    return fingerprint.hexdigest()
