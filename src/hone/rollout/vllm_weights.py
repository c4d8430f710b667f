# pyright: reportMissingImports=false
"""Weight loading into vLLM: checked for completeness, and split into parts; or an adapter beside the model that it
started from, replaced version by version."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from hone.config.run import LoraSection
from hone.errors import EngineError
from hone.model.fingerprint import weights_fingerprint
from hone.model.load import Implementation, exported_shapes, weight_shapes
from hone.model.lora import write_adapter

_PREFIX, _SUFFIXES = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
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


class VllmAdapter:
    """The one adapter of an engine, from the first version that is loaded."""

    def __init__(self, llm: Any, settings: LoraSection, base: Path) -> None:
        self._llm, self._settings, self._base = llm, settings, base
        self._folder: Path | None = None
        self.request: Any = None
        """What requests name it by (vLLM's LoRARequest); None before the first version."""

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Replace it by the adapter that comes; requests in flight continue with it. Returns its fingerprint.

        Raises EngineError when something else comes; what was there before is still in use then.
        """
        from vllm.lora.request import LoRARequest

        tensors = {name: weight.detach().cpu() for name, weight in weights}
        layers = _layers(tensors)
        # A directory of its own: vLLM's prefix cache knows an adapter by its name and path.
        folder = Path(tempfile.mkdtemp(prefix=f"hone-adapter-{version}-"))
        targets = list(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
        try:
            write_adapter(folder, self._settings, tensors, base=str(self._base), targets=targets)
            self._add(LoRARequest("policy", 1, str(folder), load_inplace=True), version)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.close()
        self._folder, self.request = folder, LoRARequest("policy", 1, str(folder))
        return weights_fingerprint(tensors.items())

    def _add(self, request: Any, version: int) -> None:
        try:
            loaded = self._llm.add_lora(request)
        except Exception as error:  # the boundary of vLLM: its reason is what helps
            raise EngineError(f"vLLM did not load the adapter of version {version}: {error}") from error
        if not loaded:
            raise EngineError(f"vLLM did not load the adapter of version {version}.")

    def close(self) -> None:
        """Remove its directory."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _layers(tensors: Iterable[str]) -> list[str]:
    """Names of the layers with an adapter. Raises EngineError for what is not an adapter's tensor."""
    found: dict[str, set[str]] = {}
    for name in tensors:
        layer, suffix = name[: -len(_SUFFIXES[0])], name[-len(_SUFFIXES[0]) :]
        if not name.startswith(_PREFIX) or suffix not in _SUFFIXES:
            raise EngineError(f"weights: {name} is not a tensor of an adapter, and lora.publish = adapter.")
        found.setdefault(layer.removeprefix(_PREFIX), set()).add(suffix)
    halves = [layer for layer, suffixes in found.items() if len(suffixes) < 2]
    if halves or not found:
        raise EngineError(f"weights: an adapter came without {halves[0] if halves else 'any layer'}'s two matrices.")
    return list(found)
