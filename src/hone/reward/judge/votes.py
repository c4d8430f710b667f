"""From a judge's question to its votes: seeds, order, asking again, remembering, and counting what it cost.

A vote is one valid list of scores. An answer that holds none is asked for again with another seed, twice; after that
the vote is invalid, and why is kept. A question, seed and all, is asked once: the same response earns the same score
wherever it stands, and a judge cannot be asked until it is kind.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean
from typing import Any

from hone.reward.http import DeviceMemory, Refused, Unavailable
from hone.reward.judge.parse import Failure, NoScores
from hone.reward.judge.prompt import Messages
from hone.reward.openai import ChatAnswer, ChatClient
from hone.reward.pool import CallFailed
from hone.reward.strict_json import encode_json

ASKS = 3
"""Times that one vote is asked for, each with another seed, until it holds scores."""
_RECENT = 1024
"""Scores that the correlation with length is over."""

ReadVote = Callable[[ChatAnswer], Awaitable[list[float]]]
"""An answer to its scores; raises NoScores, or CallFailed."""
VoteFailure = Failure | str
REFUSED = "refused"
"""The endpoint refuses this very question: too long for it, say."""


@dataclass(frozen=True, slots=True)
class Vote:
    """Result of one vote."""

    scores: tuple[float, ...] | None
    """On the judge's scale, in the order of the responses; None: invalid."""
    failures: tuple[VoteFailure, ...] = ()
    """Failures of the invalid answers, in order."""
    lost: str = ""
    """Why there was no answer to be had, through no fault of the question: then nothing is known of the responses."""


class Asker:
    """Asks one judge."""

    def __init__(
        self,
        client: ChatClient,
        sampling: Mapping[str, Any],
        *,
        seed: int,
        deadline_s: float,
        cache_items: int,
        traffic: Traffic,
    ) -> None:
        self._client, self._sampling, self._seed, self._deadline_s = client, sampling, seed, deadline_s
        self._answers = Remembered(cache_items)
        self._traffic = traffic

    async def vote(self, messages: Messages, read: ReadVote, number: int) -> Vote:
        """Vote `number` on a question."""
        failures: list[VoteFailure] = []
        for attempt in range(ASKS):
            sampling = {**self._sampling, "seed": seed_of(self._seed, "vote", number, attempt) % 2**31}
            if attempt and not sampling["temperature"]:
                sampling["temperature"] = 1.0  # asking again greedily would give the same answer again
            try:
                return Vote(tuple(await read(await self._answer(messages, sampling))), tuple(failures))
            except NoScores as error:
                failures.append(error.failure)
            except Refused as error:
                if error.status in (400, 413, 422):
                    return Vote(None, (*failures, REFUSED))
                return Vote(None, tuple(failures), f"the judge: {error}")
            except Unavailable as error:
                return Vote(None, tuple(failures), f"the judge: {error}")
            except CallFailed as error:
                return Vote(None, tuple(failures), f"data_processor_config: its function {error}")
        return Vote(None, tuple(failures))

    def order(self, number: int, question: str, count: int) -> list[int]:
        """Which response stands at each place in vote `number`."""
        places = list(range(count))
        random.Random(seed_of(self._seed, "order", number, question)).shuffle(places)
        return places

    async def close(self) -> None:
        await self._answers.close()
        await self._traffic.close()
        await self._client.close()

    async def _answer(self, messages: Messages, sampling: Mapping[str, Any]) -> ChatAnswer:
        async def ask() -> ChatAnswer:
            answer = await self._client.ask(messages, sampling, deadline_s=self._deadline_s)
            self._traffic.answered(answer)
            return answer

        return await self._answers.get(encode_json([messages, dict(sampling)]), ask)


