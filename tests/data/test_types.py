"""Records with arrays: read-only, equal to the bit, and the same after pickling."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest

from hone.types import Prompt, Sample, VersionSpan, version_spans

SAMPLE = Sample("p", 1, (5, 6, 7), (-0.1, -0.0, float("nan")), version_spans([2, 2, 3]), "stop", "x")


def test_numbers_become_read_only_arrays():
    assert SAMPLE.token_ids.dtype == np.int32 and SAMPLE.sampler_logprobs.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        SAMPLE.token_ids[0] = 1
    own = np.array([1, 2, 3], np.int32)
    prompt = Prompt("p", 0, "", own)
    own[0] = 9
    assert prompt.token_ids.tolist() == [1, 2, 3], "an array that others can change is copied"
    assert replace(SAMPLE, text="y").token_ids is SAMPLE.token_ids, "and one that nobody can is not"


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickled_record_is_equal_to_the_bit_and_read_only(protocol):
    masked = replace(SAMPLE, loss_mask=(True, False, True))
    for record in (SAMPLE, masked, Prompt("p", 3, "2+2=", (1, 2), "4", {"seen": True})):
        found = pickle.loads(pickle.dumps(record, protocol))
        assert found == record and hash(found) == hash(record) and not found.token_ids.flags.writeable
        assert copy.deepcopy(record) == record


def test_equality_is_of_bits():
    assert replace(SAMPLE, sampler_logprobs=(-0.1, -0.0, float("nan"))) == SAMPLE
    assert replace(SAMPLE, sampler_logprobs=(-0.1, 0.0, float("nan"))) != SAMPLE
    assert replace(SAMPLE, token_ids=(5, 6, 8)) != SAMPLE and SAMPLE != "x"
    assert replace(SAMPLE, loss_mask=(True, True, True)) != SAMPLE


def test_versions_are_spans():
    assert SAMPLE.versions == (VersionSpan(2, 2), VersionSpan(3, 1))
    assert SAMPLE.token_versions() == [2, 2, 3]
    assert version_spans([]) == ()
    with pytest.raises(ValueError, match="3 tokens, 3 logprobs, versions of 2 tokens, and no mask"):
        replace(SAMPLE, versions=version_spans([0, 0]))
