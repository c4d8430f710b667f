"""Interface of a policy model: token ids in, final hidden states and named weights out; and of an adapter in it.

There are two implementations: `Decoder` (decoder.py), ours, for the Llama family, and `TransformersModel` (hf.py)
for everything else. Logits of training are not here: `logprobs.py` makes them from `hidden` and `output_weight`, a
chunk at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.config.run import Checkpointing, LoraSection
from hone.model.logprobs import PLAIN, LogitMap, product_float32
from hone.model.sequence import UNDIVIDED, SequenceGroup
from hone.model.weights import Contents, copy_by_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hone.model.layout import Layout
    from hone.model.routing import LoadBalance


class Adapter(ABC):
    """What `add_adapter` put into a model: the pairs of thin matrices, under the names of the layers they are beside.

    The matrices are parameters of the model, and the only ones that are trained.
    """

    transposed = False
    """Whether the layers keep their weights as (in, out), as GPT-2's do."""

    def __init__(
        self, settings: LoraSection, base: str, names: Sequence[str], weights: Sequence[str] | None = None
    ) -> None:
        self.settings = settings
        self.base = base
        """Fingerprint of the base weights, before they were turned into another dtype; "" before there are any."""
        self.names = tuple(names)
        """Hugging Face names of the layers with an adapter, such as model.layers.0.mlp.up_proj."""
        self.layer_of = dict(zip(weights or [f"{name}.weight" for name in names], names, strict=True))
        """Layer with an adapter beside each weight, by the weight's name in the model's repository."""
        self.scale = settings.alpha / settings.rank
        self._is_on = True

    @abstractmethod
    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """A (rank, in) and B (out, rank) of a layer, detached; views."""

    @abstractmethod
    def switch(self, on: bool) -> None:
        """Let every layer add its product, or not."""

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the adapter is off; for one thread, with nothing else computing."""
        self.switch(False)
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True
            self.switch(True)

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """The weight with the adapter's change, in the more precise dtype of both; `weight` itself if there is none.

        The sum is made in float32 at least: in bfloat16 it may round small changes away, as any merged copy does.
        """
        layer = self.layer_of.get(name)
        return self.merge(weight, *self.factors(layer)) if self._is_on and layer is not None else weight

    def merge(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """A layer's weight with the change that these factors make; see `merged`."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        change = self.scale * (b.to(dtype) @ a.to(dtype))
        total = weight.to(dtype) + (change.T if self.transposed else change)
        return total.to(torch.promote_types(weight.dtype, a.dtype))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The matrices under the names that peft gives them on disk; views."""
        for name in self.names:
            for letter, factor in zip("AB", self.factors(name), strict=True):
                yield f"base_model.model.{name}.lora_{letter}.weight", factor


class CausalModel(nn.Module, ABC):
    """A decoder-only language model in one place; trainer and engine may share the very same object."""

    hf_config: PreTrainedConfig
    """Enough for Transformers to build the same architecture; written by `save_hf`."""
    vocab_size: int
    hidden_size: int
    max_positions: int
    """Longest prompt + response, in tokens."""
    checkpointing: Checkpointing = "none"
    """Activation checkpointing: which activations are recomputed."""
    logit_map: LogitMap = PLAIN
    """What is done to hidden @ output_weight.T to make logits."""
    sequences: SequenceGroup = UNDIVIDED
    """Sequence parallel ranks, which compute other tokens of the same microbatches."""
    contents: Contents | None = None
    """Weights to materialise, while the model is on device `meta`."""
    adapter: Adapter | None = None
    """The adapter that is trained instead of the weights, after `lora.add_adapter`."""

    @property
    @abstractmethod
    def output_weight(self) -> Tensor:
        """(V, h) rows that score each next token; the embedding itself where the model ties them."""

    @abstractmethod
    def hidden(self, layout: Layout, balance: LoadBalance | None = None) -> Tensor:
        """(U, h): the final, normed hidden states that predict `sequences.share(layout.target_U)`, in that order.

        Args:
            balance: is given the loss that balances the load of experts. Raises DataError for a model without one.
        """

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """(B, V) logits of the next token, for sampling. On a GPU never rounded to less than float32, as in training;
        on a CPU that would convert all of the output layer at every token."""
        product = product_float32 if hidden_BH.is_cuda else F.linear
        return self.logit_map(product(hidden_BH, self.output_weight))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once, detached, under its Hugging Face name and shape; views, not copies.

        With an adapter they are merged: what the adapter changes is a copy, made when its turn comes.
        """
        for name, weight in self.own_weights():
            yield name, weight if self.adapter is None else self.adapter.merged(name, weight)

    @abstractmethod
    def own_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Like `named_weights`, without the adapter: always views."""

    @property
    def aliases(self) -> Collection[str]:
        """Names in a directory that are duplicates or not needed by this model."""
        return ()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies weights in place, converting the dtype. Every name must come, once, in its own shape.

        They are the model's own: an adapter stays as it is.

        Raises:
            DataError: a name is missing, unknown or repeated, or a shape differs.
        """
        copy_by_name(dict(self.own_weights()), weights, ignored=self.aliases)
