"""Named tensors as a stream of buckets of fixed size, and back: pure packing, no process and no network.

A sender fills one buffer after another with tensors as they come, so a model is never in memory a second time. A bucket
says of itself what lies where in it; a tensor larger than a bucket lies in several. What arrived is what was sent when
both ends computed the fingerprint that the manifest at the end tells.

    |  embed, part 1  |  embed, part 2 | norm | q  |  q, rest | k | v | ...     each |...| one bucket of uint8
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from hone.errors import EngineError
from hone.model.fingerprint import Fingerprint

ALIGNMENT_BYTES = 16
"""Every piece begins at a multiple of it, in its tensor and in its bucket: any dtype may be viewed there."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of one tensor."""

    name: str
    dtype: str
    """As torch calls it: bfloat16."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    first_byte: int
    """Where the piece begins in the tensor."""
    offset: int
    """Where it begins in the bucket, bytes."""
    size: int
    """Bytes."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def tensor_bytes(self) -> int:
        """Of the whole tensor."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is sent at once."""

    index: int
    """Its place in the stream, from 0."""
    pieces: tuple[Piece, ...]
    data: Tensor
    """(bytes,) uint8; no more than the size that was asked for."""

    def header(self) -> str:
        """Everything but the data, as JSON."""
        pieces = [[p.name, p.dtype, p.shape, p.first_byte, p.offset, p.size] for p in self.pieces]
        return json.dumps({"index": self.index, "bytes": len(self.data), "pieces": pieces})

    @classmethod
    def of(cls, header: str, data: Tensor) -> Bucket:
        """A bucket that arrived as its header and its data."""
        said = json.loads(header)
        pieces = (Piece(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in said["pieces"])
        return cls(said["index"], tuple(pieces), data)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a stream held, told at its end."""

    version: int
    """Policy updates made."""
    buckets: int
    tensors: int
    num_bytes: int
    """Of the tensors; what is sent is a little more, for alignment."""
    fingerprint: str
    """Of the tensors as they were sent; see `model.fingerprint`."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Manifest:
        return cls(**json.loads(text))


def bucket_bytes(mib: float) -> int:
    """The size of a bucket as it is configured, rounded down to whole pieces."""
    return max(int(mib * 2**20) // ALIGNMENT_BYTES, 1) * ALIGNMENT_BYTES


class Packer:
    """Turns one version's weights into buckets. `manifest` tells of what went through, so ask for it at the end.

    Args:
        buffer: gives an empty buffer whenever the last bucket was handed on: (bytes,) uint8, all of one size, on the
            device that they are sent from. It may wait until one is free.
        dtype: what floating-point weights are sent as; None: as they are.
    """

    def __init__(self, buffer: Callable[[], Tensor], *, dtype: torch.dtype | None = None) -> None:
        self._buffer, self._dtype = buffer, dtype
        self._fingerprint = Fingerprint()
        self._buckets, self._tensors, self._bytes = 0, 0, 0

    def pack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        """The buckets, each as soon as it is full. A bucket's data is a view of its buffer."""
        buffer, pieces, used = self._buffer(), [], 0
        for name, weight in weights:
            dtype = weight.dtype if self._dtype is None or not weight.is_floating_point() else self._dtype
            size, first = weight.numel() * dtype.itemsize, 0
            self._tensors, self._bytes = self._tensors + 1, self._bytes + size
            while True:
                offset = -(-used // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                if offset >= len(buffer):
                    yield self._bucket(pieces, buffer[:used])
                    buffer, pieces, used, offset = self._buffer(), [], 0, 0
                taken = min(size - first, len(buffer) - offset)
                piece = Piece(name, str(dtype).removeprefix("torch."), tuple(weight.shape), first, offset, taken)
                used = offset + taken
                data = buffer[offset:used]
                _copy_part(weight, piece, data)
                self._fingerprint.add(name, piece.shape, dtype, data, first)
                pieces.append(piece)
                first += taken
                if first == size:
                    break
        if pieces:
            yield self._bucket(pieces, buffer[:used])

    def _bucket(self, pieces: list[Piece], data: Tensor) -> Bucket:
        self._buckets += 1
        return Bucket(self._buckets - 1, tuple(pieces), data)

    def manifest(self, version: int) -> Manifest:
        return Manifest(version, self._buckets, self._tensors, self._bytes, self._fingerprint.hexdigest())


def _copy_part(weight: Tensor, piece: Piece, target: Tensor) -> None:
    """Copies the piece of a weight, converting its dtype on the way."""
    weight, dtype = weight.detach(), piece.torch_dtype
    if piece.size == piece.tensor_bytes:
        target.view(dtype).view(weight.shape).copy_(weight)
    else:
        first = piece.first_byte // dtype.itemsize
        target.view(dtype).copy_(weight.reshape(-1)[first : first + piece.size // dtype.itemsize])


class Unpacker:
    """Turns buckets back into weights, and computes the fingerprint of what arrived."""

    def __init__(self) -> None:
        self._fingerprint = Fingerprint()
        self._buckets, self._tensors = 0, 0

    def unpack(self, buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
        """Names and weights, in the order that they were sent in, each when its last byte is there.

        A weight is a view of its bucket's data, or memory of its own where it came in several.

        Raises:
            EngineError: a bucket or a piece of a tensor is missing.
        """
        whole: Tensor | None = None
        filled = 0
        for bucket in buckets:
            if bucket.index != self._buckets:
                raise EngineError(f"weights: bucket {bucket.index} arrived where {self._buckets} was due.")
            self._buckets += 1
            for piece in bucket.pieces:
                data = bucket.data[piece.offset : piece.offset + piece.size]
                if piece.first_byte != filled or len(data) != piece.size:
                    raise EngineError(f"weights: {piece.name} did not arrive whole; byte {filled:,} was due.")
                self._fingerprint.add(piece.name, piece.shape, piece.torch_dtype, data, piece.first_byte)
                filled += piece.size
                if piece.size < piece.tensor_bytes:
                    if whole is None:
                        whole = torch.empty(piece.tensor_bytes, dtype=torch.uint8, device=data.device)
                    whole[piece.first_byte : filled].copy_(data)
                    data = whole
                if filled == piece.tensor_bytes:
                    self._tensors, whole, filled = self._tensors + 1, None, 0
                    yield piece.name, data.view(piece.torch_dtype).view(piece.shape)
        if filled:
            raise EngineError("weights: the stream ended within a tensor.")

    def check(self, manifest: Manifest) -> None:
        """Raises EngineError when something else arrived than was sent."""
        if (self._buckets, self._tensors) != (manifest.buckets, manifest.tensors):
            raise EngineError(
                f"weights of version {manifest.version}: {self._tensors} tensors in {self._buckets} buckets arrived, "
                f"{manifest.tensors} in {manifest.buckets} were sent."
            )
        found = self._fingerprint.hexdigest()
        if found != manifest.fingerprint:
            raise EngineError(
                f"weights of version {manifest.version}: what arrived hashes to {found[:12]}, what was sent to "
                f"{manifest.fingerprint[:12]}. Bytes were damaged on the way."
            )
