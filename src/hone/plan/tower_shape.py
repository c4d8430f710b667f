"""The shape of a vision tower, and its exact parameter count, from the keys of a config.json.

What its passes take is in `towers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hone.errors import DataError


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


def tower_of(kind: str, config: Mapping[str, Any], source: str) -> Tower:
    """The tower of a config.json.

    Args:
        kind: its model type.
        source: what it is called in errors.
    Raises:
        DataError: a width is missing.
    """
    if kind == "internvl":
        return _tile_tower(config, source)
    return _patch_tower(kind, config.get("vision_config") or {}, source)


def _patch_tower(kind: str, keys: Mapping[str, Any], source: str) -> Tower:
    """Of Qwen's families."""
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
    sides = keys.get("image_size", 448), keys.get("patch_size", 14)
    tile, patch = (int(side[0] if isinstance(side, list | tuple) else side) for side in sides)
    merged, values = round(1 / config.get("downsample_ratio", 0.5)) ** 2, 3 * patch**2
    norm = hidden if keys.get("norm_type") == "rms_norm" else 2 * hidden
    attention = 4 * hidden * hidden + hidden + (3 * hidden if keys.get("attention_bias") else 0)
    attention += 2 * hidden if keys.get("use_qk_norm") else 0
    block = attention + 2 * hidden * inner + inner + hidden + 2 * norm + 2 * hidden  # the last: scales of both parts
    count = (values + 1) * hidden + hidden + depth * block
    if keys.get("use_absolute_position_embeddings", True):
        count += ((tile // patch) ** 2 + 1) * hidden
    count += 0 if keys.get("use_mean_pooling", True) else 2 * hidden
    count += hidden if keys.get("use_mask_token") else 0
    count += 2 * merged * hidden + merged * hidden * out + out + out * out + out
    return Tower("internvl", count, depth, hidden, inner, patch, merged, values, out)
