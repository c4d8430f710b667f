"""Device selection from the run file."""

from __future__ import annotations

import torch

from hone.errors import DataError


def device_of(wanted: str, key: str) -> torch.device:
    """`cpu`, `cuda`, or a GPU if torch sees one for `auto`. Raises DataError, naming the key, for a GPU that is not."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise DataError(f"{key}: cuda, but torch sees no GPU. Set it to cpu or auto, or check the driver.")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")
