"""Tiny mixture-of-experts models of the architectures whose weights Transformers fuses, or keeps as they are."""

from typing import Any

import torch

from hone.model.load import init_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 48}
MOE = {
    "qwen3_moe": {**SIZES, **EXPERTS, "num_experts": 4},
    "deepseek_v3": {
        **{key: size for key, size in SIZES.items() if key != "head_dim"},
        **EXPERTS,
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "gpt_oss": {
        **SIZES,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "mixtral": {**SIZES, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def moe_model(architecture: str, seed: int = 0, **sizes: Any) -> Any:
    keys = {**MOE[architecture], **sizes, "model_type": architecture}
    return init_model(keys, vocab_size=None, seed=seed, dtype=torch.float32, device="cpu")
