"""Named weights of a model: where they come from, and copies of them into it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hone.errors import DataError

ReadTensors = Callable[[], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class Contents:
    """Weights by their Hugging Face names, each once, and what else a model cannot compute without.

    A model on device `meta` has names and shapes only; its contents are read once the sharding is known, by
    `train/weight_map.py`. A copy of a model has the same contents as the model.
    """

    read: ReadTensors
    """One at a time, on the CPU, in any dtype; of a file no more is read than is looked at."""
    is_made_whole: bool = False
    """Whether reading needs the whole model in memory: one process should read and broadcast."""

    def with_more(self, read: ReadTensors) -> Contents:
        """The same, and others behind them."""
        return Contents(partial(_one_after_another, self.read, read), self.is_made_whole)

    def __deepcopy__(self, _memo: Any) -> Contents:
        return self


def _one_after_another(*reads: ReadTensors) -> Iterator[tuple[str, Tensor]]:
    return chain.from_iterable(read() for read in reads)


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
