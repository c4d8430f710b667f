"""The shape that a config.json describes: which keys a family has, and what its class fills in for missing ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hone.config.derived import RUNS_ON, why_rows
from hone.errors import DataError, nearest
from hone.plan.architecture import Architecture, Experts, Latent
from hone.plan.states import LAYER_KINDS, STATE_SPACES, LayerKind, layer_types, state_layer
from hone.plan.tower_shape import tower_of


class _Keys:
    """The keys of a config.json, with what the model type's class fills in for missing ones."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self._config, self._source = config, source
        self.model_type = config.get("model_type")
        if self.model_type not in FAMILIES:
            close = nearest(str(self.model_type), list(FAMILIES))
            hint = f" Did you mean {close}?" if close else ""
            raise DataError(
                f"{source}: model_type {self.model_type!r} is not supported by hone plan.{hint} It knows: "
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
_IN_FLOAT32 = {"weighs_in_float32": True, "routes_in_float32": True}
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
    latent: Latent | None = None
    head_dim = int(keys.get("head_dim", hidden // heads)) if attends else 0
    if family.startswith("deepseek"):
        q_rank = keys.get("q_lora_rank")
        latent = Latent(
            q_rank=None if q_rank is None else int(q_rank),
            kv_rank=keys.number("kv_lora_rank"),
            rope_dim=keys.number("qk_rope_head_dim"),
            nope_dim=keys.number("qk_nope_head_dim"),
            value_dim=keys.number("v_head_dim"),
        )
        head_dim = latent.nope_dim + latent.rope_dim
    experts, named = _experts(keys, types), {"layer_types": types} if types else {}
    return Architecture(
        model_type=family,
        layers=layers,
        hidden=hidden,
        inner=_inner(keys, kinds),
        vocab=keys.number("vocab_size"),
        heads=heads,
        kv_heads=int(keys.get("num_key_value_heads", heads)) if attends else 0,
        head_dim=head_dim,
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


def _inner(keys: _Keys, kinds: tuple[LayerKind, ...]) -> int:
    """Width of a dense feed-forward block; 0 where no layer has any."""
    if kinds and not any(kind.has_block for kind in kinds):
        return 0
    if keys.model_type != "lfm2":
        return keys.number("intermediate_size")
    # LFM2's class makes its width of the one in config.json.
    inner, multiple = int(keys.get("block_ff_dim", keys.number("intermediate_size"))), keys.number("block_multiple_of")
    if not keys.get("block_auto_adjust_ff_dim"):
        return inner
    return multiple * math.ceil(int(float(keys.get("block_ffn_dim_multiplier")) * int(2 * inner / 3)) / multiple)


def _experts(keys: _Keys, types: list[str]) -> Experts | None:
    """
    Args:
        types: names of the layers, of a family with layers with states.
    """
    family = keys.model_type
    if family == "mixtral":
        count, active = keys.number("num_local_experts"), keys.number("num_experts_per_tok")
        return Experts(count, active, keys.number("intermediate_size"), weighs_in_float32=True)
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
        return Experts(count, active, inner, shared, has_correction_bias=corrected, **_IN_FLOAT32)
    if family == "nemotron_h" and "moe" in types:
        inner, active = keys.number("moe_intermediate_size"), keys.number("num_experts_per_tok")
        count, shared = keys.number("n_routed_experts"), keys.number("moe_shared_expert_intermediate_size")
        latent = keys.number("moe_latent_size")
        return Experts(count, active, inner, shared, has_correction_bias=True, latent=latent, **_IN_FLOAT32)
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
