"""Weights on their way through Ray's object store: buckets as numpy arrays, which every process maps without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.cluster.weights import Bucket, Manifest, Packer, Unpacker


@dataclass(frozen=True)
class Parcel:
    """One version's weights; may be gone through more than once, and is checked against its manifest each time."""

    buckets: tuple[tuple[str, NDArray[np.uint8]], ...]
    """Header and data of each."""
    manifest: Manifest

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        unpacker = Unpacker()
        yield from unpacker.unpack(Bucket.of(header, _tensor_of(data)) for header, data in self.buckets)
        unpacker.check(self.manifest)


def parcel_of(weights: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int) -> Parcel:
    """Weights, copied to the host."""
    packer = Packer(lambda: torch.empty(bucket_bytes, dtype=torch.uint8))
    buckets = tuple((bucket.header(), bucket.data.numpy()) for bucket in packer.pack(weights))
    return Parcel(buckets, packer.manifest(version))


def _tensor_of(data: NDArray[np.uint8]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # and nobody writes to it
        return torch.from_numpy(data)
