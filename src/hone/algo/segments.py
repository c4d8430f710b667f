"""Segment sums and means of a flat ragged tensor: tokens of a sample, samples of a group.

A segment index is an int64 tensor as long as the data, such as `sample_T`. On a CPU the sums run in data order, so
they are the same to the last bit in every run.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_index(length: Tensor) -> Tensor:
    """(sum of `length`,) int64 segment of each element, where segments of these lengths follow each other."""
    return torch.arange(len(length), device=length.device).repeat_interleave(length)


def segment_sum(values: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """(num_segments,) sums of `values` by segment; 0 for an empty one."""
    return values.new_zeros(num_segments).index_add(0, segment, values)


def segment_mean(values: Tensor, mask: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """(num_segments,) means of `values` where `mask` is 1; 0 for a segment without such an element."""
    count = segment_sum(mask, segment, num_segments)
    return segment_sum(values * mask, segment, num_segments) / count.clamp(min=1)


def segment_range(values: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """(num_segments,) largest minus smallest value, NaN ignored. Exactly 0 where all values are equal; -inf where
    there are none."""
    missing = values.isnan()
    low = values.new_full((num_segments,), torch.inf).scatter_reduce(
        0, segment, values.masked_fill(missing, torch.inf), "amin"
    )
    high = values.new_full((num_segments,), -torch.inf).scatter_reduce(
        0, segment, values.masked_fill(missing, -torch.inf), "amax"
    )
    return high - low
