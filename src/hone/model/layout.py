"""Shared-prompt layout: how the samples of a microbatch become one flat list of tokens, each computed once.

All samples of a prompt read the same prompt, so it is computed once and they attend to it; identical responses to one
prompt are one sequence; and the last token of a response is never an input, for nothing is predicted from it. Tokens
of one prompt and its responses are adjacent. With prompt "ab" and the samples "cd$", "ce" and "cd$":

    token_ids_X  = a b  c d  c        rows of X: prompt, first unique response, second
    position_X   = 0 1  2 3  2
    predict_U    = 1 2 3  1 4         unique response tokens c d $, c e: where in X each is predicted
    target_U     = c d $  c e
    expand_T     = 0 1 2  3 4  0 1 2  the three samples' eight tokens

Attention over such a list is ragged. For CPUs, `blocks` cuts it into padded rectangles of queries against keys, of
bounded size and of similar shape within a block, which is all that attention.py needs to know; they are made when they
are first asked for. Kernels for ragged sequences need the ends of sequences alone (varlen_attention.py). Pure index
arithmetic in numpy; nothing here loops over tokens.

All sizes are rounded up (`round_size`): the list ends in filler tokens that nothing reads, a block in tiles without a
real query. A CPU's matrix library compiles a kernel for each shape it meets, so shapes should repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.sizes import BLOCK_SCORES, QUERY_ROWS, round_size
from hone.types import UNRECORDED, Experts, Picture, TokenIds

Ints = NDArray[np.int64]

WHOLE_GROUP_TOKENS = 64
"""A prompt with its responses up to this size is attended to as one square: fewer, larger products."""
FREE_PADDING_SCORES = 1 << 13
"""Padding that is cheaper than another block would be."""


def filled(values: Ints) -> Ints:
    """The values, then zeros up to a round size."""
    return np.pad(values, (0, round_size(len(values)) - len(values)))


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
class PaddedRows:
    """The same tokens as plain sequences: one right-padded row per distinct sample, its prompt in front."""

    index_RL: Tensor
    """(R, L) index into X; padding repeats the last token."""
    real_RL: Tensor
    """(R, L) bool."""
    predict_U: Tensor
    """(U,) index into the flattened (R, L) of the position that predicts each unique response token."""


@dataclass(frozen=True)
class Layout:
    """One microbatch in shared-prompt layout: X tokens computed, U unique response tokens, T of all samples."""

    num_tokens: int
    """Of X; what follows is filler, token 0 at position 0."""
    token_ids_X: Tensor
    position_X: Tensor
    predict_U: Tensor
    """(U,) index into X of the hidden state that predicts each unique response token."""
    target_U: Tensor
    """(U,) the response tokens themselves."""
    expand_T: Tensor | None
    """(T,) index into U for every token of every sample, in sample order. None: U == T."""
    needed_W: Tensor
    """(W,) the distinct values of predict_U, ascending, then filler: the only final hidden states that are read."""
    needed_U: Tensor
    """(U,) index into W: needed_W[needed_U] == predict_U."""
    tiling: Tiling
    """Makes `blocks`."""
    spans_R: Ints
    """(R, 4) of each distinct sample: start and length of its prompt in X, start of its response, response tokens."""
    pictures: tuple[Picture, ...] = ()
    """Those of all prompts, in the order of X; `start` is their place in X."""
    grid_position_3X: Tensor | None = None
    """(3, X) where there are pictures: positions in time, height and width; see `grid_positions`."""
    routing_X: Tensor | None = None
    """(X, layers, k) integers: experts that tokens are sent to; see `types.Experts`. None: routers choose."""

    @property
    def blocks(self) -> tuple[AttentionBlock, ...]:
        """All pairs of query and key, in padded rectangles."""
        return self.tiling.blocks_and_slots[0]

    @property
    def query_slot_3X(self) -> Tensor:
        """(3, X) where each token is a query: rows of (Q,) before its own among all blocks, times Q; place in it; Q.
        Filler stands where the first token does."""
        slots = self.tiling.blocks_and_slots[1]
        more = len(self.token_ids_X) - slots.shape[1]
        return torch.cat((slots, slots[:, :1].expand(-1, more)), dim=1) if more else slots

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the inputs of its response."""
        return int((self.spans_R[:, 1] + np.maximum(self.spans_R[:, 3] - 1, 0)).max(initial=0))

    def samples_X(self) -> Tensor:
        """(X,) how many distinct samples each token is of; filler is of none."""
        prompt_start, num_prompt, own_start, num_response = self.spans_R.T
        change = np.zeros(len(self.token_ids_X) + 1, np.int64)
        for start, length in ((prompt_start, num_prompt), (own_start, np.maximum(num_response - 1, 0))):
            np.add.at(change, start, 1)
            np.add.at(change, start + length, -1)
        return torch.from_numpy(change.cumsum()[:-1]).to(self.token_ids_X.device, non_blocking=True)

    def rows(self) -> PaddedRows:
        """For models that know no layouts."""
        prompt_start, num_prompt, own_start, num_response = (self.spans_R[:, i, None] for i in range(4))
        length = num_prompt + np.maximum(num_response - 1, 0)
        column = np.arange(length.max(initial=0))
        at = np.minimum(column, length - 1)
        index_RL = np.where(at < num_prompt, prompt_start + at, own_start + at - num_prompt)
        row_starts = np.arange(len(length)) * len(column)
        predict_U = _ranges(row_starts + num_prompt[:, 0] - 1, num_response[:, 0])
        device = self.token_ids_X.device
        arrays = index_RL, column < length, predict_U
        return PaddedRows(*(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays))

    def predict_on_host(self) -> Ints:
        """`predict_U`, for index arithmetic that must not wait for a GPU."""
        prompt_start, num_prompt, own_start, num_response = self.spans_R.T
        return _predicting(prompt_start + num_prompt, own_start, num_response)

    @classmethod
    def build(
        cls,
        prompts: Sequence[Sequence[int]],
        prompt_S: Sequence[int] | Tensor,
        responses: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> Layout:
        """The layout of S samples: `responses[s]` (may be empty) answers `prompts[prompt_S[s]]` (never empty).

        Samples may come in any order; prompts that none of them answers are left out.
        """
        length_S = np.fromiter(map(len, responses), np.int64, len(responses))
        token_ids_T = np.fromiter(chain.from_iterable(responses), np.int64, int(length_S.sum()))
        return cls.from_flat(prompts, np.asarray(prompt_S, np.int64), length_S, token_ids_T, device)

    @classmethod
    def idle(cls, device: torch.device | str) -> Layout:
        """A dummy token: a rank without work takes part in the collectives."""
        one = cls.from_flat(((0,),), np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros(1, np.int64), device)
        return replace(one, expand_T=torch.empty(0, dtype=torch.int64, device=device))

    @classmethod
    def from_flat(
        cls,
        prompts: Sequence[TokenIds | Sequence[int]],
        prompt_S: Ints | Tensor,
        length_S: Ints | Tensor,
        token_ids_T: Ints | Tensor,
        device: torch.device | str = "cpu",
        pictures: Sequence[Sequence[Picture]] = (),
        routing: tuple[Experts, Sequence[Experts]] | None = None,
    ) -> Layout:
        """As `build`, from flat arrays: the (S,) response lengths and their (T,) tokens in sample order; the pictures
        of each prompt, if there are any; and the experts of these tokens and of each prompt's, if they are to be
        replayed. Of identical responses the first one's are."""
        prompt_S, length_S, token_ids_T = (np.asarray(a, np.int64) for a in (prompt_S, length_S, token_ids_T))
        samples = _merge_identical(prompt_S, length_S, token_ids_T)
        used_N, prompt_R = np.unique(samples.prompt_R, return_inverse=True)
        prompt_length_N = np.fromiter((len(prompts[i]) for i in used_N), np.int64, len(used_N))
        if not prompt_length_N.all():
            raise ValueError(f"prompt {used_N[prompt_length_N.argmin()]} has no tokens; a layout needs at least one")
        prompt_tokens = np.concatenate([np.empty(0, np.int64), *(prompts[i] for i in used_N)])
        places = _place(prompt_length_N, prompt_R, samples.length_R)
        token_ids_X = np.zeros(round_size(places.size), np.int64)
        token_ids_X[_ranges(places.prompt_start_N, prompt_length_N)] = prompt_tokens
        unique_tokens = token_ids_T[_ranges(samples.start_R, samples.length_R)]
        start_U = _starts(samples.length_R)
        token_ids_X[_ranges(places.start_R, places.inputs_R)] = unique_tokens[_ranges(start_U, places.inputs_R)]
        predict_U = _predicting(places.prompt_end_R, places.start_R, samples.length_R)
        needed_W, needed_U = np.unique(predict_U, return_inverse=True)
        routing_X = None
        if routing is not None:
            routing_T, of_prompts = routing
            routing_X = np.full((len(token_ids_X), *routing_T.shape[1:]), UNRECORDED, routing_T.dtype)
            routing_X[_ranges(places.prompt_start_N, prompt_length_N)] = np.concatenate([of_prompts[i] for i in used_N])
            routing_U = routing_T[_ranges(samples.start_R, samples.length_R)]
            routing_X[_ranges(places.start_R, places.inputs_R)] = routing_U[_ranges(start_U, places.inputs_R)]
        expand_T = _ranges(start_U[samples.row_S], length_S) if len(samples.length_R) < len(length_S) else None
        used = [pictures[i] for i in used_N] if pictures else []
        placed = [
            replace(picture, start=int(start) + picture.start)
            for start, own in zip(places.prompt_start_N, used, strict=False)
            for picture in own
        ]
        grid_position_3X = _grid_positions(places, prompt_length_N, prompt_R, used) if placed else None

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        return cls(
            num_tokens=places.size,
            token_ids_X=put(token_ids_X),
            position_X=put(filled(places.position_X)),
            predict_U=put(predict_U),
            target_U=put(unique_tokens),
            expand_T=None if expand_T is None else put(expand_T),
            needed_W=put(filled(needed_W)),
            needed_U=put(needed_U),
            tiling=Tiling(places, prompt_length_N, prompt_R, torch.device(device)),
            spans_R=np.stack(
                (places.prompt_start_N[prompt_R], prompt_length_N[prompt_R], places.start_R, samples.length_R), axis=1
            ),
            pictures=tuple(placed),
            grid_position_3X=None if grid_position_3X is None else put(grid_position_3X),
            routing_X=None if routing_X is None else put(routing_X),
        )


@dataclass(frozen=True)
class _Unique:
    """R distinct responses, ordered by prompt, and which of them each sample is."""

    prompt_R: Ints
    start_R: Ints
    length_R: Ints
    row_S: Ints


def _merge_identical(prompt_S: Ints, length_S: Ints, token_ids_T: Ints) -> _Unique:
    start_S = _starts(length_S)
    raw, width = token_ids_T.tobytes(), token_ids_T.itemsize
    first: dict[tuple[int, bytes], int] = {}
    rows = [
        first.setdefault((prompt, raw[start * width : (start + length) * width]), len(first))
        for prompt, start, length in zip(prompt_S.tolist(), start_S.tolist(), length_S.tolist(), strict=True)
    ]
    found_S = np.asarray(rows, np.int64)
    sample_R = np.unique(found_S, return_index=True)[1]
    order_R = np.argsort(prompt_S[sample_R], kind="stable")
    rank = np.empty_like(order_R)
    rank[order_R] = np.arange(len(order_R))
    sample_R = sample_R[order_R]
    return _Unique(prompt_S[sample_R], start_S[sample_R], length_S[sample_R], rank[found_S])


@dataclass(frozen=True)
class _TokenPlaces:
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


@dataclass(frozen=True)
class Tiling:
    """Blocks of a layout, from where its tokens stand."""

    places: _TokenPlaces
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


def _place(prompt_length_N: Ints, prompt_R: Ints, length_R: Ints) -> _TokenPlaces:
    inputs_R = np.maximum(length_R - 1, 0)
    inputs_N = np.bincount(prompt_R, weights=inputs_R, minlength=len(prompt_length_N)).astype(np.int64)
    group_size_N = prompt_length_N + inputs_N
    prompt_start_N = _starts(group_size_N)
    # Responses are ordered by prompt, so those before this one fill X up to it, together with the prompts so far.
    start_R = _starts(inputs_R) + np.cumsum(prompt_length_N)[prompt_R]
    size = int(group_size_N.sum())
    position_X = np.empty(size, np.int64)
    response_X = np.full(size, -1, np.int64)
    position_X[_ranges(prompt_start_N, prompt_length_N)] = _ranges(np.zeros_like(prompt_length_N), prompt_length_N)
    inputs_at = _ranges(start_R, inputs_R)
    position_X[inputs_at] = _ranges(prompt_length_N[prompt_R], inputs_R)
    response_X[inputs_at] = np.repeat(np.arange(len(inputs_R)), inputs_R)
    prompt_end_R = (prompt_start_N + prompt_length_N)[prompt_R]
    return _TokenPlaces(size, prompt_start_N, group_size_N, start_R, inputs_R, prompt_end_R, position_X, response_X)


def _grid_positions(
    places: _TokenPlaces, prompt_length_N: Ints, prompt_R: Ints, pictures: Sequence[Sequence[Picture]]
) -> Ints:
    """(3, X) positions of all tokens where prompts have pictures; of filler 0."""
    position_3X = np.stack([filled(places.position_X)] * 3)
    shift_N = np.zeros_like(prompt_length_N)
    for number, own in enumerate(pictures):
        start, length = places.prompt_start_N[number], prompt_length_N[number]
        position_3X[:, start : start + length], following = grid_positions(length, own)
        shift_N[number] = following - length
    responses = _ranges(places.start_R, places.inputs_R)
    position_3X[:, responses] += np.repeat(shift_N[prompt_R], places.inputs_R)
    return position_3X


def grid_positions(length: int, pictures: Sequence[Picture]) -> tuple[Ints, int]:
    """(3, length) positions in time, height and width of a prompt's tokens, and the one of the token behind it.

    Text counts on all three; a picture's tokens have one position in time, and count their rows and columns from it.
    Behind it, text counts from its larger side (M-RoPE, arXiv:2409.12191).
    """
    position_3P = np.empty((3, length), np.int64)
    done, following = 0, 0
    for picture in pictures:
        end, size = picture.start + picture.num_tokens, picture.start - done
        position_3P[:, done : picture.start] = np.arange(following, following + size)
        following += size
        place = np.arange(picture.num_tokens)
        position_3P[:, picture.start : end] = following
        position_3P[1, picture.start : end] += place // picture.columns
        position_3P[2, picture.start : end] += place % picture.columns
        done, following = end, following + max(picture.rows, picture.columns)
    position_3P[:, done:] = np.arange(following, following + length - done)
    return position_3P, following + length - done


def _blocks(
    places: _TokenPlaces, prompt_length_N: Ints, prompt_R: Ints
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


def _tiles(places: _TokenPlaces, prompt_length_N: Ints, prompt_R: Ints) -> Ints:
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
    first = _ranges(np.zeros_like(pieces), pieces) * rows[row]
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


def _predicting(prompt_end_R: Ints, start_R: Ints, length_R: Ints) -> Ints:
    """(U,) where in X each response token is predicted: the first by its prompt's last token, each other by the one
    before it."""
    predict_U = _ranges(start_R - 1, length_R)
    predict_U[_starts(length_R)[length_R > 0]] = prompt_end_R[length_R > 0] - 1
    return predict_U


def _starts(lengths: Ints) -> Ints:
    return np.cumsum(lengths) - lengths


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """Concatenates arange(start, start + length) of every pair."""
    return np.arange(lengths.sum()) + np.repeat(starts - _starts(lengths), lengths)
