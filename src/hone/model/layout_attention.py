"""Attention of Transformers' classes over a shared-prompt layout: the same kernels as Hone's own decoder.

A class asks Transformers' registry for the function that attends, and for the one that makes its masks. Here are two
that stand around its own: while a layout is computed, what the layers are given for a mask is the layout's attention,
with the window of their kind of layer, and they attend by it. Without a layout both are the class's own; when an engine
decodes, the mask is made without a look at which tokens are padding. Attention that cannot be done over a layout is
named by `why_rows`; such a class computes padded rows.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.config import derived
from hone.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OTHER_KINDS = ("softcap", "position_bias", "indices")
"""What a class passes to attention that the kernels do not know: capped scores, biases by distance, chosen keys."""
BASES = ("sdpa", "eager")
"""Attention that a class starts with, and keeps where there is no layout."""


@dataclass(frozen=True)
class LayoutMask:
    """What layers of one kind are given for a mask."""

    attend: Callable[..., Tensor]
    """See `attention.shared_prompt_attention`."""
    window: int | None


class _CurrentAttention(threading.local):
    """What this thread's forward pass attends by; None: there is no layout."""

    attend: Callable[..., Tensor] | None = None
    has_padding: bool | None = None
    """Without a layout, whether rows have padding; None: the class looks itself, for which the host waits."""


_current = _CurrentAttention()


@contextmanager
def over_layout(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Inside, a model of `attend_around` computes the tokens that `attend` is of, in one row."""
    before, _current.attend = _current.attend, attend
    try:
        yield
    finally:
        _current.attend = before


@contextmanager
def over_rows(*, has_padding: bool) -> Iterator[None]:
    """Inside, a model of `attend_around` computes rows of which the host knows whether any has padding."""
    before, _current.has_padding = _current.has_padding, has_padding
    try:
        yield
    finally:
        _current.has_padding = before


def why_rows(hf: PreTrainedModel, body: nn.Module) -> str | None:
    """Why a class must be given padded rows, or None: it can attend over layouts.

    Args:
        body: its language model without the output layer.
    """
    why = derived.why_rows(hf.config.get_text_config(decoder=True).to_dict())
    if why is not None:
        return why
    if not type(hf).__module__.startswith("transformers."):
        return "its class comes with the model"
    if getattr(hf, "_is_stateful", False):
        return derived.RUNS_ON
    if not asks_registry(hf):
        return "its attention is not in Transformers' registry"
    if "position_ids" not in inspect.signature(type(body).forward).parameters:
        return "it counts positions by itself"
    return None


def asks_registry(hf: PreTrainedModel) -> bool:
    """Whether a class has its attention and its masks from Transformers' registry."""
    text: Any = hf.config.get_text_config(decoder=True)
    own = type(hf).__module__.startswith("transformers.")
    return own and hf._can_set_attn_implementation() and text._attn_implementation in BASES


def attend_around(body: Any) -> None:
    """Let a language model of a class that `asks_registry` attend over layouts, unless there is a reason in `why_rows`,
    and over rows without a look at their padding."""
    from transformers.masking_utils import AttentionMaskInterface  # brings modelling code and SciPy: 0.7 s
    from transformers.modeling_utils import AttentionInterface

    base = body.config._attn_implementation
    name = f"hone_layout_{base}"
    AttentionInterface.register(name, _attention_around(base))
    AttentionMaskInterface.register(name, _mask_around(base))
    body.set_attn_implementation(name)


def _mask_around(base: str) -> Callable[..., Any]:
    from transformers.masking_utils import AttentionMaskInterface

    plain: Any = AttentionMaskInterface()[base]
    truths: Any = AttentionMaskInterface()["sdpa"]

    def mask(*, local_size: int | None = None, use_vmap: bool = False, **arguments: Any) -> Any:
        if _current.attend is not None:
            if use_vmap:  # the class brings a mask function of its own
                raise DataError("model: a class whose masks are not causal cannot be computed over a layout.")
            return LayoutMask(_current.attend, local_size)
        arguments["local_size"] = local_size
        if _current.has_padding is None or use_vmap:
            return plain(use_vmap=use_vmap, **arguments)
        # As the class has it, without a look at the mask's numbers: what it would find is known.
        if not _current.has_padding:
            arguments["attention_mask"] = None
        elif base == "sdpa":
            arguments["allow_is_causal_skip"] = False
        if base == "sdpa":
            return plain(**arguments)
        dtype = arguments.pop("dtype")
        seen = truths(**arguments | {"allow_is_causal_skip": False})
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)

    return mask


def _attention_around(base: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    over: Any = torch.compiler.disable(_attend)  # index plans and exchanges are not part of a compiled layer

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(attention_mask, LayoutMask):
            return over(module, query, key, value, attention_mask, **named), None
        if _current.attend is not None:
            raise DataError(f"model: {type(module).__name__} was given no mask: it cannot be computed over a layout.")
        plain: Any = sdpa_attention_forward
        if base == "eager":
            plain = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        return plain(module, query, key, value, attention_mask, **named)

    return attend


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: LayoutMask,
    *,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **named: Any,
) -> Tensor:
    """(1, X, heads, D) of (1, heads, X, D) queries, keys and values; values may be narrower than keys."""
    others = [name for name in OTHER_KINDS if named.get(name) is not None]
    if others or not named.get("is_causal", True):
        what = ", ".join(others) or "is_causal=False"
        raise DataError(f"model: {type(module).__name__} attends with {what}, which cannot be done over a layout.")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    size, of_values = q.shape[-1], v.shape[-1]
    width = max(size, of_values)
    factor = (size**-0.5 if scaling is None else scaling) * width**0.5  # attention scales by width ** -0.5 itself
    if not math.isclose(factor, 1.0):
        q = q * factor
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    out = mask.attend(module.layer_idx, q, k, v, window=mask.window, sink_H=s_aux)
    return out[None, ..., :of_values]
