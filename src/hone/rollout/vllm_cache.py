"""Usage of vLLM's KV cache and prefix cache hits.

vLLM reports these only to its own loggers, which cost more than a look at its scheduler. That is in this process, see
`vllm_args.ENVIRONMENT`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hone.rollout.engine import CacheUse


class VllmCache:
    """Looks at the cache of an `LLMEngine` after each of its steps, in the thread that makes them."""

    def __init__(self, llm: Any) -> None:
        config = llm.vllm_config.cache_config
        self._manager = llm.engine_core.engine_core.scheduler.kv_cache_manager
        self._room_tokens: int = config.num_gpu_blocks * config.block_size
        self._fullest = CacheUse()

    def look(self, outputs: Iterable[Any]) -> None:
        """After a step; `outputs` are what it returned."""
        finished = [output for output in outputs if output.finished]
        before = self._fullest
        self._fullest = CacheUse(
            tokens=max(before.tokens, round(self._manager.usage * self._room_tokens)),
            room_tokens=self._room_tokens,
            asked_tokens=before.asked_tokens + sum(len(output.prompt_token_ids) for output in finished),
            found_tokens=before.found_tokens + sum(output.num_cached_tokens or 0 for output in finished),
        )

    def fullest(self) -> CacheUse:
        """When it was fullest since the last call; prompts are those of samples that ended since then."""
        fullest, self._fullest = self._fullest, CacheUse()
        return fullest
