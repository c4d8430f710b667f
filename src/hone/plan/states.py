"""Layers with states, in place of attention or beside it: linear attention, short convolutions, state spaces.

Which parts each layer of a family has is one table (`LAYER_KINDS`); what its layers with states weigh and keep follows
from the keys of its config.json. A sequence has states of one size however long it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

DELTA_CHUNK = 64
"""Tokens of a chunk of the gated delta rule in Transformers."""
CALLED_PAST = ("out_proj",)
"""Layers of a state space whose weight a kernel may read past the layer, so that no adapter is beside one; the families
are in `model.lora.NEVER_CALLED`."""

StateKind = Literal["delta rule", "convolution", "state space"]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The parts of a layer: what mixes tokens, and a feed-forward block, dense or of experts."""

    attends: bool = False
    has_states: bool = False
    has_block: bool = True


ATTENTION, STATES, BOTH = LayerKind(attends=True), LayerKind(has_states=True), LayerKind(attends=True, has_states=True)
ATTENTION_ALONE, STATES_ALONE = replace(ATTENTION, has_block=False), replace(STATES, has_block=False)
BLOCK_ALONE = LayerKind()
LAYER_KINDS: dict[str, dict[str, LayerKind]] = {
    "qwen3_5_text": {"full_attention": ATTENTION, "linear_attention": STATES},
    "qwen3_next": {"full_attention": ATTENTION, "linear_attention": STATES},
    "lfm2": {"full_attention": ATTENTION, "conv": STATES},
    "mamba2": {"linear_attention": STATES_ALONE},
    "falcon_h1": {"hybrid": BOTH},
    "nemotron_h": {
        "linear_attention": STATES_ALONE,
        "full_attention": ATTENTION_ALONE,
        "mlp": BLOCK_ALONE,
        "moe": BLOCK_ALONE,
    },
}
"""Kinds of layers by family, under their names in `layer_types` of config.json."""
NEMOTRON_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Kinds of layers in `hybrid_override_pattern`, as repositories have them."""
EARLIER_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Of kinds of layers, in config.json; Transformers reads them as today's."""


