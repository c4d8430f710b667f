"""Named tensors as a stream of buckets, and back: pure packing, no process and no network.

A sender fills one buffer after another with tensors as they come, so a model is never in memory a second time. A tensor
lies whole in one bucket; one that is larger than a bucket gets a bucket of its own size. What arrived is what was sent
when both ends computed the fingerprint in the manifest at the end.

    |  embed  |  norm | q | k | v | o  |  gate | up | ...     each |...| one bucket of uint8
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.errors import EngineError
from hone.model.fingerprint import Fingerprint

ALIGNMENT_BYTES = 16
"""A tensor begins at a multiple of it in its bucket: any dtype may be viewed there."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Where a tensor lies in a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Header:
    """All of a bucket but the data."""

    index: int
    """Its place in the stream, from 0."""
    num_bytes: int
    entries: tuple[PackedTensor, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is sent at once."""

    header: Header
    data: Tensor
    """(header.num_bytes,) uint8."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a stream held, sent at its end."""

    version: int
    """Policy updates made."""
    buckets: int
    tensors: int
    num_bytes: int
    """Of the tensors; what is sent is a little more, for alignment."""
    fingerprint: str
    """Of the tensors as they were sent; see `model.fingerprint`."""


def bucket_bytes(mib: float) -> int:
    """The size of a bucket as it is configured, rounded down to the alignment, in bytes."""
    return max(int(mib * 2**20) // ALIGNMENT_BYTES, 1) * ALIGNMENT_BYTES


class Packer:
    """Packs one version's weights. Ask for the `manifest` at the end.

    Args:
        bucket_size: bytes of a bucket, unless a single tensor is larger.
        buffer: gives an empty buffer of at least the given size, (bytes,) uint8, on the device that buckets are sent
            from. It may wait until one is free.
        dtype: what floating-point weights are sent as; None: as they are.
    """

    def __init__(self, bucket_size: int, buffer: Callable[[int], Tensor], *, dtype: torch.dtype | None = None) -> None:
        self._bucket_size, self._buffer, self._dtype = bucket_size, buffer, dtype
        self._fingerprint = Fingerprint()
        self._buckets, self._tensors, self._bytes = 0, 0, 0

    def pack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        """The buckets, each as soon as it is full. A bucket's data is a view of its buffer."""
        buffer: Tensor | None = None
        entries: list[PackedTensor] = []
        used = 0
        for name, weight in weights:
            weight = weight.detach()
            dtype = weight.dtype if self._dtype is None or not weight.is_floating_point() else self._dtype
            size = weight.numel() * dtype.itemsize
            offset = -(-used // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            if buffer is not None and offset + size > len(buffer):
                yield self._bucket(entries, buffer[:used])
                buffer, entries, offset = None, [], 0
            if buffer is None:
                buffer = self._buffer(max(size, self._bucket_size))
            used = offset + size
            data = buffer[offset:used]
            data.view(dtype).view(weight.shape).copy_(weight)
            self._fingerprint.add(name, weight.shape, dtype, data)
            self._tensors, self._bytes = self._tensors + 1, self._bytes + size
            entries.append(PackedTensor(name, dtype, tuple(weight.shape), offset))
        if buffer is not None:
            yield self._bucket(entries, buffer[:used])

    def _bucket(self, entries: list[PackedTensor], data: Tensor) -> Bucket:
        self._buckets += 1
        return Bucket(Header(self._buckets - 1, len(data), tuple(entries)), data)

    def manifest(self, version: int) -> Manifest:
        return Manifest(version, self._buckets, self._tensors, self._bytes, self._fingerprint.hexdigest())


class Unpacker:
    """Turns buckets back into weights, and computes the fingerprint of what arrived."""

    def __init__(self) -> None:
        self._fingerprint = Fingerprint()
        self._buckets, self._tensors = 0, 0

    def unpack(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        """Names and weights, in the order that they were sent in: views of the bucket's data.

        Raises EngineError when a bucket is missing, or not whole.
        """
        header = bucket.header
        if header.index != self._buckets or len(bucket.data) != header.num_bytes:
            raise EngineError(
                f"weights: bucket {header.index} of {len(bucket.data):,} bytes arrived where bucket {self._buckets} "
                f"was due; its header says {header.num_bytes:,} bytes."
            )
        self._buckets += 1
        weights = []
        for entry in header.entries:
            data = bucket.data[entry.offset : entry.offset + entry.num_bytes]
            self._fingerprint.add(entry.name, entry.shape, entry.dtype, data)
            weights.append((entry.name, data.view(entry.dtype).view(entry.shape)))
        self._tensors += len(weights)
        return weights

    def fingerprint(self) -> str:
        """Of what arrived so far."""
        return self._fingerprint.hexdigest()

    def check(self, manifest: Manifest) -> None:
        """Raises EngineError when something else arrived than was sent."""
        if (self._buckets, self._tensors) != (manifest.buckets, manifest.tensors):
            raise EngineError(
                f"weights of version {manifest.version}: {self._tensors} tensors in {self._buckets} buckets arrived, "
                f"{manifest.tensors} in {manifest.buckets} were sent."
            )
        found = self.fingerprint()
        if found != manifest.fingerprint:
            raise EngineError(
                f"weights of version {manifest.version}: what arrived hashes to {found[:12]}, what was sent to "
                f"{manifest.fingerprint[:12]}. Bytes were damaged on the way."
            )
