"""Stepper for any Transformers model: its own forward and its own cache, left-padded rows, in waves.

Correct rather than fast: rows start together, and the next wave starts when the last row of one has finished. The host
waits for the device once a token. A prompt is still computed once per wave; its keys and values, and the states of
layers that have states instead, are then copied to its rows. Keys and values of later tokens are written after them,
into memory that grows a layer at a time (`WithRoom`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from hone.errors import DataError
from hone.experts import ExpertIds
from hone.model.hf import TransformersModel, no_pictures
from hone.model.layout_attention import over_rows
from hone.model.vision import with_pictures
from hone.plan.kv_cache import LEAST_COLUMNS, CacheRoom, columns_for
from hone.rollout.engine import CacheUse
from hone.rollout.sampling import upload
from hone.rollout.stepper import old_rows
from hone.types import Picture, TokenIds

FIRST_COLUMNS = 64
"""Tokens of a row that there is room for at first; then twice as many."""


class TransformersStepper:
    """See `stepper.Stepper`.

    Args:
        records_routing: keep the experts that tokens are sent to.
    """

    def __init__(
        self, model: TransformersModel, max_rows: int, *, room: CacheRoom, records_routing: bool = False
    ) -> None:
        self._model = model
        self._records_routing = records_routing
        if records_routing:
            _ = model.routing  # refuses a model without experts
        self._max_rows, self._room = max_rows, room
        takes = inspect.signature(type(model.body).forward).parameters
        self._takes_positions = "position_ids" in takes
        self._attends = "past_key_values" in takes  # Mamba does not; its state spaces want no mask of past tokens
        self.clear()

    def limit(self, *, max_rows: int, prefill_tokens: int) -> None:
        """A wave computes all its prompts together: only fewer rows help."""
        self._max_rows = max_rows

    def admission(self, live_most_tokens: int) -> WaveAdmission:
        room = 0 if self._num_rows else self._room.tokens(self._max_rows)
        longest = max((len(prompt) for prompt, _ in self._prompts.values()), default=0)
        self._admitted = WaveAdmission(room, longest)
        return self._admitted

    def rows_that_fit(self, order_B: np.ndarray) -> int:
        """A wave that was admitted has room to its end."""
        return self._num_rows

    def cache_use(self) -> CacheUse:
        room = self._num_rows * self._width
        held = sum(tensor.untyped_storage().nbytes() for tensor in held_by(self._cache))
        return CacheUse(room - int(self._padding_B.sum()), room, held)

    def clear(self) -> None:
        self._prompts: dict[int, tuple[TokenIds, tuple[Picture, ...]]] = {}
        self._next_prompt_id = 0
        self._admitted = WaveAdmission(0, 0)
        self._forget_rows()

    def add_prompts(self, prompts: Sequence[TokenIds], pictures: Sequence[tuple[Picture, ...]] = ()) -> list[int]:
        if pictures and self._model.vision is None:
            raise DataError(no_pictures(self._model.hf_config.model_type))
        ids = list(range(self._next_prompt_id, self._next_prompt_id + len(prompts)))
        self._next_prompt_id += len(prompts)
        self._prompts.update(zip(ids, zip(prompts, pictures or ((),) * len(prompts), strict=True), strict=True))
        return ids

    def release_prompt(self, prompt_id: int) -> None:
        del self._prompts[prompt_id]

    def add_rows(self, prompt_ids: Sequence[int], begun: Sequence[TokenIds]) -> Tensor:
        assert not any(map(len, begun)), "no row of a wave leaves before its end"
        self._model.hf.eval()  # the trainer may have left it in training mode, to recompute activations
        device = self._model.output_weight.device
        used, which_B = np.unique(np.array(prompt_ids), return_inverse=True)
        prompts, pictures = zip(*(self._prompts[prompt_id] for prompt_id in used.tolist()), strict=True)
        width = max(map(len, prompts))
        self._padding_B = np.array([width - len(prompt) for prompt in prompts])
        real_NP = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        token_NP = torch.tensor([[0] * (width - len(p)) + p.tolist() for p in prompts], device=device)
        self._cache = with_room(self._model.hf.config, self._admitted.width + self._admitted.most_tokens)
        self._position_B = real_NP.sum(1)
        if any(pictures):
            logits_NV = self._see(token_NP, real_NP, pictures)
        else:
            logits_NV = self._forward(token_NP, real_NP, (real_NP.cumsum(1) - 1).clamp_min(0))
        if self._experts_NLK is not None:
            each = self._experts_NLK.reshape(*token_NP.shape, *self._experts_NLK.shape[1:])
            of_prompts = [own[width - len(prompt) :].copy() for own, prompt in zip(each, prompts, strict=True)]
            self._routing = RowRouting([of_prompts[number] for number in which_B], self._experts_NLK)
        self._real_BW, self._width = real_NP, width
        return logits_NV[self._select(which_B)]

    def _see(self, token_NP: Tensor, real_NP: Tensor, pictures: Sequence[tuple[Picture, ...]]) -> Tensor:
        """Compute prompts of which some have pictures; returns as `_forward`."""
        vision, device = self._model.vision, token_NP.device
        assert vision is not None
        width = token_NP.shape[1]
        axes = 3 if vision.tower.has_grid_positions else 1
        position_ANP = torch.zeros(axes, *token_NP.shape, dtype=torch.int64)
        places = list[list[Picture]]()
        for row, (own, length) in enumerate(zip(pictures, real_NP.sum(1).tolist(), strict=True)):
            position_ANP[:, row, width - length :], following = vision.prompt_positions(length, own)
            self._position_B[row] = following
            places.append([replace(picture, start=width - length + picture.start) for picture in own])
        embedded_NPH, deeper = with_pictures(self._model.hf.get_input_embeddings()(token_NP), places, vision)
        return self._compute(
            inputs_embeds=embedded_NPH,
            position_ids=(position_ANP if axes > 1 else position_ANP[0]).to(device),
            attention_mask=real_NP,
            past_key_values=self._cache,
            **deeper,
        )

    def move_rows(self, target: np.ndarray, source: np.ndarray, count: int) -> None:
        if count == 0:
            return self._forget_rows()
        self._select(old_rows(target, source, count))
        if self._routing is not None:
            self._routing.move(target, source, count)

    def routing(self, row: int) -> tuple[ExpertIds, ExpertIds] | None:
        return None if self._routing is None else self._routing.of(row)

    def advance(self, token_ids_B: np.ndarray) -> Tensor:
        if self._width == self._real_BW.shape[1]:
            self._real_BW = F.pad(self._real_BW, (0, FIRST_COLUMNS), value=1)
        self._width += 1
        token_B1, position_B1 = upload(token_ids_B, self._position_B.device)[:, None], self._position_B[:, None]
        logits_BV = self._forward(token_B1, self._real_BW[:, : self._width], position_B1)
        self._position_B = self._position_B + 1
        if self._routing is not None and self._experts_NLK is not None:
            self._routing.append(self._experts_NLK)
        return logits_BV

    def _forward(self, token_ids_BX: Tensor, real_BW: Tensor, position_BX: Tensor) -> Tensor:
        named: dict[str, Any] = {"past_key_values" if self._attends else "cache_params": self._cache}
        if self._takes_positions:
            named["position_ids"] = position_BX
        if self._attends or token_ids_BX.shape == real_BW.shape:
            named["attention_mask"] = real_BW
        return self._compute(input_ids=token_ids_BX, **named)

    def _compute(self, **inputs: Any) -> Tensor:
        """Logits after the last tokens; keeps the experts of all of them if they are recorded."""
        with over_rows(has_padding=bool(self._padding_B.any())):
            if not self._records_routing:
                out = self._model.body(use_cache=True, **inputs)
            else:
                with self._model.routing.recording() as taken:
                    out = self._model.body(use_cache=True, **inputs)
                    self._experts_NLK = taken()
        return self._model.logits(self._model.last_hidden(out)[:, -1])

    def _select(self, order: np.ndarray) -> Tensor:
        """Have these of the rows, in that order; returns it on the device."""
        row_B: Any = upload(order, self._real_BW.device)  # typed there as one class of tensor
        self._cache.reorder_cache(row_B)  # which layers with states have too; batch_select_indices they have not
        self._real_BW, self._position_B = self._real_BW[row_B], self._position_B[row_B]
        self._padding_B = self._padding_B[order]
        return row_B

    @property
    def _num_rows(self) -> int:
        return len(self._padding_B)

    def _forget_rows(self) -> None:
        self._cache = DynamicCache()
        self._width = 0  # columns of rows so far, padding included
        self._real_BW = torch.zeros(0, 0, dtype=torch.int64)  # with more columns, of tokens to come
        self._padding_B = np.zeros(0, np.int64)  # tokens in front of each row's prompt, on the host
        self._position_B = torch.zeros(0, dtype=torch.int64)  # of the next token; pictures take fewer than they have
        self._routing: RowRouting | None = None
        self._experts_NLK: ExpertIds | None = None  # of all tokens of the newest pass


class RowRouting:
    """Experts of a wave's rows, which have all sampled as many tokens, on the host.

    Args:
        prompt_B: of the prompt of each row; rows of one prompt share an array.
        like: any routing of the model.
    """

    def __init__(self, prompt_B: list[ExpertIds], like: ExpertIds) -> None:
        self._prompt_B = prompt_B
        self._num_tokens = 0
        self._own_CBLK = np.zeros((FIRST_COLUMNS, len(prompt_B), *like.shape[1:]), like.dtype)

    def append(self, experts_BLK: ExpertIds) -> None:
        """One token more of every row."""
        columns = len(self._own_CBLK)
        if self._num_tokens == columns:
            self._own_CBLK = np.concatenate([self._own_CBLK, np.zeros_like(self._own_CBLK)])
        self._own_CBLK[self._num_tokens, : len(experts_BLK)] = experts_BLK
        self._num_tokens += 1

    def move(self, target: np.ndarray, source: np.ndarray, count: int) -> None:
        """See `Stepper.move_rows`."""
        self._own_CBLK[: self._num_tokens, target] = self._own_CBLK[: self._num_tokens, source]
        for to, origin in zip(target.tolist(), source.tolist(), strict=True):
            self._prompt_B[to] = self._prompt_B[origin]
        del self._prompt_B[count:]

    def of(self, row: int) -> tuple[ExpertIds, ExpertIds]:
        """See `Stepper.routing`; the first is shared, the second a copy."""
        return self._prompt_B[row], self._own_CBLK[: self._num_tokens, row].copy()


@dataclass
class WaveAdmission:
    """See `stepper.Admission`. Rows of a wave are as wide as its longest prompt and its longest response."""

    room_tokens: int
    width: int
    """Of the longest prompt."""
    rows: int = 0
    most_tokens: int = 0

    def take(self, begun_tokens: int, most_tokens: int, prompt_tokens: int) -> bool:
        width, most = max(self.width, prompt_tokens), max(self.most_tokens, most_tokens)
        if (self.rows + 1) * (width + most) > self.room_tokens:
            return False
        self.rows, self.width, self.most_tokens = self.rows + 1, width, most
        return True


class GrowingTokens:
    """Keys or values of a layer with memory for tokens to come, (..., columns, D): a token is written there, where
    Transformers copies all before it.

    Args:
        most_tokens: more columns are never taken, for there will be no more tokens.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._memory: Tensor | None = None
        self._end = 0

    def after(self, kept: Tensor, new: Tensor) -> Tensor:
        """Both, as a view.

        Args:
            kept: the last ones of what this returned before; anything at the first call.
        """
        tokens = kept.shape[-2] + new.shape[-2]
        if self._memory is None or self._end + new.shape[-2] > self._memory.shape[-2]:
            columns = max(min(columns_for(tokens + LEAST_COLUMNS), self._most_tokens), tokens)
            self._memory, self._end = kept.new_empty(*kept.shape[:-2], columns, kept.shape[-1]), kept.shape[-2]
            self._memory[..., : self._end, :] = kept
        self._end += new.shape[-2]
        self._memory[..., self._end - new.shape[-2] : self._end, :] = new
        return self._memory[..., self._end - tokens : self._end, :]


