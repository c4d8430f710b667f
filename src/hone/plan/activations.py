"""Activation memory of a training pass: activations per token and layer, and logits.

Closed forms, counted operation by operation: for Hone's own decoder from `model/decoder.py`, `fused.py`, `attention.py`
and `logprobs.py`; for Transformers' classes from what autograd saves of their eager code around an attention that
keeps q, k, v, its output and one normaliser per query, and capped scores beside them. What layers with states keep is
in `states.py`. Bytes per number: 2 in bfloat16, 4 in float32.

Tensor parallelism divides heads and feed-forward widths, not the residual stream; sequence parallelism divides tokens,
but not the masks of attention by blocks. On GPUs in 16 bits attention is flash attention's, which has no masks. Not
modelled: fused kernels of other libraries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from hone.config.run import Checkpointing
from hone.plan.architecture import Architecture, Experts, linear_layers
from hone.plan.states import LayerKind
from hone.sizes import BLOCK_SCORES, FLASH_WIDTH, QUERY_ROWS

INDEX_BYTES = 8
"""Of a place of a token, or of one head of it."""
SCORE_BYTES = {(4, False): 4, (4, True): 8, (2, False): 6, (2, True): 12}
"""Bytes of attention's workspace per score, by bytes per number and whether it goes backward: scores and their gradient
in float32, and for bfloat16 their copies, and the gradient as it was before."""

ForwardKind = Literal["hone", "transformers"]
Loss = Literal["chunked", "naive"]

CAPPED_SCORE_BYTES = 8
"""Bytes that are kept of each score of attention that is capped, in float32 and bfloat16 alike: tanh's results and
softmax's."""
LAST_NORM_BYTES = {2: 18, 4: 12}
"""Per number of the residual stream, by bytes per number: what the norm after the last layer keeps (6 and 8, saved by
autograd), and what its backward pass adds (the rest, measured), which computes in float32. Counted for one process, of
models with layers with states; of others a feed-forward block's gradients are more."""
NAIVE_BYTES, NAIVE_BYTES_FORWARD = 12, 8
"""Per token and vocabulary entry, of log_softmax and gather in float32: while the loss goes backward, and forward."""
CHUNK_BYTES_FORWARD, FUSED_CHUNK_BYTES_FORWARD = 12, 4
"""The same of Hone's chunked logprobs, forward: logits, their powers, and the product that entropy is a sum of; fused
kernels have products alone."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One microbatch of one model on one device."""

    architecture: Architecture
    implementation: ForwardKind
    bytes_each: int
    tokens: int
    """Tokens computed on this device, each prompt once for its samples."""
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
    sequence_parallel: int = 1
    """Devices that have the microbatch's other tokens."""
    rows: Literal["one", "padded"] | None = None
    """How Transformers' class is given samples in Hone's trainer: in one row over which Hone attends, or padded, and
    attention keeps keys and values once per query head. None: its own attention, with neither masks nor copies."""
    prompt: int = 0
    """Tokens of the longest prompt, which its samples share."""
    on_cuda: bool = False
    """On a GPU of NVIDIA or AMD."""
    fused: bool = False
    """Passes over logits are fused kernels (`run.fused_kernels`)."""

    @property
    def is_flash(self) -> bool:
        """Whether attention over a layout is flash attention's."""
        width = self.architecture.q_size // max(self.architecture.heads, 1)
        return self.on_cuda and self.bytes_each == 2 and width <= FLASH_WIDTH

    @property
    def ring(self) -> int:
        """Chunks of tokens that go round a ring, where sequence parallelism is more than divides the key-value heads;
        else 1. See `model.parallel.divide_tokens`."""
        if self.implementation != "hone":
            return 1
        heads = self.architecture.kv_heads // self.tensor_parallel
        return self.sequence_parallel // math.gcd(self.sequence_parallel, max(heads, 1))

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange tokens for heads around attention."""
        return self.sequence_parallel > self.ring

    @property
    def chunk(self) -> int:
        """Tokens whose logits exist at one time."""
        return self.response_tokens if self.loss == "naive" else min(self.chunk_tokens, self.response_tokens)


def saved_per_token(work: Pass) -> float:
    """Bytes per token and layer that the forward pass keeps for the backward pass, in the mean of all layers; of a
    layer that is recomputed, where some are."""
    kinds = work.architecture.kinds
    each = {kind: _saved(work, kind, work.checkpointing) for kind in set(kinds)}
    return sum(each[kind] for kind in kinds) / len(kinds)


def _saved(work: Pass, kind: LayerKind, mode: Checkpointing) -> float:
    """Like `saved_per_token`, of one kind of layer."""
    arch, p, tp = work.architecture, work.bytes_each, work.tensor_parallel
    if mode == "full" or isinstance(mode, int):
        return p * arch.hidden
    if mode == "selective":  # the layer's input, and the results of products
        numbers = arch.hidden + kind.has_block * _block_results(work)
        if kind.has_states or not kind.has_block:
            mixers = linear_layers(arch, replace(kind, has_block=False))
            return p * (numbers + kind.attends * arch.q_size + sum(outputs for _, outputs in mixers.values()))
        return p * (numbers + kind.attends * (arch.hidden + _attention_numbers(arch) / tp))
    return _own(work) if work.implementation == "hone" else _transformers(work, kind)


def _block_results(work: Pass) -> float:
    """Numbers per token that the products of a feed-forward block return; a router's too, and each expert's."""
    arch, moe = work.architecture, work.architecture.experts
    within = (arch.block_matrices - 1) * arch.active_inner / work.tensor_parallel
    if moe is None:
        return within + arch.hidden
    routed = moe.count + moe.active * (moe.latent or arch.hidden)
    around = (moe.latent > 0) * (moe.latent + arch.hidden) + (moe.shared_inner > 0) * arch.hidden
    return within + routed + around


def recomputed_layers(checkpointing: Checkpointing, layers: int) -> int:
    """How many of `layers` layers recompute activations."""
    if isinstance(checkpointing, int):
        return min(checkpointing, layers)
    return 0 if checkpointing == "none" else layers


def kept_by_layers(work: Pass) -> tuple[int, str]:
    """Bytes that all layers of a microbatch keep for the backward pass, and the formula."""
    kinds, tokens = work.architecture.kinds, f"{work.tokens:,} tokens"
    each, again = saved_per_token(work), recomputed_layers(work.checkpointing, len(kinds))
    if not isinstance(work.checkpointing, int) or again == len(kinds):
        return round(each * len(kinds) * work.tokens), f"{each:,.0f} B x {len(kinds)} layers x {tokens}"
    stored = sum(_saved(work, kind, "none") for kind in kinds[again:])
    others = len(kinds) - again
    formula = f"({each:,.0f} B x {again} + {stored / others:,.0f} B x {others} layers) x {tokens}"
    return round((each * again + stored) * work.tokens), formula


def kept_by_last(work: Pass) -> float:
    """Bytes per token that the last layer keeps."""
    kind, is_number = work.architecture.kinds[-1], isinstance(work.checkpointing, int)
    return _saved(work, kind, "none" if is_number and not recomputes_last(work) else work.checkpointing)


def recomputes_last(work: Pass) -> bool:
    """Whether the last layer, which goes backward while all others' activations are there, makes its own again."""
    return 0 < recomputed_layers(work.checkpointing, work.architecture.layers) == work.architecture.layers


