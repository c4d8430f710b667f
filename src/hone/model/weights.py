"""Named weights, whichever model they belong to: copied in by name, and fingerprinted."""

from __future__ import annotations

import hashlib
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


def weights_fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    """A short hash of names, shapes, dtypes and bytes: equal exactly when all weights are equal bit for bit."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in weights:
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype};".encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
