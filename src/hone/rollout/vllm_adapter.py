# pyright: reportMissingImports=false
"""A LoRA adapter inside vLLM, beside the model that it started from, replaced version by version."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from hone.config.run import LoraSection
from hone.errors import EngineError
from hone.model.fingerprint import weights_fingerprint
from hone.model.lora import write_adapter

_PREFIX, _SUFFIXES = "base_model.model.", (".lora_A.weight", ".lora_B.weight")


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
    """Names of the layers with an adapter. Raises EngineError for what is no adapter's tensor."""
    found: dict[str, set[str]] = {}
    for name in tensors:
        layer, suffix = name[: -len(_SUFFIXES[0])], name[-len(_SUFFIXES[0]) :]
        if not name.startswith(_PREFIX) or suffix not in _SUFFIXES:
            raise EngineError(f"weights: {name} is no tensor of an adapter, and lora.publish = adapter.")
        found.setdefault(layer.removeprefix(_PREFIX), set()).add(suffix)
    halves = [layer for layer, suffixes in found.items() if len(suffixes) < 2]
    if halves or not found:
        raise EngineError(f"weights: an adapter came without {halves[0] if halves else 'any layer'}'s two matrices.")
    return list(found)
