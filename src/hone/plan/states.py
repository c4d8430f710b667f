"""Layers with states, in place of attention or beside it: linear attention, short convolutions, state spaces.

Which parts each layer of a family has is one table (`LAYER_KINDS`); what its layers with states weigh and keep follows
from the keys of its config.json. A sequence has states of one size however long it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

DELTA_CHUNK = 64
"""Tokens of a chunk of the gated delta rule in Transformers."""

Kind = Literal["delta rule", "convolution", "state space"]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What mixes tokens in a layer; a feed-forward block follows."""

    attends: bool = False
    has_states: bool = False


ATTENTION, STATES = LayerKind(attends=True), LayerKind(has_states=True)
LAYER_KINDS: dict[str, dict[str, LayerKind]] = {
    "qwen3_5_text": {"full_attention": ATTENTION, "linear_attention": STATES},
    "qwen3_next": {"full_attention": ATTENTION, "linear_attention": STATES},
    "lfm2": {"full_attention": ATTENTION, "conv": STATES},
}
"""Kinds of layers by family, under their names in `layer_types` of config.json."""


@dataclass(frozen=True, slots=True)
class StateLayer:
    """One layer's part with states."""

    kind: Kind
    linear: tuple[tuple[str, int, int], ...]
    """Name, inputs and outputs of its linear layers, by their Hugging Face names."""
    others: int
    """Parameters of its convolution, decays, norm and biases."""
    channels: int
    """Of its convolution."""
    kernel: int
    """Tokens that the convolution sees, all of which its state has."""
    heads: int = 0
    key_dim: int = 0
    """Of one head; of a state space, its state size."""
    value_dim: int = 0
    """Of one head."""
    chunk: int = 1
    """Tokens that are computed together; rows are filled up to whole chunks."""

    @property
    def parameters(self) -> int:
        return self.others + sum(inputs * outputs for _, inputs, outputs in self.linear)

    @property
    def key_size(self) -> int:
        """Numbers per token in the keys of all heads."""
        return self.heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Numbers per token in the values of all heads."""
        return self.heads * self.value_dim

    def state_bytes(self, bytes_each: int) -> int:
        """Of one sequence: what the convolution sees, and the recurrent state, which is float32 always."""
        return bytes_each * self.channels * self.kernel + 4 * self.heads * self.key_dim * self.value_dim


def layer_types(family: str, get: Callable[..., Any], layers: int) -> list[str]:
    """Names of a model's layers in order, as its class fills them in where config.json does not have them.

    Args:
        get: a key's value, or the second argument.
    """
    if found := get("layer_types"):
        return list(found)
    if family == "lfm2":
        attending = get("full_attn_idxs", range(layers))
        return ["full_attention" if layer in attending else "conv" for layer in range(layers)]
    every = int(get("full_attention_interval", 4))
    return ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


def state_layer(family: str, number: Callable[[str], int], get: Callable[..., Any]) -> StateLayer:
    """The layer with states of a family's config.json.

    Args:
        number: a key's value, a whole number.
        get: a key's value, or the second argument.
    """
    if family == "lfm2":
        return _convolution(number, bool(get("conv_bias", False)))
    return _delta_rule(number, is_fused=family == "qwen3_next")


def _convolution(number: Callable[[str], int], has_bias: bool) -> StateLayer:
    """The gated short convolution of LFM2."""
    h, kernel = number("hidden_size"), number("conv_L_cache")
    linear = ("in_proj", h, 3 * h), ("out_proj", h, h)
    return StateLayer("convolution", linear, h * kernel + 5 * h * has_bias, channels=h, kernel=kernel)


def _delta_rule(number: Callable[[str], int], *, is_fused: bool) -> StateLayer:
    """Gated DeltaNet (arXiv:2412.06464), whose projections Qwen3-Next has fused."""
    h, heads, kernel = number("hidden_size"), number("linear_num_value_heads"), number("linear_conv_kernel_dim")
    key_dim, value_dim = number("linear_key_head_dim"), number("linear_value_head_dim")
    keys, values = number("linear_num_key_heads") * key_dim, heads * value_dim
    channels = 2 * keys + values
    if is_fused:
        projections = (("in_proj_qkvz", h, channels + values), ("in_proj_ba", h, 2 * heads))
    else:
        gates = (("in_proj_b", h, heads), ("in_proj_a", h, heads))
        projections = (("in_proj_qkv", h, channels), ("in_proj_z", h, values), *gates)
    return StateLayer(
        "delta rule",
        linear=(*projections, ("out_proj", values, h)),
        others=channels * kernel + 2 * heads + value_dim,
        channels=channels,
        kernel=kernel,
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        chunk=DELTA_CHUNK,
    )
