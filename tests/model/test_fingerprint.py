"""A fingerprint sees every bit, wherever the bytes lie and in whatever pieces they come."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_search import examples

from hone.model.fingerprint import Fingerprint, byte_sum, weights_fingerprint

BLOCK_BYTES = 4 * 65536


def bytes_of(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


@examples(40)
@given(st.integers(0, 3 * BLOCK_BYTES + 9), st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=4))
def test_a_sum_may_be_made_of_pieces(size, cuts):
    data = bytes_of(size)
    edges = [0, *sorted(4 * (min(cut, size) // 4) for cut in cuts), size]
    pieces = [byte_sum(data[start:end], start) for start, end in pairwise(edges)]
    assert sum(pieces) % 2**64 == byte_sum(data)


@examples(40)
@given(st.integers(1, 2 * BLOCK_BYTES + 9), st.data())
def test_one_flipped_bit_is_always_seen(size, data):
    content = bytes_of(size)
    before = byte_sum(content)
    content[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert byte_sum(content) != before


@pytest.mark.parametrize("distance", [4, 256, BLOCK_BYTES])
def test_words_that_change_places_are_seen(distance):
    content = bytes_of(2 * BLOCK_BYTES)
    swapped = content.clone()
    swapped[:4], swapped[distance : distance + 4] = content[distance : distance + 4], content[:4]
    assert byte_sum(swapped) != byte_sum(content)


def test_two_flipped_signs_are_seen():
    weight = torch.ones(100_000)
    changed = weight.clone()
    changed[[7, 70_007]] *= -1
    assert weights_fingerprint([("a", changed)]) != weights_fingerprint([("a", weight)])


def test_the_value_never_changes():
    """Checkpoints of adapters hold it: of what the adapter was learnt beside."""
    assert weights_fingerprint([("a", torch.arange(100_000.0))]) == "7d7ef3b86616165ab9736ecce1af1fd8"


def test_order_is_none_of_it():
    a, b = ("a", torch.ones(3)), ("b", torch.zeros(5, dtype=torch.bfloat16))
    assert weights_fingerprint([a, b]) == weights_fingerprint([b, a])


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_where_the_bytes_lie_is_none_of_it(offset):
    whole = torch.zeros(1000 + offset, dtype=torch.uint8)
    whole[offset:] = bytes_of(1000)
    assert byte_sum(whole[offset:]) == byte_sum(bytes_of(1000))


@pytest.mark.gpu
def test_a_gpu_computes_the_same():
    content = bytes_of(700 * BLOCK_BYTES + 13)
    assert byte_sum(content.cuda()) == byte_sum(content)
    found = Fingerprint()
    found.add("a", [13], torch.uint8, content[:13].cuda())
    assert found.hexdigest() == weights_fingerprint([("a", content[:13])])
