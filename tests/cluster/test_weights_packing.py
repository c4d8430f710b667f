"""Any tensors, in buckets of any size, come back bit for bit, and damage on the way is seen."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_search import examples

from hone.errors import EngineError
from hone.model.fingerprint import weights_fingerprint
from hone.weights.buckets import Bucket, Header, Manifest, Packer, Unpacker, bucket_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes: NaN and all. Booleans are 0 or 1."""
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), generator=torch.Generator().manual_seed(seed))
    return data.to(torch.uint8).view(dtype).view(shape)


TENSORS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(DTYPES)), max_size=6
).map(lambda specs: [(f"layer.{i}", random_tensor(*spec, seed=i)) for i, spec in enumerate(specs)])


def packed(weights, size: int, dtype: torch.dtype | None = None) -> tuple[list[Bucket], Manifest]:
    packer = Packer(size, lambda size: torch.empty(size, dtype=torch.uint8), dtype=dtype)
    return list(packer.pack(weights)), packer.manifest(version=7)


def unpacked(unpacker: Unpacker, buckets: list[Bucket]) -> list[tuple[str, torch.Tensor]]:
    return [named for bucket in buckets for named in unpacker.unpack(bucket)]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@examples(100)
@given(TENSORS, st.integers(1, 40).map(lambda n: 16 * n))
def test_every_bit_comes_back_in_buckets_of_any_size(weights, size):
    buckets, manifest = packed(weights, size)
    unpacker = Unpacker()
    found = unpacked(unpacker, buckets)

    assert [(n, t.dtype, t.shape, bits(t)) for n, t in found] == [(n, t.dtype, t.shape, bits(t)) for n, t in weights]
    unpacker.check(manifest)
    assert manifest.fingerprint == weights_fingerprint(weights)
    assert manifest.num_bytes == sum(t.numel() * t.element_size() for _, t in weights)
    assert all(
        len(bucket.data) <= size or sum(e.num_bytes > 0 for e in bucket.header.entries) == 1 for bucket in buckets
    )
    wasted = sum(len(bucket.data) for bucket in buckets) - manifest.num_bytes
    assert wasted <= 15 * len(weights), "only alignment is sent besides"
    full = [len(a.data) + 16 + b.header.entries[0].num_bytes for a, b in itertools.pairwise(buckets)]
    assert all(used > size for used in full), "what did not fit came next"


def test_a_tensor_larger_than_a_bucket_gets_one_of_its_own_size():
    weight = torch.arange(10.0)  # 40 bytes
    buckets, manifest = packed([("a", torch.ones(1)), ("b", torch.ones(1)), ("w", weight), ("c", torch.ones(1))], 32)
    assert [[(e.name, e.offset) for e in b.header.entries] for b in buckets] == [
        [("a", 0), ("b", 16)],
        [("w", 0)],
        [("c", 0)],
    ]
    assert [bucket.header.num_bytes for bucket in buckets] == [20, 40, 4]
    assert (manifest.buckets, manifest.tensors, manifest.num_bytes) == (3, 4, 52)


def test_one_buffer_is_asked_for_per_bucket_and_none_before_it_is_needed():
    """A sender with two buffers waits for the first to be sent when it asks for the third."""
    given_out = []

    def buffer(size: int) -> torch.Tensor:
        given_out.append(size)
        return torch.empty(size, dtype=torch.uint8)

    stream = Packer(16, buffer).pack([("a", torch.ones(4)), ("b", torch.ones(4)), ("c", torch.ones(9))])
    assert [(next(stream).header.index, list(given_out)) for _ in range(3)] == [
        (0, [16]),
        (1, [16, 16]),
        (2, [16, 16, 36]),
    ]
    assert list(stream) == []


def test_float_weights_are_converted_on_the_way_and_others_are_not():
    weights = [("w", torch.randn(3, 5)), ("count", torch.arange(3))]
    buckets, manifest = packed(weights, 64, torch.bfloat16)
    found = dict(unpacked(Unpacker(), buckets))
    assert torch.equal(found["w"], weights[0][1].bfloat16()) and torch.equal(found["count"], weights[1][1])
    assert manifest.num_bytes == 3 * 5 * 2 + 3 * 8
    assert manifest.fingerprint == weights_fingerprint(found.items())


@pytest.mark.parametrize("size", [48, 1024])
def test_strides_are_no_matter(size):
    weights = [
        ("t", torch.randn(8, 6).T),
        ("column", torch.randn(9, 4)[:, 2]),
        ("expanded", torch.randn(4, 1).expand(4, 5)),
    ]
    found = unpacked(Unpacker(), packed(weights, size)[0])
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, weights, strict=True))


def test_one_damaged_byte_is_seen():
    buckets, manifest = packed([("a", torch.ones(100)), ("b", torch.zeros(50))], 128)
    buckets[1].data[17] ^= 4
    unpacker = Unpacker()
    assert len(unpacked(unpacker, buckets)) == 2
    with pytest.raises(EngineError, match=r"version 7: what arrived hashes to .*damaged"):
        unpacker.check(manifest)


def test_a_missing_bucket_is_seen():
    buckets, manifest = packed([("a", torch.ones(4)), ("b", torch.zeros(4)), ("c", torch.zeros(4))], 16)
    with pytest.raises(EngineError, match="bucket 2 of 16 bytes arrived where bucket 1 was due"):
        unpacked(Unpacker(), [buckets[0], buckets[2]])
    unpacker = Unpacker()
    unpacked(unpacker, buckets[:2])
    with pytest.raises(EngineError, match="2 tensors in 2 buckets arrived, 3 in 3 were sent"):
        unpacker.check(manifest)


def test_half_a_bucket_is_seen():
    (bucket,), _ = packed([("a", torch.ones(4))], 16)
    with pytest.raises(EngineError, match="its header says 16 bytes"):
        Unpacker().unpack(Bucket(Header(0, 16, bucket.header.entries), bucket.data[:8]))


def test_a_bucket_size_is_a_multiple_of_the_alignment():
    assert [bucket_bytes(mib) for mib in (1, 0.00001, 1 / 3)] == [2**20, 16, 349_520]
