"""Ragged attention for CPUs, cut into padded rectangles of queries against keys.

They are of bounded size, and of similar shape within a block, which is all that attention.py needs to know. Their
sides are rounded up (`round_size`): a block ends in tiles without a real query.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hone.ragged import Ints, ranges, starts_of
from hone.sizes import BLOCK_SCORES, QUERY_ROWS, round_size

WHOLE_GROUP_TOKENS = 64
"""A prompt with its responses up to this size is attended to as one square: fewer, larger products."""
FREE_PADDING_SCORES = 1 << 13
"""Padding that is cheaper than another block would be."""


@dataclass(frozen=True)
class AttentionBlock:
    """B tiles of Q queries against K keys each, padded: indices into X, and their mask."""

    query_BQ: Tensor
    """Padding repeats the last real query."""
    key_BK: Tensor
    bias_BQK: Tensor
    """(B, Q, K) float32: 0 where the query sees the key, else -inf."""
    real_BQ: Tensor
    """(B, Q) bool: not padding."""
    padded: bool
    """Whether any query is padding."""


@dataclass(frozen=True)
class TokenPlaces:
    """Positions in X: each prompt, then the inputs (all tokens but the last) of its responses."""

    size: int
    prompt_start_N: Ints
    group_size_N: Ints
    start_R: Ints
    inputs_R: Ints
    prompt_end_R: Ints
    position_X: Ints
    response_X: Ints
    """(X,) index into R, or -1 for a prompt token."""


def place(prompt_length_N: Ints, prompt_R: Ints, length_R: Ints) -> TokenPlaces:
    inputs_R = np.maximum(length_R - 1, 0)
    inputs_N = np.bincount(prompt_R, weights=inputs_R, minlength=len(prompt_length_N)).astype(np.int64)
    group_size_N = prompt_length_N + inputs_N
    prompt_start_N = starts_of(group_size_N)
    # Responses are ordered by prompt, so those before this one fill X up to it, together with the prompts so far.
    start_R = starts_of(inputs_R) + np.cumsum(prompt_length_N)[prompt_R]
    size = int(group_size_N.sum())
    position_X = np.empty(size, np.int64)
    response_X = np.full(size, -1, np.int64)
    position_X[ranges(prompt_start_N, prompt_length_N)] = ranges(np.zeros_like(prompt_length_N), prompt_length_N)
    inputs_at = ranges(start_R, inputs_R)
    position_X[inputs_at] = ranges(prompt_length_N[prompt_R], inputs_R)
    response_X[inputs_at] = np.repeat(np.arange(len(inputs_R)), inputs_R)
    prompt_end_R = (prompt_start_N + prompt_length_N)[prompt_R]
    return TokenPlaces(size, prompt_start_N, group_size_N, start_R, inputs_R, prompt_end_R, position_X, response_X)


@dataclass(frozen=True)
class Tiling:
    """Blocks of a layout, from where its tokens stand."""

    places: TokenPlaces
    prompt_length_N: Ints
    prompt_R: Ints
    device: torch.device

    @cached_property
    def blocks_and_slots(self) -> tuple[tuple[AttentionBlock, ...], Tensor]:
        """See `Layout.blocks` and `Layout.query_slot_3X`."""

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(self.device, non_blocking=True)

        blocks, query_slot_3X = _blocks(self.places, self.prompt_length_N, self.prompt_R)
        made = tuple(AttentionBlock(*map(put, arrays), padded=not arrays[-1].all()) for arrays in blocks)
        return made, put(query_slot_3X)


def _blocks(
    places: TokenPlaces, prompt_length_N: Ints, prompt_R: Ints
) -> tuple[list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]], Ints]:
    """Tiles (query range; shared key range, own key range) of all tokens, gathered into blocks of similar shape."""
    tiles = _tiles(places, prompt_length_N, prompt_R)
    num_queries, num_keys = tiles[:, 1], tiles[:, 3] + tiles[:, 5]
    order = np.lexsort((num_queries, num_keys))
    query_slot_3X = np.empty((3, round_size(places.size)), np.int64)
    blocks, slots = [], 0
    for members in _split(order, num_queries, num_keys):
        block = _pad(tiles[members], places.response_X)
        queries, real_BQ = block[0], block[-1]
        tile, column = np.nonzero(real_BQ)
        width = real_BQ.shape[1]
        query_slot_3X[:, queries[real_BQ]] = slots + tile * width, column, np.full_like(tile, width)
        slots += real_BQ.size
        blocks.append(block)
    query_slot_3X[:, places.size :] = query_slot_3X[:, :1]
    return blocks, query_slot_3X


def _tiles(places: TokenPlaces, prompt_length_N: Ints, prompt_R: Ints) -> Ints:
    """(tiles, 6): start and length of the queries, of the shared keys, and of the own keys, in X."""
    whole_N = places.group_size_N <= WHOLE_GROUP_TOKENS
    start, size = places.prompt_start_N[whole_N], places.group_size_N[whole_N]
    zero = np.zeros_like(start)
    groups = np.stack((start, size, start, size, zero, zero), axis=1)

    start, length = places.prompt_start_N[~whole_N], prompt_length_N[~whole_N]
    row, first, count = _cut(length, length)
    zero = np.zeros_like(first)
    prompts = np.stack((start[row] + first, count, start[row], first + count, zero, zero), axis=1)

    apart_R = np.flatnonzero(~whole_N[prompt_R])
    row, first, count = _cut(places.inputs_R[apart_R], (prompt_length_N[prompt_R] + places.inputs_R)[apart_R])
    at = apart_R[row]
    shared = places.prompt_start_N[prompt_R[at]], prompt_length_N[prompt_R[at]]
    own = places.start_R[at]
    responses = np.stack((own + first, count, *shared, own, first + count), axis=1)
    return np.concatenate((groups, prompts, responses))


def _cut(lengths: Ints, num_keys: Ints) -> tuple[Ints, Ints, Ints]:
    """Cuts sequences into pieces that keep a tile in bounds: (which sequence, first token, length) of each piece."""
    rows = np.clip(BLOCK_SCORES // np.maximum(num_keys, 1), 1, QUERY_ROWS)
    pieces = -(-lengths // rows)
    row = np.repeat(np.arange(len(lengths)), pieces)
    first = ranges(np.zeros_like(pieces), pieces) * rows[row]
    return row, first, np.minimum(rows[row], lengths[row] - first)


def _split(order: Ints, num_queries: Ints, num_keys: Ints) -> list[Ints]:
    """Cuts tiles, sorted by size, where padding a further one to the common shape would waste too much."""
    parts, begin, real, queries = [], 0, 0, 0
    sizes = zip(num_queries[order].tolist(), num_keys[order].tolist(), strict=True)
    for i, (tile_queries, tile_keys) in enumerate(sizes):
        queries, real = max(queries, tile_queries), real + tile_queries * tile_keys
        padded = (i + 1 - begin) * queries * tile_keys
        if i > begin and (padded > BLOCK_SCORES or padded - real > real / 2 + FREE_PADDING_SCORES):
            parts.append(order[begin:i])
            begin, queries, real = i, tile_queries, tile_queries * tile_keys
    return [*parts, order[begin:]] if len(order) else []


def _pad(tiles: Ints, response_X: Ints) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of a `AttentionBlock` of these tiles, and of some more without a real query."""
    num_real = len(tiles)
    tiles = np.concatenate((tiles, np.repeat(tiles[:1], round_size(num_real) - num_real, axis=0)))
    query_start, num_queries, shared_start, num_shared, own_start, num_own = (tiles[:, i, None] for i in range(6))
    query = np.arange(round_size(int(num_queries.max())))
    real_BQ = query < num_queries
    real_BQ[num_real:] = False
    query_BQ = query_start + np.minimum(query, num_queries - 1)
    num_keys = num_shared + num_own
    column = np.arange(round_size(int(num_keys.max())))
    key = np.minimum(column, num_keys - 1)
    real_BK = column < num_keys
    key_BK = np.where(key < num_shared, shared_start + key, own_start + key - num_shared)
    query_response, key_response = response_X[query_BQ][:, :, None], response_X[key_BK][:, None]
    # Within a group X is in causal order: prompt first, then each response. So "earlier in X, and of the prompt or of
    # the same response" is exactly the causal prefix.
    seen_BQK = (key_BK[:, None] <= query_BQ[:, :, None]) & ((key_response < 0) | (key_response == query_response))
    bias_BQK = np.where(seen_BQK & real_BK[:, None], np.float32(0), np.float32(-np.inf))
    return query_BQ, key_BK, bias_BQK, real_BQ
