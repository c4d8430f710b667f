"""Parameters of a low-rank adapter: rank x (inputs + outputs) of every linear layer that has one."""

from __future__ import annotations

from hone.plan.architecture import Architecture


def linear_layers(arch: Architecture) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of the linear layers of one layer, by their Hugging Face names; experts left out."""
    h, q, kv, inner = arch.hidden, arch.q_size, arch.kv_size, arch.inner
    found = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h)}
    return found | {"gate_proj": (h, inner), "up_proj": (h, inner), "down_proj": (inner, h)}


def adapter_parameters(arch: Architecture, rank: int, targets: tuple[str, ...] | None) -> int:
    """Trained parameters of an adapter; `targets` None means every linear layer but the output layer."""
    layers = linear_layers(arch)
    chosen = layers if targets is None else {name: layers[name] for name in targets if name in layers}
    return arch.layers * rank * sum(inputs + outputs for inputs, outputs in chosen.values())
