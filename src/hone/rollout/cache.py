"""Storage of keys and values, preallocated and reused, that grows with the longest live sequence."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_COLUMNS = 64  # granularity of growth, in tokens


class KeyValueStore:
    """One tensor, (layers, 2, slots, Hkv, columns, D): a slot per sequence, a column per token.

    Zero where never written, because what attention masks must at least be finite. A slot is dense in memory per
    head, so that the matrix products of attention read it without a copy.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, like: Tensor) -> None:
        self.data = like.new_zeros(num_layers, 2, 0, num_kv_heads, 0, head_dim)

    def reserve(self, slots: int, columns: int) -> None:
        """Make room for so many slots and columns, keeping the content."""
        have_slots, have_columns = self.data.shape[2], self.data.shape[4]
        if slots <= have_slots and columns <= have_columns:
            return
        if columns > have_columns:
            columns = -(-max(columns, have_columns * 3 // 2) // _COLUMNS) * _COLUMNS
        shape = list(self.data.shape)
        shape[2], shape[4] = max(slots, have_slots), max(columns, have_columns)
        grown = self.data.new_zeros(shape)
        grown[:, :, :have_slots, :, :have_columns] = self.data
        self.data = grown

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

    def read(self, layer: int, first: int, last: int, columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots first .. last - 1, each a view (slots * Hkv, columns, D)."""
        keys, values = self.data[layer, :, first:last, :, :columns].flatten(1, 2)
        return keys, values

    def move(self, target: np.ndarray, source: np.ndarray, columns: int) -> None:
        """Copy the first columns of the source slots onto the target slots."""
        if columns == 0:
            return
        to, origin = (torch.from_numpy(slots).to(self.data.device) for slots in (target, source))
        self.data[:, :, to, :, :columns] = self.data[:, :, origin, :, :columns]