def made_again_per_token(work: Pass) -> float:
    """Bytes per token of one layer's activations that were not stored, while it goes backward."""
    return max(
        _saved(work, kind, "none") - _saved(work, kind, work.checkpointing) + _saved(work, kind, "full")
        for kind in set(work.architecture.kinds)
    )


def _attention_numbers(arch: Architecture) -> float:
    """Numbers per token in q, k, v and the output of attention, all heads."""
    if arch.latent:
        values = arch.heads * arch.latent.value_dim
        return 2 * arch.q_size + 2 * values
    return 2 * arch.q_size + 2 * arch.kv_size


def _own(work: Pass) -> float:
    """Hone's decoder: two norms (normed and scaled), qkv, rotated q and k, attention's output, gate, up, product. Where
    sequences are exchanged for heads, v is not part of qkv any more, and the output is there in both divisions."""
    arch, p, tp = work.architecture, work.bytes_each, work.tensor_parallel
    q, kv = arch.q_size / tp, arch.kv_size / tp
    attention = (4 if work.exchanges else 3) * (q + kv)
    heads = (8 * arch.heads + 4 * (arch.heads + arch.kv_heads) * arch.qk_norm) / tp
    return p * (4 * arch.hidden + attention + 3 * arch.inner / tp) + heads + 8


