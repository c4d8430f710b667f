"""Stepper for Hone's own decoder: shared computation for equal prefixes.

Rows of one prompt that have sampled the same tokens so far are one branch: it is advanced once for all of them, and
forks where they part. A prompt's keys and values are stored once. At each layer the queries of all branches of a prompt
meet it in one matrix product, each branch meets its own response in another, and one softmax spans both. A branch whose
rows are finished is closed over by moving the last branch into its slot. Attention is as wide as the longest live
prompt and, rounded up, response. Counts of tokens and branches are rounded up too (`layout.round_size` says why); the
result of the filler is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.config.run import RolloutSection
from hone.errors import DataError
from hone.model.decoder import Attend, Decoder
from hone.model.hf import no_pictures
from hone.model.layout import filled, round_size
from hone.rollout.cache import KeyValueStore
from hone.rollout.engine import CacheUse
from hone.rollout.stepper import closing_moves
from hone.types import Picture, TokenIds

PREFILL_TOKENS: int = RolloutSection.model_fields["prefill_tokens"].default
_LEAST_COLUMNS = 16


class DecoderStepper:
    """See `stepper.Stepper`. Shapes: N prompts, B rows, C branches, P and L columns of prompts and responses.

    Args:
        prefill_tokens: padded prompt tokens computed at one time, one prompt at least; memory, never the result.
    """

    def __init__(self, model: Decoder, max_rows: int, prefill_tokens: int = PREFILL_TOKENS) -> None:
        self._model = model
        self._max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        self._group_heads = model.num_heads // model.num_kv_heads
        shape, weight = (model.num_layers, model.num_kv_heads, model.head_dim), model.output_weight
        self._prompt_store, self._response_store = KeyValueStore(*shape, weight), KeyValueStore(*shape, weight)
        self.clear()

    def clear(self, *, will_return: bool = False) -> None:
        for store in (self._prompt_store, self._response_store):
            store.free(will_return=will_return)
        self._slot_of_prompt: dict[int, int] = {}
        self._next_prompt_id = 0
        self._prompt_ids: list[int] = []
        self._prompt_length_N = np.zeros(0, np.int64)
        self._prompt_released_N = np.zeros(0, bool)
        self._prompt_hidden_NH = self._model.output_weight.new_zeros(0, self._model.hidden_size)
        self._branch_B = np.zeros(0, np.int64)  # branch of each row
        self._slot_C = np.zeros(0, np.int64)  # prompt slot of each branch
        self._length_C = np.zeros(0, np.int64)  # response tokens with keys and values
        self._grouping: Grouping | None = None

    def cache_use(self) -> CacheUse:
        prompts, responses = self._prompt_store, self._response_store
        return CacheUse(
            tokens=int(self._prompt_length_N.sum()) + int(self._length_C.sum()),
            room_tokens=prompts.room_tokens + responses.room_tokens,
            room_bytes=prompts.num_bytes + responses.num_bytes,
        )

    def limit(self, *, max_rows: int, prefill_tokens: int) -> None:
        self._max_rows, self._prefill_tokens = max_rows, prefill_tokens

    def can_add_rows(self, count: int) -> bool:
        return count < self._max_rows

    # ---- prompts

    def add_prompts(self, prompts: Sequence[TokenIds], pictures: Sequence[tuple[Picture, ...]] = ()) -> list[int]:
        if pictures:
            raise DataError(no_pictures(self._model.hf_config.model_type))
        self._forget_unused_prompts()
        ids = list(range(self._next_prompt_id, self._next_prompt_id + len(prompts)))
        self._next_prompt_id += len(prompts)
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # less padding in each chunk
        while by_length:
            size = max(1, self._prefill_tokens // len(prompts[by_length[-1]]))
            chunk, by_length = by_length[-size:], by_length[:-size]
            self._prefill([prompts[i] for i in chunk], [ids[i] for i in chunk])
        self._grouping = None
        return ids

    def release_prompt(self, prompt_id: int) -> None:
        self._prompt_released_N[self._slot_of_prompt[prompt_id]] = True

    def _prefill(self, prompts: list[TokenIds], ids: list[int]) -> None:
        device = self._prompt_hidden_NH.device
        length_N = np.array([len(prompt) for prompt in prompts])
        first = len(self._prompt_ids)
        width = max(int(length_N.max()), int(self._prompt_length_N.max(initial=0)))
        self._prompt_store.reserve(max(first + len(prompts), min(2 * first, self._max_rows)), width, live=first)
        position_X = np.concatenate([np.arange(length) for length in length_N])
        prompt_X = np.repeat(np.arange(len(prompts)), length_N)
        token_X = np.concatenate(prompts, dtype=np.int64)
        hidden_NH = self._model(
            torch.from_numpy(filled(token_X)).to(device),
            torch.from_numpy(filled(position_X)).to(device),
            self._prefill_attention(first, prompt_X, position_X, length_N),
            torch.from_numpy(length_N.cumsum() - 1).to(device),
        )
        self._prompt_hidden_NH = torch.cat([self._prompt_hidden_NH, hidden_NH])
        self._prompt_length_N = np.concatenate([self._prompt_length_N, length_N])
        self._prompt_released_N = np.concatenate([self._prompt_released_N, np.zeros_like(length_N, bool)])
        self._slot_of_prompt.update(zip(ids, range(first, first + len(ids)), strict=True))
        self._prompt_ids += ids

    def _prefill_attention(
        self, first: int, prompt_X: np.ndarray, position_X: np.ndarray, length_N: np.ndarray
    ) -> Attend:
        """Causal attention within each prompt, padded on the right, where causality alone hides the padding."""
        store, num_prompts, width = self._prompt_store, len(length_N), int(length_N.max())
        flat = store.flat_index(first + prompt_X, position_X)
        padded_X = torch.from_numpy(filled(prompt_X * width + position_X)).to(flat.device)
        num_tokens = len(position_X)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store.write(layer, flat, k[:num_tokens], v[:num_tokens])
            keys, values = store.read(layer, first, first + num_prompts)
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

    def _forget_unused_prompts(self) -> None:
        rows_N = np.bincount(self._slot_C[self._branch_B], minlength=len(self._prompt_ids))
        unused_N = self._prompt_released_N & (rows_N == 0)
        if not unused_N.any():
            return
        target, source, count = closing_moves(unused_N)
        width = int(self._prompt_length_N[source].max(initial=0))
        self._prompt_store.move(target, source, width)
        order = np.arange(count)
        order[target] = source
        self._prompt_length_N = self._prompt_length_N[order]
        self._prompt_released_N = self._prompt_released_N[order]
        self._prompt_hidden_NH = self._prompt_hidden_NH[torch.from_numpy(order).to(self._prompt_hidden_NH.device)]
        self._prompt_ids = [self._prompt_ids[slot] for slot in order]
        self._slot_of_prompt = {prompt_id: slot for slot, prompt_id in enumerate(self._prompt_ids)}
        new_slot = np.zeros(len(unused_N), np.int64)  # a branch without rows may stand at a prompt that is forgotten
        new_slot[order] = np.arange(count)
        self._slot_C = new_slot[self._slot_C]
        self._grouping = None

    # ---- rows

    def add_rows(self, prompt_ids: Sequence[int]) -> Tensor:
        slot_B = np.array([self._slot_of_prompt[prompt_id] for prompt_id in prompt_ids])
        slot_C, which_B = np.unique(slot_B, return_inverse=True)
        self._branch_B = np.concatenate([self._branch_B, len(self._slot_C) + which_B])
        self._slot_C = np.concatenate([self._slot_C, slot_C])
        self._length_C = np.concatenate([self._length_C, np.zeros_like(slot_C)])
        self._grouping = None
        device = self._prompt_hidden_NH.device
        logits_CV = self._model.logits(self._prompt_hidden_NH[torch.from_numpy(slot_C).to(device)])
        return logits_CV[torch.from_numpy(which_B).to(device)]

    def move_rows(self, target: np.ndarray, source: np.ndarray, count: int) -> None:
        order = np.arange(count)
        order[target] = source
        self._branch_B = self._branch_B[order]

    def advance(self, token_ids_B: Tensor) -> Tensor:
        device = token_ids_B.device
        token_C = self._fork(token_ids_B.cpu().numpy())
        if self._grouping is None:
            self._forget_unused_prompts()
            self._prompt_store.reserve(0, int(self._prompt_length_N.max()), live=len(self._prompt_ids))
            self._grouping = Grouping.of(self._slot_C, self._prompt_length_N, self._model.num_kv_heads, device)
        position_C = self._prompt_length_N[self._slot_C] + self._length_C
        hidden_CH = self._model(
            torch.from_numpy(filled(token_C)).to(device),
            torch.from_numpy(filled(position_C)).to(device),
            self._decode_attention(self._grouping, filled(self._length_C)),
        )
        self._length_C += 1
        return self._model.logits(hidden_CH).index_select(0, torch.from_numpy(self._branch_B).to(device))

    def _fork(self, token_B: np.ndarray) -> np.ndarray:
        """Give every distinct (branch, token) a branch; returns the token of each, (C,).

        The first child of a branch takes its place, if that is within bounds; the others take what places are left.
        """
        child_C, child_B = np.unique(self._branch_B * self._model.vocab_size + token_B, return_inverse=True)
        parent_C, token_C = np.divmod(child_C, self._model.vocab_size)
        count = len(child_C)
        columns = columns_for(int(self._length_C[parent_C].max()) + 1)
        self._response_store.reserve(round_size(self._max_rows), columns, live=len(self._length_C))
        stays_C = (np.diff(parent_C, prepend=-1) != 0) & (parent_C < count)
        if count == len(self._length_C) and stays_C.all():
            return token_C
        place_C = np.where(stays_C, parent_C, 0)
        place_C[~stays_C] = np.setdiff1d(np.arange(count), parent_C[stays_C], assume_unique=True)
        origin_C = np.empty_like(parent_C)
        origin_C[place_C] = parent_C
        moves_C = ~stays_C & (self._length_C[parent_C] > 0)  # a branch without tokens may lie beyond the store
        width = int(self._length_C[parent_C[moves_C]].max(initial=0))
        self._response_store.move(place_C[moves_C], parent_C[moves_C], width)
        self._slot_C, self._length_C = self._slot_C[origin_C], self._length_C[origin_C]
        self._branch_B = place_C[child_B]
        self._grouping = None
        return token_C[np.argsort(place_C)]

    def _decode_attention(self, grouping: Grouping, length_C: np.ndarray) -> Attend:
        prompts, responses = self._prompt_store, self._response_store
        num_branches, num_prompts = len(length_C), len(self._prompt_length_N)
        flat = responses.flat_index(np.arange(num_branches), length_C)
        bias_CW = self._bias(grouping, length_C).to(flat.device)
        kv_heads, group_heads, head_dim = self._model.num_kv_heads, self._group_heads, self._model.head_dim
        prompt_width, members = grouping.prompt_width, grouping.members

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            responses.write(layer, flat, k, v)
            keys, values = responses.read(layer, 0, num_branches)
            prompt_keys, prompt_values = prompts.read(layer, 0, num_prompts)
            queries = (q * head_dim**-0.5).view(num_branches * kv_heads, group_heads, head_dim)
            own_scores = torch.bmm(queries, keys.mT)
            side_by_side = queries.index_select(0, grouping.branch_of_seat)
            side_by_side = side_by_side.view(num_prompts * kv_heads, members * group_heads, head_dim)
            prompt_scores = torch.bmm(side_by_side, prompt_keys.mT).view(-1, group_heads, prompt_width)
            scores = torch.cat([prompt_scores.index_select(0, grouping.seat_of_branch), own_scores], -1)
            scores.view(num_branches, kv_heads * group_heads, -1).add_(bias_CW[:, None])
            weights = torch.softmax(scores, -1)
            prompt_weights = weights[:, :, :prompt_width].index_select(0, grouping.branch_of_seat)
            prompt_weights = prompt_weights.view(num_prompts * kv_heads, members * group_heads, prompt_width)
            prompt_out = torch.bmm(prompt_weights, prompt_values).view(-1, group_heads, head_dim)
            out = torch.bmm(weights[:, :, prompt_width:], values)
            return out.add_(prompt_out.index_select(0, grouping.seat_of_branch)).view_as(q)

        return attend

    def _bias(self, grouping: Grouping, length_C: np.ndarray) -> Tensor:
        """(C, P + L), -inf where a branch has no such token."""
        bias_CL = torch.zeros(len(length_C), self._response_store.columns)
        bias_CL.masked_fill_(torch.arange(bias_CL.shape[1]) > torch.from_numpy(length_C)[:, None], -torch.inf)
        return torch.cat([grouping.prompt_bias_CP, bias_CL], 1).to(self._prompt_hidden_NH.dtype)


def columns_for(tokens: int) -> int:
    """Columns of a store for responses of so many tokens: a few more, so that it need not grow at every token, and
    so that the matrix products of attention come in few shapes (on CPUs each new one is compiled)."""
    step = max(_LEAST_COLUMNS, 1 << max(tokens.bit_length() - 3, 0))
    return -(-tokens // step) * step


@dataclass(frozen=True)
class Grouping:
    """Which branches sit at which prompt: N prompts with `members` seats each, some of them empty.

    Indices are over (sequence, kv head) pairs, because that is how queries and scores lie in memory. An empty seat
    repeats branch 0: its result is computed and never read.
    """

    members: int
    prompt_width: int
    """P: tokens of the longest prompt."""
    branch_of_seat: Tensor
    """(N * Hkv * members,) int64 into (C * Hkv)."""
    seat_of_branch: Tensor
    """(C * Hkv,) int64 into (N * Hkv * members); filler looks into the first seat."""
    prompt_bias_CP: Tensor
    """-inf beyond a branch's prompt."""

    @classmethod
    def of(cls, slot_C: np.ndarray, prompt_length_N: np.ndarray, kv_heads: int, device: torch.device) -> Grouping:
        num_prompts, num_branches = len(prompt_length_N), len(slot_C)
        order = np.argsort(slot_C, kind="stable")
        branches_of_prompt_N = np.bincount(slot_C, minlength=num_prompts)
        first_N = branches_of_prompt_N.cumsum() - branches_of_prompt_N
        member_C = np.empty(num_branches, np.int64)
        member_C[order] = np.arange(num_branches) - first_N[slot_C[order]]
        members = int(branches_of_prompt_N.max())
        head = np.arange(kv_heads)
        seat_of_branch = (slot_C[:, None] * kv_heads + head) * members + member_C[:, None]
        branch_of_seat = np.tile(head[:, None], (num_prompts, 1, members))
        branch_of_seat.reshape(-1)[seat_of_branch] = np.arange(num_branches)[:, None] * kv_heads + head
        width = int(prompt_length_N.max())
        prompt_length_C = torch.from_numpy(filled(prompt_length_N[slot_C]))
        num_filler = len(prompt_length_C) - num_branches
        bias_CP = torch.zeros(len(prompt_length_C), width)
        bias_CP.masked_fill_(torch.arange(width) >= prompt_length_C[:, None], -torch.inf)
        return cls(
            members,
            width,
            torch.from_numpy(branch_of_seat.reshape(-1)).to(device),
            torch.from_numpy(np.pad(seat_of_branch, ((0, num_filler), (0, 0))).reshape(-1)).to(device),
            bias_CP,
        )
