"""Attention of Transformers' own classes where the tokens of each row are divided over some ranks (`sequence.py`).

A class asks Transformers' registry for the function that attends, and for the one that makes its masks. Here are two
that stand around those of torch's scaled dot products: the mask is of whole rows, and each rank attends to whole rows
with its share of the heads. Classes that attend otherwise, or mix tokens in yet another way, are refused.
"""

from __future__ import annotations

import inspect
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from hone.errors import DataError
from hone.model.sequence import to_heads, to_tokens

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

ATTENTIONS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers, in the words of config.json, that mix tokens by nothing but attention."""


_numbers = count()
"""Every model has a function of its own in the registry."""


def divide_rows(hf: PreTrainedModel, group: ProcessGroup) -> None:
    """Let a model of Transformers' own class attend to rows whose tokens the ranks of a group divide.

    Raises:
        DataError: the class does more than attend through the registry.
    """
    config: Any = hf.config
    others = set(getattr(config, "layer_types", None) or ()) - ATTENTIONS
    why = None
    if others:
        why = f"it has layers of the kind {', '.join(sorted(others))}"
    elif config._attn_implementation != "sdpa" or not hf._can_set_attn_implementation():
        why = "its attention is no plain scaled dot product"
    elif "position_ids" not in inspect.signature(hf.base_model.forward).parameters:
        why = "it counts positions by itself"
    if why:
        raise DataError(
            f"cluster.trainer.sequence_parallel > 1: the tokens of Transformers' class for {config.model_type} cannot "
            f"be divided: {why}. Set it to 1."
        )
    name = f"hone_rows_{next(_numbers)}"
    attention = _RowAttention(group)
    apart: Any = torch.compiler.disable(attention.attend)  # exchanges are no part of what a compiled layer computes
    AttentionInterface.register(name, apart)
    AttentionMaskInterface.register(name, _whole_mask)
    hf.set_attn_implementation(name)
    hf.base_model.register_forward_pre_hook(lambda *_: attention.begin())
    hf.base_model.register_forward_hook(lambda *_: attention.end(config))


def _whole_mask(*, q_length: int, kv_length: int, q_offset: int = 0, **arguments: Any) -> Tensor | None:
    """The mask of whole rows: a rank has a part of the queries, and the padding mask is of the whole rows."""
    return sdpa_mask(q_length=kv_length, kv_length=kv_length, q_offset=q_offset, **arguments)


class _RowAttention:
    """As `sdpa_attention_forward`, of (R, H, l, D) queries, keys and values of this rank's tokens."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._calls = 0

    def begin(self) -> None:
        """A forward pass begins."""
        self._calls = 0

    def end(self, config: Any) -> None:
        """It has ended. Raises DataError if a layer did not attend here: it saw this rank's tokens only."""
        if self._calls != config.num_hidden_layers:
            raise DataError(
                f"cluster.trainer.sequence_parallel > 1: of {config.num_hidden_layers} layers of Transformers' class "
                f"for {config.model_type} only {self._calls} have attention that can be divided. Set it to 1."
            )

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
    ) -> tuple[Tensor, None]:
        self._calls += 1
        of_heads = [name for name, given in named.items() if isinstance(given, Tensor) and name != "position_ids"]
        if of_heads:
            raise DataError(
                f"cluster.trainer.sequence_parallel > 1: attention of {type(module).__name__} needs "
                f"{', '.join(of_heads)}, which Hone cannot divide over heads. Set it to 1."
            )
        rows, ranks = len(query), dist.get_world_size(self._group)
        tokens = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
        if query.shape[-1] == value.shape[-1]:
            parts = to_heads(*tokens, group=self._group)
        else:
            parts = tuple(part for x in tokens for part in to_heads(x, group=self._group))
        whole = (part.unflatten(0, (ranks, rows, -1)).permute(1, 3, 0, 2, 4).flatten(2, 3) for part in parts)
        q, k, v = whole
        out, _ = sdpa_attention_forward(module, q, k, v, attention_mask, **named)
        out = out.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 2)
        return to_tokens(out, group=self._group).unflatten(0, (rows, -1)), None
