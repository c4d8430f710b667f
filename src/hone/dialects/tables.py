"""The dialects by tool."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from hone.dialects.verdict import Dialect


@cache
def dialects() -> Mapping[str, Dialect]:
    """Every tool's dialect; imported when asked for."""
    from hone.dialects import mindspeed, nanochat, prime_rl
    from hone.dialects.openrlhf import keys as openrlhf
    from hone.dialects.trl import keys as trl
    from hone.dialects.verl import keys as verl

    return {
        "verl": verl.DIALECT,
        "openrlhf": openrlhf.DIALECT,
        "trl": trl.DIALECT,
        "mindspeed": mindspeed.DIALECT,
        "prime-rl": prime_rl.DIALECT,
        "nanochat": nanochat.DIALECT,
    }
