"""Streaming of samples as server-sent events: what of each choice is final by now.

What was sent is never taken back: half a character, and text that may turn out to begin a stop string, wait for the
tokens after them. The chunks of a choice add up to the text that it has without streaming.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from hone.reward.strict_json import encode_json
from hone.rollout.engine import Token
from hone.serve.openai import OpenAIProblem
from hone.types import Sample

DONE = b"data: [DONE]\n\n"
OnPart = Callable[[int, Token | Sample], object]
"""Takes a token or a finished sample of the prompt with that number."""


@dataclass(frozen=True, slots=True)
class News:
    """What is new of one choice."""

    index: int
    text: str
    tokens: Sequence[Token]
    is_first: bool
    text_before: int
    """Characters of its tokens before these."""
    finish_reason: Literal["stop", "length"] | None = None


class StreamedChoice:
    """One choice of a stream, from its first token to its end."""

    def __init__(self, index: int, text: GrowingText) -> None:
        self._index, self._text = index, text
        self._num_tokens = self._token_characters = 0

    def token(self, token: Token, token_text: str) -> News | None:
        """The event of a token; None if it was sent before."""
        if token.position < self._num_tokens:
            return None
        news = News(self._index, self._text.more(token.id), [token], not self._num_tokens, self._token_characters)
        self._num_tokens += 1
        self._token_characters += len(token_text)
        return news

    def end(self, sample: Sample, text: str) -> News:
        """The last news, with what was held back of the whole `text`."""
        return News(self._index, self._text.rest(text), [], False, self._token_characters, sample.finish_reason)


class GrowingText:
    """The text of tokens that come one by one.

    Args:
        decode: token ids to text.
        stop: texts that end it and do not belong to it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, stop
        self._ids: list[int] = []
        self._context, self._read = 0, 0  # tokens before _read are in the text; from _context on they are decoded again
        self._text, self._sent = "", 0

    def more(self, token_id: int) -> str:
        """Text that is final after this token."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._context : self._read])
        whole = self._decode(self._ids[self._context :])
        if not whole.endswith("\ufffd"):  # else a part of a character
            self._text += whole[len(known) :]
            self._context, self._read = self._read, len(self._ids)
        sent, self._sent = self._sent, max(self._sent, self._safe())
        return self._text[sent : self._sent]

    def rest(self, text: str) -> str:
        """The rest of the whole text."""
        return text[self._sent :]

    def _safe(self) -> int:
        """Number of characters that no stop string can still remove."""
        end = len(self._text)
        for stop in self._stop:
            found = self._text.find(stop, self._sent)
            if found >= 0:
                end = min(end, found)
            longest = min(len(stop) - 1, len(self._text) - self._sent)
            begun = next((n for n in range(longest, 0, -1) if self._text.endswith(stop[:n])), 0)
            end = min(end, len(self._text) - begun)
        return end


async def as_drawn(
    draw: Callable[[OnPart], Coroutine[Any, Any, object]],
) -> AsyncGenerator[tuple[int, Token | Sample], None]:
    """The events of `draw`, in order. Raises what it raises; ends it when the client disconnects."""
    events: asyncio.Queue[tuple[int, Token | Sample] | None] = asyncio.Queue()
    drawing = asyncio.create_task(draw(lambda number, what: events.put_nowait((number, what))))
    drawing.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (news := await events.get()) is not None:
            yield news
        await drawing
    finally:
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)


async def as_events(first: BaseModel, others: AsyncIterator[BaseModel]) -> AsyncIterator[bytes]:
    """Chunks as events, and the word that they are all. What goes wrong on the way is an event too."""
    try:
        yield _event(first.model_dump_json(exclude_unset=True).encode())
        async for chunk in others:
            yield _event(chunk.model_dump_json(exclude_unset=True).encode())
    except OpenAIProblem as problem:
        yield _event(encode_json(problem.more_members()))
    yield DONE


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
