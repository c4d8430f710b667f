"""KV cache of Hone's own decoder: one buffer of fixed size, laid out again as sequences come, grow and go; and
attention over it, of whole prompts, of responses that come back, and of one step of all branches.

Prompts lie at the front of the buffer and responses at its back, so that either may grow without moving the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model.decoder import Attend
from hone.model.layout import filled
from hone.plan.kv_cache import columns_for
from hone.rollout.sampling import upload
from hone.sizes import round_size


class KeyValueStore:
    """Room for keys and values of `room_tokens` tokens, (layers, 2, room * Hkv, D).

    Memory is taken at the first use, and on a CPU each page of it when something is first written there.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, like: Tensor) -> None:
        self._shape, self._like = (num_layers, 2, num_kv_heads, head_dim), like
        self.prompts, self.responses = Region(self, from_back=False), Region(self, from_back=True)
        self.room_tokens = 0
        self.free(0)

    def free(self, room_tokens: int) -> None:
        """Release all memory; room for `room_tokens` tokens is allocated when it is needed."""
        self.room_tokens, self._memory = room_tokens, None
        for region in (self.prompts, self.responses):
            region.forget()

    @property
    def num_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def memory(self) -> Tensor:
        """(layers, 2, room * Hkv, D)."""
        if self._memory is None:
            layers, parts, num_kv_heads, head_dim = self._shape
            self._memory = self._like.new_empty(layers, parts, self.room_tokens * num_kv_heads, head_dim)
        return self._memory

    @property
    def empty(self) -> Tensor:
        layers, parts, num_kv_heads, head_dim = self._shape
        return self._like.new_empty(layers, parts, 0, num_kv_heads, 0, head_dim)


