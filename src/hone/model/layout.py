"""Shared-prompt layout: how the samples of a microbatch become one flat list of tokens, each computed once.

All samples of a prompt read the same prompt, so it is computed once and they attend to it; identical responses to one
prompt are one sequence; and the last token of a response is never an input, for nothing is predicted from it. Tokens
of one prompt and its responses are adjacent. With prompt "ab" and the samples "cd$", "ce" and "cd$":

    token_ids_X  = a b  c d  c        rows of X: prompt, first unique response, second
    position_X   = 0 1  2 3  2
    predict_U    = 1 2 3  1 4         unique response tokens c d $, c e: where in X each is predicted
    target_U     = c d $  c e
    expand_T     = 0 1 2  3 4  0 1 2  the three samples' eight tokens

Attention over such a list is ragged. For CPUs, `blocks` cuts it into padded rectangles (tiling.py), which are made when
they are first asked for. Kernels for ragged sequences need the ends of sequences alone (varlen_attention.py). Pure
index arithmetic in numpy; nothing here loops over tokens.

All sizes are rounded up (`round_size`): the list ends in filler tokens that nothing reads. A CPU's matrix library
compiles a kernel for each shape it meets, so shapes should repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from hone.experts import UNRECORDED, ExpertIds
from hone.model.tiling import AttentionBlock, Tiling, TokenPlaces, place
from hone.ragged import Ints, ranges, starts_of
from hone.sizes import round_size
from hone.types import Picture, TokenIds


def filled(values: Ints) -> Ints:
    """The values, then zeros up to a round size."""
    return np.pad(values, (0, round_size(len(values)) - len(values)))


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
    """(X, layers, k) integers: experts that tokens are sent to; see `experts.ExpertIds`. None: routers choose."""

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
        predict_U = ranges(row_starts + num_prompt[:, 0] - 1, num_response[:, 0])
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
        routing: tuple[ExpertIds, Mapping[int, ExpertIds]] | None = None,
    ) -> Layout:
        """Like `build`, from flat arrays: the (S,) response lengths and their (T,) tokens in sample order; the pictures
        of each prompt, if there are any; and the experts of these tokens and of each prompt's, if they are to be
        replayed. Of identical responses the first one's are."""
        prompt_S, length_S, token_ids_T = (np.asarray(a, np.int64) for a in (prompt_S, length_S, token_ids_T))
        samples = _merge_identical(prompt_S, length_S, token_ids_T)
        used_N, prompt_R = np.unique(samples.prompt_R, return_inverse=True)
        prompt_length_N = np.fromiter((len(prompts[i]) for i in used_N), np.int64, len(used_N))
        if not prompt_length_N.all():
            raise ValueError(f"prompt {used_N[prompt_length_N.argmin()]} has no tokens; a layout needs at least one")
        prompt_tokens = np.concatenate([np.empty(0, np.int64), *(prompts[i] for i in used_N)])
        places = place(prompt_length_N, prompt_R, samples.length_R)
        token_ids_X = np.zeros(round_size(places.size), np.int64)
        token_ids_X[ranges(places.prompt_start_N, prompt_length_N)] = prompt_tokens
        unique_tokens = token_ids_T[ranges(samples.start_R, samples.length_R)]
        start_U = starts_of(samples.length_R)
        token_ids_X[ranges(places.start_R, places.inputs_R)] = unique_tokens[ranges(start_U, places.inputs_R)]
        predict_U = _predicting(places.prompt_end_R, places.start_R, samples.length_R)
        needed_W, needed_U = np.unique(predict_U, return_inverse=True)
        routing_X = None
        if routing is not None:
            routing_T, of_prompts = routing
            routing_X = np.full((len(token_ids_X), *routing_T.shape[1:]), UNRECORDED, routing_T.dtype)
            routing_X[ranges(places.prompt_start_N, prompt_length_N)] = np.concatenate([of_prompts[i] for i in used_N])
            routing_U = routing_T[ranges(samples.start_R, samples.length_R)]
            routing_X[ranges(places.start_R, places.inputs_R)] = routing_U[ranges(start_U, places.inputs_R)]
        expand_T = ranges(start_U[samples.row_S], length_S) if len(samples.length_R) < len(length_S) else None
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
    start_S = starts_of(length_S)
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


def _grid_positions(
    places: TokenPlaces, prompt_length_N: Ints, prompt_R: Ints, pictures: Sequence[Sequence[Picture]]
) -> Ints:
    """(3, X) positions of all tokens where prompts have pictures; of filler 0."""
    position_3X = np.stack([filled(places.position_X)] * 3)
    shift_N = np.zeros_like(prompt_length_N)
    for number, own in enumerate(pictures):
        start, length = places.prompt_start_N[number], prompt_length_N[number]
        position_3X[:, start : start + length], following = grid_positions(length, own)
        shift_N[number] = following - length
    responses = ranges(places.start_R, places.inputs_R)
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


def _predicting(prompt_end_R: Ints, start_R: Ints, length_R: Ints) -> Ints:
    """(U,) where in X each response token is predicted: the first by its prompt's last token, each other by the one
    before it."""
    predict_U = ranges(start_R - 1, length_R)
    predict_U[starts_of(length_R)[length_R > 0]] = prompt_end_R[length_R > 0] - 1
    return predict_U
