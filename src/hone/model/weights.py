"""Copying named weights into a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hone.errors import DataError


@torch.no_grad()
def copy_by_name(
    own: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]], *, ignored: Collection[str] = ()
) -> None:
    """Copies each weight onto its namesake, in place; see `checked`."""
    for name, weight in checked({name: tensor.shape for name, tensor in own.items()}, weights, ignored=ignored):
        own[name].copy_(weight)


def checked(
    shapes: Mapping[str, torch.Size], weights: Iterable[tuple[str, Tensor]], *, ignored: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """The weights as they come, without those that are `ignored`. Every name of `shapes` must come exactly once.

    Raises:
        DataError: a name is missing, unknown or repeated, or a shape differs.
    """
    missing = set(shapes)
    for name, weight in weights:
        is_constant = name.endswith("rotary_emb.inv_freq") and name not in shapes  # old checkpoints carry it
        if name in ignored or is_constant:
            continue
        if name not in missing:
            problem = "came twice" if name in shapes else "is not a weight of this architecture"
            raise DataError(f"weights: {name} {problem}. Do config.json and the weights belong together?")
        if weight.shape != shapes[name]:
            raise DataError(
                f"weights: {name} has shape {tuple(weight.shape)}, the architecture wants {tuple(shapes[name])}. "
                "Do config.json and the weights belong together?"
            )
        missing.remove(name)
        yield name, weight
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise DataError(
            f"weights: {len(missing)} of {len(shapes)} are missing, {some} among them. "
            "Do config.json and the weights belong together?"
        )
