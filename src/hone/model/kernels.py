"""Fused kernels: functions of tensors that torch.compile makes into few passes over memory, where they are on.

`run.fused_kernels` says whether they are: by default on GPUs only. A function with `@fused_kernel` computes the
same either way, up to rounding: compiled, it keeps in float32 what lies between inputs and outputs. What is compiled
has no gradient of its own (the autograd functions of `fused.py` and `logprobs.py` call it forward and backward) and no
matrix product, so that it fits into whatever surrounds it: FSDP2, tensor parallelism, adapters, checkpointing.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

OPTIONS: dict[str, Any] = {"deterministic": True}
"""Of torch.compile: no choice among kernels by timing them, which could round otherwise after a resumption."""
USUAL_ROWS = 4096
"""Kernels are compiled for this number of rows, whatever came first: how a sum is split would depend on that otherwise,
and a resumed run would round otherwise than one that was not interrupted. Kernels for a CPU sum more rows than these in
another way, so there are two of each: this number is the bound in torch's `CppKernel.need_use_acc_helper`."""
MOST_VARIANTS = 64
"""Of one function, over shapes and types of all models of a process; torch's limit is 8."""


Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a function into a fused kernel."""


class _Switch:
    device_type: str | None = None
    """Whose tensors fused kernels are for; None: off."""
    is_tried = False
    """Whether the compiler has been seen to work here."""
    compiler: Compiler | None = None
    """In place of torch.compile."""


_switch = _Switch()


def use_fused_kernels(device_type: str | None) -> None:
    """Turn fused kernels on for tensors on `cuda` or `cpu` in this process, or off."""
    _switch.device_type = device_type


@contextmanager
def fused_by(compiler: Compiler, device_type: str) -> Iterator[None]:
    """Inside, fused kernels are on for tensors on a device, and are made by `compiler` in place of torch.compile."""
    before = _switch.device_type, _switch.is_tried, _switch.compiler
    _switch.device_type, _switch.is_tried, _switch.compiler = device_type, True, compiler
    try:
        yield
    finally:
        _switch.device_type, _switch.is_tried, _switch.compiler = before


def uses_fused_kernels(device: torch.device) -> bool:
    """Whether they are on; the first time, whether the compiler works for `device`, with a warning if it does not."""
    if _switch.device_type is None or device.type != _switch.device_type:
        return False
    if not _switch.is_tried:
        try:
            _compiled(_twice)(torch.zeros(2, device=device))
            _switch.is_tried = True
        except Exception as error:  # of Dynamo, of Inductor, of Triton, or of a program that one of them calls
            _switch.device_type = None
            said = " ".join((str(error).strip() or type(error).__name__).splitlines()[:2]).rstrip(".")
            warnings.warn(
                f"run.fused_kernels is off in this process, because torch.compile fails on this machine: {said}. "
                "Results are the same up to rounding, and steps are slower. GPUs need Triton and a C compiler, CPUs a "
                "C++ compiler; run.fused_kernels=false turns it off without this warning.",
                RuntimeWarning,
                stacklevel=2,
            )
    return _switch.device_type is not None


def fused_kernel(function: Callable[..., T]) -> Callable[..., T]:
    """A function that is compiled where fused kernels are on.

    Its positional arguments are tensors with one row per token (or None): their number of rows changes from call to
    call without another compilation. Keyword arguments keep their shapes and values. Called without gradient.
    """

    @functools.wraps(function)
    def call(*rows: Tensor | None, **rest: Any) -> T:
        if _switch.device_type is None:
            return function(*rows, **rest)
        first = rows[0]
        assert first is not None
        if torch.compiler.is_compiling() or not len(first) or not uses_fused_kernels(first.device):
            return function(*rows, **rest)
        constants = {name: value.detach() if isinstance(value, Tensor) else value for name, value in rest.items()}
        return (_switch.compiler or _compiled)(function)(*map(_of_any_length, rows), **constants)

    return call


def _of_any_length(rows: Tensor | None) -> Tensor | None:
    """The same numbers without gradient, their first size marked as one that changes. One row has its own kernels."""
    if rows is None:
        return None
    rows = rows.detach()
    if len(rows) > 1:
        is_many = rows.device.type == "cpu" and len(rows) > USUAL_ROWS
        torch._dynamo.mark_dynamic(rows, 0, hint_override=2 * USUAL_ROWS if is_many else USUAL_ROWS)
    return rows


@functools.cache
def _compiled(function: Callable[..., T]) -> Callable[..., T]:
    of_function: dict[str, Any] = {}
    if "recompile_limit" in signature(torch.compile).parameters:  # from torch 2.13 on
        of_function["recompile_limit"] = MOST_VARIANTS
    else:
        config: Any = torch._dynamo.config  # of this thread alone
        config.recompile_limit = max(config.recompile_limit, MOST_VARIANTS)
    return torch.compile(function, fullgraph=True, options=OPTIONS, **of_function)


def _twice(x: Tensor) -> Tensor:
    return 2 * x
