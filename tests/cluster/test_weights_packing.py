"""Any tensors, in buckets of any size, come back bit for bit, and damage on the way is seen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_search import examples

from hone.errors import EngineError
from hone.model.fingerprint import weights_fingerprint
from hone.weights.buckets import Bucket, Manifest, Packer, Unpacker, bucket_bytes

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
    packer = Packer(lambda: torch.empty(size, dtype=torch.uint8), dtype=dtype)
    return list(packer.pack(weights)), packer.manifest(version=7)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@examples(100)
@given(TENSORS, st.integers(1, 40).map(lambda n: 16 * n))
def test_every_bit_comes_back_in_buckets_of_any_size(weights, size):
    buckets, manifest = packed(weights, size)
    sent = [(bucket.header(), bucket.data) for bucket in buckets]
    unpacker = Unpacker()
    found = list(unpacker.unpack(Bucket.of(*message) for message in sent))

    assert [(n, t.dtype, t.shape, bits(t)) for n, t in found] == [(n, t.dtype, t.shape, bits(t)) for n, t in weights]
    unpacker.check(Manifest.of(manifest.as_json()))
    assert manifest.fingerprint == weights_fingerprint(weights)
    assert manifest.num_bytes == sum(t.numel() * t.element_size() for _, t in weights)
    assert all(len(bucket.data) <= size for bucket in buckets)
    wasted = sum(len(bucket.data) for bucket in buckets) - manifest.num_bytes
    assert wasted <= 15 * len(weights), "only alignment is sent besides"
    assert len(buckets) <= (manifest.num_bytes + 16 * len(weights)) // size + 1, "buckets are filled"


def test_a_tensor_larger_than_a_bucket_lies_in_several():
    weight = torch.arange(10.0)  # 40 bytes
    buckets, manifest = packed([("a", torch.ones(1)), ("w", weight)], 32)
    assert [[(p.name, p.first_byte, p.offset, p.size) for p in b.pieces] for b in buckets] == [
        [("a", 0, 0, 4), ("w", 0, 16, 16)],
        [("w", 16, 0, 24)],
    ]
    assert (manifest.buckets, manifest.tensors, manifest.num_bytes) == (2, 2, 44)


def test_one_buffer_is_asked_for_per_bucket_and_none_before_it_is_needed():
    """A sender with two buffers waits for the first to be sent when it asks for the third."""
    given_out = []

    def buffer() -> torch.Tensor:
        given_out.append(torch.empty(16, dtype=torch.uint8))
        return given_out[-1]

    stream = Packer(buffer).pack([("a", torch.ones(12))])
    assert [(next(stream).index, len(given_out)) for _ in range(3)] == [(0, 1), (1, 2), (2, 3)]
    assert list(stream) == []


def test_float_weights_are_converted_on_the_way_and_others_are_not():
    weights = [("w", torch.randn(3, 5)), ("count", torch.arange(3))]
    buckets, manifest = packed(weights, 64, torch.bfloat16)
    found = dict(Unpacker().unpack(buckets))
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
    found = Unpacker().unpack(packed(weights, size)[0])
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, weights, strict=True))


def test_one_damaged_byte_is_seen():
    buckets, manifest = packed([("a", torch.ones(100)), ("b", torch.zeros(50))], 128)
    buckets[2].data[17] ^= 4
    unpacker = Unpacker()
    assert len(list(unpacker.unpack(buckets))) == 2
    with pytest.raises(EngineError, match=r"version 7: what arrived hashes to .*damaged"):
        unpacker.check(manifest)


@pytest.mark.parametrize(
    ("missing", "told"),
    [(1, "bucket 2 arrived where 1 was due"), (4, "ended within a tensor"), (0, "bucket 1 arrived")],
)
def test_a_missing_bucket_is_seen(missing, told):
    buckets, _ = packed([("a", torch.ones(100)), ("b", torch.zeros(50))], 128)
    assert len(buckets) == 5
    del buckets[missing]
    with pytest.raises(EngineError, match=told):
        list(Unpacker().unpack(buckets))


def test_a_stream_that_ended_between_tensors_is_seen():
    buckets, manifest = packed([("a", torch.ones(4)), ("b", torch.zeros(4))], 16)
    unpacker = Unpacker()
    assert [name for name, _ in unpacker.unpack(buckets[:1])] == ["a"]
    with pytest.raises(EngineError, match="1 tensors in 1 buckets arrived, 2 in 2 were sent"):
        unpacker.check(manifest)


def test_a_bucket_size_is_a_whole_number_of_pieces():
    assert [bucket_bytes(mib) for mib in (1, 0.00001, 1 / 3)] == [2**20, 16, 349_520]
