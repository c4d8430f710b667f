"""A model's shape and its exact parameter counts.

Dense and mixture-of-experts decoders, grouped-query and latent attention, layers with states (`states.py`). Counts are
exact: every weight that Transformers' class of the same config has, and tests compare them. Counted too are the
correction biases of DeepSeek-V3's routers, which that class keeps as buffers; not counted is its multi-token prediction
layer, which the class does not have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from hone.plan.states import ATTENTION, CALLED_PAST, LayerKind, StateLayer
from hone.plan.tower_shape import Tower
from hone.sizes import divided_dimension


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): what is cached is one low-rank vector per token."""

    q_rank: int | None
    """None: queries are projected directly."""
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the feed-forward block."""

    count: int
    active: int
    """Experts that compute each token."""
    inner: int
    shared_inner: int = 0
    """Width of the experts that compute every token, all together."""
    has_shared_gate: bool = False
    has_correction_bias: bool = False
    """One number per expert beside the router's matrix (DeepSeek-V3)."""
    latent: int = 0
    """Numbers per token that routed experts compute with, between two projections of their own (Nemotron-H); 0: all of
    the residual stream's."""
    weighs_in_float32: bool = False
    """A router's weights stay float32, and so does what experts return once it is weighted."""
    routes_in_float32: bool = False
    """Routers read the residual stream in float32, and keep that copy."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters by component, of all layers together."""

    embedding: int
    attention: int
    """And of layers with states."""
    feed_forward: int
    """Dense blocks and shared experts."""
    experts: int
    """Routed experts."""
    router: int
    norms: int
    output: int
    """The output layer; 0 where it is the embedding."""

    @property
    def total(self) -> int:
        return (
            self.embedding + self.attention + self.feed_forward + self.experts + self.router + self.norms + self.output
        )


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of one decoder."""

    model_type: str
    layers: int
    hidden: int
    inner: int
    """Width of a dense feed-forward block."""
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    """Whether the output layer is the embedding."""
    max_positions: int
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    block_matrices: int = 3
    """Of a feed-forward block, or of one expert; two where nothing is gated."""
    qk_norm: bool = False
    norms_per_layer: int = 2
    latent: Latent | None = None
    experts: Experts | None = None
    dense_layers: int = 0
    """With experts: layers that have a dense block all the same."""
    tower: Tower | None = None
    """Beside the language model, which everything else here describes."""
    caps_scores: bool = False
    """Attention caps its scores, so that Transformers' class holds all of them."""
    why_rows: str | None = None
    """Why Transformers' class computes padded rows; None: it computes each prompt once for its samples."""
    gates_attention: bool = False
    """Beside the queries there are as many gates of attention's output."""
    states: StateLayer | None = None
    """What layers have that have states."""
    mixed_kinds: tuple[LayerKind, ...] = ()
    """Of each layer in order, where some have states."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Of each layer, in order."""
        return self.mixed_kinds or (ATTENTION,) * self.layers

    @property
    def attention_layers(self) -> int:
        return sum(kind.attends for kind in self.mixed_kinds) if self.mixed_kinds else self.layers

    @property
    def expert_layers(self) -> int:
        return sum(kind.has_block for kind in self.kinds) - self.dense_layers if self.experts else 0

    @property
    def q_size(self) -> int:
        """Numbers per token in all queries."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Numbers per token in all keys, or in all values."""
        return self.kv_heads * self.head_dim

    @property
    def parameters(self) -> Parameters:
        """Exact counts by component."""
        return _counted(self)

    @property
    def total_parameters(self) -> int:
        return self.parameters.total

    @property
    def active_parameters(self) -> int:
        """Parameters that compute one token: all but the experts that it is not sent to."""
        counts = self.parameters
        if self.experts is None:
            return counts.total
        return counts.total - counts.experts + counts.experts * self.experts.active // self.experts.count

    @property
    def layer_parameters(self) -> int:
        """Parameters of the largest layer."""
        moe, norms = self.experts, self.norms_per_layer * self.hidden
        if moe is None:
            block = self.block_matrices * self.hidden * self.inner
        else:
            numbers = moe.count * moe.inner * (moe.latent or self.hidden) + moe.shared_inner * self.hidden
            block = self.block_matrices * numbers + moe.count * self.hidden + 2 * moe.latent * self.hidden
        return norms + max(_mixer_parameters(self, kind) + block * kind.has_block for kind in set(self.kinds))

    @property
    def root_parameters(self) -> int:
        """Embedding, last norm and output layer: what is in no layer."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def active_inner(self) -> int:
        """Feed-forward width that computes one token in the widest kind of layer."""
        return self.experts.active * self.experts.inner + self.experts.shared_inner if self.experts else self.inner

    def kv_bytes_per_token(self, *, bytes_each: int = 2, tensor_parallel: int = 1) -> int:
        """Bytes that one token takes in one device's KV cache.

        Tensor parallelism divides the heads of keys and values, and copies them where there are fewer heads than
        devices. The latent of MLA is one vector for all heads, so every device keeps all of it.
        """
        if self.latent:
            return self.layers * (self.latent.kv_rank + self.latent.rope_dim) * bytes_each
        return 2 * self.attention_layers * math.ceil(self.kv_heads / tensor_parallel) * self.head_dim * bytes_each

    def state_bytes(self, bytes_each: int) -> int:
        """Bytes of the states of one sequence, whatever its length, in all layers; 0 where all layers attend."""
        layers = sum(kind.has_states for kind in self.mixed_kinds)
        return layers * self.states.state_bytes(bytes_each) if self.states else 0


def padding_parameters(arch: Architecture, ranks: int) -> int:
    """Padding that FSDP2 adds to one layer's experts so that each of `ranks` ranks has the same number of parameters;
    see `sizes.divided_dimension`."""
    if arch.experts is None:
        return 0
    count, inner, width = arch.experts.count, arch.experts.inner, arch.experts.latent or arch.hidden
    stacks = (count, (arch.block_matrices - 1) * inner, width), (count, width, inner)
    missing = -count % ranks
    return sum(missing * shape[1] * shape[2] for shape in stacks if divided_dimension(shape, ranks) == 0)


@cache
def _counted(arch: Architecture) -> Parameters:
    expert_layers = arch.expert_layers
    feed_forward = (sum(kind.has_block for kind in arch.kinds) - expert_layers) * _block_parameters(arch, arch.inner)
    routed = router = 0
    if arch.experts:
        moe = arch.experts
        routed = expert_layers * moe.count * arch.block_matrices * (moe.latent or arch.hidden) * moe.inner
        per_expert = arch.hidden + moe.has_correction_bias
        router = expert_layers * (moe.count * per_expert + arch.hidden * moe.has_shared_gate)
        latent = 2 * arch.hidden * moe.latent + (arch.hidden + moe.latent) * (arch.mlp_bias and moe.latent > 0)
        shared = _block_parameters(arch, moe.shared_inner) if moe.shared_inner else 0
        feed_forward += expert_layers * (shared + latent)
    return Parameters(
        embedding=arch.vocab * arch.hidden,
        attention=sum(_mixer_parameters(arch, kind) - _inside_norms(arch) * kind.attends for kind in arch.kinds),
        feed_forward=feed_forward,
        experts=routed,
        router=router,
        norms=(arch.layers * arch.norms_per_layer + 1) * arch.hidden + arch.attention_layers * _inside_norms(arch),
        output=0 if arch.tied else arch.vocab * arch.hidden,
    )


def _block_parameters(arch: Architecture, inner: int) -> int:
    """Of a dense feed-forward block, or of shared experts."""
    others = arch.block_matrices - 1
    return (others + 1) * arch.hidden * inner + (others * inner + arch.hidden) * arch.mlp_bias


def _mixer_parameters(arch: Architecture, kind: LayerKind) -> int:
    """Of what mixes tokens in one layer: attention with its norms, and a part with states."""
    count = arch.states.parameters if kind.has_states and arch.states else 0
    if not kind.attends:
        return count
    count += _inside_norms(arch)
    h, latent = arch.hidden, arch.latent
    if latent is None:
        projected = (1 + arch.gates_attention) * arch.q_size + 2 * arch.kv_size
        return count + (h + arch.qkv_bias) * projected + (arch.q_size + arch.out_bias) * h
    queries = h * arch.q_size if latent.q_rank is None else latent.q_rank * (h + arch.q_size)
    down = h * (latent.kv_rank + latent.rope_dim)
    up = latent.kv_rank * arch.heads * (latent.nope_dim + latent.value_dim)
    return count + queries + down + up + arch.heads * latent.value_dim * h


def _inside_norms(arch: Architecture) -> int:
    """Parameters of the norms inside one layer's attention."""
    if arch.latent:
        return arch.latent.kv_rank + (arch.latent.q_rank or 0)
    return 2 * arch.head_dim if arch.qk_norm else 0


