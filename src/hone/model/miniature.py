"""Miniature of an architecture: the same class with few layers of each kind it has, and narrow ones.

What Hone must know of a class (does it share caches, train, export) does not depend on its size; a miniature answers in
a second or two on a CPU. Not here: what is tried with it (`run/trial.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hone.model.hf import auto_class, has_tower

SMALL_ENOUGH, TOO_LARGE = 1_000_000, 40_000_000
"""Parameters of an architecture that is its own miniature, and of one that would take too long."""
VOCAB, INNER, EXPERTS = 256, 64, 4
"""Sizes in a miniature, at most."""
LEAST_LAYERS = 2
TOWER_BLOCKS = 2
"""Blocks of a vision tower, and heads in each."""
TOWER_WIDTHS = ("hidden_size", "embed_dim", "intermediate_size")
"""Widths of a vision tower, which shrink as its number of heads does."""


def miniature(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """The config of a small model of the same class, or None where none of the attempts can be built.

    Layers are the first ones, as many as it takes to have one of each kind; then the vocabulary, feed-forward blocks,
    experts and attention heads become fewer as far as the class allows. A vision tower has two blocks.
    """

    def outline(keys: PreTrainedConfig) -> Any:
        with torch.device("meta"):
            return auto_class(keys).from_config(keys)

    whole = outline(config)
    if _size(whole) <= SMALL_ENOUGH:
        return config
    for changes in _ATTEMPTS:
        try:
            keys = _shallow(config.get_text_config(decoder=True), whole.get_decoder() if has_tower(config) else whole)
            for change in changes:
                keys |= change(keys)
            small = type(config).from_dict(_around(config, keys) if has_tower(config) else keys)
            if _size(outline(small)) <= TOO_LARGE and _computes(small):
                return small
        except Exception:  # boundary: any class may want another ratio of sizes; the next attempt changes fewer
            continue
    return None


def _computes(config: PreTrainedConfig) -> bool:
    """Whether the class runs in these sizes; raises whatever it raises if not."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model: Any = auto_class(config).from_config(config)
        return model.eval()(torch.zeros(1, 3, dtype=torch.int64), use_cache=False).logits.isfinite().all().item()


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _shallow(config: PreTrainedConfig, whole: Any) -> dict[str, Any]:
    """Only the first layers, until every kind has come once."""
    keys, count = config.to_dict(), config.num_hidden_layers
    stack = next(m for m in whole.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    per_layer = [v for v in keys.values() if isinstance(v, list) and len(v) == count and isinstance(v[0], str)]
    kinds = [
        (
            str([(name, tuple(p.shape)) for name, p in layer.named_parameters()]),
            str([value[number] for value in per_layer]),
        )
        for number, layer in enumerate(stack)
    ]
    depth = max(LEAST_LAYERS, 1 + max(kinds.index(kind) for kind in set(kinds)))
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    cut = {key: value[:depth] for key, value in keys.items() if isinstance(value, list) and len(value) == count}
    return keys | cut | ({name: depth} if name in keys else {})


def _around(config: PreTrainedConfig, text: dict[str, Any]) -> dict[str, Any]:
    """The keys of a whole model around those of its language model, with a small vision tower."""
    whole = config.to_dict()
    tower = dict(whole["vision_config"])
    depth = next(name for name in ("depth", "num_hidden_layers") if name in tower)
    heads = next(name for name in ("num_heads", "num_attention_heads") if name in tower)
    factor = max(1, tower[heads] // TOWER_BLOCKS)
    tower |= {depth: min(tower[depth], TOWER_BLOCKS), heads: tower[heads] // factor}
    for name in TOWER_WIDTHS:
        if isinstance(tower.get(name), int):
            tower[name] //= factor
    for name in ("out_hidden_size", *(("hidden_size",) if config.model_type == "qwen2_vl" else ())):
        tower |= {name: text["hidden_size"]} if name in tower else {}
    tower |= {name: [0] for name in ("fullatt_block_indexes", "deepstack_visual_indexes") if name in tower}
    if "image_seq_length" in whole and "downsample_ratio" in whole:  # InternVL's tiles, of 2 x 2 tokens
        side = 2 * round(1 / whole["downsample_ratio"])
        tower["image_size"], whole["image_seq_length"] = [side * pixels for pixels in tower["patch_size"]], 4
    ids = [
        key for key, value in whole.items() if isinstance(value, int) and key.endswith(("_token_id", "_token_index"))
    ]
    marks = {key: text["vocab_size"] - 1 - place for place, key in enumerate(ids) if whole[key] >= text["vocab_size"]}
    return whole | marks | {"text_config": text, "vision_config": tower}


def _words(keys: dict[str, Any]) -> dict[str, Any]:
    size = min(keys["vocab_size"], VOCAB)
    outside = {
        key: None
        for key, value in keys.items()
        if key in ("pad_token_id", "bos_token_id", "eos_token_id") and not (isinstance(value, int) and value < size)
    }
    return {"vocab_size": size, **outside}


def _inner(keys: dict[str, Any]) -> dict[str, Any]:
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp")
    return {
        key: min(value, INNER)
        for key, value in keys.items()
        if isinstance(value, int) and (key in names or key.endswith("_intermediate_size"))
    }


def _experts(keys: dict[str, Any]) -> dict[str, Any]:
    most = {
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "n_routed_experts": EXPERTS,
        "moe_num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    return {key: min(keys[key], size) for key, size in most.items() if isinstance(keys.get(key), int)}


def _heads(keys: dict[str, Any]) -> dict[str, Any]:
    """Fewer heads of the same size, as many of them per key and value head, and as much less of the hidden size and of
    what goes with it in layers with states."""
    heads, hidden = (next((n for n in names if n in keys), "") for names in (HEADS, HIDDEN))
    if not hidden:
        return {}
    many, kv_heads = keys.get(heads), keys.get("num_key_value_heads")
    changed: dict[str, Any] = {}
    if many is None:
        factor = max(1, keys[hidden] // INNER // 4)
    else:
        few = many // kv_heads if kv_heads and kv_heads != many else next(n for n in (2, 3, 1) if many % n == 0)
        factor = many // few
        changed = {heads: few} | ({"num_key_value_heads": few if kv_heads == many else 1} if kv_heads else {})
    if keys.get("linear_num_key_heads"):
        changed |= {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2 * keys["linear_num_value_heads"] // keys["linear_num_key_heads"],
        }
    sizes = [keys[name] for name in (hidden, *WITH_HIDDEN) if keys.get(name)]
    if any(size % factor for size in sizes):
        return {}
    return changed | {name: keys[name] // factor for name in (hidden, *WITH_HIDDEN) if keys.get(name)}


_ATTEMPTS = (
    (_words, _inner, _experts, _heads),
    (_words, _inner, _heads),
    (_words, _inner, _experts),
    (_words,),
    (),
)
"""What is made smaller, the smallest result first."""
HEADS, HIDDEN = ("num_attention_heads", "n_head"), ("hidden_size", "n_embd")
WITH_HIDDEN = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "mamba_d_ssm", "num_heads", "lru_width")
"""Sizes of layers with states, which the hidden size must fit."""
