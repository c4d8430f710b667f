"""Room of the KV cache of Hone's own engine: the plan counts it, and the engine takes it.

The engine admits samples by tokens within this room, and begins the newest again later where it runs out
(`rollout/decoding.py`). A response takes as many columns as the longest one that is being sampled, rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hone.config.engine import POLICY_GPU_FRAC
from hone.config.run import RunConfig
from hone.plan.architecture import Architecture
from hone.plan.workload import Workload
from hone.sizes import round_size

LEAST_COLUMNS = 16
"""Granularity of responses in the cache, in tokens."""


@lru_cache(maxsize=1024)  # asked for each sample that is admitted
def columns_for(tokens: int) -> int:
    """Columns for responses of `tokens` tokens: a few more, so that the layout need not change at every token, and so
    that the matrix products of attention come in few shapes (on CPUs each new one is compiled)."""
    step = max(LEAST_COLUMNS, 1 << max(tokens.bit_length() - 3, 0))
    return -(-tokens // step) * step


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """What may be in an engine's cache at one time, and the most that it may take."""

    prompt_tokens: int
    """Tokens of the longest prompt."""
    response_tokens: int
    """Tokens of the longest response."""
    prompts: int
    """In flight, at most."""
    samples: int
    """In flight, at most."""
    most_tokens: int | None = None
    """Bound: `rollout.kv_cache_tokens`, or from the device's memory; None: what is in flight decides alone."""
    shares_prompts: bool = True
    """A prompt is stored once for all its samples; Transformers' own classes store it for each."""

    def responses(self, rows: int) -> int:
        """Tokens that responses need, with at most `rows` rows, all at their longest."""
        rows = min(rows, self.samples)
        if not self.shares_prompts:
            return rows * (self.prompt_tokens + self.response_tokens)
        return round_size(rows) * columns_for(max(self.response_tokens - 1, 1))

    def prompts_stored(self, rows: int) -> int:
        """Prompts that are stored, at most."""
        return min(rows, self.samples, self.prompts) if self.shares_prompts else 0

    def of_one(self, prompt_tokens: int, response_tokens: int) -> int:
        """Tokens that one sample needs, alone in the cache."""
        if not self.shares_prompts:
            return prompt_tokens + response_tokens
        return prompt_tokens + columns_for(max(response_tokens - 1, 1))

    def tokens(self, rows: int) -> int:
        """Tokens that the cache has room for; one sample at its longest always fits."""
        needed = self.responses(rows) + self.prompts_stored(rows) * self.prompt_tokens
        if self.most_tokens is None:
            return needed
        return max(min(needed, self.most_tokens), self.of_one(self.prompt_tokens, self.response_tokens))


def most_within(memory_bytes: int, architecture: Architecture, bytes_each: int, rows: int) -> int | None:
    """Tokens in the share of a device's memory that a cache may take where no key says how many; None where tokens take
    nothing.

    Args:
        rows: samples in flight at most, each of which has states where layers have states.
    """
    share = int(POLICY_GPU_FRAC * memory_bytes) - rows * architecture.state_bytes(bytes_each)
    per_token = architecture.kv_bytes_per_token(bytes_each=bytes_each)
    return max(share, 0) // per_token if per_token else None


def cache_room(
    config: RunConfig,
    workload: Workload,
    architecture: Architecture | None,
    *,
    bytes_each: int,
    memory_bytes: int,
    shares_prompts: bool,
) -> CacheRoom:
    """Room of an engine's cache.

    Args:
        workload: what this engine samples.
        architecture: None where it is not known; memory bounds nothing then.
        bytes_each: of a key or value.
        memory_bytes: of the engine's device.
        shares_prompts: as in `CacheRoom`.
    """
    most = config.rollout.kv_cache_tokens
    if most is None and architecture is not None:
        most = most_within(memory_bytes, architecture, bytes_each, config.rollout.max_concurrent_samples)
    in_turns = config.rollout.environment.use is not None  # a later turn's prompt is all that was said before
    greedy = config.algorithm.credit == "remax"  # one sample more for each prompt, as a request of its own
    groups, lengths = workload.prompts * (workload.max_staleness + 1), workload.lengths
    rows = config.rollout.max_concurrent_samples
    return CacheRoom(
        prompt_tokens=lengths.longest if in_turns else lengths.max_prompt,
        response_tokens=lengths.max_response,
        prompts=rows if workload.evaluates or in_turns else groups * (1 + greedy),
        samples=rows if workload.evaluates else groups * (workload.group + greedy),
        most_tokens=most,
        shares_prompts=shares_prompts,
    )