def seed_of(*words: object) -> int:
    """A number that is a function of the words, the same everywhere."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest(), "big")


class Remembered:
    """Answers by question, the oldest forgotten first; a call for a question in flight waits for its answer."""

    def __init__(self, items: int) -> None:
        self._items = items
        self._tasks: OrderedDict[bytes, asyncio.Task[ChatAnswer]] = OrderedDict()

    async def get(self, question: bytes, ask: Callable[[], Awaitable[ChatAnswer]]) -> ChatAnswer:
        """The answer; `ask` only when it is not known. A failure is not remembered."""
        if self._items == 0:
            return await ask()
        key = hashlib.blake2b(question, digest_size=16).digest()
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.ensure_future(ask())
            task.add_done_callback(lambda done: self._forget_failure(key, done))
        self._tasks.move_to_end(key)
        while len(self._tasks) > self._items and next(iter(self._tasks.values())).done():
            self._tasks.popitem(last=False)
        return await asyncio.shield(task)  # others may wait for the same answer

    def _forget_failure(self, key: bytes, done: asyncio.Task[ChatAnswer]) -> None:
        if (done.cancelled() or done.exception() is not None) and self._tasks.get(key) is done:
            del self._tasks[key]

    async def close(self) -> None:
        tasks = [task for task in self._tasks.values() if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Traffic:
    """Throughput of the judge, logged in the two lines that users of DeepSeek-GRM know.

    Args:
        log_every_s: between two log lines.
        read_engine: figures of the judge's engines, see `EngineFigures.read`; logged after those lines.
    """

    def __init__(self, log_every_s: float, read_engine: Callable[[], Awaitable[dict[str, float]]]) -> None:
        self._log_every_s, self._read_engine = log_every_s, read_engine
        self.engine: dict[str, float] = {}
        """The latest of them."""
        self._asking: asyncio.Task[None] | None = None
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=_RECENT)
        """Score, characters and flags of responses."""
        self._clear()

    def answered(self, answer: ChatAnswer) -> None:
        self._answers += 1
        self._prompt_tokens += answer.prompt_tokens
        self._completion_tokens += answer.completion_tokens

    def judged(
        self,
        responses: Sequence[str],
        num_flags: Sequence[int],
        scores: Sequence[float | None],
        elapsed_s: float,
    ) -> None:
        """Count a group; log when it is time."""
        self._groups += 1
        self._samples += len(responses)
        self._elapsed_s.append(elapsed_s)
        self._recent += [
            (score, len(response), flags)
            for score, response, flags in zip(scores, responses, num_flags, strict=True)
            if score is not None
        ]
        if time.monotonic() - self._since >= self._log_every_s:
            self._log()
            self._clear()

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _log_engine(self) -> None:
        self.engine = await self._read_engine()
        if self.engine:
            said = ", ".join(SAID[name].format(**self.engine) for name in self.engine if name in SAID)
            print(f"[RewardModel] Engine: {said}", file=sys.stderr, flush=True)

    def _log(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._log_engine())
        seconds = max(1e-9, time.monotonic() - self._since)
        scores, lengths, flags = zip(*self._recent, strict=True) if self._recent else ((), (), ())
        elapsed_s = sorted(self._elapsed_s)
        p50_s, p95_s = (elapsed_s[int(share * (self._groups - 1))] for share in (0.5, 0.95))
        print(
            f"[RewardModel] Throughput: {self._samples / seconds:.2f} samples/sec, {self._answers / seconds:.2f} "
            f"answers/sec, tokens/sec {self._prompt_tokens / seconds:.0f} in, {self._completion_tokens / seconds:.0f} "
            f"out; correlation of score and length {_correlation(scores, lengths)}, "
            f"of score and flags {_correlation(scores, flags)}\n"
            f"[RewardModel] Inference time: {fmean(elapsed_s):.2f} sec/batch, p50 {p50_s:.2f}, p95 {p95_s:.2f}",
            file=sys.stderr,
            flush=True,
        )

    def _clear(self) -> None:
        self._since = time.monotonic()
        self._groups = self._samples = self._answers = self._prompt_tokens = self._completion_tokens = 0
        self._elapsed_s: list[float] = []


def _correlation(scores: Sequence[float], others: Sequence[float]) -> str:
    try:
        return f"{correlation(scores, others):+.2f}"
    except StatisticsError:  # fewer than two, or all equal
        return "none"


HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
CACHE_USED = "vllm:kv_cache_usage_perc"
MEMORY = "policy_memory_bytes"
SAID = {
    "prefix_hit_frac": "prefix cache hits {prefix_hit_frac:.0%} of prompt tokens",
    "cache_used_frac": "KV cache {cache_used_frac:.0%} used",
    "memory_gib": "memory {memory_gib:.2f} GiB",
    "device_used_gib": "devices {device_used_gib:.1f} / {device_total_gib:.1f} GiB",
}
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class EngineFigures:
    """Figures of one judge's engines, since they were last asked for.

    Args:
        memory: of their devices, where it is known: their own pages do not say.
    """

    def __init__(self, client: ChatClient, memory: DeviceMemory | None = None) -> None:
        self._client, self._memory = client, memory
        self._hits = self._queries = 0.0

    async def read(self) -> dict[str, float]:
        """Values by the names in `SAID`, and `device_total_gib`: of those that are reported."""
        found = read_metrics(await self._client.metrics())
        figures: dict[str, float] = {}
        hits, queries = (sum(found.get(name, ())) for name in (HITS, QUERIES))
        if queries > self._queries:
            figures["prefix_hit_frac"] = (hits - self._hits) / (queries - self._queries)
        self._hits, self._queries = hits, queries
        if CACHE_USED in found:
            figures["cache_used_frac"] = fmean(found[CACHE_USED])
        if MEMORY in found:
            figures["memory_gib"] = sum(found[MEMORY]) / 2**30
        if self._memory is not None and (of_devices := await self._memory()) is not None:
            figures["device_used_gib"], figures["device_total_gib"] = (size / 2**30 for size in of_devices)
        return figures


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