@dataclass(frozen=True, slots=True)
class StateLayer:
    """One layer's part with states."""

    kind: StateKind
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
    is_normed: bool = True
    """A state space's results are normed before they are projected, and not only gated."""
    is_scaled: bool = False
    """What it projects is scaled by numbers in float32, so that a trainer in bfloat16 computes on in float32."""

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

    def kept(self, p: int, length: int) -> float:
        """Bytes per token that one layer's part with states keeps for its backward pass.

        Counted from what autograd saves in Transformers' own PyTorch code; fused kernels of other libraries keep far
        less. The gated delta rule computes chunks of tokens in float32, whatever the model's precision: five matrices
        of a chunk by a chunk per head, and copies of queries, keys and values. Mamba 2's state space as well: decays,
        scores and their product, each a chunk by a chunk per head; five copies of keys and four of values by chunks;
        states between chunks twice, and of each row one more.

        Args:
            p: bytes per number of the model's precision.
            length: tokens of a row.
        """
        if self.kind == "convolution":  # two gates and what they gate, the convolution's input and result, the product
            return 6 * p * self.channels
        if self.kind == "delta rule":
            inside = 4 * (5 * self.chunk + 10) * self.heads + 4 * self.key_size * self.value_dim / self.chunk
            inside += (52 if p == 4 else 32) * self.key_size + (36 if p == 4 else 30) * self.value_size
            return 2 * p * self.channels + self._filled(length) * inside + 8
        inside = 4 * ((3 * self.chunk + 3) * self.heads + 5 * self.key_size + 4 * self.value_size)
        between = 4 * (2 * -(-length // self.chunk) + 1) * self.key_size * self.value_dim / length
        results = (20 if self.is_normed else 12) * self.value_size
        if p == 2:
            results += (-2 if self.is_scaled else 6 * self.is_normed) * self.value_size
        projected = (4 if self.is_scaled else p) * (self.value_size + self.channels + self.heads)
        convolved = (8 if p == 4 or self.is_scaled else 2) * self.channels
        return self._filled(length) * inside + between + results + projected + convolved + 12 * self.heads + 16

    def added_backward(self, p: int, length: int) -> float:
        """Bytes per token that its backward pass adds at its most to what is kept; arguments as `kept`."""
        if self.kind == "convolution":
            return 5 * p * self.channels
        if self.kind == "delta rule":
            return self._filled(length) * 4 * (4 * self.chunk * self.heads + 5 * self.key_size)
        # Either what follows the products of chunks goes backward, or the decays inside a chunk, when that is used up.
        states = self.key_size * self.value_dim / self.chunk
        late, early = 1.5 * self.chunk * self.heads, 2 * self.key_size + 2 * states + 2.5 * self.value_size
        return self._filled(length) * 4 * max(early, late)

    def forward(self, p: int, length: int) -> float:
        """Bytes per token alive at once inside it without gradients; arguments as `kept`."""
        if self.kind == "convolution":
            return 6 * p * self.channels
        if self.kind == "delta rule":
            inside = 4 * (4 * self.chunk * self.heads + 6 * self.key_size + 4 * self.value_size)
            return p * (2 * self.channels + self.value_size) + self._filled(length) * inside
        states = self.key_size * self.value_dim / self.chunk
        inside = 4 * (3 * self.chunk * self.heads + 3 * self.key_size + 7 * self.value_size + 2 * states)
        each = 4 if self.is_scaled else p
        return each * (2 * self.channels + self.value_size) + self._filled(length) * inside

    def _filled(self, length: int) -> float:
        """Tokens of a row that is filled up to whole chunks, over its own."""
        return -(-length // self.chunk) * self.chunk / length


def layer_types(family: str, get: Callable[..., Any], layers: int) -> list[str]:
    """Names of a model's layers in order, as its class fills them in where config.json does not have them.

    Args:
        get: a key's value, or the second argument.
    """
    if family in ("mamba2", "falcon_h1"):  # whose layers are all alike
        return [*LAYER_KINDS[family]] * layers
    if family == "nemotron_h":
        listed = get("layers_block_type") or get("layer_types") or get("hybrid_override_pattern")
        return [({**EARLIER_NAMES, **NEMOTRON_LETTERS}).get(str(name), str(name)) for name in listed]
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
        h, kernel, is_biased = number("hidden_size"), number("conv_L_cache"), bool(get("conv_bias", False))
        linear = ("in_proj", h, 3 * h), ("out_proj", h, h)
        return StateLayer("convolution", linear, h * kernel + 5 * h * is_biased, channels=h, kernel=kernel)
    if family in STATE_SPACES:
        return _state_space(family, number, get)
    return _delta_rule(number, is_fused=family == "qwen3_next")


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


MAMBA_2 = {
    "heads": "num_heads",
    "head_dim": "head_dim",
    "state": "state_size",
    "groups": "n_groups",
    "kernel": "conv_kernel",
    "chunk": "chunk_size",
    "convolution's bias": "use_conv_bias",
    "in_proj's bias": "use_bias",
    "out_proj's bias": "use_bias",
}
STATE_SPACES: dict[str, dict[str, str]] = {
    "mamba2": MAMBA_2,
    "falcon_h1": {
        "heads": "mamba_n_heads",
        "head_dim": "mamba_d_head",
        "state": "mamba_d_state",
        "groups": "mamba_n_groups",
        "kernel": "mamba_d_conv",
        "chunk": "mamba_chunk_size",
        "convolution's bias": "mamba_conv_bias",
        "in_proj's bias": "mamba_proj_bias",
        "out_proj's bias": "projectors_bias",
    },
    "nemotron_h": {
        **MAMBA_2,
        "heads": "mamba_num_heads",
        "head_dim": "mamba_head_dim",
        "state": "ssm_state_size",
    },
}
"""Keys of config.json that have the shape of a family's state spaces."""
EARLIER_KEYS = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "chunk_size": "mamba_chunk_size",
    "use_conv_bias": "mamba_conv_bias",
}
"""Of Nemotron-H's; its class prefers them where they are there."""


def _state_space(family: str, number: Callable[[str], int], get: Callable[..., Any]) -> StateLayer:
    """Mamba 2 (arXiv:2405.21060)."""
    keys: Mapping[str, str] = STATE_SPACES[family]
    if family == "nemotron_h":
        keys = {
            part: EARLIER_KEYS[key] if get(EARLIER_KEYS.get(key, "")) is not None else key for part, key in keys.items()
        }
    h, heads, state = (number(key) for key in ("hidden_size", keys["heads"], keys["state"]))
    if get(keys["head_dim"]) == "auto":
        head_dim = (get("mamba_d_ssm") or number("mamba_expand") * h) // heads
    else:
        head_dim = number(keys["head_dim"])
    inner, is_normed = heads * head_dim, family != "falcon_h1" or bool(get("mamba_rms_norm"))
    channels, kernel = inner + 2 * number(keys["groups"]) * state, number(keys["kernel"])
    projected = inner + channels + heads
    biases = channels * bool(get(keys["convolution's bias"]))
    biases += projected * bool(get(keys["in_proj's bias"])) + h * bool(get(keys["out_proj's bias"]))
    return StateLayer(
        "state space",
        linear=(("in_proj", h, projected), ("out_proj", inner, h)),
        others=channels * kernel + 3 * heads + inner * is_normed + biases,
        channels=channels,
        kernel=kernel,
        heads=heads,
        key_dim=state,
        value_dim=head_dim,
        chunk=number(keys["chunk"]),
        is_normed=is_normed,
        is_scaled=family == "falcon_h1",
    )