def _transformers(work: Pass, kind: LayerKind) -> float:
    """Transformers' eager code. In bfloat16 its norms compute in float32 and keep that copy too."""
    arch, tp, two_bytes = work.architecture, work.tensor_parallel, work.bytes_each == 2
    h, inner = arch.hidden, arch.active_inner / tp
    in_float32 = arch.gates_attention or arch.model_type == "nemotron_h"  # what norms scale
    norm = (10 if in_float32 else 8) if two_bytes else 12
    total = norm * h * arch.norms_per_layer + 8
    if kind.has_block:  # gate, what it is squashed to, up and their product; without a gate, what is squashed and that
        total += (4 if arch.block_matrices == 3 else 2) * work.bytes_each * inner
    if kind.attends and kind.has_states:  # Falcon-H1 scales the layer's input for each of both
        total += work.bytes_each * h
    if kind.attends:
        total += _attended(work)
    if kind.has_states and arch.states:
        total += arch.states.kept(work.bytes_each, work.longest - 1)
    if arch.experts and kind.has_block:  # copies of the residual stream, one per expert of a token, before and after
        width = arch.experts.latent or h
        total += 2 * work.bytes_each * arch.experts.active * width + 8 * arch.experts.count
        total += 4 * h * (arch.experts.routes_in_float32 and two_bytes)
    return total


def _attended(work: Pass) -> float:
    """What attention keeps of one layer, in Transformers' eager code."""
    arch, tp, two_bytes = work.architecture, work.tensor_parallel, work.bytes_each == 2
    numbers = (4 * arch.q_size if work.rows == "padded" and not arch.latent else _attention_numbers(arch)) / tp
    total = work.bytes_each * numbers + 4 * arch.heads / tp
    if arch.qk_norm:
        normed = (arch.q_size + arch.kv_size) / tp
        total += (6 if two_bytes and not arch.gates_attention else 8) * normed + 4 * (arch.heads + arch.kv_heads) / tp
    if arch.gates_attention:  # the projection of queries and gates, gates, what they are squashed to, and the product
        total += (6 if two_bytes else 16) * arch.q_size / tp
    if arch.model_type == "phi3":  # values are a view of the fused projection, which is kept with them
        total += work.bytes_each * (arch.q_size + arch.kv_size) / tp
    if arch.latent:
        ranks = arch.latent.kv_rank + (arch.latent.q_rank or 0)
        total += (8 if two_bytes else 12) * ranks
    if arch.caps_scores:
        total += CAPPED_SCORE_BYTES * arch.heads * work.longest / tp
    return total + _mask_per_token(work)


def _mask_per_token(work: Pass) -> int:
    """Bytes per token of one layer's mask of padded rows, which PyTorch's attention makes of the shared one."""
    return work.bytes_each * work.longest if work.rows == "padded" and not work.architecture.caps_scores else 0


def backward_per_token(work: Pass) -> float:
    """Bytes per token that the layers' backward passes add at their most to all that is kept: in the last layer, or in
    an earlier one with states, when what later layers kept has been used up."""
    arch, freed, most = work.architecture, 0.0, 0.0
    missing = set(arch.kinds)
    for kind in reversed(arch.kinds):
        added = _block_backward(work) if kind.has_block else work.bytes_each * arch.hidden
        if kind.has_states and arch.states:
            inside = arch.states.added_backward(work.bytes_each, work.longest - 1) + work.bytes_each * arch.hidden
            used_up = work.bytes_each * 4 * arch.active_inner / work.tensor_parallel if kind.has_block else 0
            added = max(added, inside - used_up)
        most, freed = max(most, added - freed), freed + _saved(work, kind, work.checkpointing)
        missing.discard(kind)
        if not missing:
            break
    return most


