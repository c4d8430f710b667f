"""Stepper for Hone's own decoder: shared prompts, one new token per row, nothing computed for the dead.

A prompt's keys and values are stored once. At each layer the queries of all rows of a prompt meet it in one matrix
product, each row meets its own response in another, and one softmax spans both. A finished row is closed over by
moving the last row into its slot. Attention is as wide as the longest live prompt and response, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model.decoder import Attend, Decoder
from hone.rollout.cache import KeyValueStore
from hone.rollout.stepper import closing_moves

_PREFILL_TOKENS = 16384  # padded prompt tokens computed at one time; memory, never the result


class DecoderStepper:
    """See `stepper.Stepper`. Shapes: N prompts, B rows, P and L columns of the longest prompt and response."""

    def __init__(self, model: Decoder, max_rows: int) -> None:
        self._model = model
        self._max_rows = max_rows
        self._group_heads = model.num_heads // model.num_kv_heads
        self.clear()

    def clear(self) -> None:
        model = self._model
        weight = model.output_weight
        shape = (model.num_layers, model.num_kv_heads, model.head_dim)
        self._prompt_store, self._row_store = KeyValueStore(*shape, weight), KeyValueStore(*shape, weight)
        self._slot_of_prompt: dict[int, int] = {}
        self._next_prompt_id = 0
        self._prompt_ids: list[int] = []
        self._prompt_length_N = np.zeros(0, np.int64)
        self._prompt_uses_N = np.zeros(0, np.int64)  # rows, and one more until it is released
        self._prompt_hidden_NH = weight.new_zeros(0, model.hidden_size)
        self._slot_B = np.zeros(0, np.int64)  # prompt slot of each row
        self._length_B = np.zeros(0, np.int64)  # response tokens with keys and values
        self._grouping: Grouping | None = None

    def can_add_rows(self, count: int) -> bool:
        return count < self._max_rows

    # ---- prompts

    def add_prompts(self, prompts: Sequence[tuple[int, ...]]) -> list[int]:
        self._forget_unused_prompts()
        ids = list(range(self._next_prompt_id, self._next_prompt_id + len(prompts)))
        self._next_prompt_id += len(prompts)
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # less padding in each chunk
        while by_length:
            size = max(1, _PREFILL_TOKENS // len(prompts[by_length[-1]]))
            chunk, by_length = by_length[-size:], by_length[:-size]
            self._prefill([prompts[i] for i in chunk], [ids[i] for i in chunk])
        self._grouping = None
        return ids

    def release_prompt(self, prompt_id: int) -> None:
        self._prompt_uses_N[self._slot_of_prompt[prompt_id]] -= 1

    def _prefill(self, prompts: list[tuple[int, ...]], ids: list[int]) -> None:
        device = self._prompt_hidden_NH.device
        length_N = np.array([len(prompt) for prompt in prompts])
        first = len(self._prompt_ids)
        self._prompt_store.reserve(max(first + len(prompts), min(2 * first, self._max_rows)), int(length_N.max()))
        position_X = np.concatenate([np.arange(length) for length in length_N])
        prompt_X = np.repeat(np.arange(len(prompts)), length_N)
        token_X = np.concatenate([np.array(prompt) for prompt in prompts])
        hidden_NH = self._model(
            torch.from_numpy(token_X).to(device),
            torch.from_numpy(position_X).to(device),
            self._prefill_attention(first, prompt_X, position_X, length_N),
            torch.from_numpy(length_N.cumsum() - 1).to(device),
        )
        self._prompt_hidden_NH = torch.cat([self._prompt_hidden_NH, hidden_NH])
        self._prompt_length_N = np.concatenate([self._prompt_length_N, length_N])
        self._prompt_uses_N = np.concatenate([self._prompt_uses_N, np.ones_like(length_N)])
        self._slot_of_prompt.update(zip(ids, range(first, first + len(ids)), strict=True))
        self._prompt_ids += ids

    def _prefill_attention(
        self, first: int, prompt_X: np.ndarray, position_X: np.ndarray, length_N: np.ndarray
    ) -> Attend:
        """Causal attention within each prompt, padded on the right, where causality alone hides the padding."""
        store, num_prompts, width = self._prompt_store, len(length_N), int(length_N.max())
        flat = store.flat_index(first + prompt_X, position_X)
        padded_X = torch.from_numpy(prompt_X * width + position_X).to(flat.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store.write(layer, flat, k, v)
            keys, values = store.read(layer, first, first + num_prompts, width)
            heads, kv_heads, head_dim = q.shape[1], k.shape[1], k.shape[2]
            q_padded = q.new_zeros(num_prompts * width, heads, head_dim).index_copy_(0, padded_X, q)
            out = F.scaled_dot_product_attention(
                q_padded.view(num_prompts, width, heads, head_dim).transpose(1, 2),
                keys.view(num_prompts, kv_heads, width, head_dim),
                values.view(num_prompts, kv_heads, width, head_dim),
                is_causal=True,
                enable_gqa=heads != kv_heads,
            )
            return out.transpose(1, 2).reshape(num_prompts * width, heads, head_dim).index_select(0, padded_X)

        return attend

    def _forget_unused_prompts(self) -> None:
        unused_N = self._prompt_uses_N == 0
        if not unused_N.any():
            return
        target, source, count = closing_moves(unused_N)
        width = int(self._prompt_length_N[source].max(initial=0))
        self._prompt_store.move(target, source, width)
        order = np.arange(count)
        order[target] = source
        self._prompt_length_N, self._prompt_uses_N = self._prompt_length_N[order], self._prompt_uses_N[order]
        self._prompt_hidden_NH = self._prompt_hidden_NH[torch.from_numpy(order).to(self._prompt_hidden_NH.device)]
        self._prompt_ids = [self._prompt_ids[slot] for slot in order]
        self._slot_of_prompt = {prompt_id: slot for slot, prompt_id in enumerate(self._prompt_ids)}
        new_slot = np.empty(len(unused_N), np.int64)
        new_slot[order] = np.arange(count)
        self._slot_B = new_slot[self._slot_B]
        self._grouping = None

    # ---- rows

    def add_rows(self, prompt_ids: Sequence[int]) -> Tensor:
        slot_B = np.array([self._slot_of_prompt[prompt_id] for prompt_id in prompt_ids])
        np.add.at(self._prompt_uses_N, slot_B, 1)
        self._slot_B = np.concatenate([self._slot_B, slot_B])
        self._length_B = np.concatenate([self._length_B, np.zeros_like(slot_B)])
        self._grouping = None
        used_N, which_B = np.unique(slot_B, return_inverse=True)
        device = self._prompt_hidden_NH.device
        logits_NV = self._logits(self._prompt_hidden_NH[torch.from_numpy(used_N).to(device)])
        return logits_NV[torch.from_numpy(which_B).to(device)]

    def move_rows(self, target: np.ndarray, source: np.ndarray, count: int) -> None:
        self._row_store.move(target, source, int(self._length_B[source].max(initial=0)))
        order = np.arange(count)
        order[target] = source
        np.subtract.at(self._prompt_uses_N, self._slot_B, 1)
        self._slot_B, self._length_B = self._slot_B[order], self._length_B[order]
        np.add.at(self._prompt_uses_N, self._slot_B, 1)
        self._grouping = None

    def advance(self, token_ids_B: Tensor) -> Tensor:
        num_rows, device = len(self._slot_B), token_ids_B.device
        if self._grouping is None:
            self._forget_unused_prompts()
            self._grouping = Grouping.of(self._slot_B, self._prompt_length_N, self._model.num_kv_heads, device)
        self._row_store.reserve(max(num_rows, self._max_rows), int(self._length_B.max()) + 1)
        position_B = torch.from_numpy(self._prompt_length_N[self._slot_B] + self._length_B).to(device)
        hidden_BH = self._model(token_ids_B, position_B, self._decode_attention(self._grouping))
        self._length_B += 1
        return self._logits(hidden_BH)

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        return F.linear(hidden_BH, self._model.output_weight)

    def _decode_attention(self, grouping: Grouping) -> Attend:
        prompts, rows = self._prompt_store, self._row_store
        num_rows, num_prompts = len(self._slot_B), len(self._prompt_length_N)
        flat = rows.flat_index(np.arange(num_rows), self._length_B)
        width = int(self._length_B.max()) + 1
        bias_BW = self._bias(grouping, width, flat.device)
        kv_heads, group_heads, head_dim = self._model.num_kv_heads, self._group_heads, self._model.head_dim
        prompt_width, members = grouping.prompt_width, grouping.members

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows.write(layer, flat, k, v)
            row_keys, row_values = rows.read(layer, 0, num_rows, width)
            prompt_keys, prompt_values = prompts.read(layer, 0, num_prompts, prompt_width)
            queries = (q * head_dim**-0.5).view(num_rows * kv_heads, group_heads, head_dim)
            row_scores = torch.bmm(queries, row_keys.mT)
            side_by_side = queries.index_select(0, grouping.row_of_seat)
            side_by_side = side_by_side.view(num_prompts * kv_heads, members * group_heads, head_dim)
            prompt_scores = torch.bmm(side_by_side, prompt_keys.mT).view(-1, group_heads, prompt_width)
            scores = torch.cat([prompt_scores.index_select(0, grouping.seat_of_row), row_scores], -1)
            if bias_BW is not None:
                scores.view(num_rows, kv_heads * group_heads, -1).add_(bias_BW[:, None])
            weights = torch.softmax(scores, -1)
            prompt_weights = weights[:, :, :prompt_width].index_select(0, grouping.row_of_seat)
            prompt_weights = prompt_weights.view(num_prompts * kv_heads, members * group_heads, prompt_width)
            prompt_out = torch.bmm(prompt_weights, prompt_values).view(-1, group_heads, head_dim)
            out = torch.bmm(weights[:, :, prompt_width:], row_values)
            return out.add_(prompt_out.index_select(0, grouping.seat_of_row)).view_as(q)

        return attend

    def _bias(self, grouping: Grouping, width: int, device: torch.device) -> Tensor | None:
        """(B, P + L), -inf where a row has no such token; None when all rows are equally long."""
        ragged = bool((self._length_B != width - 1).any())
        if not ragged and grouping.prompt_bias_BP is None:
            return None
        num_rows = len(self._length_B)
        dtype = self._prompt_hidden_NH.dtype
        prompt_bias = grouping.prompt_bias_BP
        if prompt_bias is None:
            prompt_bias = torch.zeros(num_rows, grouping.prompt_width)
        response_bias = torch.zeros(num_rows, width)
        if ragged:
            response_bias.masked_fill_(torch.arange(width) > torch.from_numpy(self._length_B)[:, None], -torch.inf)
        return torch.cat([prompt_bias, response_bias], 1).to(device, dtype)


@dataclass(frozen=True)
class Grouping:
    """Which rows sit at which prompt: N prompts with `members` seats each, some of them empty.

    Indices are over (sequence, kv head) pairs, because that is how queries and scores lie in memory. An empty seat
    repeats row 0: its result is computed and never read.
    """

    members: int
    prompt_width: int
    """P: tokens of the longest prompt."""
    row_of_seat: Tensor
    """(N * Hkv * members,) int64 into (B * Hkv)."""
    seat_of_row: Tensor
    """(B * Hkv,) int64 into (N * Hkv * members)."""
    prompt_bias_BP: Tensor | None
    """-inf beyond a row's prompt; None when all prompts are equally long."""

    @classmethod
    def of(cls, slot_B: np.ndarray, prompt_length_N: np.ndarray, kv_heads: int, device: torch.device) -> Grouping:
        num_prompts, num_rows = len(prompt_length_N), len(slot_B)
        order = np.argsort(slot_B, kind="stable")
        rows_of_prompt_N = np.bincount(slot_B, minlength=num_prompts)
        first_N = rows_of_prompt_N.cumsum() - rows_of_prompt_N
        member_B = np.empty(num_rows, np.int64)
        member_B[order] = np.arange(num_rows) - first_N[slot_B[order]]
        members = int(rows_of_prompt_N.max())
        head = np.arange(kv_heads)
        seat_of_row = (slot_B[:, None] * kv_heads + head) * members + member_B[:, None]
        row_of_seat = np.tile(head[:, None], (num_prompts, 1, members))
        row_of_seat.reshape(-1)[seat_of_row] = np.arange(num_rows)[:, None] * kv_heads + head
        width = int(prompt_length_N.max())
        bias = None
        if (prompt_length_N != width).any():
            bias = torch.zeros(num_rows, width)
            bias.masked_fill_(torch.arange(width) >= torch.from_numpy(prompt_length_N[slot_B])[:, None], -torch.inf)
        return cls(
            members,
            width,
            torch.from_numpy(row_of_seat.reshape(-1)).to(device),
            torch.from_numpy(seat_of_row.reshape(-1)).to(device),
            bias,
        )
