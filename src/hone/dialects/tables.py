"""The dialects by tool."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from hone.dialects.verdict import Dialect


@cache
def dialects() -> Mapping[str, Dialect]:
    """Every tool's dialect; imported when asked for."""
    from hone.dialects import mindspeed, openrlhf, prime_rl, trl, verl

    return {
        "verl": verl.DIALECT,
        "openrlhf": openrlhf.DIALECT,
        "trl": trl.DIALECT,
        "mindspeed": mindspeed.DIALECT,
        "prime-rl": prime_rl.DIALECT,
    }
