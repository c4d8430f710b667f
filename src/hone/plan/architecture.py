"""A model's shape and its exact parameter counts, from the keys of a config.json alone.

Dense and mixture-of-experts decoders, grouped-query and latent attention, layers with states (`states.py`). Counts are
exact: every weight that Transformers' class of the same config has, and tests compare them. Counted too are the
correction biases of DeepSeek-V3's routers, which that class keeps as buffers; not counted is its multi-token prediction
layer, which the class does not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hone.config.derived import RUNS_ON, why_rows
from hone.config.messages import nearest
from hone.errors import DataError
from hone.plan.states import (
    ATTENTION,
    CALLED_PAST,
    LAYER_KINDS,
    STATE_SPACES,
    LayerKind,
    StateLayer,
    layer_types,
    state_layer,
)
from hone.plan.tower_shape import Tower, tower_of

GIB = 2**30


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
    def state_layers(self) -> int:
        return sum(kind.has_states for kind in self.mixed_kinds)

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
    def matrix_parameters(self) -> int:
        """Active parameters that each token is multiplied with, output layer included: two operations each, forward."""
        return self.active_parameters - (0 if self.tied else self.vocab * self.hidden)

    @property
    def largest_weight(self) -> int:
        """Parameters of the largest weight, at most: of an embedding, or of a layer's fused experts."""
        return max(self.vocab * self.hidden, self.layer_parameters if self.experts else 0)

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
        return self.state_layers * self.states.state_bytes(bytes_each) if self.states else 0

    def as_critic(self) -> Architecture:
        """The same body with one number per token in place of logits; its head is too small to count."""
        return replace(self, tied=True)


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
    attention = (_attention_parameters(arch) + _inside_norms(arch)) * kind.attends
    return attention + (arch.states.parameters if kind.has_states and arch.states else 0)


def _attention_parameters(arch: Architecture) -> int:
    """Of one layer, without its norms."""
    h, latent = arch.hidden, arch.latent
    if latent is None:
        projected = (1 + arch.gates_attention) * arch.q_size + 2 * arch.kv_size
        return (h + arch.qkv_bias) * projected + (arch.q_size + arch.out_bias) * h
    queries = h * arch.q_size if latent.q_rank is None else latent.q_rank * (h + arch.q_size)
    down = h * (latent.kv_rank + latent.rope_dim)
    up = latent.kv_rank * arch.heads * (latent.nope_dim + latent.value_dim)
    return queries + down + up + arch.heads * latent.value_dim * h


def _inside_norms(arch: Architecture) -> int:
    """Parameters of the norms inside one layer's attention."""
    if arch.latent:
        return arch.latent.kv_rank + (arch.latent.q_rank or 0)
    return 2 * arch.head_dim if arch.qk_norm else 0


class _Keys:
    """The keys of a config.json, with what the model type's class fills in for missing ones."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self._config, self._source = config, source
        self.model_type = config.get("model_type")
        if self.model_type not in FAMILIES:
            close = nearest(str(self.model_type), list(FAMILIES))
            hint = f" Did you mean {close}?" if close else ""
            raise DataError(
                f"{source}: model_type {self.model_type!r} is none that hone plan can count.{hint} It knows: "
                f"{', '.join(FAMILIES)}."
            )

    def number(self, name: str) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise DataError(f"{self._source}: {name} must be a whole number (got {value!r}); it is needed to plan.")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        value = self._config.get(name)
        if name == "mamba_d_ssm" and name in self._config:  # for which null says that another key has it
            return value
        return value if value is not None else FAMILIES[str(self.model_type)].get(name, default)


_MOE_DEFAULTS = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
_QWEN_STATES = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32, "vocab_size": 151936},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936},
    "phi3": {},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"qkv_bias": True, **_MOE_DEFAULTS},
    "qwen3_moe": {"num_key_value_heads": 4, **_MOE_DEFAULTS},
    "qwen3_5_text": _QWEN_STATES,
    "qwen3_next": {
        **_QWEN_STATES,
        **_MOE_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "lfm2": {
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "vocab_size": 65536,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    "mamba2": {
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 256,
        "use_conv_bias": True,
    },
    "falcon_h1": {
        "num_key_value_heads": 8,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
    },
    "nemotron_h": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hybrid_override_pattern": "ME*-",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 128,
        "use_conv_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": 0,
    },
    "deepseek_v2": {"first_k_dense_replace": 0},
    "deepseek_v3": {"first_k_dense_replace": 3},
}
"""What can be counted, and what Transformers fills in where a config.json does not say it."""
VISION_LANGUAGE = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "internvl": "qwen2"}
"""Model types with a vision tower, and the language model beside it; InternVL's config.json may name another."""


