"""How full vLLM's cache is, and how much of prompts it finds there, as vLLM tells the loggers of its statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hone.rollout.engine import CacheUse


class VllmCache:
    """A `StatLoggerBase` of vLLM's, for the one engine of this process. It hears of every step, in vLLM's thread."""

    def __init__(self) -> None:
        self._config: Any = None
        self._fullest = CacheUse()

    def watch(self, config: Any, _: int) -> VllmCache:
        """The factory that vLLM asks for, with its own configuration, which knows the room once vLLM has started."""
        self._config = config.cache_config
        return self

    def fullest(self) -> CacheUse:
        """When it was fullest since the last call; prompts are counted since then."""
        fullest, self._fullest = self._fullest, CacheUse()
        return fullest

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        """After a step of vLLM's."""
        if scheduler_stats is None:
            return
        room = self._config.num_gpu_blocks * self._config.block_size
        tokens, found = round(scheduler_stats.kv_cache_usage * room), scheduler_stats.prefix_cache_stats
        before = self._fullest
        self._fullest = replace(
            before,
            tokens=max(before.tokens, tokens),
            room_tokens=room,
            asked_tokens=before.asked_tokens + found.queries,
            found_tokens=before.found_tokens + found.hits,
        )

    def log(self) -> None:
        """Nothing is written."""

    def log_engine_initialized(self) -> None:
        """See `log`."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """See `log`."""