class WithRoom(DynamicLayer):
    """A layer of Transformers' with room for tokens after the prompt. See `GrowingTokens` for the argument."""

    def __init__(self, most_tokens: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._most_tokens = most_tokens
        self._forget_room()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `Cache.update`."""
        if not self.is_initialized:
            return super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None
        self.keys = keys = self._room_of_keys.after(self.keys, key_states)
        self.values = values = self._room_of_values.after(self.values, value_states)
        if isinstance(self, DynamicSlidingWindowLayer):
            self.cumulative_length += key_states.shape[-2]
            self.keys, self.values = (all_of[..., 1 - self.sliding_window :, :] for all_of in (keys, values))
        return keys, values

    def reorder_cache(self, beam_idx: Any) -> None:
        """See `Cache.reorder_cache`."""
        super().reorder_cache(beam_idx)
        self._forget_room()

    def _forget_room(self) -> None:
        self._room_of_keys, self._room_of_values = (GrowingTokens(self._most_tokens) for _ in range(2))


class WindowWithRoom(WithRoom, DynamicSlidingWindowLayer):
    """Like `WithRoom`, of the last tokens."""


class IndexedWithRoom(WithRoom, DynamicIndexedLayer):
    """Like `WithRoom`, with keys of an indexer, which are a single narrow head and grow as the library has it."""


class StatesWithRoom(WithRoom, LinearAttentionAndFullAttentionLayer):
    """Like `WithRoom`, beside states."""


class StatesAndWindowWithRoom(WithRoom, LinearAttentionAndSlidingWindowAttentionLayer):
    """Like `WithRoom`, of the last tokens, beside states."""


KINDS: dict[type, type[WithRoom]] = {
    DynamicLayer: WithRoom,
    DynamicSlidingWindowLayer: WindowWithRoom,
    DynamicIndexedLayer: IndexedWithRoom,
    LinearAttentionAndFullAttentionLayer: StatesWithRoom,
    LinearAttentionAndSlidingWindowAttentionLayer: StatesAndWindowWithRoom,
}
"""Transformers' kinds of layers with keys, and what is used instead."""


def with_room(config: PreTrainedConfig, most_tokens: int) -> DynamicCache:
    """An empty cache for rows of at most `most_tokens` tokens, padding included. Layers without keys, and those that a
    model brings itself, are as Transformers has them."""
    cache = DynamicCache(config=config)
    for number, layer in enumerate(cache.layers):
        if (kind := KINDS.get(type(layer))) is not None:
            settings = ("sliding_window", "number_of_states")
            named = {name: getattr(layer, name) for name in settings if hasattr(layer, name)}
            cache.layers[number] = kind(most_tokens, **named)
    return cache


def held_by(cache: Cache) -> Iterator[Tensor]:
    """Keys and values of attention, and states of convolutions, state spaces and linear attention."""
    for layer in cache.layers:
        held = [getattr(layer, name, None) for name in ("keys", "values")]
        for states in ("conv_states", "recurrent_states"):
            held += getattr(layer, states, {}).values()
        yield from (tensor for tensor in held if tensor is not None)
