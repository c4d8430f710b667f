"""Stepper for Hone's own decoder: shared computation for equal prefixes.

Rows of one prompt that have sampled the same tokens so far are one branch: it is advanced once for all of them, and
forks where they part. A prompt's keys and values are stored once. At each layer the queries of all branches of a prompt
meet it in one matrix product, each branch meets its own response in another, and one softmax spans both. A branch whose
rows are finished is closed over by moving the last branch into its slot. Attention is as wide as the longest live
prompt and, rounded up, response. Counts of tokens and branches are rounded up too (`sizes.round_size` says why); the
result of the filler is never read.

The cache has room for a number of tokens (`plan.kv_cache`). A response takes as many columns as the longest one,
because a matrix product wants its keys dense: pages would have to be copied together first, at every token. Rows come
while there is room for all of them, also once the columns grow next; the newest leave where there is none, and come
back with their tokens, whose keys and values are then computed anew in one pass.

On a GPU steps are replayed as CUDA graphs (graphs.py). Numbers of prompts, of members and of a prompt's columns are
then rounded up too, where there is room, so that few graphs serve many steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hone.config.run import RolloutSection
from hone.errors import DataError
from hone.model.decoder import Decoder
from hone.model.hf import no_pictures
from hone.model.layout import filled
from hone.plan.kv_cache import CacheRoom, columns_for
from hone.rollout.cache import (
    DecoderAdmission,
    Grouping,
    KeyValueStore,
    prompt_attention,
    response_attention,
    step_attention,
)
from hone.rollout.engine import CacheUse
from hone.rollout.graphs import StepGraphs
from hone.rollout.sampling import upload
from hone.rollout.stepper import closing_moves, old_rows
from hone.sizes import round_size
from hone.types import Picture, TokenIds

PREFILL_TOKENS: int = RolloutSection.model_fields["prefill_tokens"].default


class DecoderStepper:
    """See `stepper.Stepper`. Shapes: N prompts, B rows, C branches, P and L columns of prompts and responses.

    Args:
        prefill_tokens: padded prompt tokens computed at one time, one prompt at least; memory, never the result.
        graphs: by which steps are replayed; None: each is launched kernel by kernel.
    """

    def __init__(
        self,
        model: Decoder,
        max_rows: int,
        *,
        room: CacheRoom,
        prefill_tokens: int = PREFILL_TOKENS,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._model = model
        self._graphs = graphs
        self._parameters = [*model.parameters()]
        self._addresses: list[int] = []
        self._max_rows, self._room = max_rows, room
        self._prefill_tokens = prefill_tokens
        self._store = KeyValueStore(model.num_layers, model.num_kv_heads, model.head_dim, model.output_weight)
        self.clear()

    def clear(self) -> None:
        if self._graphs is not None:
            self._graphs.drop()  # they read the memory that is freed
        self._store.free(self._room.tokens(self._max_rows))
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
        tokens = int(self._prompt_length_N.sum()) + int(self._length_C.sum())
        return CacheUse(tokens, self._store.room_tokens, self._store.num_bytes)

    def limit(self, *, max_rows: int, prefill_tokens: int) -> None:
        self._max_rows, self._prefill_tokens = max_rows, prefill_tokens

    # ---- room

    def admission(self, live_most_tokens: int) -> DecoderAdmission:
        self._forget_unused_prompts()
        if not self._prompt_ids and self._store.room_tokens != self._room.tokens(self._max_rows):
            self.clear()
        return DecoderAdmission(
            room_tokens=self._store.room_tokens,
            prompts=len(self._prompt_ids),
            width=int(self._prompt_length_N.max(initial=0)),
            rows=len(self._branch_B),
            longest=self._longest_row() + 1,
            most_tokens=live_most_tokens,
        )

    def rows_that_fit(self, order_B: np.ndarray) -> int:
        count, room = len(self._branch_B), self._store.room_tokens
        stored = self._prompt_length_N[self._is_prompt_in_use()]
        responses = round_size(count) * columns_for(self._longest_row() + 1)
        if len(stored) * int(stored.max(initial=0)) + responses <= room:
            return count
        branch_B = self._branch_B[order_B]
        slot_B = self._slot_C[branch_B]
        is_first_B = np.zeros(count, bool)
        is_first_B[np.unique(slot_B, return_index=True)[1]] = True
        prompts_B = is_first_B.cumsum() * np.maximum.accumulate(self._prompt_length_N[slot_B])
        longest_B = np.maximum.accumulate(self._length_C[branch_B]) + 1
        responses_B = [round_size(n + 1) * columns_for(longest) for n, longest in enumerate(longest_B.tolist())]
        return int(np.searchsorted(prompts_B + responses_B, room, side="right"))

    def _longest_row(self) -> int:
        return int(self._length_C[self._branch_B].max(initial=0))

    def _reserve_prompts(self, slots: int, width: int, *, live: int) -> None:
        """Have at least `slots` slots, of exactly that width; for graphs rounded up, where there is room."""
        prompts, responses = self._store.prompts, self._store.responses
        if self._graphs is not None:
            rounded = round_size(slots), round_size(width)
            if rounded[0] * rounded[1] + responses.tokens <= self._store.room_tokens:
                slots, width = rounded
        if slots <= prompts.slots and width == prompts.columns:
            return
        if slots * width + responses.tokens > self._store.room_tokens:
            self._close_branches()
            count = len(self._length_C)
            columns = columns_for(int(self._length_C.max()) + 1) if count else 0
            columns = min(columns, responses.columns)
            responses.lay_out(round_size(count), columns, live=count)
        prompts.lay_out(slots, width, live=live)

    def _reserve_responses(self, slots: int, columns: int, *, live: int) -> None:
        """Have at least `slots` slots, of exactly `columns` columns; of what is left, slots for all rows."""
        prompts, responses = self._store.prompts, self._store.responses
        if slots <= responses.slots and columns == responses.columns:
            return
        if slots * columns + prompts.tokens > self._store.room_tokens:
            self._forget_unused_prompts()
            width = int(self._prompt_length_N.max(initial=0))
            prompts.lay_out(len(self._prompt_ids), width, live=len(self._prompt_ids))
            self._grouping = None
        for_all = round_size(len(self._branch_B))
        if slots < for_all and for_all * columns + prompts.tokens <= self._store.room_tokens:
            slots = for_all
        responses.lay_out(slots, columns, live=live)

    def _close_branches(self) -> None:
        """Close over branches without rows."""
        dead_C = np.bincount(self._branch_B, minlength=len(self._length_C)) == 0
        if not dead_C.any():
            return
        target, source, count = closing_moves(dead_C)
        stored = self._length_C[source] > 0  # a branch without tokens may lie beyond the store
        self._store.responses.move(target[stored], source[stored], int(self._length_C[source].max(initial=0)))
        place_C = np.arange(len(dead_C))
        place_C[source] = target
        self._branch_B = place_C[self._branch_B]
        order = old_rows(target, source, count)
        self._slot_C, self._length_C = self._slot_C[order], self._length_C[order]
        self._grouping = None

    # ---- prompts

    def add_prompts(self, prompts: Sequence[TokenIds], pictures: Sequence[tuple[Picture, ...]] = ()) -> list[int]:
        if pictures:
            raise DataError(no_pictures(self._model.hf_config.model_type))
        # Drop graphs that read weights where they no longer are; publishing and training write them in place.
        if self._graphs is not None:
            addresses = [weight.data_ptr() for weight in (*self._parameters, self._model.rope_table)]
            if addresses != self._addresses:
                self._graphs.drop()
                self._addresses = addresses
        self._forget_unused_prompts()
        ids = list(range(self._next_prompt_id, self._next_prompt_id + len(prompts)))
        self._next_prompt_id += len(prompts)
        before, lengths = len(self._prompt_ids), [len(prompt) for prompt in prompts]
        width = max(*lengths, int(self._prompt_length_N.max(initial=0)), 0)
        self._reserve_prompts(before + len(prompts), width, live=before)
        by_length = sorted(range(len(prompts)), key=lambda i: lengths[i])  # less padding in each chunk
        while by_length:
            size = max(1, self._prefill_tokens // lengths[by_length[-1]])
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
        position_X = np.concatenate([np.arange(length) for length in length_N])
        prompt_X = np.repeat(np.arange(len(prompts)), length_N)
        token_X = np.concatenate(prompts, dtype=np.int64)
        hidden_NH = self._model(
            upload(filled(token_X), device),
            upload(filled(position_X), device),
            prompt_attention(self._store, first, prompt_X, position_X, length_N),
            upload(length_N.cumsum() - 1, device),
        )
        self._prompt_hidden_NH = torch.cat([self._prompt_hidden_NH, hidden_NH])
        self._prompt_length_N = np.concatenate([self._prompt_length_N, length_N])
        self._prompt_released_N = np.concatenate([self._prompt_released_N, np.zeros_like(length_N, bool)])
        self._slot_of_prompt.update(zip(ids, range(first, first + len(ids)), strict=True))
        self._prompt_ids += ids

    def _is_prompt_in_use(self) -> np.ndarray:
        rows_N = np.bincount(self._slot_C[self._branch_B], minlength=len(self._prompt_ids))
        return ~self._prompt_released_N | (rows_N > 0)

    def _forget_unused_prompts(self) -> None:
        unused_N = ~self._is_prompt_in_use()
        if not unused_N.any():
            return
        target, source, count = closing_moves(unused_N)
        width = int(self._prompt_length_N[source].max(initial=0))
        self._store.prompts.move(target, source, width)
        order = old_rows(target, source, count)
        self._prompt_length_N = self._prompt_length_N[order]
        self._prompt_released_N = self._prompt_released_N[order]
        self._prompt_hidden_NH = self._prompt_hidden_NH[upload(order, self._prompt_hidden_NH.device)]
        self._prompt_ids = [self._prompt_ids[slot] for slot in order]
        self._slot_of_prompt = {prompt_id: slot for slot, prompt_id in enumerate(self._prompt_ids)}
        new_slot = np.zeros(len(unused_N), np.int64)  # a branch without rows may stand at a prompt that is forgotten
        new_slot[order] = np.arange(count)
        self._slot_C = new_slot[self._slot_C]
        self._grouping = None

    # ---- rows

    def routing(self, row: int) -> None:
        """See `stepper.Stepper`. Hone's decoder has no experts."""

    def add_rows(self, prompt_ids: Sequence[int], begun: Sequence[TokenIds]) -> Tensor:
        slot_B = np.array([self._slot_of_prompt[prompt_id] for prompt_id in prompt_ids])
        length_B = np.array([len(tokens) for tokens in begun])
        self._close_branches()
        # Rows without tokens are one branch for each prompt; those that come back, one each.
        key_B = np.where(length_B == 0, slot_B, len(self._prompt_ids) + np.arange(len(slot_B)))
        _, first_C, which_B = np.unique(key_B, return_index=True, return_inverse=True)
        before = len(self._length_C)
        self._branch_B = np.concatenate([self._branch_B, before + which_B])
        self._slot_C = np.concatenate([self._slot_C, slot_B[first_C]])
        self._length_C = np.concatenate([self._length_C, np.zeros_like(first_C)])
        self._grouping = None
        hidden_CH = self._prompt_hidden_NH[upload(slot_B[first_C], self._prompt_hidden_NH.device)]
        returning_C = np.flatnonzero(length_B[first_C])
        if len(returning_C):
            tokens = [begun[first_C[c]] for c in returning_C]
            hidden_CH[upload(returning_C, hidden_CH.device)] = self._read_again(before, returning_C, tokens)
        logits_CV = self._model.logits(hidden_CH)
        return logits_CV[upload(which_B, logits_CV.device)]

    def _read_again(self, before: int, returning_C: np.ndarray, begun: list[TokenIds]) -> Tensor:
        """Compute keys and values of responses that come back; returns the hidden states after their last tokens.

        Args:
            before: branches that were there already.
            returning_C: which of the branches after them these are.
        """
        length_R = np.array([len(tokens) for tokens in begun])
        branch_R, longest = before + returning_C, max(int(length_R.max()), int(self._length_C.max()))
        self._reserve_responses(round_size(len(self._length_C)), columns_for(longest), live=before)
        hidden_RH = self._prompt_hidden_NH.new_empty(len(begun), self._model.hidden_size)
        device = hidden_RH.device
        left = np.argsort(length_R, kind="stable")  # less padding in each chunk
        seen = self._store.prompts.columns if device.type == "cuda" else 0  # copied there, see `masked_attention`
        while len(left):
            size = max(1, self._prefill_tokens // (int(length_R[left[-1]]) + seen))
            left, chunk = left[:-size], left[-size:]
            tokens_X = np.concatenate([begun[r] for r in chunk], dtype=np.int64)
            position_X = np.concatenate([np.arange(length) for length in length_R[chunk]])
            row_X = np.repeat(np.arange(len(chunk)), length_R[chunk])
            slot_K = self._slot_C[branch_R[chunk]]
            prompt_length_K = self._prompt_length_N[slot_K]
            hidden_RH[upload(chunk, device)] = self._model(
                upload(filled(tokens_X), device),
                upload(filled(prompt_length_K[row_X] + position_X), device),
                response_attention(self._store, slot_K, branch_R[chunk], prompt_length_K, row_X, position_X),
                upload(length_R[chunk].cumsum() - 1, device),
            )
        self._length_C[branch_R] = length_R
        return hidden_RH

    def move_rows(self, target: np.ndarray, source: np.ndarray, count: int) -> None:
        self._branch_B = self._branch_B[old_rows(target, source, count)]

    def advance(self, token_ids_B: np.ndarray) -> Tensor:
        device = self._prompt_hidden_NH.device
        token_C = self._fork(token_ids_B)
        if self._grouping is None:
            self._forget_unused_prompts()
            count = len(self._prompt_ids)
            self._reserve_prompts(count, int(self._prompt_length_N.max()), live=count)
            self._grouping = self._group()
        grouping, prompts, responses = self._grouping, self._store.prompts, self._store.responses
        position_C = self._prompt_length_N[self._slot_C] + self._length_C
        rows_3C = upload(np.stack([filled(token_C), filled(position_C), filled(self._length_C)]), device)
        inputs = rows_3C, grouping.branch_of_seat, grouping.seat_of_branch, grouping.prompt_length_C
        sizes = grouping.prompts, grouping.members
        if self._graphs is None:
            longest = int(self._length_C.max())
            column = longest if int(self._length_C.min()) == longest else None
            hidden_CH = self._step(sizes, *inputs, column=column)
        else:
            place = sizes, prompts.place, responses.place
            hidden_CH = self._graphs.run(place, partial(self._step, sizes), inputs)
        self._length_C += 1
        return self._model.logits(hidden_CH).index_select(0, upload(self._branch_B, device))

    def _group(self) -> Grouping:
        counts = len(self._prompt_ids), int(np.bincount(self._slot_C).max())
        if self._graphs is not None:
            counts = min(round_size(counts[0]), self._store.prompts.slots), round_size(counts[1])
        length_C = self._prompt_length_N[self._slot_C]
        return Grouping.of(self._slot_C, length_C, *counts, self._model.num_kv_heads, self._prompt_hidden_NH.device)

    def _fork(self, token_B: np.ndarray) -> np.ndarray:
        """Give every distinct (branch, token) a branch; returns the token of each, (C,).

        The first child of a branch takes its place, if that is within bounds; the others take what places are left.
        """
        before = len(self._length_C)
        if len(token_B) == before and (np.bincount(self._branch_B, minlength=before) == 1).all():  # a branch each
            self._reserve_responses(round_size(before), columns_for(int(self._length_C.max()) + 1), live=before)
            token_C = np.empty_like(self._branch_B)
            token_C[self._branch_B] = token_B
            return token_C
        child_C, child_B = np.unique(self._branch_B * self._model.vocab_size + token_B, return_inverse=True)
        parent_C, token_C = np.divmod(child_C, self._model.vocab_size)
        count = len(child_C)
        columns = columns_for(int(self._length_C[parent_C].max()) + 1)
        stays_C = (np.diff(parent_C, prepend=-1) != 0) & (parent_C < count)
        if count == before and stays_C.all():
            self._reserve_responses(round_size(count), columns, live=count)
            return token_C
        if grows := count > self._store.responses.slots:
            self._reserve_responses(round_size(count), columns, live=before)
        place_C = np.where(stays_C, parent_C, 0)
        place_C[~stays_C] = np.setdiff1d(np.arange(count), parent_C[stays_C], assume_unique=True)
        origin_C = np.empty_like(parent_C)
        origin_C[place_C] = parent_C
        moves_C = ~stays_C & (self._length_C[parent_C] > 0)  # a branch without tokens may lie beyond the store
        width = int(self._length_C[parent_C[moves_C]].max(initial=0))
        self._store.responses.move(place_C[moves_C], parent_C[moves_C], width)
        self._slot_C, self._length_C = self._slot_C[origin_C], self._length_C[origin_C]
        self._branch_B = place_C[child_B]
        self._grouping = None
        if not grows:
            self._reserve_responses(round_size(count), columns, live=count)
        return token_C[np.argsort(place_C)]

    def _step(
        self,
        sizes: tuple[int, int],
        rows_3C: Tensor,
        branch_of_seat: Tensor,
        seat_of_branch: Tensor,
        prompt_length_C: Tensor,
        *,
        column: int | None = None,
    ) -> Tensor:
        """(C, H) hidden states after one token more of each branch; a CUDA graph may be made of it.

        Args:
            rows_3C: of each branch its token, the token's position, and how many response tokens came before it.
            sizes, branch_of_seat, seat_of_branch, prompt_length_C, column: as in `step_attention`.
        """
        token_ids, positions, length_C = rows_3C.unbind()
        grouped = sizes, branch_of_seat, seat_of_branch, prompt_length_C
        return self._model(token_ids, positions, step_attention(self._store, *grouped, length_C, column=column))
