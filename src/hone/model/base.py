"""What the rest of Hone knows of a policy: token ids in, final hidden states and named weights out.

There are two implementations: `Decoder` (decoder.py), ours, for the Llama family, and `TransformersModel` (hf.py)
for everything else. Logits are not here: `logprobs.py` makes them from `hidden` and `output_weight`, a chunk at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hone.model.contents import Contents
from hone.model.recompute import Checkpointing
from hone.model.sequence import UNDIVIDED, Sequences
from hone.model.weights import copy_by_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hone.model.layout import Layout
    from hone.model.lora import Adapter


class CausalModel(nn.Module, ABC):
    """A decoder-only language model in one place; trainer and engine may share the very same object."""

    hf_config: PreTrainedConfig
    """Enough for Transformers to build the same architecture; written by `save_hf`."""
    vocab_size: int
    hidden_size: int
    max_positions: int
    """Longest prompt + response, in tokens."""
    checkpointing: Checkpointing = "none"
    """Which activations are made again in the backward pass instead of stored."""
    sequences: Sequences = UNDIVIDED
    """Who computes other tokens of the same microbatches."""
    contents: Contents | None = None
    """What is to be in it, while it has no memory (device `meta`)."""
    adapter: Adapter | None = None
    """What is trained instead of the weights, once `lora.add_adapter` has put it into the model."""

    @property
    @abstractmethod
    def output_weight(self) -> Tensor:
        """(V, h) rows that score each next token; the embedding itself where the model ties them."""

    @abstractmethod
    def hidden(self, layout: Layout) -> Tensor:
        """(U, h): the final, normed hidden states that predict `sequences.share(layout.target_U)`, in that order."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once, detached, under its Hugging Face name and shape; views, not copies.

        With an adapter they are merged: what the adapter changes is a copy, made when its turn comes.
        """
        for name, weight in self.own_weights():
            yield name, weight if self.adapter is None else self.adapter.merged(name, weight)

    @abstractmethod
    def own_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `named_weights`, without the adapter: always views."""

    @property
    def aliases(self) -> Collection[str]:
        """Names under which a directory may have a weight once more, or one that this model does without."""
        return ()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies weights in place, converting the dtype. Every name must come, once, in its own shape.

        They are the model's own: an adapter stays as it is.

        Raises:
            DataError: a name is missing, unknown or repeated, or a shape differs.
        """
        copy_by_name(dict(self.own_weights()), weights, ignored=self.aliases)
