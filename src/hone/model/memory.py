"""Memory of a device that several processes use in turn."""

from __future__ import annotations

import torch


def give_back_memory() -> None:
    """To the GPU, for other processes: torch would keep what activations, caches and moved weights took."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
