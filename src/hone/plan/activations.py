"""What one training pass holds besides weights: activations per token and layer, and logits.

Closed forms, counted operation by operation: for Hone's own decoder from `model/decoder.py`, `fused.py`, `attention.py`
and `logprobs.py`; for Transformers' classes from what autograd saves of their eager code around an attention that
keeps q, k, v, its output and one normaliser per query. Bytes per number: 2 in bfloat16, 4 in float32.

Not modelled: sequence parallelism (tensor parallelism divides heads and feed-forward widths, not the residual stream),
fused kernels of other libraries, and attention that materialises its scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hone.plan.architecture import Architecture

OWN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""What Hone's own decoder runs; must equal `model.decoder.FAMILY`, a test compares them."""
BLOCK_SCORES = 1 << 19
"""Scores per head that attention makes at one time; `model.layout.BLOCK_SCORES`, a test compares them."""
QUERY_ROWS = 256
"""Queries of a tile of attention; `model.layout.QUERY_ROWS`, a test compares them."""

Implementation = Literal["hone", "transformers"]
Checkpointing = Literal["none", "selective", "full"]
Loss = Literal["chunked", "naive"]

NAIVE_BYTES, NAIVE_BYTES_NO_GRAD = 12, 8
"""Per token and vocabulary entry, of log_softmax and gather in float32: while the loss goes backward, and without."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One microbatch of one model on one device."""

    architecture: Architecture
    implementation: Implementation
    bytes_each: int
    tokens: int
    """Tokens computed, each prompt once for its samples."""
    response_tokens: int
    """Tokens whose logits are wanted."""
    longest: int
    """Tokens of the longest prompt with its response."""
    checkpointing: Checkpointing = "none"
    loss: Loss = "chunked"
    chunk_tokens: int = 1024
    entropy_gradient: bool = False
    has_logits: bool = True
    """A critic has none."""
    tensor_parallel: int = 1

    @property
    def chunk(self) -> int:
        """Tokens whose logits exist at one time."""
        return self.response_tokens if self.loss == "naive" else min(self.chunk_tokens, self.response_tokens)


def saved_per_token(work: Pass, checkpointing: Checkpointing | None = None) -> float:
    """Bytes per token and layer that the forward pass keeps for the backward pass."""
    mode, arch, p, tp = checkpointing or work.checkpointing, work.architecture, work.bytes_each, work.tensor_parallel
    if mode == "full":
        return p * arch.hidden
    if mode == "selective":  # the layer's input, and the results of matrix products; the rest is made again
        return p * (arch.hidden + (_attention_numbers(arch) + 2 * arch.active_inner) / tp)
    return _own(work) if work.implementation == "hone" else _transformers(work)


def _attention_numbers(arch: Architecture) -> float:
    """Numbers per token in q, k, v and the output of attention, all heads."""
    if arch.latent:
        values = arch.heads * arch.latent.value_dim
        return 2 * arch.q_size + 2 * values
    return 2 * arch.q_size + 2 * arch.kv_size


def _own(work: Pass) -> float:
    """Hone's decoder: two norms (normed and scaled), qkv, rotated q and k, attention's output, gate, up, product."""
    arch, p, tp = work.architecture, work.bytes_each, work.tensor_parallel
    q, kv = arch.q_size / tp, arch.kv_size / tp
    heads = (8 * arch.heads + 4 * (arch.heads + arch.kv_heads) * arch.qk_norm) / tp
    return p * (4 * arch.hidden + 3 * q + 3 * kv + 3 * arch.inner / tp) + heads + 8


def _transformers(work: Pass) -> float:
    """Transformers' eager code. In bfloat16 its norms compute in float32 and keep that copy too."""
    arch, tp, two_bytes = work.architecture, work.tensor_parallel, work.bytes_each == 2
    h, inner = arch.hidden, arch.active_inner / tp
    numbers = _attention_numbers(arch) / tp
    norms = (8 if two_bytes else 12) * h * arch.norms_per_layer
    total = norms + (2 if two_bytes else 4) * numbers + (8 if two_bytes else 16) * inner + 4 * arch.heads / tp + 8
    if arch.qk_norm:
        normed = (arch.q_size + arch.kv_size) / tp
        total += (6 if two_bytes else 8) * normed + 4 * (arch.heads + arch.kv_heads) / tp
    if arch.latent:
        ranks = arch.latent.kv_rank + (arch.latent.q_rank or 0)
        total += (8 if two_bytes else 12) * ranks
    if arch.experts:  # copies of the residual stream, one per expert that a token is sent to, before and after
        total += 2 * work.bytes_each * arch.experts.active * h + 8 * arch.experts.count
    return total


def backward_per_token(work: Pass) -> float:
    """Bytes per token of gradients alive at once inside one layer's backward pass: the feed-forward block's."""
    arch = work.architecture
    return work.bytes_each * (4 * arch.active_inner / work.tensor_parallel + 3 * arch.hidden)


def forward_per_token(work: Pass) -> float:
    """Bytes per token alive at once inside one layer without gradients: feed-forward block or attention."""
    arch, tp = work.architecture, work.tensor_parallel
    feed_forward = 3 * arch.active_inner / tp + 3 * arch.hidden
    attention = 2 * (arch.q_size + 2 * arch.kv_size) / tp + arch.q_size / tp + 2 * arch.hidden
    return work.bytes_each * max(feed_forward, attention)


def logits_bytes(work: Pass, *, gradient: bool) -> int:
    """Bytes of logits and what is made of them, at their most."""
    if not work.has_logits:
        return 0
    if work.loss == "naive":
        each = NAIVE_BYTES if gradient else NAIVE_BYTES_NO_GRAD
    else:
        each = logits_bytes_each(work) if gradient else 8
    return round(each * work.chunk * work.architecture.vocab / work.tensor_parallel)


def logits_bytes_each(work: Pass) -> int:
    """Bytes per token and vocabulary entry of a chunk going backward: logprobs and gradient in float32, and its copy
    in the compute dtype; with an entropy bonus one slope more."""
    return 8 + (2 if work.bytes_each == 2 else 0) + 4 * work.entropy_gradient


def mask_bytes(work: Pass) -> int:
    """Hone's attention: masks of all blocks in float32, and its workspace of scores, which all layers share."""
    if work.implementation != "hone":
        return 0
    mean_keys = min(work.longest, work.longest / 2 + QUERY_ROWS)
    scores = min(BLOCK_SCORES, work.tokens * mean_keys)
    each = 14 if work.bytes_each == 2 else 8
    return round(4 * work.tokens * mean_keys + each * scores * work.architecture.heads / work.tensor_parallel)
