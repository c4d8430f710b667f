"""KV cache storage: one buffer of fixed size, laid out anew as sequences come, grow and go.

Prompts lie at the front of the buffer and responses at its back, so that either may grow without moving the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hone.plan.kv_cache import columns_for
from hone.rollout.upload import upload
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
        """Give all memory back; room for so many tokens will be taken when it is needed."""
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
        """Be empty."""
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
        """Have so many slots and columns; keeps what fits of the `live` first slots. Copies a layer at a time."""
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
        """As `flat_index`, for a token in each of the first X slots."""
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
