"""Engine protocol: prompts in, samples out, weights in between.

Token in, token out: an engine never tokenises text. It may decode, to find stop strings and to give each sample
a text that people and rewards can read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from hone.types import Prompt, Sample

if TYPE_CHECKING:
    from torch import Tensor


Stream = Literal["train", "eval"]
OnSample = Callable[[Sample], object]


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a sample that is still being drawn."""

    sample_index: int
    position: int
    """In its sample, from 0. An engine that ran out of memory reports a sample's tokens again, the same ones."""
    id: int
    logprob: float
    version: int


OnToken = Callable[[Token], object]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw one response. Temperature first, then top-k, then top-p, then min-p, each renormalised."""

    max_tokens: int
    """The response is cut here (tokens), and where the model's positions end."""
    temperature: float
    """0 is greedy: the likeliest token, with its logprob under the untempered softmax."""
    top_k: int
    """0 is off."""
    top_p: float
    """1 is off."""
    min_p: float
    """0 is off."""
    stop: tuple[str, ...]
    """The response ends with the token that completes one of these strings."""
    stop_token_ids: tuple[int, ...]
    """The response ends with one of these tokens; EOS always ends it."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1:
            raise ValueError(
                f"need top_k >= 0, 0 < top_p <= 1 and 0 <= min_p < 1, "
                f"got top_k={self.top_k}, top_p={self.top_p}, min_p={self.min_p}"
            )
        if "" in self.stop:
            raise ValueError("an empty stop string would end every response at its first token")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how many samples to draw for it: the work of one `generate` call.

    The randomness of a token is a function of (seed, stream, prompt.index, sample index, token position) alone:
    never of when the request arrived or of what else was in the batch.
    """

    prompt: Prompt
    num_samples: int
    sampling: Sampling
    seed: int
    stream: Stream
    first_sample: int = 0
    """Index of the first sample; a sample that continues after an observation is a request of its own."""
    first_position: int = 0
    """Position of the first token in its sample: how many of the prompt's last tokens are the sample's already."""
    num_routed: int = 0
    """The prompt's first tokens whose routing is known already, so that an engine may leave it out."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {self.num_samples} (prompt {self.prompt.id})")
        if not len(self.prompt.token_ids):
            raise ValueError(f"prompt {self.prompt.id} has no tokens; there is nothing to predict from")


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Keys and values that an engine holds at a moment."""

    tokens: int = 0
    """Tokens in use: a prompt's once for all its samples."""
    room_tokens: int = 0
    """Tokens that the allocated memory has room for."""
    room_bytes: int = 0
    """Bytes of that memory; 0 where it is not known."""
    asked_tokens: int = 0
    """Prompt tokens that were looked up among those computed before (vLLM's prefix cache); 0 without a cache."""
    found_tokens: int = 0

    def metrics(self, name: str) -> dict[str, float]:
        """Metrics of the engine with that name."""
        measured = {
            f"memory/{name}_cache_tokens": float(self.tokens),
            f"memory/{name}_cache_room_tokens": float(self.room_tokens),
        }
        if self.room_bytes:
            measured[f"memory/{name}_cache_mib"] = self.room_bytes / 2**20
        if self.asked_tokens:
            measured[f"engine/{name}_prefix_hit_frac"] = self.found_tokens / self.asked_tokens
        return measured


@runtime_checkable
class Caching(Protocol):
    """An engine that reports how full its cache was."""

    def cache_use(self) -> CacheUse:
        """When it was fullest since the last call."""
        ...


class Engine(Protocol):
    """A program that holds the policy and samples from it."""

    @property
    def version(self) -> int:
        """Policy version (number of updates made) of the weights that the next token is sampled with."""
        ...

    async def generate(self, request: Request, on_sample: OnSample | None = None) -> tuple[Sample, ...]:
        """Draw `num_samples` samples, in the order of their index; the prompt is computed once for all.

        `on_sample` is called in the event loop with each sample as it is finished, in that order, before this returns.
        Cancelling the call frees its rows. Raises EngineError when asleep, closed or broken.
        """
        ...

    async def load(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """Take new weights between two tokens; sequences in flight continue, and their next tokens carry `version`.

        Weights may still be on their way: iterate in a thread, not in the event loop. None: they are shared with the
        trainer and have changed already; only the version is new.
        """
        ...

    async def sleep(self) -> None:
        """Release the cache's memory. Nothing may be in flight."""
        ...

    async def wake(self) -> None:
        """Be ready to generate again."""
        ...

    async def close(self) -> None:
        """Stop; calls in flight fail. May be called twice."""
        ...

    def fingerprint(self) -> str:
        """Content hash of the weights, equal to the trainer's when every byte is."""
        ...


class TokenwiseEngine(Engine, Protocol):
    """An engine that also reports each token as it is drawn."""

    async def generate(
        self, request: Request, on_sample: OnSample | None = None, on_token: OnToken | None = None
    ) -> tuple[Sample, ...]:
        """See `Engine.generate`. `on_token` is called in the event loop; a sample comes after all of its tokens."""
        ...


@runtime_checkable
class Buckets(Protocol):
    """One version on its way: what `weights.receive.Arriving` is, which this layer may not import."""

    def buckets(self) -> Iterable[tuple[Any, Any]]:
        """Header and parts of each, for `weights.vllm_worker`."""
        ...

    @property
    def manifest(self) -> Any:
        """What it held, once all has arrived."""
        ...


Decode = Callable[[Sequence[int]], str]


def stop_window(stop: tuple[str, ...]) -> int:
    """How many last tokens to decode to see a stop string that the newest one completes.

    A token is at least one byte of text; a few more stand at the left, where decoding may differ from the whole.
    """
    return max(len(string.encode()) for string in stop) + 8 if stop else 0


def text_up_to_stop(token_ids: Any, stop: tuple[str, ...], window: int, decode: Decode) -> str | None:
    """The text up to the end of its first stop string, if the newest token completed one.

    Only the tail that the new token can have changed is decoded at each step; a hit there is confirmed, and cut, in the
    whole text, because a tail may decode differently at its first character.

    Args:
        token_ids: all of the response so far, a list or an array.
        window: `stop_window(stop)`, which need not be computed for each token.
    """
    tail = decode([int(token) for token in token_ids[-window:]])
    if not any(string in tail for string in stop):
        return None
    text = decode([int(token) for token in token_ids])
    ends = [text.index(string) + len(string) for string in stop if string in text]
    return text[: min(ends)] if ends else None