def architecture_from(config: Mapping[str, Any], *, source: str = "config.json") -> Architecture:
    """The shape that a config.json describes.

    Args:
        source: where it is from, for messages.
    Raises:
        DataError: a model type that cannot be counted, or a key is missing.
    """
    if (kind := str(config.get("model_type"))) in VISION_LANGUAGE:
        text = {**(config.get("text_config") or config)}
        is_tiled = kind == "internvl"
        text["model_type"] = text.get("model_type", VISION_LANGUAGE[kind]) if is_tiled else VISION_LANGUAGE[kind]
        text["tie_word_embeddings"] = config.get("tie_word_embeddings", is_tiled)
        tower = tower_of(kind, config, source)
        return replace(architecture_from(text, source=source), model_type=kind, tower=tower)
    keys = _Keys(config, source)
    family = str(keys.model_type)
    hidden = keys.number("hidden_size")
    layers, types, kinds = _kinds(keys, source)
    attends = not kinds or any(kind.attends for kind in kinds)
    heads = keys.number("num_attention_heads") if attends else 0
    if attends and heads == 0:
        raise DataError(f"{source}: num_attention_heads is 0.")
    biased = bool(keys.get("attention_bias", False)) and family not in ("lfm2", "nemotron_h")
    qwen2_like = family == "qwen2" or (family == "qwen2_moe" and bool(keys.get("qkv_bias")))
    latent = _latent(keys) if family.startswith("deepseek") else None
    experts, named = _experts(keys, types), {"layer_types": types} if types else {}
    return Architecture(
        model_type=family,
        layers=layers,
        hidden=hidden,
        inner=_inner(keys, kinds),
        vocab=keys.number("vocab_size"),
        heads=heads,
        kv_heads=int(keys.get("num_key_value_heads", heads)) if attends else 0,
        head_dim=_head_dim(keys, latent, hidden // heads) if attends else 0,
        tied=bool(keys.get("tie_embedding", keys.get("tie_word_embeddings", False))) and family != "nemotron_h",
        max_positions=int(keys.get("max_position_embeddings", 0)),
        qkv_bias=biased or qwen2_like,
        out_bias=biased and not qwen2_like,
        mlp_bias=bool(keys.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text", "qwen3_5_text", "qwen3_next", "lfm2"),
        block_matrices=2 if family == "nemotron_h" else 3,
        norms_per_layer={"gemma2": 4, "gemma3_text": 4, "mamba2": 1, "nemotron_h": 1}.get(family, 2),
        latent=latent,
        experts=experts,
        dense_layers=_dense_layers(keys, types) if experts else 0,
        caps_scores=bool(keys.get("attn_logit_softcapping")),
        why_rows=RUNS_ON if family in STATE_SPACES else why_rows({**FAMILIES[family], **config, **named}),
        gates_attention=family in ("qwen3_5_text", "qwen3_next"),
        states=state_layer(family, keys.number, keys.get) if kinds else None,
        mixed_kinds=kinds,
    )


def _kinds(keys: _Keys, source: str) -> tuple[int, list[str], tuple[LayerKind, ...]]:
    """How many layers; and of each layer of a family with layers with states, its name as config.json would have it,
    and its kind."""
    family = str(keys.model_type)
    if family not in LAYER_KINDS:
        return keys.number("num_hidden_layers"), [], ()
    layers = 0 if family == "nemotron_h" else keys.number("num_hidden_layers")
    known, named = LAYER_KINDS[family], layer_types(family, keys.get, layers)
    if family == "nemotron_h":  # which has as many layers as it names
        layers = len(named)
    if len(named) != layers or not known.keys() >= set(named):
        raise DataError(
            f"{source}: layer_types must name each of {layers} layers, as {' or '.join(known)} (got {named})."
        )
    return layers, named, tuple(known[name] for name in named)


def _head_dim(keys: _Keys, latent: Latent | None, otherwise: int) -> int:
    return latent.nope_dim + latent.rope_dim if latent else int(keys.get("head_dim", otherwise))


def _inner(keys: _Keys, kinds: tuple[LayerKind, ...]) -> int:
    """Width of a dense feed-forward block; 0 where no layer has any."""
    if kinds and not any(kind.has_block for kind in kinds):
        return 0
    return _lfm2_inner(keys) if keys.model_type == "lfm2" else keys.number("intermediate_size")


def _lfm2_inner(keys: _Keys) -> int:
    """Width of LFM2's feed-forward block, which its class makes of the width in config.json."""
    inner, multiple = int(keys.get("block_ff_dim", keys.number("intermediate_size"))), keys.number("block_multiple_of")
    if not keys.get("block_auto_adjust_ff_dim"):
        return inner
    return multiple * math.ceil(int(float(keys.get("block_ffn_dim_multiplier")) * int(2 * inner / 3)) / multiple)


def _latent(keys: _Keys) -> Latent:
    q_rank = keys.get("q_lora_rank")
    return Latent(
        q_rank=None if q_rank is None else int(q_rank),
        kv_rank=keys.number("kv_lora_rank"),
        rope_dim=keys.number("qk_rope_head_dim"),
        nope_dim=keys.number("qk_nope_head_dim"),
        value_dim=keys.number("v_head_dim"),
    )


def _experts(keys: _Keys, types: list[str]) -> Experts | None:
    """
    Args:
        types: names of the layers, of a family with layers with states.
    """
    family = keys.model_type
    if family == "mixtral":
        count, active = keys.number("num_local_experts"), keys.number("num_experts_per_tok")
        return Experts(count, active, keys.number("intermediate_size"))
    if family in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        inner, active = keys.number("moe_intermediate_size"), keys.number("num_experts_per_tok")
        has_shared = family != "qwen3_moe"
        shared = keys.number("shared_expert_intermediate_size") if has_shared else 0
        # Transformers 5.19 saves the number under another name than repositories have it.
        count = keys.number("num_local_experts" if keys.get("num_experts") is None else "num_experts")
        return Experts(count, active, inner, shared, has_shared_gate=has_shared)
    if family in ("deepseek_v2", "deepseek_v3"):
        inner, active = keys.number("moe_intermediate_size"), keys.number("num_experts_per_tok")
        shared = keys.number("n_shared_experts") * inner
        count, corrected = keys.number("n_routed_experts"), family == "deepseek_v3"
        return Experts(count, active, inner, shared, has_correction_bias=corrected)
    if family == "nemotron_h" and "moe" in types:
        inner, active = keys.number("moe_intermediate_size"), keys.number("num_experts_per_tok")
        count, shared = keys.number("n_routed_experts"), keys.number("moe_shared_expert_intermediate_size")
        latent = keys.number("moe_latent_size")
        return Experts(count, active, inner, shared, has_correction_bias=True, latent=latent)
    return None


def _dense_layers(keys: _Keys, types: list[str]) -> int:
    """Layers of a mixture of experts that have a dense block; `types` as in `_experts`."""
    if keys.model_type == "nemotron_h":
        return types.count("mlp")
    if str(keys.model_type).startswith("deepseek"):
        return min(int(keys.get("first_k_dense_replace")), keys.number("num_hidden_layers"))
    if keys.model_type == "mixtral":
        return 0
    dense, every = set(keys.get("mlp_only_layers")), int(keys.get("decoder_sparse_step"))
    layers = range(keys.number("num_hidden_layers"))
    return sum(layer in dense or (layer + 1) % every != 0 for layer in layers)


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
