"""Activation checkpointing: which activations are recomputed. Changes memory, not results.

none: autograd stores what it needs. selective: each layer's input, matrix products and attention outputs are stored;
norms, rotations and the like are recomputed. full: only each layer's input is stored. A number N: `full` in the first N
layers, and `none` in the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hone.config.run import Checkpointing

T = TypeVar("T")

_aten: Any = torch.ops.aten
GROUPED_PRODUCT = _aten._grouped_mm.default
"""Of experts."""
PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    GROUPED_PRODUCT,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
"""Operators whose results are stored. Batched products are not among them: naive attention's scores are such."""


def is_recomputed(checkpointing: Checkpointing, layer: int) -> bool:
    """Whether a layer, counted from 0, makes activations again."""
    return layer < checkpointing if isinstance(checkpointing, int) else checkpointing != "none"


class _RecomputePass(threading.local):
    """What this thread is doing for a layer that is computed twice."""

    kept: list[tuple[Tensor, ...]] | None = None
    """What `kept` has stored; None: everything is stored, or nothing."""
    is_second = False
    is_made_again = False


_pass = _RecomputePass()


def again(function: Callable[..., T], *args: Any, selective: bool) -> T:
    """`function(*args)`, whose activations are made again in the backward pass: all, or those that cost little."""
    if selective:
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
    return checkpoint(function, *args, use_reentrant=False)


def contexts(*made_again: Any) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What surrounds the forward pass of a layer, and what surrounds its second one; for `checkpoint`.

    Args:
        made_again: operators whose results are not stored although they are `PRODUCTS`.
    """

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_kept = operator in PRODUCTS and operator not in made_again and not _pass.is_made_again
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(policy)
    kept: list[tuple[Tensor, ...]] = []
    return _passing(first, kept, is_second=False), _passing(second, kept, is_second=True)


def kept(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What `compute` finds, without gradient; in a second pass over a layer, what it found in the first.

    It must not call any of the `PRODUCTS`.
    """
    if _pass.kept is None:
        return compute()
    if _pass.is_second:
        return _pass.kept.pop(0)
    found = compute()
    _pass.kept.append(tuple(tensor.detach() for tensor in found))  # what is returned will be of an autograd graph
    return found


@contextmanager
def made_again() -> Iterator[None]:
    """Inside, products are not stored, for they are added to in place."""
    before, _pass.is_made_again = _pass.is_made_again, True
    try:
        yield
    finally:
        _pass.is_made_again = before


@contextmanager
def _passing(
    operators: AbstractContextManager[Any], kept: list[tuple[Tensor, ...]], *, is_second: bool
) -> Iterator[None]:
    before = _pass.kept, _pass.is_second
    _pass.kept, _pass.is_second = kept, is_second
    try:
        with operators:
            yield
    finally:
        _pass.kept, _pass.is_second = before
