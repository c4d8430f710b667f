"""Memory of a vision tower's passes: closed forms, counted from the code of Transformers' classes of Qwen-VL and
InternVL.

Attention keeps q, k, v, its output and one normaliser per query; scores are not kept. Bytes per number, `p`: 2 in
bfloat16, 4 in float32.
"""

from __future__ import annotations

from hone.config.run import Checkpointing
from hone.plan.activations import Pass
from hone.plan.ledger import Term, term
from hone.plan.tower_shape import Tower


def forward_per_patch(tower: Tower, p: int) -> int:
    """Bytes alive at once without gradients: in a block's feed-forward layers, where it rotates q and k in float32, or
    where learned positions are taken between four neighbours."""
    h = tower.hidden
    if tower.kind == "internvl":  # nothing is rotated
        return p * (2 * tower.inner + 5 * h)
    if tower.kind == "qwen3_vl":
        return max(p * (2 * tower.inner + 3 * h), (4 * p + 32) * h)
    return max(p * (3 * tower.inner + 3 * h), (5 * p + 24) * h)


def kept_per_patch(tower: Tower, p: int, checkpointing: Checkpointing) -> int:
    """Bytes that one block keeps for its backward pass."""
    h, inner = tower.hidden, tower.inner
    if checkpointing == "full" or isinstance(checkpointing, int):  # a number is of the decoder's layers
        return p * h
    if checkpointing == "selective":  # the block's input, and the results of products
        return p * (7 * h + (2 if tower.kind == "qwen2_5_vl" else 1) * inner)
    if tower.kind == "qwen2_5_vl":  # gated; in bfloat16 its norms compute in float32 and keep that copy too
        return p * (4 * inner + 13 * h) + (4 * h if p == 2 else 0)
    if tower.kind == "internvl":  # positions are added once, in front of the blocks
        return p * (2 * inner + 10 * h)
    return p * ((3 if tower.kind == "qwen2_vl" else 2) * inner + 11 * h)


def patches(tower: Tower, work: Pass) -> int:
    """Of a microbatch, if all tokens of its prompts are of pictures."""
    return tower.patches_per_token * max(work.tokens - work.response_tokens, 0)


def kept(tower: Tower, count: int, p: int, checkpointing: Checkpointing) -> Term:
    """All blocks' activations, and those of what is before and behind them."""
    others = (4 if tower.kind == "qwen2_vl" else 5) * tower.hidden
    others += (2 if tower.kind == "qwen2_5_vl" else 1) * tower.out // tower.patches_per_token
    each = tower.layers * kept_per_patch(tower, p, checkpointing) + p * others
    return term("tower activations", each * count, f"{each:,} B x {count:,} patches", "model.freeze")


def backward(tower: Tower, count: int, p: int, checkpointing: Checkpointing) -> Term:
    """The most that the backward pass adds: the gradient of the largest matrix, or those of one block, which may have
    to be computed again."""
    again = 0
    if checkpointing != "none":
        stored = kept_per_patch(tower, p, checkpointing) - kept_per_patch(tower, p, "full")
        again = kept_per_patch(tower, p, "none") - stored
    block = (again + p * (2 * tower.inner + 3 * tower.hidden)) * count
    matrix = p * tower.merged**2
    return term(
        "tower's gradients", max(block, matrix), f"of one block, or {p} B x {tower.merged:,} x {tower.merged:,}"
    )