def _block_backward(work: Pass) -> float:
    """Bytes per token that one layer's backward pass adds at its most, in the feed-forward block: gradients of gate, up
    and residual stream, less the product that has been used up. Hone's decoder takes one more width on the way. Routed
    experts may take more where their results are weighted, whose gradients are the results' and the weights', each as
    long as all copies of the residual stream; and have used up their results later. Capped scores of attention may
    take more: their gradients, when the feed-forward block's activations have been used up."""
    arch, tp = work.architecture, work.tensor_parallel
    if (moe := arch.experts) is not None:
        copies = moe.active * (moe.latent or arch.hidden)
        weighted = 3 * (4 if moe.weighs_in_float32 else work.bytes_each) * copies
        widths = work.bytes_each * (2 * moe.active * moe.inner / tp - copies)
        return max(weighted, widths) + work.bytes_each * arch.hidden
    widths = 3 if work.implementation == "hone" else 2
    feed_forward = work.bytes_each * (widths * arch.active_inner / tp + arch.hidden)
    if work.ring > 1:  # as it comes, what the feed-forward block kept is gone
        used_up = work.bytes_each * (3 * arch.active_inner / tp + 2 * arch.hidden)
        return max(feed_forward, ring_per_token(work, backward=True) - used_up)
    if not arch.caps_scores:
        return feed_forward
    used_up = work.bytes_each * 4 * arch.active_inner / tp
    gradients = (4 + work.bytes_each) * arch.heads * work.longest / tp  # softmax's in float32, and its conversion
    return max(feed_forward, gradients - used_up)


def ring_per_token(work: Pass, *, backward: bool) -> float:
    """Bytes per token of this device that ring attention takes at its most in one layer: the chunk of keys and values
    that a device has, the one that it computes with, and the next one on its way; and what has been summed so far, in
    float32 at least: output, or the gradients of queries, of its own chunk, of the one it computes with and of the one
    that goes back, which is sent and received. Besides, what a kernel returns; forward that is of half of the chunk,
    and is mixed in float32."""
    arch, p = work.architecture, work.bytes_each
    q, kv = arch.q_size / work.tensor_parallel, 2 * arch.kv_size / work.tensor_parallel
    exact = max(p, 4)
    if backward:
        return 3 * p * kv + exact * (q + 4 * kv) + p * (q + kv)
    return 3 * p * kv + exact * q + (p + 2 * exact) * q / 2


def forward_per_token(work: Pass) -> float:
    """Bytes per token alive at once inside one layer without gradients, in the kind of layer that needs most."""
    return max(_forward(work, kind) for kind in set(work.architecture.kinds))


def _forward(work: Pass, kind: LayerKind) -> float:
    """Like `forward_per_token`, of one kind: attention's tensors are still there while the feed-forward block computes,
    but for padded rows; those of a part with states are not."""
    arch, tp = work.architecture, work.tensor_parallel
    numbers, scores = 3.0 * _unrouted_inner(arch) * kind.has_block, 0.0
    if kind.attends:
        scores = CAPPED_SCORE_BYTES * arch.heads * work.longest / tp if arch.caps_scores else _mask_per_token(work)
        if work.rows == "padded" and not arch.latent:  # also keys and values once per query head, and gates
            numbers = max(numbers, (4 + 2 * arch.gates_attention) * arch.q_size + 2 * arch.kv_size)
        else:
            numbers += 1.5 * _attention_numbers(arch)
        if work.ring > 1:  # instead of the feed-forward block's
            block = 3 * work.bytes_each * arch.active_inner * kind.has_block / tp
            scores = max(ring_per_token(work, backward=False) - block, 0)
    computed = work.bytes_each * (numbers / tp + 3 * arch.hidden) + scores
    if arch.experts and kind.has_block:
        computed = max(computed, _routed_forward(work, arch.experts))
    if not (kind.has_states and arch.states):
        return computed
    inside = arch.states.forward(work.bytes_each, work.longest - 1)
    return max(computed, inside + 4 * work.bytes_each * arch.hidden)


def _unrouted_inner(arch: Architecture) -> int:
    """Width of the widest feed-forward block that all tokens go through: with experts, of shared or of first layers."""
    if arch.experts is None:
        return arch.inner
    return max(arch.experts.shared_inner, arch.inner if arch.dense_layers else 0)


def _routed_forward(work: Pass, moe: Experts) -> float:
    """Bytes per token while routed experts compute without gradients, at their most: copies of what they read, one per
    expert of a token, that are there to the end; with those first gate and up in one product, what gate is squashed to
    and the product of both; then results, and those weighted, in the order of experts and in that of tokens. Each copy
    has its expert and its place in both orders. Besides there are the router's numbers, and the residual stream as
    embedding, as the layer's input, after attention and normed; shared experts with a gate compute first, others later.
    """
    arch, p, inner = work.architecture, work.bytes_each, moe.inner / work.tensor_parallel
    widths = 4 if arch.block_matrices == 3 else 2
    width = moe.latent or arch.hidden
    results = p + 2 * (4 if moe.weighs_in_float32 else p)
    copy = p * width + max(p * widths * inner, results * width) + 3 * INDEX_BYTES
    return moe.active * copy + p * (moe.count + (4 + moe.has_shared_gate) * arch.hidden)


