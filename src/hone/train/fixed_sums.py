"""Sums in a fixed order: what `run.deterministic` asks of passes on GPUs.

Several of PyTorch's CUDA kernels add up with atomics, in whatever order blocks finish: flash attention's backward pass,
`index_add_`, `scatter_add_`, the gradient of a gather. PyTorch has others for them, which are chosen for the whole
process; where an operator has none it raises RuntimeError. So they are chosen while a trainer computes, and no longer:
an engine in the same process draws with cumulative sums that have no such kernel, and its own sums are in a fixed order
already. Matrix products by cuBLAS need workspaces of a fixed size, which are set when the process starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

CUBLAS_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""As NVIDIA asks for in "Results reproducibility" of cuBLAS's documentation: 24 MiB for each thread and stream."""


def prepare_fixed_sums() -> None:
    """Before this process's first product on a GPU."""
    for name, value in CUBLAS_WORKSPACES.items():
        os.environ.setdefault(name, value)


@contextmanager
def fixed_sums(is_on: bool) -> Iterator[None]:
    """While it lasts PyTorch adds up in a fixed order, if `is_on`; it may be entered again inside."""
    if not is_on or torch.are_deterministic_algorithms_enabled():
        yield
        return
    settings = cast(Any, torch.utils.deterministic)
    fills = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False  # for finding errors: a pass over every new tensor
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = fills