BLOCK = ("gate_proj", "up_proj", "down_proj")
"""Linear layers of a feed-forward block."""


def linear_layers(arch: Architecture, kind: LayerKind = ATTENTION) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of the linear layers of one layer, by their Hugging Face names; experts left out."""
    h, q, kv, inner = arch.hidden, arch.q_size, arch.kv_size, arch.inner
    out, *block = ("out_proj", "w1", "w3", "w2") if arch.model_type == "lfm2" else ("o_proj", *BLOCK)
    found = {"q_proj": (h, (1 + arch.gates_attention) * q), "k_proj": (h, kv), "v_proj": (h, kv), out: (q, h)}
    mixers = found if kind.attends else {}
    if kind.has_states and arch.states:
        mixers |= {name: (inputs, outputs) for name, inputs, outputs in arch.states.linear}
    if not kind.has_block:
        return mixers
    *into, back = block[-arch.block_matrices :]
    return mixers | dict.fromkeys(into, (h, inner)) | {back: (inner, h)}


def adapter_room(arch: Architecture, rank: int, tensor_parallel: int) -> int:
    """Numbers that vLLM keeps on each device for one adapter (0.32, `create_lora_weights` of `vllm/lora/layers`):
    beside every linear layer, the embedding and the output layer, whatever its targets. Of a divided layer the matrix
    on the side that is not divided is whole; those of embedding and output layer are, too."""
    ways = tensor_parallel
    each = 0
    for name, (inputs, outputs) in linear_layers(arch).items():
        by_rows = name in ("o_proj", "down_proj")
        each += inputs // ways + outputs if by_rows else inputs + outputs // ways
    if arch.experts:
        each += 3 * arch.experts.count * (arch.hidden + arch.experts.inner)
    return rank * (arch.layers * each + 2 * (arch.vocab + arch.hidden))


def adapter_parameters(arch: Architecture, rank: int, targets: tuple[str, ...] | None) -> int:
    """Trained parameters of an adapter; `targets` None means every linear layer but the output layer."""
    uncalled = CALLED_PAST if arch.states and arch.states.kind == "state space" else ()
    return rank * sum(
        inputs + outputs
        for kind in arch.kinds
        for name, (inputs, outputs) in linear_layers(arch, kind).items()
        if (targets is None or name in targets) and not (kind.has_states and name in uncalled)
    )