class Region:
    """(layers, 2, slots, Hkv, columns, D) at one end of a store: a slot per sequence, a column per token.

    Finite where never written, because attention masks it by adding -inf. Attention reads whole slots: a part of the
    columns would not be dense in memory, and each matrix product would copy it first.
    """

    def __init__(self, store: KeyValueStore, *, from_back: bool) -> None:
        self._store, self._from_back = store, from_back

    def forget(self) -> None:
        """Empty the region."""
        self.data = self._store.empty
        self._written = 0
        """How far from its end of the memory numbers are finite."""

    @property
    def slots(self) -> int:
        return self.data.shape[2]

    @property
    def columns(self) -> int:
        return self.data.shape[4]

    @property
    def tokens(self) -> int:
        return self.slots * self.columns

    @property
    def place(self) -> tuple[int, int]:
        """Address and columns: where each slot's tokens lie, whatever the number of slots."""
        return self.data.data_ptr(), self.columns

    def lay_out(self, slots: int, columns: int, *, live: int) -> None:
        """Resize to `slots` x `columns`; keeps what fits of the `live` first slots. Copies a layer at a time."""
        if (slots, columns) == (self.slots, self.columns):
            return
        assert slots * columns + self._other.tokens <= self._store.room_tokens, "more tokens than there is room for"
        memory, num_kv_heads = self._store.memory, self.data.shape[3]
        length = slots * columns * num_kv_heads
        if length > self._written:
            self._at_end(memory, self._written, length).zero_()
            self._written = length
        old, live, kept = self.data, min(live, slots, self.slots), min(columns, self.columns)
        self.data = self._at_end(memory, 0, length).unflatten(2, (slots, num_kv_heads, columns))
        if live and kept:
            for layer in range(len(memory)):  # one at a time: the new layout lies over the old one
                self.data[layer, :, :live, :, :kept] = old[layer, :, :live, :, :kept].clone()

    def flat_index(self, slot_X: np.ndarray, column_X: np.ndarray) -> Tensor:
        """(X * Hkv,) where `write` puts X tokens."""
        num_kv_heads, columns = self.data.shape[3], self.data.shape[4]
        index = (slot_X[:, None] * num_kv_heads + np.arange(num_kv_heads)) * columns + column_X[:, None]
        return upload(index.reshape(-1), self.data.device)

    def flat_index_of_first(self, column_X: Tensor) -> Tensor:
        """Like `flat_index`, for a token in each of the first X slots."""
        num_kv_heads, columns = self.data.shape[3], self.data.shape[4]
        first = torch.arange(0, len(column_X) * num_kv_heads * columns, columns, device=column_X.device)
        return (first.view(-1, num_kv_heads) + column_X[:, None]).view(-1)

    def write(self, layer: int, place: Tensor | int, k: Tensor, v: Tensor) -> None:
        """Store (X, Hkv, D) keys and values of one layer.

        Args:
            place: of `flat_index`, or one column of the first X slots: a copy by strides, several times faster.
        """
        head_dim = k.shape[-1]
        for part, value in enumerate((k, v)):
            if isinstance(place, int):
                self.data[layer, part, : len(value), :, place] = value
            else:
                self.data[layer, part].view(-1, head_dim).index_copy_(0, place, value.reshape(-1, head_dim))

    def read(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots first .. last - 1, each a view (slots * Hkv, columns, D)."""
        keys, values = self.data[layer, :, first:last].flatten(1, 2)
        return keys, values

    def move(self, target: np.ndarray, source: np.ndarray, columns: int) -> None:
        """Copy the first columns of the source slots onto the target slots."""
        if columns == 0:
            return
        to, origin = (upload(slots, self.data.device) for slots in (target, source))
        part = self.data[:, :, :, :, :columns]
        part.index_copy_(2, to, part.index_select(2, origin))  # on CPUs several times faster than part[:, :, to] = ...

    @property
    def _other(self) -> Region:
        return self._store.prompts if self._from_back else self._store.responses

    def _at_end(self, memory: Tensor, first: int, last: int) -> Tensor:
        """Rows first .. last - 1 of the memory, counted from this region's end of it."""
        size = memory.shape[2]
        return memory[:, :, size - last : size - first] if self._from_back else memory[:, :, first:last]


@dataclass
class DecoderAdmission:
    """See `stepper.Admission`."""

    room_tokens: int
    prompts: int
    width: int
    """Of the longest prompt."""
    rows: int
    longest: int
    """Tokens of the longest row, at the next step."""
    most_tokens: int
    """That any row may sample."""

    def take(self, begun_tokens: int, most_tokens: int, prompt_tokens: int) -> bool:
        prompts, width = self.prompts + (prompt_tokens > 0), max(self.width, prompt_tokens)
        longest, most = max(self.longest, begun_tokens), max(self.most_tokens, most_tokens)
        columns = min(columns_for(columns_for(longest) + 1), columns_for(max(most - 1, 1)))  # once they have grown
        if prompts * width + round_size(self.rows + 1) * columns > self.room_tokens:
            return False
        self.prompts, self.width, self.rows = prompts, width, self.rows + 1
        self.longest, self.most_tokens = longest, most
        return True


@dataclass(frozen=True)
class Grouping:
    """Which branches sit at which prompt: N prompts with `members` seats each, some of them empty.

    Indices are over (sequence, kv head) pairs, because that is how queries and scores lie in memory. An empty seat
    repeats branch 0: its result is computed and never read.
    """

    prompts: int
    """N; may be more than there are."""
    members: int
    branch_of_seat: Tensor
    """(N * Hkv * members,) int64 into (C * Hkv)."""
    seat_of_branch: Tensor
    """(C * Hkv,) int64 into (N * Hkv * members); filler looks into the first seat."""
    prompt_length_C: Tensor
    """Tokens of each branch's prompt."""

    @classmethod
    def of(
        cls,
        slot_C: np.ndarray,
        prompt_length_C: np.ndarray,
        prompts: int,
        members: int,
        kv_heads: int,
        device: torch.device,
    ) -> Grouping:
        """`slot_C`: the prompt of each branch; at most `members` have the same."""
        num_branches = len(slot_C)
        order = np.argsort(slot_C, kind="stable")
        branches_of_prompt_N = np.bincount(slot_C, minlength=prompts)
        first_N = branches_of_prompt_N.cumsum() - branches_of_prompt_N
        member_C = np.empty(num_branches, np.int64)
        member_C[order] = np.arange(num_branches) - first_N[slot_C[order]]
        head = np.arange(kv_heads)
        seat_of_branch = (slot_C[:, None] * kv_heads + head) * members + member_C[:, None]
        branch_of_seat = np.tile(head[:, None], (prompts, 1, members))
        branch_of_seat.reshape(-1)[seat_of_branch] = np.arange(num_branches)[:, None] * kv_heads + head
        num_filler = round_size(num_branches) - num_branches
        return cls(
            prompts,
            members,
            upload(branch_of_seat.reshape(-1), device),
            upload(np.pad(seat_of_branch, ((0, num_filler), (0, 0))).reshape(-1), device),
            upload(filled(prompt_length_C), device),
        )


def prompt_attention(
    store: KeyValueStore, first: int, prompt_X: np.ndarray, position_X: np.ndarray, length_N: np.ndarray
) -> Attend:
    """Causal attention within each of N whole prompts, which are stored from slot `first` on.

    Padded on the right, where causality alone hides the padding.

    Args:
        prompt_X: of each token, the number of its prompt.
        position_X: its position there.
    """
    prompts, num_prompts, width = store.prompts, len(length_N), int(length_N.max())
    flat = prompts.flat_index(first + prompt_X, position_X)
    padded_X = upload(filled(prompt_X * width + position_X), flat.device)
    num_tokens = len(position_X)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prompts.write(layer, flat, k[:num_tokens], v[:num_tokens])
        keys, values = prompts.read(layer, first, first + num_prompts)
        heads, kv_heads, head_dim = q.shape[1], k.shape[1], k.shape[2]
        q_padded = q.new_zeros(num_prompts * width, heads, head_dim).index_copy_(
            0, padded_X[:num_tokens], q[:num_tokens]
        )
        out = F.scaled_dot_product_attention(
            q_padded.view(num_prompts, width, heads, head_dim).transpose(1, 2),
            keys.view(num_prompts, kv_heads, -1, head_dim)[:, :, :width],
            values.view(num_prompts, kv_heads, -1, head_dim)[:, :, :width],
            is_causal=True,
            enable_gqa=heads != kv_heads,
        )
        return out.transpose(1, 2).reshape(num_prompts * width, heads, head_dim).index_select(0, padded_X)

    return attend


def response_attention(
    store: KeyValueStore,
    slot_R: np.ndarray,
    branch_R: np.ndarray,
    prompt_length_R: np.ndarray,
    row_X: np.ndarray,
    position_X: np.ndarray,
) -> Attend:
    """Attention of R whole responses: each sees its prompt, and causally itself.

    Args:
        slot_R: of each response, the slot of its prompt.
        branch_R: the slot that it is stored in.
        row_X: of each token, the number of its response.
        position_X: its position there.
    """
    prompts, responses, num_rows, num_tokens = store.prompts, store.responses, len(branch_R), len(row_X)
    width = int(position_X.max()) + 1
    flat = responses.flat_index(branch_R[row_X], position_X)
    device = flat.device
    padded_X = upload(filled(row_X * width + position_X), device)
    slots, branches = upload(slot_R, device), upload(branch_R, device)
    in_prompt_RP = torch.arange(prompts.columns, device=device) < upload(prompt_length_R, device)[:, None]
    column_L = torch.arange(width, device=device)
    seen_RLW = torch.cat(
        [
            in_prompt_RP[:, None].expand(-1, width, -1),
            (column_L <= column_L[:, None]).expand(num_rows, -1, -1),
        ],
        -1,
    )

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        responses.write(layer, flat, k[:num_tokens], v[:num_tokens])
        heads, head_dim = q.shape[1:]
        q_padded = q.new_zeros(num_rows * width, heads, head_dim).index_copy_(0, padded_X[:num_tokens], q[:num_tokens])
        keys, values = (
            torch.cat([prompts.data[layer, part, slots], responses.data[layer, part, branches, :, :width]], 2)
            for part in range(2)
        )
        queries = q_padded.view(num_rows, width, heads, head_dim).transpose(1, 2)
        out = masked_attention(queries, keys, values, seen_RLW[:, None], repeats=q.is_cuda)
        return out.transpose(1, 2).reshape(num_rows * width, heads, head_dim).index_select(0, padded_X)

    return attend


def masked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, repeats: bool) -> Tensor:
    """Attention of (R, heads, L, D) queries to (R, Hkv, W, D) keys and values, by a mask.

    Args:
        repeats: copy keys and values for each query head. On CUDA no kernel but the one that holds all scores takes
            both a mask and grouped heads.
    """
    group = q.shape[1] // k.shape[1]
    if repeats and group > 1:
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=group > 1)


