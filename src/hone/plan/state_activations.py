"""Activation memory of layers with states in Transformers' own PyTorch code: closed forms, counted from what autograd
saves. Not here: fused kernels of other libraries, which keep far less; attention and feed-forward blocks
(`activations.py`).

The gated delta rule computes chunks of tokens in float32, whatever the model's precision: five matrices of a chunk by a
chunk per head, and copies of queries, keys and values.
"""

from __future__ import annotations

from hone.plan.states import StateLayer


def kept(layer: StateLayer, p: int, length: int) -> float:
    """Bytes per token that one layer's part with states keeps for its backward pass.

    Args:
        p: bytes per number of the model's precision.
        length: tokens of a row.
    """
    if layer.kind == "convolution":  # two gates and what they gate, the convolution's input and result, the product
        return 6 * p * layer.channels
    if layer.kind == "state space":
        return _kept_of_space(layer, p, length)
    inside = 4 * (5 * layer.chunk + 10) * layer.heads + 4 * layer.key_size * layer.value_dim / layer.chunk
    inside += (52 if p == 4 else 32) * layer.key_size + (36 if p == 4 else 30) * layer.value_size
    return 2 * p * layer.channels + _filled(layer, length) * inside + 8


def _kept_of_space(layer: StateLayer, p: int, length: int) -> float:
    """Of Mamba 2's state space, computed by chunks in float32: decays, scores and their product, each a chunk by a
    chunk per head; five copies of keys and four of values by chunks; states between chunks twice, and of each row one
    more."""
    inside = 4 * ((3 * layer.chunk + 3) * layer.heads + 5 * layer.key_size + 4 * layer.value_size)
    between = 4 * (2 * -(-length // layer.chunk) + 1) * layer.key_size * layer.value_dim / length
    results = (20 if layer.is_normed else 12) * layer.value_size
    if p == 2:
        results += (-2 if layer.is_scaled else 6 * layer.is_normed) * layer.value_size
    projected = (4 if layer.is_scaled else p) * (layer.value_size + layer.channels + layer.heads)
    convolved = (8 if p == 4 or layer.is_scaled else 2) * layer.channels
    return _filled(layer, length) * inside + between + results + projected + convolved + 12 * layer.heads + 16


def added_backward(layer: StateLayer, p: int, length: int) -> float:
    """Bytes per token that its backward pass adds at its most to what is kept."""
    if layer.kind == "convolution":
        return 5 * p * layer.channels
    if layer.kind == "state space":
        # Either what follows the products of chunks goes backward, or the decays inside a chunk, when that is used up.
        states = layer.key_size * layer.value_dim / layer.chunk
        late, early = 1.5 * layer.chunk * layer.heads, 2 * layer.key_size + 2 * states + 2.5 * layer.value_size
        return _filled(layer, length) * 4 * max(early, late)
    return _filled(layer, length) * 4 * (4 * layer.chunk * layer.heads + 5 * layer.key_size)


def forward(layer: StateLayer, p: int, length: int) -> float:
    """Bytes per token alive at once inside it without gradients."""
    if layer.kind == "convolution":
        return 6 * p * layer.channels
    if layer.kind == "state space":
        states = layer.key_size * layer.value_dim / layer.chunk
        inside = 4 * (3 * layer.chunk * layer.heads + 3 * layer.key_size + 7 * layer.value_size + 2 * states)
        each = 4 if layer.is_scaled else p
        return each * (2 * layer.channels + layer.value_size) + _filled(layer, length) * inside
    inside = 4 * (4 * layer.chunk * layer.heads + 6 * layer.key_size + 4 * layer.value_size)
    return p * (2 * layer.channels + layer.value_size) + _filled(layer, length) * inside


def _filled(layer: StateLayer, length: int) -> float:
    """Tokens of a row that is filled up to whole chunks, over its own."""
    return -(-length // layer.chunk) * layer.chunk / length
