"""Attention over the key-value cache: of whole prompts, of responses that come back, and of a step of all branches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model.decoder import Attend
from hone.model.layout import filled
from hone.rollout.cache import KeyValueStore
from hone.rollout.upload import upload
from hone.sizes import round_size


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
        out = F.scaled_dot_product_attention(
            q_padded.view(num_rows, width, heads, head_dim).transpose(1, 2),
            keys,
            values,
            attn_mask=seen_RLW[:, None],
            enable_gqa=heads != k.shape[1],
        )
        return out.transpose(1, 2).reshape(num_rows * width, heads, head_dim).index_select(0, padded_X)

    return attend


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
        queries = (q * head_dim**-0.5).view(num_branches * kv_heads, group_heads, head_dim)
        own_scores = torch.bmm(queries, keys.mT)
        side_by_side = queries.index_select(0, branch_of_seat)
        side_by_side = side_by_side.view(num_prompts * kv_heads, members * group_heads, head_dim)
        prompt_scores = torch.bmm(side_by_side, prompt_keys.mT).view(-1, group_heads, prompt_width)
        scores = torch.cat([prompt_scores.index_select(0, seat_of_branch), own_scores], -1)
        scores.view(num_branches, kv_heads * group_heads, -1).add_(bias_CW[:, None])
        weights = torch.softmax(scores, -1)
        prompt_weights = weights[:, :, :prompt_width].index_select(0, branch_of_seat)
        prompt_weights = prompt_weights.view(num_prompts * kv_heads, members * group_heads, prompt_width)
        prompt_out = torch.bmm(prompt_weights, prompt_values).view(-1, group_heads, head_dim)
        out = torch.bmm(weights[:, :, prompt_width:], values)
        return out.add_(prompt_out.index_select(0, seat_of_branch)).view_as(q)

    return attend
