"""Copies from the host to the device that computes, which wait for nothing.

A plain `.to(device)` waits until the device has done all that it was asked: one for each token and array is what an
engine on a GPU would mostly do.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on the device; on a CPU the same memory.

    The driver takes a copy before this returns, so the array may change afterwards.
    """
    return torch.from_numpy(values).to(device, non_blocking=True)
