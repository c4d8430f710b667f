"""Weight loading into vLLM: checked for completeness, and split into parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedConfig

from hone.errors import EngineError
from hone.model.load import Implementation, exported_shapes, weight_shapes

PART_BYTES = 256 * 2**20
"""New weights are handed to vLLM's workers in parts of about this size."""


def published_shapes(folder: Path, *, is_tied: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a trainer publishes: those of a checkpoint, but what it may hold twice, or constants."""
    extra = ("lm_head.weight",) if is_tied else ()
    shapes = weight_shapes(folder).items()
    return {name: shape for name, shape in shapes if name not in extra and not name.endswith("rotary_emb.inv_freq")}


def publishing_problem(
    folder: Path,
    config: PreTrainedConfig,
    *,
    implementation: Implementation = "auto",
    trust_remote_code: bool = False,
) -> str | None:
    """Why weights that a trainer of this model publishes would be refused by an engine started from its directory.

    Reads headers and makes the model on device `meta`; no weights. Raises DataError as `load_model`.
    """
    ours = exported_shapes(config, implementation=implementation, trust_remote_code=trust_remote_code)
    theirs = published_shapes(folder, is_tied=config.tie_word_embeddings)
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if not differing:
        return None
    some = [
        f"{name} ({ours.get(name, 'none')} of the trainer, {theirs.get(name, 'none')} here)" for name in differing[:3]
    ]
    return (
        f"{folder}: {len(differing)} of {len(theirs)} weights have other names or shapes than those that the trainer "
        f"publishes: {', '.join(some)}. Start from a directory that Transformers 5 or Hone has saved."
    )


class Missing:
    """Names that a version still lacks: vLLM itself only warns of a layer that did not come."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes, self._missing = shapes, dict(shapes)

    def without(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights, which came. Raises EngineError when a name is unknown or repeated, or a shape differs."""
        for name, weight in weights:
            if self._missing.pop(name, None) != tuple(weight.shape):
                expected = f"has shape {self._shapes[name]}" if name in self._shapes else "is none of it"
                raise EngineError(
                    f"weights: {name} came with shape {tuple(weight.shape)}; in the model that vLLM was started with "
                    f"it {expected}, and each comes once."
                )
            yield name, weight

    def check(self) -> None:
        """Raises EngineError when a name is missing."""
        if self._missing:
            raise EngineError(
                f"weights: {len(self._missing)} of {len(self._shapes)} did not come, {min(self._missing)} among them."
            )


def in_parts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """The same weights, as many at a time as have about `PART_BYTES`."""
    part, size = [], 0
    for name, weight in weights:
        part.append((name, weight))
        size += weight.nbytes
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
