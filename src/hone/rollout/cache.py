"""KV cache storage: one buffer, allocated once, laid out anew as sequences come, grow and go."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


class KeyValueStore:
    """(layers, 2, slots, Hkv, columns, D): a slot per sequence, a column per token.

    Finite where never written, because attention masks it by adding -inf. Attention reads whole slots: a part of the
    columns would not be dense in memory, and each matrix product would copy it first.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, like: Tensor) -> None:
        self._memory = like.new_zeros(0)
        self._expected = 0
        self.data = like.new_zeros(num_layers, 2, 0, num_kv_heads, 0, head_dim)

    @property
    def columns(self) -> int:
        return self.data.shape[4]

    @property
    def room_tokens(self) -> int:
        return self.data.shape[2] * self.columns

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def free(self, *, will_return: bool) -> None:
        """Give all memory back. `will_return`: as much will be needed again, and is then taken at once: to grow as
        sequences do costs new pages and a copy each time."""
        self._expected = max(len(self._memory), self._expected) if will_return else 0
        self._memory = self._memory.new_zeros(0)
        layers, parts, _, num_kv_heads, _, head_dim = self.data.shape
        self.data = self._memory.view(layers, parts, 0, num_kv_heads, 0, head_dim)

    def reserve(self, slots: int, columns: int, *, live: int) -> None:
        """Make room for so many slots or more, and for just so many columns; keeps what fits of the `live` first."""
        have_slots, have_columns = self.data.shape[2], self.columns
        if slots <= have_slots and columns == have_columns:
            return
        shape = list(self.data.shape)
        shape[2], shape[4] = max(slots, have_slots), columns
        live = min(live, have_slots)
        kept = self.data[:, :, :live, :, :columns]
        if math.prod(shape) > len(self._memory):
            self._memory = self._memory.new_zeros(max(math.prod(shape), self._expected))
        else:
            kept = kept.clone()  # the new layout lies over the old one
        self.data = self._memory[: math.prod(shape)].view(shape)
        self.data[:, :, :live, :, :have_columns] = kept

    def flat_index(self, slot_X: np.ndarray, column_X: np.ndarray) -> Tensor:
        """(X * Hkv,) where `write` puts X tokens."""
        num_kv_heads, columns = self.data.shape[3], self.data.shape[4]
        index = (slot_X[:, None] * num_kv_heads + np.arange(num_kv_heads)) * columns + column_X[:, None]
        return torch.from_numpy(index.reshape(-1)).to(self.data.device)

    def write(self, layer: int, flat_index: Tensor, k: Tensor, v: Tensor) -> None:
        """Store (X, Hkv, D) keys and values of one layer."""
        head_dim = k.shape[-1]
        for part, value in enumerate((k, v)):
            self.data[layer, part].view(-1, head_dim).index_copy_(0, flat_index, value.reshape(-1, head_dim))

    def read(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots first .. last - 1, each a view (slots * Hkv, columns, D)."""
        keys, values = self.data[layer, :, first:last].flatten(1, 2)
        return keys, values

    def move(self, target: np.ndarray, source: np.ndarray, columns: int) -> None:
        """Copy the first columns of the source slots onto the target slots."""
        if columns == 0:
            return
        to, origin = (torch.from_numpy(slots).to(self.data.device) for slots in (target, source))
        self.data[:, :, to, :, :columns] = self.data[:, :, origin, :, :columns]
