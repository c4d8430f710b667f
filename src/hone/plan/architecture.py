"""A model's shape and its exact parameter counts, from the keys of a config.json alone.

Dense and mixture-of-experts decoders, grouped-query and latent attention. Counts are exact: every weight that
Transformers' class of the same config has, and tests compare them. Counted too are the correction biases of
DeepSeek-V3's routers, which that class keeps as buffers; not counted is its multi-token prediction layer, which the
class does not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hone.config.derived import why_rows
from hone.config.messages import nearest
from hone.errors import DataError

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


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision tower, of Qwen-VL or InternVL."""

    kind: str
    """The model type."""
    parameters: int
    layers: int
    hidden: int
    inner: int
    patch: int
    """Pixels along a side of a patch."""
    patches_per_token: int
    values_per_patch: int
    """Numbers that describe one."""
    out: int
    """Width of a token's features."""

    @property
    def merged(self) -> int:
        """Width of the patches of a token side by side."""
        return self.patches_per_token * self.hidden


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters by component, of all layers together."""

    embedding: int
    attention: int
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
        moe = self.experts
        attention = _attention_parameters(self) + _norm_parameters(self)
        if moe is None:
            return attention + 3 * self.hidden * self.inner
        widths = moe.count * moe.inner + moe.shared_inner
        return attention + 3 * self.hidden * widths + moe.count * self.hidden

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
        return 2 * self.layers * math.ceil(self.kv_heads / tensor_parallel) * self.head_dim * bytes_each

    def as_critic(self) -> Architecture:
        """The same body with one number per token in place of logits; its head is too small to count."""
        return replace(self, tied=True)


@cache
def _counted(arch: Architecture) -> Parameters:
    expert_layers = arch.layers - arch.dense_layers if arch.experts else 0
    dense_block = 3 * arch.hidden * arch.inner + (2 * arch.inner + arch.hidden) * arch.mlp_bias
    feed_forward = (arch.layers - expert_layers) * dense_block
    routed = router = 0
    if arch.experts:
        moe = arch.experts
        routed = expert_layers * moe.count * 3 * arch.hidden * moe.inner
        per_expert = arch.hidden + moe.has_correction_bias
        router = expert_layers * (moe.count * per_expert + arch.hidden * moe.has_shared_gate)
        feed_forward += expert_layers * 3 * arch.hidden * moe.shared_inner
    return Parameters(
        embedding=arch.vocab * arch.hidden,
        attention=arch.layers * _attention_parameters(arch),
        feed_forward=feed_forward,
        experts=routed,
        router=router,
        norms=arch.layers * _norm_parameters(arch) + arch.hidden,
        output=0 if arch.tied else arch.vocab * arch.hidden,
    )


def _attention_parameters(arch: Architecture) -> int:
    """Of one layer."""
    h, latent = arch.hidden, arch.latent
    if latent is None:
        biases = (arch.q_size + 2 * arch.kv_size) * arch.qkv_bias + h * arch.out_bias
        return h * (arch.q_size + 2 * arch.kv_size) + arch.q_size * h + biases
    queries = h * arch.q_size if latent.q_rank is None else latent.q_rank * (h + arch.q_size)
    down = h * (latent.kv_rank + latent.rope_dim)
    up = latent.kv_rank * arch.heads * (latent.nope_dim + latent.value_dim)
    return queries + down + up + arch.heads * latent.value_dim * h


def _norm_parameters(arch: Architecture) -> int:
    """Of one layer."""
    inside = 2 * arch.head_dim if arch.qk_norm else 0
    if arch.latent:
        inside = arch.latent.kv_rank + (arch.latent.q_rank or 0)
    return arch.norms_per_layer * arch.hidden + inside


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
        return value if value is not None else FAMILIES[str(self.model_type)].get(name, default)


_MOE_DEFAULTS = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
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
        tower = _tile_tower(config, source) if is_tiled else _tower(kind, config.get("vision_config") or {}, source)
        return replace(architecture_from(text, source=source), model_type=kind, tower=tower)
    keys = _Keys(config, source)
    family = str(keys.model_type)
    hidden, heads = keys.number("hidden_size"), keys.number("num_attention_heads")
    if heads == 0:
        raise DataError(f"{source}: num_attention_heads is 0.")
    biased = bool(keys.get("attention_bias", False))
    qwen2_like = family == "qwen2" or (family == "qwen2_moe" and bool(keys.get("qkv_bias")))
    latent = _latent(keys) if family.startswith("deepseek") else None
    experts = _experts(keys)
    return Architecture(
        model_type=family,
        layers=keys.number("num_hidden_layers"),
        hidden=hidden,
        inner=keys.number("intermediate_size"),
        vocab=keys.number("vocab_size"),
        heads=heads,
        kv_heads=int(keys.get("num_key_value_heads", heads)),
        head_dim=latent.nope_dim + latent.rope_dim if latent else int(keys.get("head_dim", hidden // heads)),
        tied=bool(keys.get("tie_word_embeddings", False)),
        max_positions=int(keys.get("max_position_embeddings", 0)),
        qkv_bias=biased or qwen2_like,
        out_bias=biased and not qwen2_like,
        mlp_bias=bool(keys.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        norms_per_layer=4 if family in ("gemma2", "gemma3_text") else 2,
        latent=latent,
        experts=experts,
        dense_layers=_dense_layers(keys) if experts else 0,
        caps_scores=bool(keys.get("attn_logit_softcapping")),
        why_rows=why_rows({**FAMILIES[family], **config}),
    )


def _tower(kind: str, keys: Mapping[str, Any], source: str) -> Tower:
    """Raises DataError for a width that is missing."""
    names = {"qwen2_vl": ("embed_dim", "hidden_size")}.get(kind, ("hidden_size", "out_hidden_size"))
    missing = [name for name in ("depth", *names) if not isinstance(keys.get(name), int)]
    if missing:
        raise DataError(f"{source}: vision_config.{missing[0]} must be a whole number; it is needed to plan.")
    depth, (hidden, out) = keys["depth"], (keys[name] for name in names)
    inner = int(keys.get("intermediate_size", keys.get("mlp_ratio", 4) * hidden))
    patch, merged = keys.get("patch_size", 16 if kind == "qwen3_vl" else 14), keys.get("spatial_merge_size", 2) ** 2
    values = 3 * keys.get("temporal_patch_size", 2) * patch**2
    attention, wide = 4 * hidden * hidden + 4 * hidden, merged * hidden
    merger = wide * wide + wide + wide * out + out
    if kind == "qwen2_5_vl":  # norms without bias, and a gated block
        block = attention + 2 * hidden + 3 * hidden * inner + 2 * inner + hidden
        count = values * hidden + depth * block + hidden + merger
    else:
        block = attention + 4 * hidden + 2 * hidden * inner + inner + hidden
        count = values * hidden + depth * block + 2 * hidden + merger
    if kind == "qwen3_vl":  # learned positions, and mergers behind some blocks
        deeper = len(keys.get("deepstack_visual_indexes", (8, 16, 24)))
        count += hidden + keys.get("num_position_embeddings", 2304) * hidden + deeper * (2 * wide + merger)
    return Tower(kind, count, depth, hidden, inner, patch, merged, values, out)


def _tile_tower(config: Mapping[str, Any], source: str) -> Tower:
    """InternVL's, with the layers between it and the language model."""
    keys = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, **config.get("vision_config", {})}
    out = (config.get("text_config") or {}).get("hidden_size")
    if not isinstance(out, int):
        raise DataError(f"{source}: text_config.hidden_size must be a whole number; it is needed to plan.")
    hidden, inner, depth = (keys[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    tile, patch = (_first(keys.get(name, default)) for name, default in (("image_size", 448), ("patch_size", 14)))
    merged, values = round(1 / config.get("downsample_ratio", 0.5)) ** 2, 3 * patch**2
    norm = hidden if keys.get("norm_type") == "rms_norm" else 2 * hidden
    count = (values + 1) * hidden + hidden + depth * _tile_block(keys, hidden, inner, norm)
    if keys.get("use_absolute_position_embeddings", True):
        count += ((tile // patch) ** 2 + 1) * hidden
    count += 0 if keys.get("use_mean_pooling", True) else 2 * hidden
    count += hidden if keys.get("use_mask_token") else 0
    count += 2 * merged * hidden + merged * hidden * out + out + out * out + out
    return Tower("internvl", count, depth, hidden, inner, patch, merged, values, out)


def _tile_block(keys: Mapping[str, Any], hidden: int, inner: int, norm: int) -> int:
    """Parameters of one block: attention, feed-forward layers, norms and the scales of both."""
    attention = 4 * hidden * hidden + hidden + (3 * hidden if keys.get("attention_bias") else 0)
    between = 2 * hidden if keys.get("use_qk_norm") else 0
    return attention + between + 2 * hidden * inner + inner + hidden + 2 * norm + 2 * hidden


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)


def _latent(keys: _Keys) -> Latent:
    q_rank = keys.get("q_lora_rank")
    return Latent(
        q_rank=None if q_rank is None else int(q_rank),
        kv_rank=keys.number("kv_lora_rank"),
        rope_dim=keys.number("qk_rope_head_dim"),
        nope_dim=keys.number("qk_nope_head_dim"),
        value_dim=keys.number("v_head_dim"),
    )


def _experts(keys: _Keys) -> Experts | None:
    family = keys.model_type
    if family == "mixtral":
        count, active = keys.number("num_local_experts"), keys.number("num_experts_per_tok")
        return Experts(count, active, keys.number("intermediate_size"))
    if family in ("qwen2_moe", "qwen3_moe"):
        inner, active = keys.number("moe_intermediate_size"), keys.number("num_experts_per_tok")
        shared = keys.number("shared_expert_intermediate_size") if family == "qwen2_moe" else 0
        # Transformers 5.19 saves the number under another name than repositories have it.
        count = keys.number("num_local_experts" if keys.get("num_experts") is None else "num_experts")
        return Experts(count, active, inner, shared, has_shared_gate=family == "qwen2_moe")
    if family in ("deepseek_v2", "deepseek_v3"):
        inner, active = keys.number("moe_intermediate_size"), keys.number("num_experts_per_tok")
        shared = keys.number("n_shared_experts") * inner
        count, corrected = keys.number("n_routed_experts"), family == "deepseek_v3"
        return Experts(count, active, inner, shared, has_correction_bias=corrected)
    return None


def _dense_layers(keys: _Keys) -> int:
    """Layers of a mixture of experts that have a dense block."""
    if str(keys.model_type).startswith("deepseek"):
        return min(int(keys.get("first_k_dense_replace")), keys.number("num_hidden_layers"))
    if keys.model_type == "mixtral":
        return 0
    dense, every = set(keys.get("mlp_only_layers")), int(keys.get("decoder_sparse_step"))
    layers = range(keys.number("num_hidden_layers"))
    return sum(layer in dense or (layer + 1) % every != 0 for layer in layers)


def linear_layers(arch: Architecture) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of the linear layers of one layer, by their Hugging Face names; experts left out."""
    h, q, kv, inner = arch.hidden, arch.q_size, arch.kv_size, arch.inner
    found = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h)}
    return found | {"gate_proj": (h, inner), "up_proj": (h, inner), "down_proj": (inner, h)}


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
    layers = linear_layers(arch)
    chosen = layers if targets is None else {name: layers[name] for name in targets if name in layers}
    return arch.layers * rank * sum(inputs + outputs for inputs, outputs in chosen.values())
