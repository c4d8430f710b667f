"""Pictures to the features that stand at their tokens: each distinct one through the vision tower once.

The language model of these classes then computes a shared-prompt layout (`model/layout_attention.py`). Not here: what a
picture's tokens are (`data/pictures.py`), and how a family's tower is called (`model/towers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hone.model.layout import Layout, grid_positions
from hone.model.towers import PictureFeatures, VisionTower
from hone.runtime.bounded_cache import BoundedCache
from hone.sizes import KEPT_FEATURES_BYTES, PATCHES_PER_PASS
from hone.types import Picture


class Vision:
    """The vision tower of a model, called once for each distinct picture."""

    def __init__(self, tower: VisionTower) -> None:
        self.tower = tower
        self.patches_per_pass = PATCHES_PER_PASS
        self._kept = BoundedCache[PictureFeatures](KEPT_FEATURES_BYTES, lambda features: features.num_bytes)
        self.num_computed = 0
        """Pictures that went through the tower."""
        self.most_passes: Callable[[int], int] = int
        """From the passes that this rank needs to those that all ranks make: whose weights are divided among them, they
        gather together (`train/fsdp.py`)."""

    def forget(self) -> None:
        """The tower's weights have changed."""
        self._kept.clear()

    def features(self, pictures: Sequence[Picture]) -> tuple[list[PictureFeatures], Tensor | None]:
        """Those of each picture, equal pictures computed once; of a frozen tower those that are kept are not computed
        again. And 0, if this rank made passes for others that a gradient has to pass through."""
        is_frozen = not any(weight.requires_grad for weight in self.tower.weights())
        distinct = {picture.digest: picture for picture in pictures}
        kept = {digest: self._kept.get(digest) for digest in distinct} if is_frozen else {}
        found = {digest: features for digest, features in kept.items() if features is not None}
        missing = [picture for digest, picture in distinct.items() if digest not in found]
        parts, zero = list(self._passes(missing)), None
        others = self.most_passes(len(parts)) - len(parts)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_frozen):
            for part in parts:
                self.num_computed += len(part)
                found |= zip((picture.digest for picture in part), self.tower.features(part), strict=True)
            for _ in range(others):
                (black,) = self.tower.features([self.tower.black()])
                idle = torch.stack([0 * tensor.sum() for tensor in (black.embedded, *black.deeper)]).sum()
                zero = idle if zero is None else zero + idle
        if is_frozen:
            for digest in distinct:
                self._kept.put(digest, found[digest])
        return [found[picture.digest] for picture in pictures], zero

    def _passes(self, pictures: Sequence[Picture]) -> Iterator[list[Picture]]:
        part, size = list[Picture](), 0
        for picture in pictures:
            patches = picture.num_tokens * self.tower.patches_per_token
            if part and size + patches > self.patches_per_pass:
                yield part
                part, size = [], 0
            part.append(picture)
            size += patches
        if part:
            yield part

    def positions(self, layout: Layout) -> Tensor:
        """(1, X), or (3, 1, X) for a family that counts in time, height and width: of a layout's tokens."""
        if not self.tower.has_grid_positions:
            return layout.position_X[None]
        position_3X = layout.grid_position_3X
        return (layout.position_X.expand(3, -1) if position_3X is None else position_3X)[:, None]

    def prompt_positions(self, length: int, pictures: Sequence[Picture]) -> tuple[Tensor, int]:
        """(1, length), or (3, length), of a prompt's tokens, and the position of the token behind it."""
        if not self.tower.has_grid_positions:
            return torch.arange(length)[None], length
        position_3P, following = grid_positions(length, pictures)
        return torch.from_numpy(position_3P), following


def with_pictures(
    embedded_NWH: Tensor, pictures: Sequence[Sequence[Picture]], vision: Vision
) -> tuple[Tensor, dict[str, Any]]:
    """Embeddings of rows of tokens with pictures in place of theirs, and what the language model takes besides.

    Args:
        pictures: of each row, in order; `start` is their place in it.
    """
    rows, width = embedded_NWH.shape[:2]
    placed = [replace(p, start=row * width + p.start) for row, own in enumerate(pictures) for p in own]
    found, zero = vision.features(placed)
    if zero is not None:
        embedded_NWH = embedded_NWH + zero.to(embedded_NWH.dtype)
    if not placed:
        return embedded_NWH, {}
    device = embedded_NWH.device
    place_P = torch.cat([torch.arange(p.start, p.start + p.num_tokens, device=device) for p in placed])
    embedded = torch.cat([features.embedded for features in found]).to(embedded_NWH.dtype)
    seen = embedded_NWH.flatten(0, 1).index_copy(0, place_P, embedded).view_as(embedded_NWH)
    if not found[0].deeper:
        return seen, {}
    mask = torch.zeros(rows * width, dtype=torch.bool, device=place_P.device).index_fill_(0, place_P, True)
    layers = [torch.cat(layer) for layer in zip(*(features.deeper for features in found), strict=True)]
    return seen, {"visual_pos_masks": mask.view(rows, width), "deepstack_visual_embeds": layers}
