"""What the engine behind a judge says of itself at `/metrics`: how much of the prompts it had computed before, how full
its cache is, how much memory it holds. In vLLM's names and in those of `hone serve policy`; others say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean

from hone.reward.openai import ChatClient

HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
CACHE_USED = "vllm:kv_cache_usage_perc"
MEMORY = "policy_memory_bytes"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class EngineFigures:
    """Figures of one judge's engines, since they were last asked for."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client
        self._hits = self._queries = 0.0

    async def line(self) -> str:
        """One log line; empty where no engine reports metrics."""
        found = read_metrics(await self._client.metrics())
        said: list[str] = []
        hits, queries = (sum(found.get(name, ())) for name in (HITS, QUERIES))
        if queries > self._queries:
            said.append(f"prefix cache hits {(hits - self._hits) / (queries - self._queries):.0%} of prompt tokens")
        self._hits, self._queries = hits, queries
        if CACHE_USED in found:
            said.append(f"KV cache {fmean(found[CACHE_USED]):.0%} used")
        if MEMORY in found:
            said.append(f"memory {sum(found[MEMORY]) / 2**30:.2f} GiB")
        return ", ".join(said)


def read_metrics(pages: Sequence[str]) -> Mapping[str, list[float]]:
    """Values by name from pages in Prometheus' text format, whatever their labels."""
    found: dict[str, list[float]] = {}
    for page in pages:
        for name, value in _SAMPLE.findall(page):
            try:
                found.setdefault(name, []).append(float(value))
            except ValueError:  # not a number: not a sample
                continue
    return found
