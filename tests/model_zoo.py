"""Tiny architectures of every kind that Hone trains or refuses, under their model types: the keys of a config.json."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 0,
}
NO_HEADS = {key: value for key, value in SIZES.items() if "head" not in key}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA_RULE = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}

TEXT: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES,
    "mistral": {**SIZES, "sliding_window": 4},
    "gpt2": {"vocab_size": 48, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 96, "initializer_range": 0.25},
    "gpt_neox": SIZES,
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi3": SIZES,
    "smollm3": SIZES,
    "olmo3": SIZES,
    "glm4": SIZES,
    "gemma2": {**SIZES, "final_logit_softcapping": 2.0},
    "gemma3_text": SIZES,
    "cohere2": SIZES,
    "granite": {**SIZES, "logits_scaling": 2.0},
    "mixtral": {**SIZES, **EXPERTS},
    "qwen3_moe": {**SIZES, **EXPERTS},
    "glm4_moe": {**SIZES, **LATENT},
    "gpt_oss": {**SIZES, **EXPERTS},
    "deepseek_v3": {**SIZES, **LATENT},
    "qwen3_5_text": {**SIZES, **DELTA_RULE, **MIXED},
    "qwen3_next": {**SIZES, **EXPERTS, **DELTA_RULE, **MIXED, "shared_expert_intermediate_size": 16},
    "olmo_hybrid": {**SIZES, **MIXED},
    "lfm2": {**SIZES, "layer_types": ["conv", "full_attention"]},
    "mamba": NO_HEADS,
    "mamba2": {**NO_HEADS, "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "chunk_size": 8},
    "falcon_h1": {**SIZES, **MAMBA_2, "mamba_d_ssm": 64},
    "bamba": {**SIZES, **MAMBA_2, "attn_layer_indices": [1]},
    "granitemoehybrid": {**SIZES, **EXPERTS, **MAMBA_2, "layer_types": ["mamba", "attention"]},
    "jamba": {**SIZES, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": {
        **{key: value for key, value in SIZES.items() if key != "num_hidden_layers"},
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "time_step_limit": [0.0, float("inf")],
    },
    "recurrent_gemma": {**SIZES, "num_hidden_layers": 3, "lru_width": 32},
    "rwkv": {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 96},
    "minimax": {**SIZES, **EXPERTS, **MIXED, "block_size": 16},
    "llama4_text": {**SIZES, **EXPERTS, "intermediate_size_mlp": 48},
    "phi": SIZES,
    "doge": SIZES,
}
"""Language models: architectures that generate text from text with a decoder."""

SEES = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 32, "out_hidden_size": 32}
ANGLES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {**SIZES, **ANGLES},
        "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 32},
    },
    "qwen2_5_vl": {"text_config": {**SIZES, **ANGLES}, "vision_config": SEES},
    "qwen3_vl": {"text_config": {**SIZES, **ANGLES}, "vision_config": {**SEES, "deepstack_visual_indexes": [0]}},
    "qwen3_5": {"text_config": {**SIZES, **DELTA_RULE, **MIXED}, "vision_config": SEES},
    "gemma3": {
        "text_config": SIZES,
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 32,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **SIZES},
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 32,
            "image_size": 28,
            "patch_size": 7,
        },
        "pad_token_id": 0,
        "image_token_id": 47,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **SIZES},
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 16,
            "patch_size": 4,
        },
        "image_seq_length": 4,
        "image_token_id": 47,
    },
    "t5": {"vocab_size": 48, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4},
    "bert": SIZES,
    "qwen3 in float8": {"model_type": "qwen3", **SIZES, "quantization_config": {"quant_method": "fp8"}},
}
"""Others: with towers for pictures, encoder-decoders, encoders, quantized."""
WITH_ADAPTER = (
    "qwen3",
    "gpt2",
    "gemma2",
    "qwen3_moe",
    "glm4_moe",
    "qwen3_next",
    "qwen3_5_text",
    "lfm2",
    "mamba2",
    "jamba",
    "qwen2_5_vl",
    "qwen3_vl",
    "internvl",
)
"""What is tried with LoRA too: every way in which layers are named and called."""


def architecture(model_type: str) -> dict[str, Any]:
    """The keys of one of them, with its model type."""
    return {"model_type": model_type, **TEXT[model_type]}
