"""Release of cached GPU memory, for devices that processes use in turn."""

from __future__ import annotations

import torch


def give_back_memory() -> None:
    """Release torch's cached memory to the GPU, for other processes."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
