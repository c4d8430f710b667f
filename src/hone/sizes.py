"""Sizes that both the code which allocates and the memory plan read, so that the two cannot differ. Imports nothing
heavy: `hone plan` runs without torch.

Room of the KV cache is in `plan/kv_cache.py`, which the embedded engine asks too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

MIB, GIB = 2**20, 2**30
OWN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that Hone's own decoder runs; its attention can be a ring over ranks."""
QUERY_ROWS = 256
"""Queries per tile of longer sequences; a tile of attention sees only the keys before its end."""
BLOCK_SCORES = 1 << 19
"""Most scores per head in a block of attention, before its sizes are rounded up: 64 MiB in float32 with 32 heads."""
FLASH_WIDTH = 256
"""Widest head that flash attention computes."""
PATCHES_PER_PASS = 4096
"""Patches that a vision tower computes together, one picture at least; memory, never the result."""
KEPT_FEATURES_BYTES = 1 << 28
"""Features of a frozen vision tower that are kept, those used last."""
KEPT_PIXELS_BYTES = 1 << 27
"""Pixels that a process keeps, those used last, as the model sees them."""
ONE_BYTE_EXPERTS = 128
"""Most experts of a layer whose numbers are recorded in a byte, which has -1 for none."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8_BYTES = 1
CHARACTER_SPECIALS = ("<pad>", "<eos>")
"""Tokens that a tokenizer of `model.characters` has in front of the characters."""


@lru_cache(maxsize=1024)  # asked for each sample that is admitted
def round_size(size: int) -> int:
    """The next size of few: at most 12 % and 63 above, and exact up to 15."""
    step = min(64, 1 << max(size.bit_length() - 4, 0))
    return -(-size // step) * step


def divided_dimension(shape: Sequence[int], ranks: int) -> int:
    """The dimension of a parameter that is divided over ranks.

    The first, which FSDP2 fills up to a multiple of the ranks: of stacked matrices (a layer's experts) with whole
    matrices, so that eight experts on 64 ranks would take the memory of 64. Such a stack is divided inside its
    matrices, where their rows come out even.
    """
    is_uneven_stack = len(shape) > 2 and shape[0] % ranks > 0
    return 1 if is_uneven_stack and shape[1] % ranks == 0 else 0
