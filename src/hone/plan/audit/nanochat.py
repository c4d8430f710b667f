"""nanochat's model as memory sees it: not a Transformers class, with weights of two dtypes and two optimizers.

Matrices and output layer are float32, the embedding and every other layer's value embedding bfloat16; matrices have one
moment (Muon), everything else two in its own dtype (AdamW). Linear layers keep a bfloat16 copy of their weights for the
backward pass. Counted from its source and met by a trace of the real model within 1 % (16 layers, vocabularies of
32,768 and 65,536).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SAVED_PER_HIDDEN = 48
"""Bytes per token, layer and unit of width that the forward pass keeps, all in bfloat16: 24 numbers."""
LOGITS_SAVED, LOGITS_BACKWARD = 8, 16
"""Bytes per token and vocabulary entry of its capped cross-entropy: kept, and at the most of the backward pass."""


@dataclass(frozen=True, slots=True)
class Nanochat:
    """One model."""

    layers: int
    hidden: int
    heads: int
    vocab: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Nanochat:
        return cls(*(int(config[name]) for name in ("n_layer", "n_embd", "n_head", "vocab_size")))

    @property
    def matrices(self) -> int:
        return 12 * self.hidden**2 * self.layers

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def value_embeddings(self) -> int:
        return self.layers // 2 * self.embedding

    @property
    def weights_bytes(self) -> int:
        return 4 * (self.matrices + self.embedding) + 2 * (self.embedding + self.value_embeddings)

    @property
    def gradients_bytes(self) -> int:
        """In the dtypes of the weights."""
        return self.weights_bytes

    @property
    def optimizer_bytes(self) -> int:
        return 4 * self.matrices + 8 * self.embedding + 4 * (self.embedding + self.value_embeddings)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.layers * self.hidden

    def saved_bytes(self, tokens: int) -> int:
        """What a forward pass keeps, logits included."""
        return self._layers_bytes(tokens) + LOGITS_SAVED * tokens * self.vocab

    def peak_bytes(self, tokens: int) -> int:
        """While the loss goes backward, gradients of earlier passes there."""
        static = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return static + self._layers_bytes(tokens) + LOGITS_BACKWARD * tokens * self.vocab

    def _layers_bytes(self, tokens: int) -> int:
        casts = 2 * (self.matrices + self.embedding)
        return SAVED_PER_HIDDEN * self.hidden * self.layers * tokens + casts

    def floor_bytes(self, tokens: int) -> int:
        """One bfloat16 tensor per layer: what full activation checkpointing keeps."""
        return 2 * tokens * self.hidden * self.layers
