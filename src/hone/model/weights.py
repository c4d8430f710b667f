"""Named weights, whichever model they belong to, copied in by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from hone.errors import DataError


@torch.no_grad()
def copy_by_name(
    own: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]], *, ignored: Collection[str] = ()
) -> None:
    """Copies each weight onto its namesake, in place. Every name of `own` must come exactly once.

    Raises:
        DataError: a name is missing, unknown or repeated, or a shape differs.
    """
    missing = set(own)
    for name, weight in weights:
        if name in ignored or name.endswith("rotary_emb.inv_freq"):  # old checkpoints carry this constant
            continue
        if name not in missing:
            problem = "came twice" if name in own else "is not a weight of this architecture"
            raise DataError(f"weights: {name} {problem}. Do config.json and the weights belong together?")
        if weight.shape != own[name].shape:
            raise DataError(
                f"weights: {name} has shape {tuple(weight.shape)}, the architecture wants {tuple(own[name].shape)}. "
                "Do config.json and the weights belong together?"
            )
        own[name].copy_(weight)
        missing.remove(name)
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise DataError(
            f"weights: {len(missing)} of {len(own)} are missing, {some} among them. "
            "Do config.json and the weights belong together?"
        )
