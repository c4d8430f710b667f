"""Models for a trace: the classes that a run would train, of shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from hone.model.base import CausalModel
from hone.model.decoder import Decoder
from hone.model.hf import TransformersModel, auto_class, without_dropout
from hone.model.load import Implementation, init_config, is_ours


def empty_model(architecture: Mapping[str, Any], implementation: Implementation) -> CausalModel:
    """The float32 model that a run would load, among fake tensors; to be called among them.

    Args:
        architecture: keys of a config.json.
    """
    config = init_config(architecture, vocab_size=None)
    with unset_fake_temporarily():  # fake tensors on the meta device cannot become others in place; real ones can
        if is_ours(config, implementation):
            made: Decoder | PreTrainedModel = Decoder(config, dtype=torch.float32, device="meta")
        else:
            with torch.device("meta"):
                made = auto_class(config).from_config(without_dropout(config), dtype=torch.float32)
    made.to_empty(device="cpu")
    if isinstance(made, Decoder):
        return made
    made.tie_weights()
    return TransformersModel(made, config)


def with_layers(architecture: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The same architecture with its first `layers` layers only."""
    cut = {**architecture, "num_hidden_layers": layers}
    if "layer_types" in cut:
        cut["layer_types"] = cut["layer_types"][:layers]
    return cut