def step_attention(
    store: KeyValueStore,
    sizes: tuple[int, int],
    branch_of_seat: Tensor,
    seat_of_branch: Tensor,
    prompt_length_C: Tensor,
    length_C: Tensor,
    *,
    column: int | None = None,
) -> Attend:
    """Attention of one token more of each of C branches: to its prompt, its response and itself.

    Args:
        sizes: (prompts, members) of the `Grouping` that the next three arguments are from.
        length_C: how many response tokens of each branch came before.
        column: that number, where it is one for all: a faster way to store keys.
    """
    prompts, responses = store.prompts, store.responses
    num_branches, (num_prompts, members) = len(length_C), sizes
    place = responses.flat_index_of_first(length_C) if column is None else column
    column_P, column_L = (torch.arange(one.columns, device=length_C.device) for one in (prompts, responses))
    beyond_CW = torch.cat([column_P >= prompt_length_C[:, None], column_L > length_C[:, None]], 1)
    bias_CW = responses.data.new_zeros(beyond_CW.shape).masked_fill_(beyond_CW, -torch.inf)
    prompt_width = prompts.columns

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv_heads, head_dim = k.shape[1:]
        group_heads = q.shape[1] // kv_heads
        responses.write(layer, place, k, v)
        keys, values = responses.read(layer, 0, num_branches)
        prompt_keys, prompt_values = prompts.read(layer, 0, num_prompts)
        queries = q.reshape(num_branches * kv_heads, group_heads, head_dim)
        own_scores = _products(queries, keys.mT)
        side_by_side = queries.index_select(0, branch_of_seat)
        side_by_side = side_by_side.view(num_prompts * kv_heads, members * group_heads, head_dim)
        prompt_scores = _products(side_by_side, prompt_keys.mT).view(-1, group_heads, prompt_width)
        scores = torch.cat([prompt_scores.index_select(0, seat_of_branch), own_scores], -1)
        scores_CHW = scores.view(num_branches, kv_heads * group_heads, -1)
        torch.add(bias_CW[:, None], scores_CHW, alpha=head_dim**-0.5, out=scores_CHW)
        weights = torch.softmax(scores, -1).to(q.dtype)
        prompt_weights = weights[:, :, :prompt_width].index_select(0, branch_of_seat)
        prompt_weights = prompt_weights.view(num_prompts * kv_heads, members * group_heads, prompt_width)
        prompt_out = torch.bmm(prompt_weights, prompt_values).view(-1, group_heads, head_dim)
        out = torch.bmm(weights[:, :, prompt_width:], values)
        return out.add_(prompt_out.index_select(0, seat_of_branch)).view_as(q)

    return attend


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """queries @ keys; on CUDA of numbers in 16 bits without rounding, as the trainer's flash attention has scores."""
    if queries.is_cuda and queries.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(queries, keys, out_dtype=torch.float32)
    return torch.bmm(queries, keys)