def logits_forward_bytes_each(work: Pass) -> int:
    """Bytes per token and vocabulary entry in the forward pass."""
    if work.loss == "naive":
        return NAIVE_BYTES_FORWARD
    return FUSED_CHUNK_BYTES_FORWARD if work.fused else CHUNK_BYTES_FORWARD


def logits_forward_bytes(work: Pass) -> int:
    """Bytes of logits and what is made of them, at their most in the forward pass."""
    return _of_chunk(work, logits_forward_bytes_each(work))


def logits_backward_bytes_each(work: Pass) -> int:
    """Bytes per token and vocabulary entry while the loss goes backward: logprobs and gradient in float32, and its
    copy in the compute dtype; with an entropy bonus one slope more. Fused kernels have products in float32, and their
    gradient in the compute dtype."""
    if work.loss == "naive":
        return NAIVE_BYTES
    if work.fused:
        return 4 + work.bytes_each
    return 8 + (2 if work.bytes_each == 2 else 0) + 4 * work.entropy_gradient


def logits_backward_bytes(work: Pass) -> int:
    """Bytes of logits and what is made of them, at their most while the loss goes backward."""
    return _of_chunk(work, logits_backward_bytes_each(work))


def _of_chunk(work: Pass, bytes_each: int) -> int:
    """Bytes of one chunk of logits, at `bytes_each` bytes a logit."""
    return round(bytes_each * work.chunk * work.architecture.vocab / work.tensor_parallel) if work.has_logits else 0


def output_gradient_bytes(work: Pass) -> int:
    """Bytes of the output layer's gradient beside those logits: summed in float32, and for bfloat16 converted after
    the last chunk, when the logits are gone."""
    matrix = work.architecture.vocab * work.architecture.hidden / work.tensor_parallel
    converted = 6 * matrix - logits_backward_bytes(work) if work.bytes_each == 2 else 0
    return round(max(4 * matrix, converted))


def attention_bytes(work: Pass, *, backward: bool) -> int:
    """What attention takes besides activations, for all layers together. Over a layout: with flash attention, and in a
    ring, the places of tokens. By blocks: masks of all blocks in float32, indices of the rows that they gather, and a
    workspace of scores. Of padded rows a mask of each: numbers that are added to capped scores, and else truth values.
    """
    if work.rows == "padded":
        each = work.bytes_each if work.architecture.caps_scores else 1
        return each * work.tokens * work.longest if work.architecture.attention_layers else 0
    if work.implementation != "hone" and work.rows != "one":
        return 0
    tokens = work.tokens * work.sequence_parallel
    if work.ring > 1:
        chunk = tokens // work.ring
        if work.is_flash:
            return INDEX_BYTES * chunk
        # Scores of one tile of plain products: themselves, their gradient, and what one of them is made of.
        heads = work.architecture.heads / work.tensor_parallel / (work.sequence_parallel // work.ring)
        scores = heads * QUERY_ROWS * min(chunk, work.longest)
        return INDEX_BYTES * chunk + round(3 * max(work.bytes_each, 4) * scores)
    if work.is_flash:
        return INDEX_BYTES * tokens
    ways = work.tensor_parallel * work.sequence_parallel
    heads, kv_heads = work.architecture.heads / ways, work.architecture.kv_heads / ways
    rows = max(min(BLOCK_SCORES // work.longest, QUERY_ROWS), 1)
    mean_keys = min(
        work.longest, (work.prompt + work.longest) / 2 + rows
    )  # those of a response see all of their prompt
    if work.prompt:
        share = min(work.response_tokens / work.tokens, 1)
        mean_keys = share * mean_keys + (1 - share) * min(work.prompt, work.prompt / 2 + rows)
    # Of each head: queries, where their results are put, and where those are read; of each tile, its keys, its values
    # and where their gradients are summed. And of each token alone.
    indices = INDEX_BYTES * (tokens * (3 * heads + 4) + tokens / rows * mean_keys * (3 * kv_heads + 1))
    workspace = SCORE_BYTES[work.bytes_each, backward] * min(BLOCK_SCORES, tokens * mean_keys) * heads
    return round(4 * tokens * mean_keys + indices + workspace)
